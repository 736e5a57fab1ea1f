"""The result of a comparison: plain numbers that survive a round trip through JSON unchanged."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fewkeys.core.clock import in_words
from fewkeys.core.columns import aligned
from fewkeys.core.files import write_whole
from fewkeys.core.records import CHECKSUM, build, parse, seal, unseal

SCHEMA = "fewkeys.report/1"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One plan at one budget, judged over every layer, head and valid query.

    The error of a query is `||approximate - exact|| / ||exact||` of its attention output in one head.

    Attributes:
        name, budget: unique in a report together; the requested slots, None for a plan not made for a budget.
        kind: "exact" (keeps every key), "oracle" (computes all scores to choose keys: a bound only) or "method".
        plan, config: the plan in words; as `Plan.to_dict()` gives it.
        slots: mean slots per query: kept keys plus the price of the stand-ins.
        error: mean over queries, heads and layers; `error_p50`, `error_p90`: quantiles, to within 0.1 percent.
        worst_head: [layer, head] with the largest mean error, `worst_head_error`.
        mass: mean share of a query's exact attention weight on its kept keys.
        recall: share of exact attention weights >= `settings["eps"]` whose key is kept; None if there are none.
        cosine: between mean-pooled last hidden states of the exact model and of the model with this plan in every
            layer, mean over sequences; `cosine_min`: of the worst sequence; `token_cosine`: between the last hidden
            states of each token, mean over tokens. All None without a model.
        ms: median milliseconds of one attention call (one layer, shape in `settings["timed_shape"]`); `exact_ms`: of
            `scaled_dot_product_attention`, in turns with the plan.
        per_layer: a number for each layer under "error", "mass", "recall" and "slots".
        per_head: a list for each layer, a number for each query head, under "error", "mass" and "recall".
        kept: for each layer and query head, "1" (kept) or "0" for each query and key of `Report.sample`.
    """

    name: str
    budget: int | None
    kind: str
    plan: str
    config: dict[str, Any]
    slots: float
    error: float
    error_p50: float
    error_p90: float
    worst_head: list[int]
    worst_head_error: float
    mass: float
    recall: float | None
    cosine: float | None = None
    cosine_min: float | None = None
    token_cosine: float | None = None
    ms: float
    exact_ms: float
    per_layer: dict[str, list[float | None]] = field(repr=False)
    per_head: dict[str, list[list[float | None]]] = field(repr=False)
    kept: list[list[str]] = field(default_factory=list, repr=False)

    @property
    def label(self) -> str:
        return self.name if self.budget is None else f"{self.name}, {self.budget} slots"


@dataclass(frozen=True)
class WholeTime:
    """The time of a model of the same shape with a row's plan in every layer, on one text of `length` tokens: median
    milliseconds over `turns`, and `exact_ms` of exact attention, in turns with it.
    """

    name: str
    budget: int | None
    length: int
    turns: int
    ms: float
    exact_ms: float


@dataclass(frozen=True)
class Skipped:
    """A plan that could not be judged on this model, and why."""

    name: str
    budget: int | None
    reason: str


@dataclass(frozen=True)
class Sample:
    """A few queries of the first sequence, and their heaviest keys in exact attention.

    `queries`: positions. `keys`, `weights`: for each layer, query head and query, the positions and weights of its
    keys, the heaviest first. `tokens`: of the sequence, as its tokenizer writes them; empty if unknown.
    """

    queries: list[int]
    keys: list[list[list[list[int]]]]
    weights: list[list[list[list[float]]]]
    tokens: list[str] = field(default_factory=list)


@dataclass(frozen=True, repr=False)
class Report:
    """All rows of one comparison, and the settings to repeat it.

    The JSON form is an object with these keys, `"schema": "fewkeys.report/1"` and a checksum. Numbers that do not exist
    are null. Up to rounding, only times, `versions` and `machine` depend on the machine, and nothing on the date.

    Attributes:
        model: name or folder of the model.
        layers, query_heads, kv_heads, head_dim, value_dim, is_causal: of its attention.
        sequences, length, tokens: sequences judged, the longest one, and all valid tokens together.
        settings: "eps", "seed", "impl", "budgets", "timed_shape" ([batch, query heads, length, head dim]), and the
            caller's additions (the command line adds "text").
        versions, machine: as `fewkeys.bench.machine` gives them.
        rows: one per plan and budget, in the order given.
        skipped: plans that gave no row.
        whole_times: of whole models at other lengths (`fewkeys compare --lengths`).
        sample: a few queries in detail; None where the first sequence is all padding.
    """

    model: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    is_causal: bool
    sequences: int
    length: int
    tokens: int
    settings: dict[str, Any]
    versions: dict[str, str]
    machine: dict[str, Any]
    rows: list[Row]
    skipped: list[Skipped]
    whole_times: list[WholeTime] = field(default_factory=list)
    sample: Sample | None = None

    def __repr__(self) -> str:
        """A table of all rows, and the plans that were left out."""
        lines, _ = aligned([_cells(row) for row in self.rows])
        return "\n".join([*lines, *(f"left out: {item.name}: {item.reason}" for item in self.skipped)])

    def row(self, name: str, budget: int | None = None) -> Row:
        """The row of that name and budget, or the only row of that name."""
        rows = [row for row in self.rows if row.name == name and (budget is None or row.budget == budget)]
        if len(rows) != 1:
            have = sorted({(row.name, row.budget) for row in self.rows}, key=str)
            raise ValueError(f"name, budget: expected one row, got {len(rows)} for {name!r}, {budget}; rows are {have}")
        return rows[0]

    def best(self, budget: int | None, kind: str = "method") -> Row | None:
        """The row of `budget` and `kind` with the least error; methods that used more slots are left out."""
        most = math.inf if budget is None or kind != "method" else budget + 1e-6
        rows = [row for row in self.rows if (row.kind, row.budget) == (kind, budget) and row.slots <= most]
        return min(rows, key=lambda row: row.error, default=None)

    def times_of(self, row: Row) -> list[WholeTime]:
        """The times of whole models under a row's plan, by length."""
        times = [item for item in self.whole_times if (item.name, item.budget) == (row.name, row.budget)]
        return sorted(times, key=lambda item: item.length)

    def with_settings(self, **more: Any) -> Report:
        """The same report with more settings (JSON values)."""
        return replace(self, settings=plain({**self.settings, **more}))

    def to_dict(self) -> dict[str, Any]:
        """The JSON object, without the checksum."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """The report whose `to_dict()` is `data`. Raises ValueError if `data` is not one."""
        got = data.get("schema") if isinstance(data, Mapping) else type(data).__name__
        if got != SCHEMA:
            raise ValueError(f'data: expected a report with "schema": "{SCHEMA}", got {got!r}; write it with compare')
        return build(cls, {key: value for key, value in data.items() if key not in ("schema", CHECKSUM)})

    def to_json(self) -> str:
        """The JSON text, with its checksum, indented, ending in a newline."""
        return json.dumps(seal(self.to_dict()), indent=1, allow_nan=False) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON text to `path`, whole or not at all."""
        write_whole(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Read what `save` wrote. Raises ValueError for other files, and for those that were changed."""
        try:
            return cls.from_dict(unseal(parse(Path(path).read_bytes()), required=True))
        except ValueError as error:
            raise ValueError(f"path: expected a JSON report, got {os.fspath(path)!r} ({error})") from error


def _cells(row: Row) -> dict[str, str]:
    return {
        "plan": row.name,
        "asked": "" if row.budget is None else str(row.budget),
        "slots": f"{row.slots:.1f}",
        "error": f"{row.error:.3f}",
        "p90": f"{row.error_p90:.3f}",
        "cosine": "" if row.cosine is None else f"{row.cosine:.4f}",
        "time": in_words(row.ms),
        "speed": f"{row.exact_ms / row.ms:.2f}",
    }


def plain(value: Any) -> Any:
    """The value as JSON reads it (tuples become lists), so that a report equals its copy from a file."""
    return json.loads(json.dumps(value, allow_nan=False))
