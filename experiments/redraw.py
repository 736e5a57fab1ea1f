"""Draw the pictures again from the results that are committed, after a change of how they look.

python experiments/redraw.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder that holds `experiments`

from experiments.causal import figure as causal
from experiments.sparsefinder import analysis
from experiments.sparsefinder import report as sparsefinder
from experiments.sparsefinder.tags import Occupancy

from fewkeys import ModelPlan
from fewkeys.bench.timing import Timing
from fewkeys.judge.result import Report
from fewkeys.report.speed import headline, save_error, save_time
from fewkeys.report.tuned import save_tuned

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Draw all, and name them."""
    for path in sorted((ROOT / "benchmarks" / "results").glob("*/bench.json")):
        data = json.loads(path.read_text())
        rows = [Timing(**row) for row in data["rows"]]
        title = headline(data["settings"], max(row.heads for row in rows))
        save_time(rows, path.parent / "time.png", title=title)
        if data["settings"]["inputs"] != "random":
            save_error(rows, path.parent / "error.png", title=title)
        print(path.parent)
    tuned = ROOT / "docs" / "results" / "tuned"
    report = Report.load(tuned / "tuned.json")
    save_tuned(ModelPlan.from_pretrained(tuned), report, ROOT / "docs" / "images" / "tuned.png")
    print(tuned)
    here = ROOT / "experiments"
    folder = here / "causal" / "results"
    causal.save_figure(json.loads((folder / "results.json").read_text()), folder / "figure.png")
    for name in ("en-de", "en-fr", "mlm"):
        folder = here / "sparsefinder" / "results" / name
        sparsefinder.save_figure(json.loads((folder / "results.json").read_text()), folder / "figure.png")
        print(folder)
    folder = here / "sparsefinder" / "results" / "analysis"
    found = [Occupancy(**one) for one in json.loads((folder / "clusters.json").read_text())["clusters"]]
    analysis.draw_clusters(found, folder / "clusters.png")
    print(folder)


if __name__ == "__main__":
    main()
