"""Figures of experiments/: training, decoders, vision transformers, value-aware attention, predicted graphs."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from docs.figures.sources import ROOT, fence, read, table

Row = dict[str, Any]
DECODERS = "experiments/causal/results/results.json"


def _decoders() -> str:
    from experiments.causal.figure import table as tables

    return tables(read(DECODERS)).rstrip()


def _decoder(task: str, method: str, slots: int) -> Row:
    rows: list[Row] = read(DECODERS)[task]
    return next(row for row in rows if (row["method"], row["slots"]) == (method, slots))


def _cost(rows: list[Row]) -> str:
    """The least perplexity among rows, above exact attention's, per cent."""
    exact = _decoder("text", "exact", 0)["perplexity"]
    return f"{100 * (min(row['perplexity'] for row in rows) / exact - 1):.1f}"


def _evicting(slots: int) -> list[Row]:
    return [row for row in read(DECODERS)["text"] if row["slots"] == slots and "fewkeys" not in row["method"]]


def _recalled(method: str, slots: int, digits: int) -> str:
    return f"{100 * _decoder('recall', method, slots)['accuracy']:.{digits}f}"


PRETRAINED = "experiments/decoders/results/results.json"


def _pretrained() -> str:
    from experiments.decoders.report import table as tables

    return tables(read(PRETRAINED)["cells"]).rstrip()


def _stretches(method: str, slots: int, text: str = "wikitext", length: int = 2048) -> dict[str, Row]:
    """What a method costs a decoder, by the place where a stretch begins."""
    of = {"kind": "perplexity", "text": text, "length": length, "method": method, "slots": slots}
    return {cell["of"]["place"]: cell for cell in read(PRETRAINED)["cells"] if of.items() <= cell["of"].items()}


def _ours() -> str:
    rows = []
    for text in TEXTS:
        exact, *few = [
            _stretches(*row, text=text)[STRETCH] for row in (("exact", 0), ("fewkeys", 256), ("fewkeys", 128))
        ]
        shown = [f"{cell['ratio']:.3f} (KL {cell['kl']:.4f})" for cell in few]
        rows.append([TEXTS[text], f"{exact['perplexity']:.2f}", *shown])
    return table(["text", "exact perplexity", "256 slots", "128 slots"], rows)


TEXTS = {"wikitext": "WikiText-2, validation", "pydoc": "Python's help topics"}
BESIDE = {
    "fewkeys": "**`budget(slots, is_causal=True)`**",
    "oracle": "each query's own best keys (oracle)",
    "constant memory": '`budget(..., memory="constant")`',
}
STRETCH = "1/3"


def _beside() -> str:
    """Every method on one stretch, by its perplexity at 256 slots; what pays more than its slots says how much."""
    methods = dict.fromkeys(
        cell["of"]["method"] for cell in read(PRETRAINED)["cells"] if cell["of"].get("slots") == 256
    )
    stretches = {}
    for method in methods:
        cells = [_stretches(method, slots).get(STRETCH) for slots in (256, 128)]
        if all(cells):
            stretches[method] = cells
    rows = []
    for method, cells in sorted(stretches.items(), key=lambda item: item[1][0]["ratio"]):
        name = BESIDE.get(method, method)
        if cells[0]["paid"] > 1.1 * 256:
            name += f" ({cells[0]['paid']:.0f} and {cells[1]['paid']:.0f} slots paid)"
        shown = [f"{cell[field]:.3f}" for cell in cells for field in ("ratio", "kl")]
        rows.append([name, *(f"**{cell}**" if method == "fewkeys" else cell for cell in shown)])
    return table(["", "256 slots: perplexity / exact", "KL", "128 slots", "KL"], rows)


def _lost(method: str) -> list[float]:
    """Perplexity lost with 256 slots on each stretch, per cent, the least first."""
    return sorted(100 * (cell["ratio"] - 1) for cell in _stretches(method, 256).values())


def _answers(method: str, slots: int, length: int = 2048, without: str = "") -> str:
    """Right answers of a method, and exact attention's, over the prompts of both. `without`: a task to leave out."""

    def right(**wanted: object) -> dict[tuple[str, int], int]:
        of = {"kind": "retrieval", "length": length, **wanted}
        cells = [cell for cell in read(PRETRAINED)["cells"] if of.items() <= cell["of"].items()]
        return {
            (cell["of"]["task"], cell["of"]["seed"]): cell["right"] for cell in cells if cell["of"]["task"] != without
        }

    answers, exact = right(method=method, slots=slots), right(method="exact")
    both = answers.keys() & exact.keys()
    return f"{sum(answers[one] for one in both)} of {sum(exact[one] for one in both)}"


def _costs() -> str:
    return f"{_lost('fewkeys')[0]:.1f} % of perplexity on a stretch of 2,048 tokens"


def _encoders() -> str:
    """Mean error and worst head of `budget(slots)` on every encoder at its largest length, and the oracle's error."""
    from experiments.encoders.choose import by_place
    from experiments.encoders.models import ENCODERS

    places, rows = by_place(read("experiments/encoders/results/encoders.json")["errors"]), []
    for name, encoder in ENCODERS.items():
        length = max(encoder.lengths)
        errors = [places.get((name, length, slots)) for slots in (64, 192)]
        if not any(errors):
            continue
        shown = ["" if plans is None else "{:.3f}, {:.2f}".format(*plans["fk.budget"]) for plans in errors]
        oracle = ["" if plans is None else f"{plans['best keys'][0]:.3f}" for plans in errors]
        rows.append([encoder.title, f"{length:,}", shown[0], oracle[0], shown[1], oracle[1]])
    titles = [cell for slots in (64, 192) for cell in (f"{slots} slots: error, worst head", "oracle")]
    return table(["encoder", "tokens", *titles], rows)


SHORT = {
    "minilm": "MiniLM",
    "mpnet": "MPNet",
    "whisper": "Whisper",
    "vit": "MNIST",
    "digits": "digits",
    "albert": "ALBERT",
    "twin": "the twin",
}


def _rules() -> str:
    """What rules have, as multiples of the best rule for each model."""
    chosen = read("experiments/encoders/results/encoders.json")["chosen"]
    held_out = {row["model"]: row["error beside best rule"] for row in chosen["held_out"] if not row["and"]}
    rows = {
        "chosen on all models": chosen["excess"],
        "chosen on the other models, mean error alone": held_out,
        "`fk.budget`": chosen["excess of budget"],
    }
    cells = [[name, *(f"{ratios[model]:.2f}" for model in SHORT)] for name, ratios in rows.items()]
    return table(["rule", *SHORT.values()], cells)


def _budget_of(model: str, length: int, slots: int) -> float:
    """The mean error of `budget(slots)`."""
    plans = read("experiments/encoders/results/encoders.json")["errors"][f"{model} {length} {slots}"]
    return float(plans["fk.budget"][0])


def _vision(data: str) -> str:
    sys.path.insert(0, str(ROOT / "experiments/levattention"))  # its scripts find one another so
    from vit_report import text

    return fence(text(read(f"experiments/levattention/results/vit-{data}.json")))


def _layers(data: str) -> str:
    sys.path.insert(0, str(ROOT / "experiments/levattention"))
    from vit_evidence import text

    return fence(text(read(f"experiments/levattention/results/vit-{data}-evidence.json")))


VALUES = "experiments/value_aware/results/results.json"
METHODS = ("oblivious", "aware", "fewkeys", "LevAttention", "HyperAttention", "window", "key norm", "random keys")


def _values(model: str, title: str) -> str:
    from experiments.value_aware.table import cell

    sizes = (1, 2, 4, 8, 16, 33, 64)
    by_size = {
        (row["method"], row["r"]): row
        for row in read(VALUES)["rows"]
        if (row["model"], row["kernel"]) == (model, "softmax")
    }
    rows = [[method, *(cell(by_size[method, size]) for size in sizes)] for method in METHODS]
    return table([title, "r = 1", *sizes[1:]], rows)


SKEWS = {
    "mass on the largest weight": "top-1 mass",
    "mass on the 8 largest": "top-8 mass",
    "keys in use (exp of the entropy)": "keys in use (exp entropy)",
    "Gini": "gini",
}


def _skew() -> str:
    facts = read(VALUES)["facts"]
    rows = []
    for name, field in SKEWS.items():
        shown = [fact["skew"][field] for fact in facts]
        rows.append([name, *(f"{value:.2f}" if value < 1 else f"{value:.2g}" for value in shown)])
    return table(["", "encoder: softmax", "elu", "relu", "lm: softmax", "elu", "relu"], rows)


def _points(task: str, part: str) -> list[Row]:
    rows: list[Row] = read(f"experiments/sparsefinder/results/{task}/results.json")["points"][part]
    return rows


def _sparsest(task: str, part: str, recall: float, rival: str) -> str:
    """The greatest sparsity at a recall among a rival's points; nothing where none reaches it."""
    from experiments.sparsefinder.report import PAPER

    published = {name + space for name in PAPER for space in ("", ", raw")}
    belongs: dict[str, Callable[[Row], bool]] = {
        "pairs": lambda row: row["family"] in published or row["family"].startswith("cluster pairs"),
        "published": lambda row: row["family"] in published,
        "not learned": lambda row: row["kind"] == "not learned",
        "control": lambda row: row["kind"] == "control",
    }
    sparsities = [row["sparsity"] for row in _points(task, part) if belongs[rival](row) and row["recall"] >= recall]
    if not sparsities:
        return ""
    return f"**{max(sparsities):.3f}**" if rival == "pairs" else f"{max(sparsities):.3f}"


RIVALS = {
    "pairs": "Sparsefinder with cluster pairs",
    "published": "Sparsefinder as published",
    "not learned": "best that needs no learning",
    "control": "best control",
}


def _translation() -> str:
    columns = [(task, part) for part in ("encoder", "decoder", "cross") for task in ("en-de", "en-fr")]
    rows = [[name, *(_sparsest(*column, 0.9, rival) for column in columns)] for rival, name in RIVALS.items()]
    return table(["", "encoder de", "fr", "decoder de", "fr", "cross de", "fr"], rows)


def _masked() -> str:
    recalls = (0.8, 0.85, 0.9, 0.95, 0.98)
    names = RIVALS | {"not learned": "best that needs no learning (BigBird in blocks of 8)"}
    rows = [
        [name, *(_sparsest("mlm", "encoder", recall, rival) for recall in recalls)] for rival, name in names.items()
    ]
    return table(["", *recalls], rows)


def _left_out(rival: str) -> str:
    return f"{float(_sparsest('mlm', 'encoder', 0.9, rival).strip('*')):.2f}"


def _task(task: str, field: str, digits: int) -> str:
    return f"{read(f'experiments/sparsefinder/results/{task}/results.json')['task'][field]:.{digits}f}"


def _training_runs() -> tuple[list[Row], list[Row]]:
    """What was judged of the exact run and of the plan's."""
    exact, plan = read("experiments/training/results/training.json")["runs"].values()
    return exact, plan


def _training() -> str:
    rows = []
    for name, run in read("experiments/training/results/training.json")["runs"].items():
        last = run[-1]
        by_plan = "" if name == "exact attention" else f"{last['plan']:.3f}"
        rows.append([name, f"{last['seconds']:.0f}", last["steps"], f"{last['exact']:.3f}", by_plan])
    return table(["trained by", "seconds", "steps", "held-out loss, exact attention", "with the plan"], rows)


def _faster() -> str:
    exact, plan = (run[-1]["steps"] / run[-1]["seconds"] for run in _training_runs())
    return f"{plan / exact:.1f}"


def _worst() -> str:
    from experiments.worst.report import table as tables

    return tables(read("experiments/worst/results/worst.json")).rstrip()


FIGURES: dict[str, Callable[[], str]] = {
    "worst": _worst,
    "training": _training,
    "training.first": lambda: f"{_training_runs()[1][0]['seconds']:.0f}",
    "training.faster": _faster,
    "training.off": lambda: f"{_training_runs()[1][-1]['exact'] - _training_runs()[1][-1]['plan']:.3f}",
    "training.exact": lambda: f"{_training_runs()[0][-1]['exact']:.2f}",
    "training.plan": lambda: f"{_training_runs()[1][-1]['exact']:.2f}",
    "training.seconds": lambda: f"{_training_runs()[0][-1]['seconds']:.0f}",
    "encoders": _encoders,
    "encoders.rules": _rules,
    "encoders.mpnet": lambda: f"{_budget_of('mpnet', 512, 64):.3f}",
    "decoders": _decoders,
    "decoders.ours-256": lambda: _cost([_decoder("text", "fewkeys", 256)]),
    "decoders.evicting-256": lambda: _cost(_evicting(256)),
    "decoders.evicting-512": lambda: _cost(_evicting(512)),
    "decoders.recalled": lambda: _recalled("fewkeys", 128, 1),
    "decoders.recalled-by-window": lambda: _recalled("sinks + window", 128, 0),
    "codes": _pretrained,
    "codes.ours": _ours,
    "codes.beside": _beside,
    "codes.costs": _costs,
    "codes.even": lambda: _answers("fewkeys", 256),
    "codes.longest": lambda: _answers("fewkeys", 256, 8192),
    "codes.longest-needles": lambda: _answers("fewkeys", 256, 8192, without="common words"),
    "codes.window": lambda: _answers("sinks + window", 256),
    "codes.oracle": lambda: _answers("oracle", 256),
    "codes.constant": lambda: f"{_lost('constant memory')[-1]:.0f}",
    **{f"vision.{data}": partial(_vision, data) for data in ("mnist", "digits")},
    "vision.layers": partial(_layers, "mnist"),
    "values.encoder": partial(_values, "encoder", "encoder"),
    "values.lm": partial(_values, "lm", "language model"),
    "values.skew": _skew,
    "graphs.translation": _translation,
    "graphs.masked": _masked,
    "graphs.pairs": partial(_left_out, "pairs"),
    "graphs.published": partial(_left_out, "published"),
    "graphs.not-learned": partial(_left_out, "not learned"),
    "graphs.bleu-de": partial(_task, "en-de", "exact", 2),
    "graphs.bleu-fr": partial(_task, "en-fr", "exact", 2),
    "graphs.accuracy": partial(_task, "mlm", "exact", 1),
    "graphs.perplexity": partial(_task, "mlm", "perplexity", 1),
}
