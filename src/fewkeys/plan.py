"""A plan: keep + rest + weights, as one value that can be named, compared, saved and loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from fewkeys.core.catalogue import named_class
from fewkeys.core.files import folder_of, read_json, write_json
from fewkeys.core.inputs import Inputs
from fewkeys.core.records import Load, build, not_here
from fewkeys.core.tensor_files import learned_parts, load_learned, pack, write_tensors
from fewkeys.core.validation import check_cohorts, check_count, check_flag
from fewkeys.core.weights import Softmax, Weights
from fewkeys.rest import BlockMeans, ClusterMeans, Drop, Rest, RunningMeans
from fewkeys.select import KeyScan, Outliers, RecentBlocks, Selector, Window, united
from fewkeys.sketch.codes import BLOCK

FORMAT = 1
FILE, MODEL_FILE = "plan.json", "model_plan.json"
MOST_COHORTS, COHORT_SLOTS, MOST_RANK = 64, 4096, 8
"""The most cohorts of a budget, the most times its slots, and the largest rank beside them."""
OWN_BLOCK = BLOCK // 2 + 1
"""Keys of the unfinished block that a query of a scan keeps on average, rounded up."""


@dataclass(frozen=True)
class Plan:
    """Which keys are kept, what stands in for the rest, and how scores become weights.

    Args:
        keep: the selector, or None for every key (exact attention).
        rest: the stand-ins; `Drop()` for none.
        weights: the kernel.
        exact_if_faster: `impl="auto"` may answer with exact attention where that is faster.
        is_causal: refuse calls without causality.
    """

    keep: Selector | None = None
    rest: Rest = Drop()
    weights: Weights = Softmax()
    exact_if_faster: bool = False
    is_causal: bool = False

    def __post_init__(self) -> None:
        for name, value, kind in (("rest", self.rest, Rest), ("weights", self.weights, Weights)):
            if not isinstance(value, kind):
                raise TypeError(f"{name}: expected a fewkeys {kind.__name__}, got {type(value).__name__}")
        if self.keep is not None and not isinstance(self.keep, Selector):
            raise TypeError(f"keep: expected a selector or None, got {type(self.keep).__name__}")
        check_flag("exact_if_faster", self.exact_if_faster)
        check_flag("is_causal", self.is_causal)
        self.rest.check(self.weights)
        if self.keep is not None:
            self.rest.check_beside(self.keep)

    @property
    def parts(self) -> tuple[Selector, ...]:
        return () if self.keep is None else self.keep.parts

    @property
    def scanned(self) -> int:
        """How many keys each query chooses by a `KeyScan`; 0 without one."""
        return 0 if self.keep is None else self.keep.scanned

    def check(self, inputs: Inputs) -> None:
        """Raise `ValueError` where the plan cannot run on such inputs."""
        if self.is_causal and not inputs.is_causal:
            raise ValueError(
                "is_causal: the plan was made for causal attention; pass is_causal=True where queries see no future, "
                "or use budget(slots) where they see every key"
            )
        if self.keep is None:
            return
        if self.rest.needs_causal and not inputs.is_causal:
            raise ValueError(
                f"is_causal: {self.rest} stands for the past of every query; expected is_causal=True, got False; use "
                "ClusterMeans where queries see the whole sequence"
            )
        for part in (self.rest, self.keep):
            if inputs.is_causal and not part.causal:
                raise ValueError(
                    f"is_causal: {part} looks at the future; use budget(slots, is_causal=True), or "
                    "Drop() beside Window, Sinks, TopK, RandomKeys, KeyNorm or Leverage(count)"
                )

    def never_exact(self) -> Plan:
        """The same plan without `exact_if_faster`: it always runs."""
        return replace(self, exact_if_faster=False) if self.exact_if_faster else self

    def slots(self, kept: float, head_dim: int, value_dim: int) -> float:
        """What a query pays: the mean number of kept keys, plus the price of the stand-ins."""
        return kept + self.rest.slots(head_dim, value_dim)

    def __str__(self) -> str:
        text = "exact" if self.keep is None else str(self.keep)
        if self.rest != Drop():
            text += f" + {self.rest}"
        return text if self.weights == Softmax() else f"{text}, {self.weights}"

    def to_dict(self) -> dict[str, Any]:
        """JSON values, with the fingerprints of learned tensors."""
        return {
            "format": FORMAT,
            "keep": None if self.keep is None else [pack(part) for part in self.parts],
            "rest": pack(self.rest),
            "weights": pack(self.weights),
            "exact_if_faster": self.exact_if_faster,
            "is_causal": self.is_causal,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], learned: Load = not_here) -> Plan:
        """The plan that `to_dict` described. learned: loads the value of a class with a fingerprint."""
        kind = data.get("format") if isinstance(data, Mapping) else type(data).__name__
        if kind != FORMAT:
            raise ValueError(f"plan: expected a description of format {FORMAT}, got {kind!r}")
        try:
            plan = build(_Description, data, learned)
            keep = None if plan.keep is None else united(plan.keep)
            return cls(keep, plan.rest, plan.weights, plan.exact_if_faster, plan.is_causal)
        except (ValueError, OverflowError) as error:
            raise ValueError(f"plan: expected what Plan.to_dict() writes ({error})") from None

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write `plan.json` and learned tensors into `directory` (made if missing), each file whole or not at all.
        `TypeError` for a part that no catalogue lists.
        """
        save_plans(directory, FILE, self.to_dict(), [self])

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike[str]) -> Plan:
        """The plan saved in `directory`, a folder or a file in it. `ValueError` for missing or damaged files."""
        folder = folder_of(directory)
        return cls.from_dict(read_json(folder, FILE), partial(load_learned, folder))


@dataclass(frozen=True)
class _Description:
    """What `Plan.to_dict` gives."""

    format: int
    keep: list[Selector] | None
    rest: Rest
    weights: Weights
    exact_if_faster: bool
    is_causal: bool = False


def save_plans(directory: str | os.PathLike[str], name: str, data: object, plans: Sequence[Plan]) -> None:
    """Write their description and their learned tensors; no parts that `from_dict` could not find by their names."""
    for part in (part for plan in plans for part in (*plan.parts, plan.rest, plan.weights)):
        if named_class(kind := type(part).__name__) is not type(part):
            raise TypeError(
                f"plan: expected parts that can be loaded by name, got {kind}, which no catalogue lists; define it by "
                f"`class {kind}(..., listed=True)`, and import it before the plan is loaded"
            )
    for learned in set(learned_parts(plans)):
        write_tensors(directory, type(learned).__name__, learned.tensors)
    write_json(directory, name, data)


def budget(
    slots: int,
    *,
    is_causal: bool = False,
    memory: Literal["all", "constant"] = "all",
    cohorts: int | None = None,
) -> Plan:
    """The recommended plan for `slots` key slots per query, with `exact_if_faster`.

    Without causality, similar queries form `cohorts`, a power of two, by default about 4096 / slots and at most 64:
    more have a smaller error and take longer to prepare. Each cohort has a list of outliers, which are kept exactly,
    and cluster means; each query also has a window. With `cohorts=1` all queries of a head share means and a list. The
    shares of the slots were chosen on encoders of text, speech, images and molecules (experiments/encoders).

    With `is_causal=True`, `memory` is "all" or "constant", and the plan refuses calls without causality:

    - "all": every key stays in memory, and each query chooses keys by the codes of all keys (docs/codes.md). 17 slots
      are the unfinished block, on average; a 32nd of the slots, at least one, are means of the keys that are not kept;
      all others are chosen keys. Below 19 slots, which leave little room beside the block, it is as "constant".
    - "constant": keys are deleted after they were summarised, for streams and caches that must not grow. About half of
      the slots are recent blocks of keys, on average; all others are means of the keys before them.
    """
    check_count("slots", slots)
    check_flag("is_causal", is_causal)
    if memory not in ("all", "constant"):
        raise ValueError(f"memory: expected 'all' or 'constant', got {memory!r}")
    if memory == "constant" and not is_causal:
        raise ValueError("memory: expected 'all' without is_causal=True, got 'constant'; only a causal plan forgets")
    if cohorts is None:
        cohorts = 1 if is_causal else 1 << min(MOST_COHORTS, max(1, COHORT_SLOTS // slots)).bit_length() - 1
    if check_cohorts("budget", cohorts) > 1 and is_causal:
        raise ValueError(f"cohorts: expected 1 with is_causal=True, got {cohorts}; cohorts see all queries at once")
    if is_causal:
        # A scan needs the unfinished block, a chosen key and a mean.
        parts = _scan(slots) if memory == "all" and slots >= OWN_BLOCK + 2 else _recent(slots)
        return Plan(*parts, exact_if_faster=True, is_causal=True)
    if slots == 1:
        return Plan(Window(1))
    outliers, window, rank = _shared_split(slots) if cohorts == 1 else _cohort_split(slots)
    factors = 1 + slots // 128 if rank else 0  # a bound of the slots means / (D + Dv) of factors, for D + Dv >= 64
    means = slots - rank - outliers - window - factors
    keep = Outliers(outliers, means, cohorts=cohorts)
    return Plan(keep | Window(window) if window else keep, ClusterMeans(means, rank, cohorts), exact_if_faster=True)


def _scan(slots: int) -> tuple[Selector, Rest]:
    means = max(1, slots // 32)
    return KeyScan(slots - OWN_BLOCK - means), BlockMeans(means)


def _recent(slots: int) -> tuple[Selector, Rest]:
    if slots < 8:
        return Window(slots), Drop()
    size = 1 << ((slots // 3).bit_length() - 1)
    recent = size + size // 2 + 1  # the block before, and on average (size + 1) / 2 keys of the unfinished block
    return RecentBlocks(size), RunningMeans(slots - recent)


def _cohort_split(slots: int) -> tuple[int, int, int]:
    """Outliers, window and rank of a budget with cohorts."""
    window = (int(1.5 * slots**0.5) - 1) | 1 if slots >= 8 else 0
    rank = min(slots // 8, MOST_RANK)
    return max(1, (slots - window) * 5 // 8), window, rank if rank > 1 else 0


def _shared_split(slots: int) -> tuple[int, int, int]:
    """The same with one list. Below 12 slots, one more mean is worth more than a window."""
    return (slots * 3 // 16, slots // 4 | 1, slots // 8) if slots >= 12 else (max(1, slots // 4), 0, slots // 8)
