"""The result of a comparison: plain numbers that survive a round trip through JSON unchanged.

`compare` fills a `Report`, `fewkeys.report` shows it. It holds no tensors, models or plots.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fewkeys.core.files import write_whole
from fewkeys.core.records import build, parse, seal, unseal
from fewkeys.judge.checked import SIZES, check_report, check_times
from fewkeys.judge.row import Row, Skipped, WholeTime
from fewkeys.judge.short import as_html, as_text

SCHEMA = "fewkeys.report/1"


@dataclass(frozen=True)
class Report:
    """All rows of one comparison, and the settings to repeat it.

    The JSON form is an object with these keys and `"schema": "fewkeys.report/1"`; `Row` and `Skipped` describe the
    objects in `rows`, `skipped`
    and `whole_times`. Numbers that do not exist are null, never NaN. Nothing depends on the date. Only
    times, `versions` and `machine` depend on the machine (up to rounding).

    Attributes:
        model: name or folder of the model.
        layers, query_heads, kv_heads, head_dim, value_dim: the shape of its attention.
        is_causal: whether tokens see only what came before them.
        sequences, length, tokens: sequences judged, the longest one, and all valid tokens together.
        settings: "eps", "seed", "budgets", "timed_shape" ([batch, query heads, length, head dim]), and the caller's
            additions (the command line adds "text").
        versions: of fewkeys, python, torch, and transformers where it was used.
        machine: "cpu", "cores", "threads", "platform", "device".
        rows: one per plan and budget, in the order given.
        skipped: plans that gave no row.
        whole_times: of whole models at other lengths, where they were asked for (`fewkeys compare --lengths`).
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

    def __str__(self) -> str:
        return as_text(self.rows, self.skipped)

    def _repr_html_(self) -> str:
        return as_html(self.rows, self.skipped)

    def row(self, name: str, budget: int | None = None) -> Row:
        """The row of that name and budget (budget None: the only row of that name)."""
        matches = [r for r in self.rows if r.name == name and (budget is None or r.budget == budget)]
        if len(matches) != 1:
            have = sorted({(r.name, r.budget) for r in self.rows}, key=str)
            raise ValueError(
                f"name, budget: expected one row, got {len(matches)} for {name!r}, {budget}; rows are {have}"
            )
        return matches[0]

    def with_settings(self, **more: Any) -> Report:
        """The same report with more settings noted (they must be JSON values)."""
        return replace(self, settings=plain({**self.settings, **more}))

    def to_dict(self) -> dict[str, Any]:
        """The JSON object described above, made of dicts, lists, strings and numbers."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """The report whose `to_dict()` is `data`. Raises ValueError if `data` is not one."""
        if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
            got = data.get("schema") if isinstance(data, Mapping) else type(data).__name__
            raise ValueError(f'data: expected a report with "schema": "{SCHEMA}", got {got!r}; write it with compare')
        try:
            report = build(cls, {key: value for key, value in data.items() if key != "schema"})
            sizes = {name: getattr(report, name) for name in SIZES}
            check_report(sizes, report.settings, report.machine, report.rows, report.skipped)
            check_times(report.whole_times, report.rows)
        except ValueError as error:
            raise ValueError(f"data: {error}") from None
        return report

    def to_json(self) -> str:
        """The JSON text, indented, ending in a newline."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON text to `path`, whole or not at all."""
        write_whole(path, json.dumps(seal(self.to_dict()), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Read what `save` wrote. Raises ValueError if the file is not such a report."""
        try:
            return cls.from_dict(unseal(parse(Path(path).read_bytes())))
        except ValueError as error:
            raise ValueError(f"path: expected a JSON report, got {os.fspath(path)!r} ({error})") from error


def plain(value: Any) -> Any:
    """The value after a round trip through JSON (tuples become lists), so that a report equals its copy from a file."""
    return json.loads(json.dumps(value, allow_nan=False))
