"""Decides what answers an attention call: the stream of a cache, the innermost active plan, or the model itself.

A plan that was entered by `with` acts only in that context (`contextvars`: a thread, or a task of asyncio). Every other
plan acts wherever the model is called.
"""

import threading
import warnings
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fewkeys.captures.capture import AttentionInputs
from fewkeys.core.derivatives import in_backward

ATTRIBUTE = "_fewkeys"
LOCK = threading.RLock()
"""Held while the plans of a model change, not by its calls. Finalizers of caches may take it again in one thread."""


class Length(int):
    """The number of keys of a call that passes only new keys; a stream holds the earlier ones."""

    held: Callable[[], Tensor]
    """The mask (B, N) of the earlier keys, False for padding."""


streams = WeakIdKeyDictionary()
"""`streams[key](inputs)` appends the new keys and their values to a stream of a cache, and attends."""

LayerAnswer = Callable[[nn.Module, AttentionInputs], Tensor | None]
Answer = Callable[[int, nn.Module, AttentionInputs], Tensor | None]
"""`answer(layer, module, inputs)`: the output (B, Hq, Nq, Dv) of a call of the `layer`-th attention module. None: the
model's own attention answers this call, and later ones of the same shapes, types and options.
"""


class Scope:
    """Where a plan acts: in the contexts that entered it, or in all."""

    def __init__(self) -> None:
        self.is_entered = False
        self.thread = threading.current_thread()

    def enter(self) -> None:
        """Limit the scope to the current context and those that begin in it."""
        _entered.set((*_entered.get(), self))
        self.is_entered = True

    def leave(self) -> None:
        _entered.set(tuple(other for other in _entered.get() if other is not self))


_entered: ContextVar[tuple[Scope, ...]] = ContextVar("fewkeys_entered", default=())


def in_force(scopes: Iterable[Scope]) -> Scope | None:
    """The innermost (last) of `scopes` that acts in the current context; None: the model itself answers."""
    inner_first, entered, here = tuple(scopes)[::-1], _entered.get(), threading.current_thread()
    # Those that this context entered, and those that none did and this thread made.
    acting = [scope for scope in inner_first if (scope in entered if scope.is_entered else scope.thread is here)]
    acting = acting or [scope for scope in inner_first if not scope.is_entered]  # another thread's, in all contexts
    if acting:
        return acting[0]
    if inner_first and isinstance(here, threading._DummyThread) and in_backward():
        # Gradient checkpointing computes a layer again, in a thread of autograd, which has no context.
        if len(inner_first) > 1:
            raise ValueError("model: expected one plan for gradient checkpointing, applied without `with`")
        return inner_first[0]
    if inner_first:
        warnings.warn(
            "fewkeys.apply: a thread or task that did not enter `with fewkeys.apply(...)` calls the model, and its "
            "attention is exact there; apply the plan without `with` to reach every thread, or start the thread by "
            "contextvars.copy_context().run",
            stacklevel=1,
        )
    return None


@dataclass(eq=False)
class PlanStack:
    """The answers of one attention module; the innermost is last.

    It is copied and pickled with the model. A copy keeps only the answer that is active there (`interface`).
    """

    answers: dict[Scope, LayerAnswer]
    owner: int | None = None
    """The `id` of the module that has this stack, and is in `attached`; None in a copy."""
    own_call: tuple[object, ...] | None = None
    """The facts of the last plain call that the model's own attention answered; it answers equal calls at once."""

    def innermost(self) -> LayerAnswer | None:
        """The answer that is active in this context, if any."""
        scope = in_force(self.answers) if self.answers else None
        return None if scope is None else self.answers[scope]


_EMPTY = PlanStack({})
attached: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
"""Modules that have or had a stack, by their `id`."""


def plan_stack(module: nn.Module) -> PlanStack:
    """The stack of a module, empty without a plan."""
    stack: PlanStack = vars(module).get(ATTRIBUTE, _EMPTY)
    return stack


def push(module: nn.Module, scope: Scope, answer: LayerAnswer) -> None:
    """Let `answer` answer the calls of `module` within `scope`. The caller has the `LOCK`."""
    attached[id(module)] = module
    vars(module)[ATTRIBUTE] = PlanStack(plan_stack(module).answers | {scope: answer}, id(module))


def remove(module: nn.Module, scope: Scope) -> None:
    """Undo `push`. The caller has the `LOCK`."""
    stack = plan_stack(module)
    others = {other: answer for other, answer in stack.answers.items() if other is not scope}
    if others:
        vars(module)[ATTRIBUTE] = PlanStack(others, stack.owner)
    else:
        vars(module).pop(ATTRIBUTE, None)
