"""Figures of benchmarks/results."""

from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

from docs.figures.sources import ratio, read, table

Row = dict[str, Any]


def _bench(form: str) -> dict[int, dict[str, Row]]:
    """Rows by length and name."""
    by_length: dict[int, dict[str, Row]] = {}
    for row in read(f"benchmarks/results/{form}/bench.json")["rows"]:
        by_length.setdefault(row["length"], {})[row["name"]] = row
    return by_length


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
    cells = [["exact attention, ms", *(_milliseconds(row["exact"]["ms"]) for row in rows.values())]]
    for slots in (64, 192):
        plan_rows = [row[f"budget:{slots}"] for row in rows.values()]
        cells.append([f"`budget({slots})`, ms", *(_milliseconds(one["ms"]) for one in plan_rows)])
        cells.append(["exact / plan", *(ratio(one["ratio"]) for one in plan_rows)])
    return table(["tokens", *(f"{length:,}" for length in rows)], cells)


FORMS = {
    "with gradients": "cpu-backward",
    "bfloat16": "cpu-bfloat16",
    "float16, on an AMD EPYC": "cpu-float16",
}


def _forms() -> str:
    lengths = (1024, 4096, 16384)
    rows = []
    for name, form in FORMS.items():
        by_length = _bench(form)
        cells = [ratio(by_length[length][PLAN]["ratio"]) if length in by_length else "" for length in lengths]
        rows.append([name, *cells, f"[JSON](../benchmarks/results/{form}/bench.json)"])
    return table(["tokens", *(f"{length:,}" for length in lengths), ""], rows)


def _decode(field: str, digits: int, unit: float = 1.0) -> Callable[[], str]:
    rows = read("benchmarks/results/decode.json")["fewkeys"]
    return lambda: f"{median(row[field] for row in rows) / unit:.{digits}f}"


def _campaign() -> str:
    parts = read("benchmarks/results/campaign.json").items()
    rows = [[name, part["promise"], f"{part['tried']:,}", len(part["failed"])] for name, part in parts]
    return table(["part", "promise", "tried", "failed"], rows)


def _short() -> str:
    rows = [
        [
            f"{row['batch']} x {row['length']}",
            *(_milliseconds(row["ms"][way]) for way in ("exact", "apply")),
            f"{row['over_exact']:.2f}",
        ]
        for row in read("benchmarks/results/short.json")["rows"]
    ]
    return table(["batch", "the model, ms", "under `fk.apply`, ms", "apply / the model"], rows)


def _short_most() -> str:
    """How much longer a short call takes under a plan, at most, per cent."""
    return f"{100 * (max(row['over_exact'] for row in read('benchmarks/results/short.json')['rows']) - 1):.0f}"


ENGINES = ("torch", "torch.compile", "onnxruntime", "openvino", "fewkeys", "fewkeys.compile")
SHOWN = (
    *(("minilm", length) for length in (1024, 2048, 4096, 8192)),
    *(("base", length) for length in (1024, 2048, 4096)),
)
"""Rows of the README."""


ON = {
    "epyc": "benchmarks/results/engines.json",
    "zen4": "benchmarks/results/zen4/engines.json",
    "xeon": "benchmarks/results/xeon/engines.json",
}


def _engines(processor: str, shapes: tuple[tuple[str, int], ...] = ()) -> str:
    """All rows, or those of some models and lengths with one sequence."""
    rows = [
        [
            row["model"],
            f"{row['length']:,}" if row["batch"] == 1 else f"{row['batch']} x {row['length']}",
            *(_milliseconds(row["ms"][way]) if way in row["ms"] else "-" for way in ENGINES),
            ratio(row["ratio"]),
            *(() if shapes else (ratio(row["ceiling"]) if "ceiling" in row else "-",)),
        ]
        for row in read(ON[processor])["rows"]
        if not shapes or (row["batch"] == 1 and (row["model"], row["length"]) in shapes)
    ]
    free = () if shapes else ("best engine / no attention",)
    return table(["model", "tokens", *ENGINES, "best engine / fewkeys", *free], rows)


def _engine_row(model: str, length: int, processor: str = "epyc") -> dict[str, Any]:
    rows = read(ON[processor])["rows"]
    return next(row for row in rows if (row["model"], row["batch"], row["length"]) == (model, 1, length))


def _wrong() -> str:
    """How much longer the base model of 1,024 tokens took under `fk.apply` than in torch on a Xeon, per cent."""
    ms = _engine_row("base", 1024, "xeon")["ms"]
    return f"{100 * (ms['fewkeys'] / ms['torch'] - 1):.0f}"


def _on_xeon() -> str:
    """The ratios of the README's rows on the other processor."""
    parts = []
    for model in ("minilm", "base"):
        *ratios, last = (ratio(_engine_row(model, length, "xeon")["ratio"]) for name, length in SHOWN if name == model)
        parts.append(f"{', '.join(ratios)} and {last} for `{model}`")
    return " and ".join(parts)


def _compiled() -> str:
    """Milliseconds of a short call in torch and compiled."""
    ms = _engine_row("minilm", 512)["ms"]
    return f"{_milliseconds(ms['torch'])} ms in torch and {_milliseconds(ms['torch.compile'])} ms compiled"


def _saved() -> str:
    """The share of a long call under a plan that compiling saves, per cent."""
    rows = [row["ms"] for row in read(ON["epyc"])["rows"] if row["batch"] == 1 and 2048 <= row["length"] <= 8192]
    saved = [100 * (1 - ms["fewkeys.compile"] / ms["fewkeys"]) for ms in rows]
    return f"{min(saved):.0f} to {max(saved):.0f}"


FLOAT32 = "float32"
ALSO = "benchmarks/results/epyc/"
"""Results of decoders on the other processor."""


def _decoders(part: str, heads: int, count: str) -> Callable[[], str]:
    """Milliseconds of one attention call of a decoder at each length."""

    def of_heads(path: str) -> list[Any]:
        return [row for row in read(path)[part] if row["heads"] == heads]

    def shown() -> str:
        rows, also = of_heads("benchmarks/results/decoders.json"), of_heads(f"{ALSO}decoders.json")
        times = [_milliseconds(1000 * row["constant"]) for row in rows if "constant" in row]
        constant = [['the same with `memory="constant"`, ms', *times]] if times else []
        return table(
            [count, *(f"{row['tokens']:,}" for row in rows)],
            [
                ["exact attention, ms", *(_milliseconds(1000 * row["exact"]) for row in rows)],
                ["`budget(256, is_causal=True)`, ms", *(_milliseconds(1000 * row["plan"]) for row in rows)],
                ["exact / plan", *(ratio(row["ratio"]) for row in rows)],
                ["exact / plan on an AMD EPYC", *(ratio(row["ratio"]) for row in also)],
                *constant,
            ],
        )

    return shown


def _whole_decoder() -> str:
    cells = []
    for processor, folder in (("Intel Xeon", "benchmarks/results/"), ("AMD EPYC", ALSO)):
        results = read(f"{folder}whole_decoder.json")
        parts = {"prefill": "a prompt of {}", "compiled": "a prompt of {}, compiled", "token": "a token after {}"}
        cells += [
            [
                processor,
                dtype,
                name.format(f"{row['tokens']:,}"),
                *(_milliseconds(row["ms"][way]) for way in ("exact", "plan")),
                ratio(row["ratio"]),
                ratio(row["ms"]["exact"] / row["ms"]["empty"]) if "empty" in row["ms"] else "",
            ]
            for dtype in (FLOAT32, "bfloat16")
            for part, name in parts.items()
            for row in _of_dtype(results.get(part, ()), dtype)
        ]
    head = ["processor", "dtype", "", "DynamicCache, ms", "`fk.cache`, ms", "exact / plan", "exact / no keys"]
    return table(head, cells)


def _of_dtype(rows: Iterable[dict[str, Any]], dtype: str) -> list[dict[str, Any]]:
    """The rows of a dtype. Older results have none: they were measured in float32."""
    return [row for row in rows if row.get("dtype", FLOAT32) == dtype]


def _whole_decoder_rows(folder: str, dtype: str) -> list[dict[str, Any]]:
    """The longest prompt, and every token."""
    results = read(f"{folder}whole_decoder.json")
    return [_of_dtype(results["prefill"], dtype)[-1], *_of_dtype(results["token"], dtype)]


def _whole_decoder_ratios() -> str:
    """The time of exact attention over that of the plan: the longest prompt, and every token."""
    rows = _whole_decoder_rows(ALSO, "bfloat16")
    names = ("a prompt of", *("a token after" for _ in rows[1:]))
    parts = [f"{ratio(row['ratio'])} for {name} {row['tokens']:,}" for name, row in zip(names, rows, strict=True)]
    folders = (ALSO, "benchmarks/results/")
    there, here = ([ratio(row["ratio"]) for row in _whole_decoder_rows(folder, FLOAT32)] for folder in folders)
    return (
        f"{parts[0]} tokens, {' and '.join(parts[1:])}. In float32 it is {', '.join(there[:-1])} and {there[-1]}, "
        f"and on an Intel Xeon {', '.join(here[:-1])} and {here[-1]}"
    )


def _token_against_float32() -> str:
    """The least time of exact attention in either dtype over that of the plan in bfloat16, for every token."""
    exact, plan = (_whole_decoder_rows(ALSO, dtype)[1:] for dtype in (FLOAT32, "bfloat16"))
    ratios = (ratio(a["ms"]["exact"] / b["ms"]["plan"]) for a, b in zip(exact, plan, strict=True))
    return " and ".join(ratios)


GPU = "benchmarks/results/gpu.json"


def _gpu(part: str, names: tuple[str, ...], dtypes: tuple[str, ...]) -> Callable[[], str]:
    """Milliseconds on a GPU: exact, by the plan, and by `impl="auto"`; `names`: the fields that name a row."""

    def shown() -> str:
        rows = [
            [
                *(f"`{row[name]}`" if name == "plan" else row[name] for name in names),
                f"{row['length']:,}",
                *(_milliseconds(row["ms"][way]) for way in ("exact", "plan", "auto")),
                f"{row['ms']['exact'] / row['ms']['plan']:.2g}",
            ]
            for row in read(GPU)[part]
            if row["dtype"] in dtypes
        ]
        head = [*names, "tokens", "exact attention, ms", "the plan, ms", '`impl="auto"`, ms', "exact / plan"]
        return table(head, rows)

    return shown


def _gpu_difference(dtype: str) -> str:
    rows = [row["difference"].values() for row in read(GPU)["agreement"] if row["dtype"] == dtype]
    return f"{max(map(max, rows)):.1e}"


def _gpu_more() -> str:
    """How many milliseconds longer calls took that exact attention answered."""
    times = [row["ms"] for row in read(GPU)["calls"]]
    more = [ms["auto"] - ms["exact"] for ms in times if ms["auto"] > ms["exact"]]
    return f"{min(more):.1f} to {max(more):.1f}"


def _kernels() -> str:
    ratios = [row["ratio"] for row in read("benchmarks/results/kernels.json")["rows"]]
    return f"{min(ratios):.1f} to {max(ratios):.1f}"


def _wheel() -> str:
    """The time by a wheel's kernels over that by those that this machine's compiler makes."""
    calls = read("benchmarks/results/wheel.json")["ms"]
    return " and ".join(f"{ms['wheel'] / ms['here']:.2f}" for ms in calls.values())


NEWCOMER = "benchmarks/results/newcomer.json"
FIGURES: dict[str, Callable[[], str]] = {
    "short": _short,
    "short.most": _short_most,
    "decoders.prefill": _decoders("prefill", 9, "tokens"),
    "decoders.token": _decoders("decoding", 9, "tokens before"),
    "engines": lambda: _engines("epyc"),
    "engines.xeon": lambda: _engines("xeon"),
    "engines.zen4": lambda: _engines("zen4"),
    "engines.short": lambda: _engines("epyc", SHOWN),
    "engines.short.xeon": _on_xeon,
    "engines.compiled": _compiled,
    "engines.saved": _saved,
    "engines.wrong": _wrong,
    "bench.lengths": _lengths,
    "bench.forms": _forms,
    "bench.avx2": _avx2,
    "bench.error": lambda: f"{_bench('cpu-error')[16384][PLAN]['error']:.3f}",
    "decode.megabytes": _decode("bytes", 1, 1e6),
    "newcomer.minutes": lambda: f"{read(NEWCOMER)['total'] / 60:.1f}",
    "newcomer.wheel": lambda: f"{read(NEWCOMER)['seconds']['build the wheel'] / 60:.1f}",
    "campaign": _campaign,
    "decoders.whole": _whole_decoder,
    "decoders.whole-ratios": _whole_decoder_ratios,
    "decoders.token-float32": _token_against_float32,
    "gpu.calls": _gpu("calls", ("plan", "dtype"), (FLOAT32, "bfloat16")),
    "gpu.models": _gpu("models", ("model",), (FLOAT32,)),
    "gpu.more": _gpu_more,
    "kernels": _kernels,
    "kernels.wheel": _wheel,
    "gpu.float32": lambda: _gpu_difference(FLOAT32),
    "gpu.float64": lambda: _gpu_difference("float64"),
}
