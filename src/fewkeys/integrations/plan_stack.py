"""The plans in force in an attention module, and which of them answers a call.

Each attention module holds its own stack of applications. So the stack belongs to the model: it is copied or sent to
another process with the model, and ends with it. An application that was entered by `with` answers only in the context
that entered it (`contextvars`: a thread, or a task of asyncio). Every other one answers wherever the model is called.
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
    """Answers one attention call of the `layer`-th attention module: (B, Hq, Nq, Dv).

    None: the model's own attention answers this call, and later ones of the same shapes, types and options.
    """

    def __call__(self, layer: int, module: nn.Module, inputs: AttentionInputs) -> Tensor | None: ...


class Application:
    """An answer in force; `is_entered`: only in the contexts that entered it."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.is_entered = False
        self.thread = threading.get_ident()
        self._warned = False

    def enter(self) -> None:
        """From now on, answer only in the current context, and in those that begin in it."""
        _entered.set((*_entered.get(), self))
        self.is_entered = True

    def leave(self) -> None:
        """Stop answering in the current context."""
        _entered.set(tuple(other for other in _entered.get() if other is not self))

    def warn_once(self) -> None:
        """Warn, once, that the model is called from a context where this answer is not in force."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                "fewkeys.apply: a thread or task that did not enter `with fewkeys.apply(...)` calls the model, and its "
                "attention is exact there; apply the plan without `with` to reach every thread, or start the thread by "
                "contextvars.copy_context().run",
                stacklevel=2,
            )

    @property
    def is_current(self) -> bool:
        """Whether it is in force in the current context: entered here, or never entered and applied by this thread."""
        return self in _entered.get() if self.is_entered else self.thread == threading.get_ident()


_entered: ContextVar[tuple[Application, ...]] = ContextVar("fewkeys_entered", default=())

Applications = tuple[tuple[int, Application], ...]


class PlanStack:
    """The applications in one attention module, each with the number of its layer, the innermost last.

    A copy, in this process or another, keeps only the application that answers where it is copied (`interface`).
    """

    def __init__(self, applications: Applications = ()) -> None:
        self.applications = applications
        self.own_call: tuple[object, ...] | None = None
        """What decided that the model's own attention answered the last call that no mask restricts; calls of which
        the same is true take no other step."""

    def innermost(self) -> tuple[int, Answer] | None:
        """The layer and the answer that are in force here; None: the model's own attention."""
        for layer, application in reversed(self.applications):
            if application.is_current:
                return layer, application.answer
        # What other threads applied for all comes last.
        for layer, application in reversed(self.applications):
            if not application.is_entered:
                return layer, application.answer
        entered = [item for item in self.applications if item[1].is_entered]
        if entered and _is_autograd_thread():
            # Gradient checkpointing computes a layer again, in a thread that has no context.
            if len(entered) > 1:
                raise ValueError(
                    "model: expected one plan to compute a layer again by, got several, applied by `with` in several "
                    "threads; apply one plan without `with` to train on this device with gradient checkpointing"
                )
            return entered[0][0], entered[0][1].answer
        for _, application in entered:
            application.warn_once()
        return None


def plan_stack(module: nn.Module) -> PlanStack:
    """The applications in a module."""
    stack: PlanStack = vars(module).get(ATTRIBUTE, _EMPTY)
    return stack


def push(layer: int, module: nn.Module, application: Application) -> None:
    """Let `application` answer for `module`."""
    with LOCK:
        vars(module)[ATTRIBUTE] = PlanStack((*plan_stack(module).applications, (layer, application)))


def remove(module: nn.Module, application: Application) -> None:
    """Take `application` out of `module`."""
    with LOCK:
        others = tuple(item for item in plan_stack(module).applications if item[1] is not application)
        if others:
            vars(module)[ATTRIBUTE] = PlanStack(others)
        else:
            vars(module).pop(ATTRIBUTE, None)


_EMPTY = PlanStack()


def _is_autograd_thread() -> bool:
    """Whether this is a thread that autograd started, as it does for devices."""
    is_foreign = isinstance(threading.current_thread(), threading._DummyThread)
    return is_foreign and torch._C._current_graph_task_id() != -1
