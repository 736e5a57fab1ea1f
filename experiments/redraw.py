"""Draw all pictures again from the committed results, after a change of their look.

python experiments/redraw.py
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder that holds `experiments`
sys.path.insert(0, str(Path(__file__).resolve().parent / "levattention"))  # of `vit_report` and `vit_plans`

from experiments.causal import figure as causal
from experiments.decoders import report as decoders
from experiments.embeddings import run as embeddings
from experiments.encoders import report as encoders
from experiments.levattention import recovery, vit_report
from experiments.peers import picture as peers
from experiments.sparsefinder import analysis, report as sparsefinder
from experiments.sparsefinder.tags import Occupancy
from experiments.training import picture as training
from experiments.value_aware import figure as value_aware
from experiments.worst import report as worst

from fewkeys import ModelPlan
from fewkeys.bench.timing import Timing
from fewkeys.judge.result import Report
from fewkeys.report.figure import save_figure, save_tuned
from fewkeys.report.speed import save_pictures

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


def main() -> None:
    """Draw all."""
    for path in sorted((ROOT / "benchmarks" / "results").glob("*/bench.json")):
        data = read(path)
        rows = [Timing(**{name.name: row[name.name] for name in fields(Timing)}) for row in data["rows"]]
        save_pictures(rows, data["settings"], path.parent)
    docs = ROOT / "docs"
    save_figure(Report.load(docs / "results" / "demo.json"), docs / "images" / "pareto.png")
    tuned = docs / "results" / "tuned"
    save_tuned(ModelPlan.from_pretrained(tuned), Report.load(tuned / "tuned.json"), docs / "images" / "tuned.png")
    for experiment, draw in {"causal": causal.save_figure, "value_aware": value_aware.save_figure}.items():
        draw(read(HERE / experiment / "results" / "results.json"), HERE / experiment / "results" / "figure.png")
    folder = HERE / "decoders" / "results"
    decoders.save_figure(read(folder / "results.json")["cells"], folder / "figure.png")
    folder = HERE / "levattention" / "results"
    recovery.draw_all(read(folder / "recovery.json"), folder / "recovery.png")
    for name in ("vit-mnist", "vit-digits"):
        vit_report.figure(read(folder / f"{name}.json"), folder / f"{name}.png")
    folder = HERE / "embeddings" / "results"
    embeddings.figure(read(folder / "minilm.json"), folder / "minilm.png")
    folder = HERE / "encoders" / "results"
    encoders.save_picture(read(folder / "encoders.json"), folder / "encoders.png")
    folder = HERE / "training" / "results"
    training.save_picture(read(folder / "training.json"), folder / "training.png")
    folder = HERE / "worst" / "results"
    worst.save_picture(read(folder / "worst.json"), folder / "worst.png")
    for path in sorted((HERE / "peers" / "results").glob("*.png")):
        draw = peers.save_slots if path.stem == "smollm2" else peers.save_picture
        draw(read(path.with_suffix(".json")), path)
    folder = HERE / "sparsefinder" / "results"
    for name in ("en-de", "en-fr", "mlm"):
        sparsefinder.save_figure(read(folder / name / "results.json"), folder / name / "figure.png")
    folder = folder / "analysis"
    analysis.draw_graphs(read(folder / "graphs.json"), folder / "graphs.png")
    clusters = [Occupancy(**fields) for fields in read(folder / "clusters.json")["clusters"]]
    analysis.draw_clusters(clusters, folder / "clusters.png")


def read(path: Path) -> Any:
    """The results in a file."""
    return json.loads(path.read_text())


if __name__ == "__main__":
    main()
