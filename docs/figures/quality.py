"""Figures of errors: the demo, stand-ins, spot checks, causal means, tuning, fitting."""

from collections.abc import Callable
from typing import Any

from docs.figures.sources import read, table

Row = dict[str, Any]
DEMO = "docs/results/demo.json"
OURS = "fewkeys budget"
NEIGHBOURS = "experiments/embeddings/results/minilm.json"
MODERNBERT = "experiments/long_documents/results/modernbert.json"


def _demo_rows(slots: int) -> list[Row]:
    return [row for row in read(DEMO)["rows"] if row["budget"] in (None, slots)]


def _demo_row(name: str) -> Row:
    return next(row for row in _demo_rows(64) if row["name"] == name)


def _demo() -> str:
    rows = []
    for row in _demo_rows(64):
        cells = [
            row["name"],
            f"{row['slots']:.1f}",
            *(f"{row[name]:.3f}" for name in ("error", "error_p90")),
            f"{row['worst_head_error']:.2f}",
            f"{row['mass']:.3f}",
            f"{row['cosine']:.4f}",
        ]
        rows.append([f"**{cell}**" for cell in cells] if row["name"] == OURS else cells)
    return table(["plan", "slots", "error", "p90", "worst head", "mass", "cosine"], rows)


TUNED = "docs/results/tuned/tuned.json"
CHOICE = "docs/results/tuned/model_plan.json"
TABLED = (
    "tuned", OURS, "top-k per query (oracle)", "best shared columns (oracle)", "window", "leverage + window",
    "random keys", "key norm",
)  # fmt: skip


def _tuned_rows() -> dict[str, Row]:
    return {row["name"]: row for row in read(TUNED)["rows"]}


def _tuned() -> str:
    rows = []
    for name in TABLED:
        row = _tuned_rows()[name]
        errors = [f"{row[field]:.3f}" for field in ("error", "error_p90")]
        rows.append([name, f"{row['slots']:.1f}", *errors, f"{row['worst_head_error']:.2f}", f"{row['cosine']:.4f}"])
    return table(["plan", "slots", "error", "p90", "worst head", "cosine"], rows)


def _tuned_beside(name: str) -> Callable[[], str]:
    return lambda: f"{_tuned_rows()['tuned']['error'] / _tuned_rows()[name]['error']:.2f}"


def _tuned_or_more_slots() -> str:
    """The tuned plan beside `budget` with as many slots and more: errors, and times of whole models."""
    run = read("docs/results/tuned/beside.json")
    times = {(t["name"], t["budget"], t["length"]): t["ms"] for t in run["whole_times"]}
    exact = {t["length"]: t["exact_ms"] for t in run["whole_times"]}
    lines = []
    for row in run["rows"]:
        name, budget = row["name"], row["budget"]
        label = name if budget is None else f"`budget({budget})`"
        cells = [label, f"{row['slots']:.1f}", f"{row['error']:.3f}", f"{row['cosine']:.4f}"]
        spent = exact if name == "exact" else {length: times[name, budget, length] for length in exact}
        lines.append([*cells, *(f"{ms:,.0f}" for ms in spent.values())])
    return table(["plan", "slots", "error", "cosine", *(f"ms at {length:,}" for length in exact)], lines)


def _tuned_layers() -> str:
    record = read(CHOICE)["record"]
    return f"{record['layer_error']:.3f} against {record['budget']['layer_error']:.3f}"


FIT = "docs/results/fit.json"


def _fit() -> str:
    rows = []
    for row in read(FIT)["rows"]:
        numbers = [row[field] for field in ("recall", "window", "random", "sparsity", "exact", "entropy")]
        rows.append([f"`{row['name']}`", row["space"], *("" if x is None else f"{x:.3f}" for x in numbers)])
    titles = ["with `Window(3)`", "space", "recall", "same keys in a window", "at random", "sparsity", "exact"]
    return table([*titles, "entropy"], rows)


def _fit_one(name: str, field: str) -> Callable[[], str]:
    def shown() -> str:
        rows = read(FIT)["rows"]
        return next(f"{row[field]:.3f}" for row in rows if (row["name"], row["space"]) == (name, "projected"))

    return shown


STAND_INS = "experiments/value_aware/results/stand_ins.json"


def _stand_ins() -> str:
    rows = read(STAND_INS)["rows"]
    ours = rows[0]["error"]
    cells = [[row["name"], f"{row['error']:.4f}", f"{100 * (row['error'] / ours - 1):+.1f}%"] for row in rows]
    return table(["part changed", "error", "change"], cells)


def _of_the_oracle() -> str:
    results = read(STAND_INS)
    return f"{results['rows'][0]['error'] / results['oracle_top_64']:.2f}"


CHECKS = {
    "budget(64, cohorts=1)": {
        "one head": "one head",
        "one layer": "one layer, 12 heads",
        "all layers": "model, 72 heads",
    },
    "window 64": {"one head": "one head", "one layer": "one layer", "all layers": "model"},
    "leverage 64": {"one head": "one head", "one layer": "one layer", "all layers": "model"},
    "top-64 oracle": {"one head": "one head"},
    'budget(64, is_causal=True, memory="constant")': {"one head": "one head"},
    "lognormal, sigma 1": {"made up": "one head"},
    "lognormal, sigma 1.5": {"made up": "one head"},
    "2 % of the queries have all the error": {"made up": "one head"},
}
"""Plans and checks shown, with the name of the check."""
SHOWN = {
    "lognormal, sigma 1": "made up: lognormal errors, sigma 1",
    "lognormal, sigma 1.5": "made up: lognormal errors, sigma 1.5",
    "2 % of the queries have all the error": "made up: 2 % of the queries have all the error",
    "budget(64, cohorts=1)": "`budget(64, cohorts=1)`",
    'budget(64, is_causal=True, memory="constant")': '`budget(64, is_causal=True, memory="constant")`',
}


def _spot_checks() -> str:
    by_check = {
        (row["plan"], row["check"]): row for row in read("experiments/value_aware/results/spot_check.json")["rows"]
    }
    rows = []
    for plan, checks in CHECKS.items():
        for place, (check, name) in enumerate(checks.items()):
            row = by_check[plan, check]
            rows.append(
                [
                    SHOWN.get(plan, plan) if place == 0 else "",
                    name,
                    f"{100 * row['coverage']:.1f} %",
                    f"{100 * row['coverage_worst']:.1f} %",
                    f"{100 * row['blocks_with_93']:.0f} %",
                    f"{100 * row['half_width']:.0f} %",
                    f"{100 * row['textbook_coverage']:.1f} %",
                ]
            )
    return table(["plan", "check", "covered", "worst", "at least 93 of 100", "half width", "textbook"], rows)


BARS = "experiments/decoders/results/error-bars.json"


def _bars_of_heads() -> str:
    rows = [
        [
            f"{row['error']:.0%}",
            f"{row['bars']:,}",
            f"{row['covered']:.2%}",
            f"{row['worst_head']:.1%}",
            f"{row['reached']:.0%}",
            f"{row['covered_if_reached']:.2%}",
            f"{row['drawn']:.0f}",
            f"{row['mean_off']:.3f}",
            f"{row['mean_off_of_plan']:.3f}",
        ]
        for row in read(BARS)["heads"]
        if row["slots"] == 256
    ]
    titles = ["to reach", "bars", "hold", "worst head", "reached", "hold, of those", "draws"]
    return table([*titles, "mean error", "mean error of the plan"], rows)


def _bars_of_hard_keys() -> str:
    by_keys = {(row["keys"], row["error"]): row for row in read(BARS)["hard"]}
    errors = sorted({error for _, error in by_keys})
    rows = []
    for name in dict.fromkeys(name for name, _ in by_keys):
        cells = [by_keys[name, error] for error in errors]
        held = min(1 - cell["missed"] for cell in cells)
        rows.append([name, f"{held:.1%}", *(f"{cell['reached']:.0%}" for cell in cells)])
    return table(["keys", "hold", *(f"{error:.0%} reached" for error in errors)], rows)


ENCODER = "experiments/causal/results/encoder.json"
CAUSAL = {
    "each query's best keys (oracle)": "each query's own best 96 keys (oracle)",
    "fewkeys": '**`budget(96, is_causal=True, memory="constant")`**',
    "sinks + window": "4 sinks + window 92",
    "leverage + window": "leverage 48 + window 48",
    "key norm + window": "key norm 48 + window 48",
    "random + window": "random 48 + window 48",
}


def _causal_encoder() -> str:
    results = read(ENCODER)["results"]
    rows = []
    for method, name in CAUSAL.items():
        cells = [f"{results[length][method]['error']:.3f}" for length in ("512", "8192")]
        rows.append([name, *(f"**{cell}**" if method == "fewkeys" else cell for cell in cells)])
    return table(["at 96 slots", "512 tokens", "8,192 tokens (16 texts in a row)"], rows)


def _neighbours() -> str:
    results = read(NEIGHBOURS)
    from experiments.embeddings.run import LINES

    rows = []
    order = [*LINES, "exact"]
    for row in sorted(results["rows"], key=lambda row: (-row["texts"], order.index(row["line"]), row["slots"])):
        if row["line"] != "exact":
            share = " to ".join(f"{100 * row[end]:.0f}" for end in ("low", "high"))
            same = f"{100 * row['agreement']:.1f} % ({share})"
            rows.append([LINES[row["line"]], row["slots"], row["texts"], same, f"{row['cosine']:.4f}"])
    return table(["plan", "slots", "texts", "same nearest neighbour", "cosine to exact"], rows)


def _slots_needed() -> str:
    """The fewest slots tried whose agreement is at least 95 and 99 %, on equally many texts."""
    results = read(NEIGHBOURS)
    needed = []
    for goal in (95, 99):
        for line, name in (("budget", "`budget(slots, cohorts=1)`"), ("cohorts", "`budget(slots, cohorts=32)`")):
            of_line = [row for row in results["rows"] if row["line"] == line and row["texts"] == results["few"]]
            enough = [row["slots"] for row in of_line if row["agreement"] >= goal / 100]
            most = max(row["slots"] for row in of_line)
            needs = f"needs {min(enough)} slots for {goal} %" if enough else f"is below {goal} % with {most} slots"
            needed.append(f"{name} {needs}")
    return f"Of the slots tried, on {results['few']} texts, " + "; ".join(needed) + "."


def _modernbert() -> str:
    rows = read(MODERNBERT)["rows"]
    cells = [[row["plan"], f"{row['seconds']:.1f}", f"{row['megabytes']:,.0f} MB"] for row in rows]
    return table(
        ["ModernBERT-base's shape, 6 of its 22 layers", "seconds a document", "peak memory beside the model"], cells
    )


LONG_ENCODER = "experiments/long_encoder/results/long_encoder.json"


def _long_encoder() -> str:
    from experiments.long_encoder.judge import table as tables

    return tables(read(LONG_ENCODER)["rows"]).rstrip()


def _long_encoder_at(length: int) -> str:
    """What each plan finds at one length, in %, with its time in terms of that of exact attention, which took turns."""
    rows = [row for row in read(LONG_ENCODER)["rows"] if row["length"] == length]
    tasks, lines, seconds = list(dict.fromkeys(row["task"] for row in rows)), [], dict[str, float]()
    for name in dict.fromkeys(row["plan"] for row in rows):
        of_plan = {row["task"]: row for row in rows if row["plan"] == name}
        seconds[name] = sum(row["seconds"] for row in of_plan.values())
        found = [f"{100 * of_plan[task]['found']:.0f}" for task in tasks]
        faster = f"{seconds['exact'] / seconds[name]:.1f}"
        lines.append([name, *found, f"{of_plan['passage']['cosine']:.4f}", faster])
    return table(["plan", *(f"{task}, % found" for task in tasks), "cosine to exact", "exact / plan, time"], lines)


HIDDEN = ("pass key", "fact")


def _of_tasks(plan: str, tasks: tuple[str, ...], shortest: int) -> list[Row]:
    """The rows of a plan and these tasks in documents of at least so many tokens."""
    rows = [row for row in read(LONG_ENCODER)["rows"] if row["plan"] == plan and row["length"] >= shortest]
    return [row for row in rows if row["task"] in tasks]


def _of_exact(*tasks: str, shortest: int = 8192) -> Callable[[], str]:
    """Answers that the plans of 64 and 192 slots and exact attention find."""

    def text() -> str:
        few, more, exact = (
            round(sum(row["found"] * row["questions"] for row in _of_tasks(plan, tasks, shortest)))
            for plan in ("budget(64)", "budget(192)", "exact")
        )
        return f"{few} and {more} answers where exact attention finds {exact}"

    return text


def _hidden_intervals() -> str:
    """The least and the largest end of the intervals of hidden sentences, at 8,192 tokens."""
    ends = [row["of_exact_95"] for plan in ("budget(64)", "budget(192)") for row in _of_tasks(plan, HIDDEN, 8192)]
    return f"from {min(low for low, _ in ends):.2f} to {max(high for _, high in ends):.2f}"


EMBED = "benchmarks/results/embed.json"


def _embed() -> str:
    """Every way to embed the folder, against exact attention in batches of 32 or, for chunks, by the same command."""
    run = read(EMBED)["minilm"]
    rows = run["rows"]
    of_rows = {"": "cosine", " --compile": "cosine_compiled", ", late chunks": "cosine_chunks"}
    cosines = {f"fewkeys embed{way}": run[name] for way, name in of_rows.items()}
    cells = []
    for name, row in rows.items():
        if name != "one short text":
            exact = rows["exact late chunks" if "chunks" in name else "exact, batches of 32"]
            cosine = cosines.get(name)
            shown = "" if cosine is None else f"{cosine['mean']:.4f}, {cosine['least']:.4f}"
            faster = f"{exact['seconds'] / row['seconds']:.2f}"
            cells.append(
                [name, f"{row['seconds']:,.0f}", f"{row['cpu_seconds']:,.0f}", faster, f"{row['above_mb']:,.0f}", shown]
            )
    return table(
        [
            "",
            "seconds",
            "of the processor",
            "exact / this",
            "peak memory above one short text, MB",
            "cosine: mean, least",
        ],
        cells,
    )


def _embed_texts() -> str:
    run = read(EMBED)["minilm"]
    tokens, machine = run["tokens"], run["machine"]
    sizes = f"{tokens['least']:,} to {tokens['most']:,} tokens, {tokens['sum']:,} in all"
    return f"{run['texts']} texts of {sizes}; {machine['cpu']}, threads in use: {machine['threads']}"


def _embed_summary() -> str:
    run = read(EMBED)["minilm"]
    ways = ("fewkeys embed", "exact, batches of 32", "exact, text by text")
    ours, batches, single = (f"{run['rows'][way]['seconds']:.0f} s" for way in ways)
    tokens, cosine = run["tokens"], run["cosine"]["mean"]
    return (
        f"{run['texts']} texts of {tokens['least']:,} to {tokens['most']:,} tokens take {ours} on two cores. "
        f"`SentenceTransformer.encode` takes {batches}, or {single} text by text. "
        f"The mean cosine with its vectors is {cosine:.4f}"
    )


FIGURES: dict[str, Callable[[], str]] = {
    "demo": _demo,
    "demo.budget": lambda: f"{_demo_row(OURS)['error']:.3f}",
    "demo.cosine": lambda: f"{_demo_row(OURS)['cosine']:.4f}",
    "demo.oracle": lambda: f"{_demo_row('top-k per query (oracle)')['error']:.3f}",
    "embed": _embed,
    "embed.summary": _embed_summary,
    "embed.texts": _embed_texts,
    "modernbert": _modernbert,
    "long-encoder": _long_encoder,
    "long-encoder.8192": lambda: _long_encoder_at(8192),
    "long-encoder.content": _of_exact("passage", "chunk"),
    "long-encoder.hidden": _of_exact(*HIDDEN),
    "long-encoder.hidden-all": _of_exact(*HIDDEN, shortest=512),
    "long-encoder.hidden-intervals": _hidden_intervals,
    "neighbours": _neighbours,
    "neighbours.slots": _slots_needed,
    "tuned": _tuned,
    "tuned.of-budget": _tuned_beside(OURS),
    "tuned.of-the-oracle": _tuned_beside("top-k per query (oracle)"),
    "tuned.layers": _tuned_layers,
    "tuned.or-more-slots": _tuned_or_more_slots,
    "fit": _fit,
    "fit.pairs.sparsity": _fit_one("ClusterPairs(count=11, lift=1.0)", "sparsity"),
    "fit.pairs.recall": _fit_one("ClusterPairs(count=11, lift=1.0)", "recall"),
    "fit.buckets.recall": _fit_one("Buckets(beta=11, kind='uniform')", "recall"),
    "fit.buckets.sparsity": _fit_one("Buckets(beta=11, kind='uniform')", "sparsity"),
    "stand-ins": _stand_ins,
    "stand-ins.of-the-oracle": _of_the_oracle,
    "spot-checks": _spot_checks,
    "error-bars.heads": _bars_of_heads,
    "error-bars.hard": _bars_of_hard_keys,
    "causal.encoder": _causal_encoder,
    "causal.encoder.512": lambda: f"{read(ENCODER)['results']['512']['fewkeys']['of the oracle']:.2f}",
    "causal.encoder.8192": lambda: f"{read(ENCODER)['results']['8192']['fewkeys']['of the oracle']:.2f}",
}
