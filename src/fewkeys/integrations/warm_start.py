"""Full attention for the first share of the training steps, then the plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from fewkeys.core.impl import Impl
from fewkeys.core.validation import check_count, check_real
from fewkeys.integrations.transformers import Applied, Plans, apply
from fewkeys.plan import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class WarmStart:
    """`model` trains with full attention for the first `ceil(share * steps)` steps and with `plan` from then on.

        schedule = fk.WarmStart(model, plan, steps=len(loader) * epochs)
        for batch in batches:
            model(**batch).loss.backward()
            optimizer.step()
            schedule.step()
        schedule.restore()                         # or `with fk.WarmStart(...) as schedule:` around the loop

    Used like the schedulers of `torch.optim.lr_scheduler`: call `step()` once after each optimiser step, save
    `state_dict()` with the optimiser's and give it back to `load_state_dict()`. Whatever calls the model, training or
    evaluation, gets the attention of the moment; after the last step the plan stays until `restore()`.

    Args:
        model, plan, impl, generator: as in `fewkeys.apply`. The state of `generator` is the caller's to save.
        steps: optimiser steps of the whole training, an int >= 1.
        share: the share of them that trains with full attention, in [0, 1].

    The full attention is an `apply` of the exact plan on top of the one of `plan`, so what no plan honours
    (attention dropout, ...) is refused at the first step, not when `plan` takes over.

    Raises:
        TypeError, ValueError: as `fewkeys.apply`, and for `steps` and `share` out of range.

    Source: LevAttention (arXiv 2410.05462): its large models start with full attention for 15 % of the steps.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        plan: Plans,
        *,
        steps: int,
        share: float = 0.15,
        impl: Impl = "auto",
        generator: torch.Generator | None = None,
    ) -> None:
        self._set(steps, share, 0)
        self.model = model
        self._plan = apply(model, plan, impl=impl, generator=generator)
        self._full: Applied | None = None
        self._restored = False
        self._switch()

    @property
    def warm_steps(self) -> int:
        """How many steps train with full attention."""
        # 0.07 * 100 is 7.000000000000001 in floating point, and its ceiling would be 8.
        return math.ceil(self.share * self.steps * (1 - 1e-12))

    @property
    def warm(self) -> bool:
        """Whether the next step trains with full attention."""
        return self.done < self.warm_steps

    def step(self) -> None:
        """Count one optimiser step; the plan takes over after the last warm one."""
        self.done += 1
        self._switch()

    def state_dict(self) -> dict[str, Any]:
        """The steps done, and the schedule: plain numbers."""
        return {"done": self.done, "steps": self.steps, "share": self.share}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where `state_dict()` was taken, with its schedule. Raises ValueError for anything else."""
        names = {"done", "steps", "share"}
        if not isinstance(state_dict, Mapping) or set(state_dict) != names:
            came = sorted(state_dict) if isinstance(state_dict, Mapping) else type(state_dict).__name__
            raise ValueError(f"state_dict: expected what WarmStart.state_dict() gives, {sorted(names)}, got {came}")
        self._set(state_dict["steps"], state_dict["share"], state_dict["done"])
        self._switch()

    def restore(self) -> None:
        """Give the model back the attention it had. A second time does nothing; a restored schedule only counts."""
        self._restored = True
        if self._full is not None:
            self._full.restore()
        self._plan.restore()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.restore()

    def _set(self, steps: int, share: float, done: int) -> None:
        steps, share = check_count("steps", steps), check_real("share", share)
        if not 0 <= share <= 1:
            raise ValueError(f"share: expected a number in [0, 1], got {share}; 0.15 is the paper's")
        self.steps, self.share, self.done = steps, share, check_count("state_dict['done']", done, least=0)

    def _switch(self) -> None:
        if self._restored:
            return
        if self.warm and self._full is None:
            self._full = apply(self.model, Plan())
        elif not self.warm and self._full is not None:
            self._full.restore()
            self._full = None
