"""Figures of LevAttention: heavy entries, streams, sketches, recovery, shards."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from docs.figures.sources import read, table


@cache
def _tables() -> dict[str, str]:
    report = read("benchmarks/results/levattention.json")
    wide = report["scaling"]["rows"]
    tables = {
        "scaling": table(
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
        "stream": table(
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
        "embeddings": table(
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
        tables[name] = table(titles, cells)
    return tables


RECOVERY = "experiments/levattention/results/recovery.json"
RECOVERED = [
    ("noise", {"noise": 0.2}),
    ("noise", {"noise": 0.4}),
    ("noise", {"noise": 0.5}),
    ("noise", {"noise": 0.7}),
    ("irrelevant, leak 0.05", {"irrelevant": 256}),
    ("irrelevant, leak 0.05", {"irrelevant": 65536}),
    ("irrelevant, leak 0.1", {"irrelevant": 256}),
    ("irrelevant, leak 0.1", {"irrelevant": 4096}),
    ("irrelevant, leak 0.1", {"irrelevant": 16384}),
    ("leak", {"leak": 0.09}),
    ("leak", {"leak": 0.11}),
    ("leak", {"leak": 0.16}),
]
"""Which rows of which sweep are shown."""


def _recovery() -> str:
    recovery = read(RECOVERY)
    usual = {"noise": 0.2, "irrelevant": 4096, "leak": 0.05}
    rows = []
    for sweep, asked in RECOVERED:
        (row,) = (row for row in recovery["planted"][sweep] if asked.items() <= row.items())
        of = usual | {name: row[name] for name in usual if name in row}
        share: dict[str, dict[str, float]] = row["recovery"]
        shown = [share["leverage"]["relevant"]]
        shown += [share[name]["heavy"] for name in ("leverage", "leverage (centred)", "key norm", "random keys")]
        name = f"noise {of['noise']:g}, {of['irrelevant']:,} irrelevant keys, leak {of['leak']:g}"
        rows.append([name, *(f"{value:.2f}" for value in (*shown, share["oracle"]["heavy"]))])
    titles = ["", "relevant keys found by leverage", "leverage", "centred", "key norm", "random", "oracle"]
    return table(titles, rows)


def _shards() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read("experiments/levattention/results/distributed.json")["rows"]
    return rows


def _bytes() -> str:
    columns = ("tokens", "ranks", "universal_set_bytes", "leverage_bytes", "leverage_training_bytes")
    return table(
        [
            "tokens",
            "ranks",
            "`universal_set`",
            "`attention`",
            "with its backward",
            "all keys and values",
            "times fewer",
        ],
        [
            [*(f"{row[column]:,}" for column in (*columns, "all_gather_bytes")), f"{row['ratio']:.0f}"]
            for row in _shards()
            if row["tokens"] in (4096, 65536, 262144)
        ],
    )


def _controls(which: Callable[[list[int]], int]) -> str:
    return f"{round(which([row[f'{name}_bytes'] for row in _shards() for name in ('key norm', 'random keys')]), -3):,}"


def _gradients() -> str:
    kinds = ("leverage", "key norm", "random keys")
    return f"{max(row[f'{name}_gradient_difference'] for row in _shards() for name in kinds):.0e}".replace("e-0", "e-")


FIGURES: dict[str, Callable[[], str]] = {
    **{
        f"levattention.{name}": partial(lambda name: _tables()[name.replace("-", " ")], name)
        for name in ("scaling", "stream", "sketches", "embeddings", "power-4")
    },
    "recovery": _recovery,
    "shards.bytes": _bytes,
    "shards.least": lambda: _controls(min),
    "shards.most": lambda: _controls(max),
    "shards.runs": lambda: str(len(_shards())),
    "shards.gradients": _gradients,
}
