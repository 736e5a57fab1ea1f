"""Figures of benchmarks/results."""

from collections.abc import Callable
from statistics import median
from typing import Any

from docs.figures.sources import ratio, read, table

Row = dict[str, Any]


def _bench(form: str) -> dict[int, dict[str, Row]]:
    """Rows by length and name."""
    found: dict[int, dict[str, Row]] = {}
    for row in read(f"benchmarks/results/{form}/bench.json")["rows"]:
        found.setdefault(row["length"], {})[row["name"]] = row
    return found


PLAN = "budget:192"


def _milliseconds(value: float) -> str:
    return f"{value:#.3g}" if value < 100 else f"{value:,.0f}"


def _lengths() -> str:
    rows = _bench("cpu")
    each = rows.values()
    auto = {"plan": "the plan", "exact": "exact"}
    return table(
        ["tokens", *(f"{length:,}" for length in rows)],
        [
            ["exact attention, ms", *(_milliseconds(row["exact"]["ms"]) for row in each)],
            ["`budget(192)`, ms", *(_milliseconds(row[PLAN]["ms"]) for row in each)],
            ["exact / plan", *(ratio(row[PLAN]["ratio"]) for row in each)],
            ['`impl="auto"` runs', *(auto[row[PLAN]["auto"]] for row in each)],
        ],
    )


def _avx2() -> str:
    rows = _bench("avx2")
    found = [["exact attention, ms", *(_milliseconds(row["exact"]["ms"]) for row in rows.values())]]
    for slots in (64, 192):
        own = [row[f"budget:{slots}"] for row in rows.values()]
        found.append([f"`budget({slots})`, ms", *(_milliseconds(one["ms"]) for one in own)])
        found.append(["exact / plan", *(ratio(one["ratio"]) for one in own)])
    return table(["tokens", *(f"{length:,}" for length in rows)], found)


def _avx2_causal() -> str:
    rows = _bench("avx2-causal")
    found = [["exact attention, ms", *(_milliseconds(row["exact"]["ms"]) for row in rows.values())]]
    own = [row["constant:192"] for row in rows.values()]
    found.append(["constant memory, ms", *(_milliseconds(one["ms"]) for one in own)])
    found.append(["exact / plan", *(ratio(one["ratio"]) for one in own)])
    return table(["tokens", *(f"{length:,}" for length in rows)], found)


FORMS = {
    "with gradients": "cpu-backward",
    "bfloat16": "cpu-bfloat16",
}


def _forms() -> str:
    lengths = (1024, 4096, 16384)
    rows = []
    for name, form in FORMS.items():
        found = _bench(form)
        cells = [ratio(found[length][PLAN]["ratio"]) if length in found else "" for length in lengths]
        rows.append([name, *cells, f"[JSON](benchmarks/results/{form}/bench.json)"])
    return table(["tokens", *(f"{length:,}" for length in lengths), ""], rows)


def _decode(field: str, digits: int, unit: float = 1.0) -> Callable[[], str]:
    rows = read("benchmarks/results/decode.json")["fewkeys"]
    return lambda: f"{median(row[field] for row in rows) / unit:.{digits}f}"


def _sharded(name: str, rows: str) -> str:
    return table(
        ["ranks", "tokens", "ring, bytes", "fewkeys, bytes", "ring, s", "fewkeys, s"],
        [
            [
                *(f"{row[column]:,.0f}" for column in ("ranks", "tokens", "ring_bytes", "fewkeys_bytes")),
                *(f"{row[column]:.3g}" for column in ("ring_seconds", "fewkeys_seconds")),
            ]
            for row in read(f"benchmarks/results/{name}")[rows]
        ],
    )


def _campaign() -> str:
    parts = read("benchmarks/results/campaign.json").items()
    rows = [[name, part["promise"], f"{part['tried']:,}", len(part["failed"])] for name, part in parts]
    return table(["part", "promise", "tried", "failed"], rows)


def _sets() -> str:
    rows = []
    for name, own in read("benchmarks/results/sets.json")["sets"].items():
        for row in own["rows"]:
            ms = [_milliseconds(row["ms"][way]) for way in ("exact", "kernels", "steps")]
            ratios = [ratio(number) for number in (row["exact_over"]["kernels"], row["steps_over_kernels"])]
            rows.append([f"`{name}`", row["form"], f"{row['length']:,}", *ms, *ratios])
    return table(
        [
            "set",
            "form",
            "tokens",
            "exact, ms",
            "kernels, ms",
            "torch's steps, ms",
            "exact / kernels",
            "steps / kernels",
        ],
        rows,
    )


def _busy() -> str:
    rows = []
    for policy, own in read("benchmarks/results/sets.json")["busy"].items():
        for row in own["rows"]:
            times = [_milliseconds(row[way][kind]) for way in ("exact", "kernels") for kind in ("median", "worst")]
            rows.append([policy, f"{row['length']:,}", *times])
    return table(["threads wait", "tokens", "exact, ms", "its slowest", "plan, ms", "its slowest"], rows)


def _models() -> str:
    rows = []
    for name, own in read("benchmarks/results/models.json")["models"].items():
        for row in own["rows"]:
            times = [_milliseconds(row[way]) for way in ("exact_ms", "ms")]
            shares = [f"{100 * row[way]:.0f} %" for way in ("exact_share", "share")]
            rows.append([name, f"{row['length']:,}", *times, ratio(row["ratio"]), *shares])
    return table(
        ["model", "tokens", "exact, ms", "plan, ms", "exact / plan", "attention's share", "under the plan"], rows
    )


def _wheel() -> str:
    rows = []
    for name, own in read("benchmarks/results/wheel.json").items():
        times = [_milliseconds(own[way]) for way in ("first_ms", "later_ms", "exact_ms", "ms")]
        rows.append([name, f"`{own['library']}`", ", ".join(own["compilers"]) or "none", *times, ratio(own["ratio"])])
    return table(
        ["", "library", "compilers", "first call, ms", "later, ms", "16,384: exact, ms", "plan, ms", "exact / plan"],
        rows,
    )


def _short() -> str:
    rows = [
        [
            f"{row['sequences']} of {row['length']}" + (" at most" if row["padded"] else ""),
            *(_milliseconds(row["ms"][way]) for way in ("exact", "auto", "kernels")),
            *(ratio(row["over_exact"][way]) for way in ("auto", "kernels")),
        ]
        for row in read("benchmarks/results/short.json")["rows"]
    ]
    return table(["sequences", "exact, ms", "`auto`, ms", "kernels, ms", "`auto` / exact", "kernels / exact"], rows)


NEWCOMER = "benchmarks/results/newcomer.json"
FIGURES: dict[str, Callable[[], str]] = {
    "sets": _sets,
    "sets.busy": _busy,
    "models": _models,
    "wheel": _wheel,
    "short": _short,
    "bench.lengths": _lengths,
    "bench.forms": _forms,
    "bench.avx2": _avx2,
    "bench.avx2-causal": _avx2_causal,
    "bench.short": lambda: ratio(1 / _bench("cpu")[512][PLAN]["ratio"]),
    "bench.peak": lambda: f"{_bench('cpu')[16384][PLAN]['peak_bytes'] / 1e6:.0f}",
    "bench.tensors": lambda: f"{_bench('cpu')[16384][PLAN]['tensor_bytes'] / 1e6:.0f}",
    "decode.ms": _decode("milliseconds", 1),
    "decode.megabytes": _decode("bytes", 1, 1e6),
    "sharded.measured": lambda: _sharded("sharded.json", "rows"),
    "sharded.modelled": lambda: _sharded("sharded_model.json", "predictions"),
    "newcomer.minutes": lambda: f"{read(NEWCOMER)['total'] / 60:.1f}",
    "newcomer.wheel": lambda: f"{read(NEWCOMER)['seconds']['build the wheel'] / 60:.1f}",
    "campaign": _campaign,
}
