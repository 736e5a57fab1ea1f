"""Decides what answers an attention call: the stream of a cache, the innermost active plan, or the model itself.

A stream is found by the tensor of new keys, which its cache has registered. Each attention module has a stack of plans,
which is copied and pickled with the model. A plan that was entered by `with` acts only in that context (`contextvars`:
a thread, or a task of asyncio). Every other plan acts wherever the model is called.
"""

import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fewkeys.captures.capture import AttentionInputs
from fewkeys.core.derivatives import in_backward

ATTRIBUTE = "_fewkeys"
LOCK = threading.RLock()


class Length(int):
    """The number of keys of a call that passes only new keys; a stream holds the earlier ones."""

    held: Callable[[], Tensor]
    """The mask (B, N) of the earlier keys, False for padding."""


streams = WeakIdKeyDictionary()
"""`streams[key](inputs)` appends the tensor of new keys, with its values, to a stream of a cache, and attends."""

Answer = Callable[[int, nn.Module, AttentionInputs], Tensor | None]
"""`answer(layer, module, inputs)`: the output (B, Hq, Nq, Dv) of one attention call of the `layer`-th attention module.

None: the model's own attention answers this call, and later ones of the same shapes, types and options.
"""


class Scope:
    """The contexts in which one application of a plan acts: those that entered it, or all."""

    def __init__(self) -> None:
        self.is_entered = False
        self._thread = threading.get_ident()
        self._warned = False

    def enter(self) -> None:
        """Limit the scope to the current context and to contexts that begin in it."""
        _entered.set((*_entered.get(), self))
        self.is_entered = True

    def leave(self) -> None:
        _entered.set(tuple(other for other in _entered.get() if other is not self))

    def warn_once(self) -> None:
        """Warn that a context outside this scope calls the model."""
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
        """Whether the scope was entered in this context, or was never entered and was made by this thread."""
        return self in _entered.get() if self.is_entered else self._thread == threading.get_ident()


_entered: ContextVar[tuple[Scope, ...]] = ContextVar("fewkeys_entered", default=())


def in_force(scopes: Iterable[Scope]) -> Scope | None:
    """The innermost (last) of `scopes` that acts in the current context; None: the model itself answers."""
    inner_first = tuple(scopes)[::-1]
    for scope in inner_first:
        if scope.is_current:
            return scope
    for scope in inner_first:
        if not scope.is_entered:  # another thread applied the plan in all contexts
            return scope
    if inner_first and _is_autograd_thread():
        # Gradient checkpointing computes a layer again, in a thread that has no context.
        if len(inner_first) > 1:
            raise ValueError(
                "model: expected one plan for gradient checkpointing on this device, got several, applied by `with` in "
                "several threads; apply one plan without `with`"
            )
        return inner_first[0]
    for scope in inner_first:
        scope.warn_once()
    return None


class PlanStack:
    """The answers of one attention module, each with the number of its layer; the innermost is last.

    A copy keeps only the answer that is active in the context that copies (`interface`).
    """

    def __init__(
        self, answers: Mapping[Scope, tuple[int, Answer]] = MappingProxyType({}), owner: int | None = None
    ) -> None:
        self.answers = dict(answers)
        self.owner = owner
        """The `id` of the module that has this stack, and is in `attached`; None in a copy."""
        self.own_call: tuple[object, ...] | None = None
        """The facts of the last plain call that the model's own attention answered; equal calls go there at once."""

    def innermost(self) -> tuple[int, Answer] | None:
        """The layer and the answer that are active in this context; None: the model's own attention."""
        scope = in_force(self.answers) if self.answers else None
        return None if scope is None else self.answers[scope]


_EMPTY = PlanStack()
attached: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
"""Modules that have or had a stack, by their `id`."""


def plan_stack(module: nn.Module) -> PlanStack:
    """The stack of a module."""
    stack: PlanStack = vars(module).get(ATTRIBUTE, _EMPTY)
    return stack


def push(module: nn.Module, scope: Scope, layer: int, answer: Answer) -> None:
    """Use `answer` for the calls of `module` within `scope`."""
    with LOCK:
        attached[id(module)] = module
        vars(module)[ATTRIBUTE] = PlanStack(plan_stack(module).answers | {scope: (layer, answer)}, id(module))


def remove(module: nn.Module, scope: Scope) -> None:
    """Undo `push`."""
    with LOCK:
        stack = PlanStack(plan_stack(module).answers, plan_stack(module).owner)
        stack.answers.pop(scope, None)
        if stack.answers:
            vars(module)[ATTRIBUTE] = stack
        else:
            vars(module).pop(ATTRIBUTE, None)


def _is_autograd_thread() -> bool:
    """Whether autograd started this thread, as it does for devices."""
    return isinstance(threading.current_thread(), threading._DummyThread) and in_backward()
