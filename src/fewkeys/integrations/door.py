"""Who answers the attention calls of a module, for whom.

Applications stand in the attention modules themselves. So they belong to the model object, go with it when it is
copied or sent to another process, and are gone when it is. One that was entered by `with` answers in the context that
entered it alone (`contextvars`: a thread, or a task of asyncio); every other answers wherever the model is called.
"""

from __future__ import annotations

import threading
import warnings
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor, nn

from fewkeys.captures.capture import AttentionInputs

ATTRIBUTE = "_fewkeys"
LOCK = threading.RLock()


class Answer(Protocol):
    """Answers one attention call of the `layer`-th attention module: (B, Hq, Nq, Dv)."""

    def __call__(self, layer: int, module: nn.Module, inputs: AttentionInputs) -> Tensor: ...


class Application:
    """An answer in force. `own`: only in the contexts that entered it."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.own = False
        self.thread = threading.get_ident()
        self._warned = False

    def enter(self) -> None:
        """From now on, answer in the present context alone, and in those that begin in it."""
        _entered.set((*_entered.get(), self))
        self.own = True

    def leave(self) -> None:
        """Forget the present context."""
        _entered.set(tuple(other for other in _entered.get() if other is not self))

    def warn_once(self) -> None:
        """Say that the model is called where this answer does not hold, the first time."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                "fewkeys.apply: a thread or task that did not enter `with fewkeys.apply(...)` calls the model, and its "
                "attention is exact there; apply the plan without `with` to reach every thread, or start the thread by "
                "contextvars.copy_context().run",
                stacklevel=2,
            )

    @property
    def mine(self) -> bool:
        """Whether it was made for the present context: entered here, or not at all by this very thread."""
        return self in _entered.get() if self.own else self.thread == threading.get_ident()


_entered: ContextVar[tuple[Application, ...]] = ContextVar("fewkeys_entered", default=())

Standing = tuple[tuple[int, Application], ...]


class Door:
    """The applications that stand in one attention module, each with the number of its layer, the innermost last.

    A copy, in this process or another, has the one that answers where it is copied, for good (`interface`).
    """

    def __init__(self, standing: Standing = ()) -> None:
        self.standing = standing

    def innermost(self) -> tuple[int, Answer] | None:
        """The layer and the answer that are in force here; None: the model's own."""
        standing = self.standing
        for wanted in (lambda found: found.mine, lambda found: not found.own):  # what others applied for all comes last
            for layer, application in reversed(standing):
                if wanted(application):
                    return layer, application.answer
        own = [found for found in standing if found[1].own]
        if own and _is_thread_of_autograd():
            # A layer that is computed again for its gradient, by a thread that knows no contexts.
            if len(own) > 1:
                raise ValueError(
                    "model: expected one plan to compute a layer again by, got several, applied by `with` in several "
                    "threads; apply one plan without `with` to train on this device with gradient checkpointing"
                )
            return own[0][0], own[0][1].answer
        for _, application in own:
            application.warn_once()
        return None


def door(module: nn.Module) -> Door | None:
    """Where applications stand in a module; None where none ever stood."""
    found: Door | None = vars(module).get(ATTRIBUTE)
    return found


def stand(layer: int, module: nn.Module, application: Application) -> None:
    """Let `application` answer for `module`."""
    with LOCK:
        before = door(module)
        vars(module)[ATTRIBUTE] = Door((*(() if before is None else before.standing), (layer, application)))


def go(module: nn.Module, application: Application) -> None:
    """Take `application` out of `module`."""
    with LOCK:
        before = door(module)
        left = tuple(found for found in (before.standing if before else ()) if found[1] is not application)
        if left:
            vars(module)[ATTRIBUTE] = Door(left)
        else:
            vars(module).pop(ATTRIBUTE, None)


def _is_thread_of_autograd() -> bool:
    """Whether autograd runs here in a thread of its own, as it does for devices."""
    alien = isinstance(threading.current_thread(), threading._DummyThread)
    return alien and torch._C._current_graph_task_id() != -1
