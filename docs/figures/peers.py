"""Figures of experiments/peers: rivals side by side."""

from collections.abc import Callable
from functools import partial
from typing import Any

from docs.figures.sources import read, table

from fewkeys import budget

RESULTS = "experiments/peers/results"
ENCODERS = ("minilm", "minilm-4096", "minilm-16384", "t2t-3136", "t2t-784", "biggan", "normal-1024", "normal-4096")
REACHED = (0.5, 0.3, 0.2, 0.1)


def _data(name: str) -> dict[str, Any]:
    results: dict[str, Any] = read(f"{RESULTS}/{name}.json")
    return results


def _shown(ms: float) -> str:
    return f"{ms:.3g}" if ms < 100 else f"{ms:,.0f}"


def _threads(machine: dict[str, Any]) -> str:
    return "one thread" if machine["threads"] == 1 else f"{machine['threads']} threads"


def _encoder(name: str) -> str:
    """The least milliseconds in which each row reaches an error, and its least error among the settings timed."""
    from experiments.peers.fronts import fronts

    data = _data(name)
    rows = []
    for peer, front in fronts(data["rows"]).items():
        times = [min((row["ms"] for row in front if row["error"] <= level), default=None) for level in REACHED]
        shown = ["" if ms is None else _shown(ms) for ms in times]
        best = front[-1]
        cells = [peer, *shown, f"{best['error']:.3f} in {_shown(best['ms'])}"]
        rows.append([f"**{cell}**" if cell and peer == "fewkeys" else cell for cell in cells])
    title = f"ms, {_threads(data['machine'])}; exact {_shown(data['exact_ms'])}"
    return table([title, *(f"error {level}" for level in REACHED), "least error"], rows)


def _points_below(name: str, most: float = 1.0) -> dict[str, dict[str, Any]]:
    """Who has less error than we in the same time, at errors up to `most` and below that of the mean of all values:
    each with its fastest such point.
    """
    from experiments.peers.fronts import rivals_below

    data = _data(name)
    worst = min(most, data["without_attention"])
    return {peer: points[0] for peer, points in rivals_below(data["rows"], data["exact_ms"], worst).items()}


def _below(name: str) -> str:
    shown = (f"{peer} ({row['error']:.2f} in {row['ms']:.2g} ms)" for peer, row in _points_below(name).items())
    return ", ".join(shown) or "none"


def _inputs_below(most: float, *kinds: str) -> str:
    """On how many inputs that is so for methods of these kinds at errors up to `most`, and which."""
    from experiments.peers.registry import PEERS

    names = [name for name in ENCODERS if any(PEERS[peer].kind in kinds for peer in _points_below(name, most))]
    listed = f" ({', '.join(f'`{name}`' for name in names)})" if names else ""
    return f"{len(names)} of {len(ENCODERS)} inputs{listed}"


LENGTHS = {"minilm": "512 tokens", "minilm-4096": "4,096 tokens", "minilm-16384": "16,384 tokens"}


def _cohorts() -> str:
    """Error and milliseconds of `budget` by slots and cohorts; what it has by default stands out."""
    settings = _data("cohorts")["settings"]
    cells: dict[tuple[int, int], dict[str, str]] = {}
    for name in LENGTHS:
        for row in settings[name]["rows"]:
            by_length = cells.setdefault((row["cohorts"], row["slots"]), {})
            by_length[name] = f"{row['error']:.3f} in {_shown(row['ms'])}"
    rows = []
    for (cohorts, slots), by_length in sorted(cells.items()):
        cells = [str(slots), str(cohorts), *(by_length.get(name, "") for name in LENGTHS)]
        usual = cohorts == budget(slots).keep.cohort_lists
        rows.append([f"**{cell}**" if usual and cell else cell for cell in cells])
    exact = [f"{length}; exact {_shown(settings[name]['exact_ms'])} ms" for name, length in LENGTHS.items()]
    threads = {_threads(settings[name]["machine"]) for name in LENGTHS}
    return table([f"slots ({', '.join(sorted(threads))})", "cohorts", *(f"error, ms: {text}" for text in exact)], rows)


def _at(name: str, slots: int, cohorts: int) -> dict[str, Any]:
    rows: list[dict[str, Any]] = _data("cohorts")["settings"][name]["rows"]
    return next(row for row in rows if (row["slots"], row["cohorts"]) == (slots, cohorts))


def _of_the_oracle() -> str:
    """The error of `budget(64)` beside that of each query's own best 64 keys."""
    rows = _data("minilm")["rows"]
    best = next(
        row["error"]
        for row in rows
        if row["peer"] == "best keys per query (oracle)" and row["settings"] == {"kept": 64}
    )
    return f"{_at('minilm', 64, 32)['error'] / best:.2f}"


def _from_when() -> str:
    """From which multiple of the time of one cohort with 64 slots on a plan with cohorts has less error than every plan
    of one cohort in the same time, at each length.
    """
    shown = []
    for name, length in LENGTHS.items():
        rows = _data("cohorts")["settings"][name]["rows"]
        ones, others = ([row for row in rows if (row["cohorts"] == 1) == is_one] for is_one in (True, False))
        better = (
            row["ms"]
            for row in others
            if not any(one["ms"] <= row["ms"] and one["error"] <= row["error"] for one in ones)
        )
        shown.append(f"{min(better) / _at(name, 64, 1)['ms']:.1f} at {length}")
    return ", ".join(shown)


def _one_cohort() -> str:
    """Time and error of one cohort with 96 slots, relative to `budget(192)`."""
    cohorts = budget(192).keep.cohort_lists
    pairs = [(_at(name, 96, 1), _at(name, 192, cohorts)) for name in LENGTHS]
    times, errors = (sorted(one[key] / usual[key] for one, usual in pairs) for key in ("ms", "error"))
    return f"{times[0]:.1f} to {times[-1]:.1f} of the time, with {errors[0]:.1f} to {errors[-1]:.1f} times the error"


def _decoder() -> str:
    by_peer: dict[str, dict[int, dict[str, Any]]] = {}
    for row in _data("smollm2")["rows"]:
        by_peer.setdefault(row["peer"], {})[row["slots"]] = row
    rows = []
    for peer, by_slots in by_peer.items():
        cells = [
            f"{by_slots[slots]['error']:.3f} ({by_slots[slots]['paid']:.0f})" if slots in by_slots else ""
            for slots in (64, 128, 256)
        ]
        rows.append([peer, *cells])
    return table(["error (slots paid)", "64 slots", "128 slots", "256 slots"], rows)


QUESTIONS = "experiments/decoders/results/questions.json"
OPENVINO = "experiments/decoders/results/questions-openvino.json"
SIZES = (256, 128)


def _questions(slots: int) -> str:
    from experiments.decoders.questions.report import table as tables

    return tables(read(QUESTIONS)["cells"], slots)


def _asked(slots: int) -> dict[str, dict[str, Any]]:
    from experiments.decoders.questions.report import rows

    return {row["row"]: row for row in rows(read(QUESTIONS)["cells"], slots)}


def _presses() -> str:
    """Every row at both sizes, by its KL at the larger: what it answers, how far it is, what it reads and holds."""
    larger, smaller = (_asked(slots) for slots in SIZES)
    lines = []
    for name, row in larger.items():
        pair = [row] if name == "exact" else [row, smaller[name]]
        line = [name, f"{row['slots']:.0f}", f"{row['read'] / 1e3:,.0f}", f"{row['held'] / 1e6:.1f}"]
        line += [cell for one in pair for cell in (_answered(one), f"{one['kl']:.3f}")]
        line += [""] * (8 - len(line))
        lines.append([f"**{cell}**" for cell in line] if name == "fewkeys" else line)
    first, second = SIZES
    head = ["", "slots a query", "KB read", "MB held", f"{first} slots: right", "KL", f"{second} slots: right", "KL"]
    return table(head, lines)


def _answered(row: dict[str, Any]) -> str:
    right, answers = (sum(counts) for counts in zip(*row["right"].values(), strict=True))
    return f"{right} / {answers}"


def _nearest() -> str:
    """The press that is nearest to exact attention."""
    from experiments.decoders.questions.presses import PRESSES

    name, row = next((name, row) for name, row in _asked(SIZES[0]).items() if name in PRESSES)
    return f"{name} (KL {row['kl']:.2f}, {_answered(row)} right)"


def _many() -> str:
    """What presses answer that keep most of the keys."""
    return ", ".join(f"{name} {_answered(row)}" for name, row in _asked(1024).items())


def _half() -> str:
    """Our plan with half of the slots."""
    row = _asked(SIZES[1])["fewkeys"]
    return f"KL {row['kl']:.3f}, {_answered(row)} right, {row['read'] / 1e3:,.0f} KB"


def _openvino() -> str:
    """Right answers by OpenVINO's own rows, beside its exact attention on the same prompts."""
    by_row: dict[str, dict[tuple[str, int], dict[str, Any]]] = {}
    for cell in read(OPENVINO)["cells"]:
        of = cell["of"]
        by_row.setdefault(of["row"], {})[of["task"], of["seed"]] = cell
    exact, rows = by_row.pop("exact"), []
    for name, by_prompt in by_row.items():
        shared = by_prompt.keys() & exact.keys()
        cells = [by_prompt[prompt] for prompt in shared], [exact[prompt] for prompt in shared]
        rows.append([name, *(f"{sum(c['right'] for c in row)} / {sum(c['answers'] for c in row)}" for row in cells)])
    return table(["OpenVINO GenAI", "right", "exact attention, same prompts"], rows)


FIGURES: dict[str, Callable[[], str]] = {
    **{f"questions.{slots}": partial(_questions, slots) for slots in SIZES},
    "questions.nearest": _nearest,
    "questions.half": _half,
    "questions.many": _many,
    "peers.presses": _presses,
    "peers.openvino": _openvino,
    **{f"peers.{name}": partial(_encoder, name) for name in ENCODERS},
    **{f"peers.below.{name}": partial(_below, name) for name in ENCODERS},
    "peers.below.half": partial(_inputs_below, 0.5, "rival", "control"),
    "peers.below.rivals": partial(_inputs_below, 1.0, "rival"),
    "peers.below.controls": partial(_inputs_below, 1.0, "control"),
    "peers.decoder": _decoder,
    "cohorts": _cohorts,
    "cohorts.of-the-oracle": _of_the_oracle,
    "cohorts.from-when": _from_when,
    "cohorts.one": _one_cohort,
}
