"""The rivals side by side on one kind of input: errors, work, times and a picture.

    python -m experiments.peers.run --setting NAME [NAME ...] [--text FILE] [--only errors times picture] [--out DIR]

`errors` tries every setting of every rival and writes each figure to DIR/NAME.json at once, so a stopped run goes on.
`times` measures, in one run with exact attention, the settings that may be a rival's best. `picture` draws DIR/NAME.png
and prints the rivals with points below ours. Names are in `settings.py`, rivals in `registry.py`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from experiments.cells import exit_code, opened
from experiments.peers.fronts import fronts, rivals_below
from experiments.peers.measure import candidates, error_without_attention, exact, judge, time_all
from experiments.peers.picture import save_picture
from experiments.peers.registry import OURS, PEERS, PLAIN
from experiments.peers.settings import SETTINGS, Problem, load

from fewkeys.bench.machine import machine, versions
from fewkeys.core.clock import clock
from fewkeys.core.files import write_json

STEPS = ("errors", "times", "picture")
RESULTS = Path(__file__).parent / "results"


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", nargs="+", required=True, metavar="NAME", help=", ".join(SETTINGS))
    parser.add_argument("--text", type=Path, help="what MiniLM reads, plain or .gz; default: the demo's")
    parser.add_argument("--only", nargs="+", choices=STEPS, default=STEPS)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=15.0, help="of turns at timing, three turns at least")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--work", type=Path, default=Path("out/peers"), help="where captured inputs are kept")
    options = parser.parse_args(arguments)
    return exit_code(lambda: [_run(name, options) for name in options.setting])


def _run(name: str, options: argparse.Namespace) -> None:
    file = f"{name}.json"
    data = opened(options.out, file, "rows", setting=name)
    if "errors" in options.only:
        x = load(name, options.text, options.work)
        data["title"] = _title(x)
        data["versions"] = versions()
        _errors(data, x, options.peers, options.out)
    if "times" in options.only:
        x = load(name, options.text, options.work)
        for row in data["rows"]:
            row["ms"] = None
        rows = candidates(data["rows"], min(clock(lambda: exact(x), x.query.device) for _ in range(2)))
        data["exact_ms"], data["turns"] = time_all(rows, x, options.seconds, lambda text: _say(name, text))
        data["machine"] = machine()
        write_json(options.out, file, data)
    if "picture" in options.only:
        save_picture(data, options.out / f"{name}.png")
        print(_summary(data))


def _errors(data: dict[str, Any], x: Problem, peers: list[str], out: Path) -> None:
    judged = [(row["peer"], row["settings"]) for row in data["rows"]]
    size = x.query.shape[2], x.key.shape[2], x.query.shape[3]
    cells = [(peer, settings) for peer in peers for settings in PEERS[peer].grid(*size)]
    truth = exact(x)
    data["without_attention"] = _short(error_without_attention(x, truth))
    for number, (peer, settings) in enumerate(cells):
        if (peer, settings) in judged:
            continue
        row = judge(peer, settings, x, truth)
        data["rows"].append({key: _short(value) for key, value in row.items()})
        write_json(out, f"{data['setting']}.json", data)
        _say(data["setting"], f"{number + 1} of {len(cells)}: {peer} {settings}: error {row['error']:.3f}")
    spent = {str(row["settings"]): row["work"] for row in data["rows"] if row["peer"] == PLAIN}
    for row in data["rows"]:
        if row["peer"] == OURS:
            row["work"] = spent.get(str(row["settings"]))
    write_json(out, f"{data['setting']}.json", data)


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _title(x: Problem) -> str:
    batch, heads, queries, dim = x.query.shape
    keys = "" if x.key.shape[2] == queries else f" and {x.key.shape[2]:,} keys"
    return f"{batch * heads} {'head' if batch * heads == 1 else 'heads'} of {dim}, {queries:,} queries{keys}"


def _say(name: str, text: str) -> None:
    print(f"{name}: {text}", file=sys.stderr, flush=True)


def _summary(data: dict[str, Any]) -> str:
    """A line for every front, and the rivals with points below ours."""
    lines = [f"{data['setting']}: {data['title']}, exact attention {data['exact_ms']:.1f} ms"]
    for peer, front in fronts(data["rows"]).items():
        lines.append(f"  {peer}: " + ", ".join(f"{row['error']:.3f} at {row['ms']:.1f}" for row in front))
    for ours in (OURS, PLAIN):
        rivals = rivals_below(data["rows"], data["exact_ms"], data["without_attention"], ours)
        lines.append(f"  below {ours}: {', '.join(rivals) or 'none'}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
