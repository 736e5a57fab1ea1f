"""Put results/levattention.json into docs/levattention.md, as tables between their marks."""

import json
import re
from pathlib import Path

from fewkeys.core.files import write_whole

HERE = Path(__file__).parent


def tables(report):
    """The report's tables in Markdown, by name."""
    wide = report["scaling"]["rows"]
    found = {
        "scaling": markdown(
            ["keys", *(f"2^{row['keys'].bit_length() - 1}" for row in wide)],
            [
                [name, *(f"{row[column]:,.{digits}f}" for row in wide)]
                for name, column, digits in (
                    ("all pairs, s", "peer_s", 2),
                    ("`heavy_entries`, s", "heavy_entries_s", 3),
                    ("`universal_set`, s", "universal_set_s", 3),
                    ("all pairs / `heavy_entries`", "ratio", 1),
                )
            ],
        ),
        "stream": markdown(
            [
                "keys of the stream",
                "the keys, MB",
                "held by the sketch, MB",
                "process before and after, MB",
                "keys lost",
            ],
            [
                [
                    f"{row['keys']:,}",
                    f"{row['all_keys_bytes'] / 1e6:,.0f}",
                    f"{row['held_bytes'] / 1e6:.2f}",
                    f"{row['process_before_mb']:.0f}, {row['process_peak_mb']:.0f}",
                    row["lost_against_two_passes"],
                ]
                for row in report["stream"]["rows"]
            ],
        ),
        "embeddings": markdown(
            ["S, at 2^20 keys", "rows", "S K, s", "K'K, s", "error of the worst normaliser"],
            [
                [
                    row["projection"],
                    f"{row['rows']:,}",
                    f"{row['seconds']:.2f}",
                    f"{row['gram_s']:.2f}",
                    row["worst_error"],
                ]
                for row in report["embeddings"]
                if row["keys"] == report["embeddings"][-1]["keys"]
            ],
        ),
    }
    for name, rows in (("sketches", report["sketches"]), ("power 4", report["power 4"]["rows"])):
        cells = [
            [
                f"2^{row['keys'].bit_length() - 1}",
                row["option"] if row["option"] != "peer" else "all pairs, float32",
                f"{row['seconds']:.3f}",
                f"{row['sketch_rows']:,}" if row.get("sketch_rows") else "",
                row["entries"],
                f"{row['missed']} (to {row['largest_missed/eps']} eps)" if row.get("missed") else row.get("missed", ""),
                row.get("extra", ""),
                f"{row['largest_error']:.2g}" if "missed" in row else "",
            ]
            for row in rows
        ]
        titles = ["keys", "option", "s", "rows of S", "entries", "missed", "extra", "largest error of a value"]
        found[name] = markdown(titles, cells)
    return found


def markdown(titles, rows):
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def main():
    report = json.loads((HERE / "results" / "levattention.json").read_text())
    page = HERE.parent / "docs" / "levattention.md"
    text = page.read_text(encoding="utf-8")
    for name, table in tables(report).items():
        text, count = re.subn(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", rf"\g<1>{table}\n\g<2>", text, flags=re.S)
        if count != 1:
            raise SystemExit(f"{page}: expected one pair of marks for {name}, got {count}")
    write_whole(page, text)


if __name__ == "__main__":
    main()
