"""Attention with few keys as one operator of torch, so that compiled and exported graphs hold it whole.

Inside `torch.compile` a call of `fewkeys.attention` becomes `torch.ops.fewkeys.attention`: no graph break, whatever the
plan and the data decide, and no recompilation beyond that of its shapes. Plans travel by their description, as
`Plan.to_dict` writes it; plans with learned tensors are known by it to the process that compiled them.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fewkeys.core.learned import Learned, pack
from fewkeys.flow import attention
from fewkeys.plan import FORMAT, Plan
from fewkeys.select.base import SELECTORS

if TYPE_CHECKING:
    from fewkeys.core.impl import Impl
    from fewkeys.core.validation import Options
    from fewkeys.guard.fallback import Guard

PLANS, LEARNED = 64, 64
_ARGUMENTS = """Tensor query, Tensor key, Tensor value, Tensor? lengths, Tensor? key_mask,
    str plan, bool is_causal, float? scale, SymInt query_offset, str impl"""
_known: WeakValueDictionary[str, Learned] = WeakValueDictionary()
"""By fingerprint, the learned values of the plans that were compiled here, for as long as somebody holds them."""
_latest: deque[Learned] = deque(maxlen=LEARNED)
"""The last of them, which compiled code may outlive its plan with."""


def compiled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Plan | Sequence[Plan],
    max_error: float | Guard | None,
    options: Options,
) -> Tensor:
    """What `fewkeys.attention` does where it is compiled: the operator, or else a break of the graph."""
    output: Tensor
    if all(own is None for own in (options["generator"], options["distance_bias"], max_error)) and holds(plan):
        o, name = options, name_of(plan)
        rest = (o["is_causal"], o["scale"], o["query_offset"], o["impl"])
        output = attend(query, key, value, o["lengths"], o["key_mask"], name, *rest)
    else:
        output = _outside(query, key, value, plan=plan, max_error=max_error, **options)
    return output


_outside = torch.compiler.disable(attention)


def holds(plan: Plan | Sequence[Plan]) -> bool:
    """Whether the operator can hold such a plan: all selectors are of the catalogue."""
    plans = (plan,) if isinstance(plan, Plan) else plan
    return all(type(part) in SELECTORS for own in plans for part in own.parts)


def name_of(plan: Plan | Sequence[Plan]) -> str:
    """What the operator finds a plan by: its `to_dict` as JSON; of one for each key head, those of all, line by line.

    Written so that `torch.compile` follows it, also for plans that the compiled code makes itself.
    """
    if isinstance(plan, Plan):
        return _line(plan)
    return "".join([_line(own) + "\n" for own in plan])


def _line(plan: Plan) -> str:
    values = {
        "format": str(FORMAT),
        "keep": "null" if plan.keep is None else _text(plan.parts),
        "rest": _text(plan.rest),
        "weights": _text(plan.weights),
        "exact_if_faster": _text(plan.exact_if_faster),
        "is_causal": _text(plan.is_causal),
    }
    return "{" + ", ".join([f'"{name}": {text}' for name, text in values.items()]) + "}"


def _text(value: Any) -> str:
    if isinstance(value, Learned):
        return _learned(value)
    if value is None or value is True or value is False:
        return "null" if value is None else "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, int):
        return f"{int(value)}"  # of a number that is different from call to call, `torch.compile` compiles each
    if isinstance(value, float):
        return f"{value}"
    if isinstance(value, tuple):
        return "[" + ", ".join([_text(part) for part in value]) + "]"
    own = [f', "{name}": {_text(getattr(value, name))}' for name in type(value).__match_args__]
    return f'{{"type": "{type(value).__name__}"' + "".join(own) + "}"


def _remembered(value: Learned) -> str:
    _known[value.fingerprint] = value
    _latest.append(value)
    return json.dumps(pack(value))


_learned = cast("Callable[[Learned], str]", torch.compiler.assume_constant_result(_remembered))


@lru_cache(PLANS)
def plan_of(name: str) -> Plan | tuple[Plan, ...]:
    """The plan of such a name, `ValueError` where it has learned tensors that this process has not seen."""
    found = tuple(Plan.from_dict(json.loads(line), _known) for line in name.splitlines())
    return found if name.endswith("\n") else found[0]


def _attention(
    lengths: Tensor | None,
    key_mask: Tensor | None,
    plan: str,
    is_causal: bool,
    scale: float | None,
    query_offset: int,
    impl: Impl,
) -> Callable[..., Tensor]:
    options: Options = {"is_causal": is_causal, "scale": scale, "lengths": lengths, "key_mask": key_mask}
    options |= {"query_offset": query_offset, "impl": impl}
    return partial(attention, plan=plan_of(plan), **options)


def _attend(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    output = _attention(*rest)(query, key, value)
    return output.clone(memory_format=torch.contiguous_format)  # an operator's output must be no view of its inputs


attend = torch.library.custom_op("fewkeys::attention", _attend, mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor")
"""The output (B, Hq, Nq, Dv) of `fewkeys.attention`."""


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> Tensor:
    return query.new_empty((*query.shape[:3], value.shape[3]))


def _attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    given = [rows.detach().requires_grad_() for rows in (query, key, value)]
    with _autograd():
        output = _attention(*rest)(*given)
        found = torch.autograd.grad(output, given, grad, materialize_grads=True)
    query, key, value = (part.clone(memory_format=torch.contiguous_format) for part in found)
    return query, key, value


attend_backward = torch.library.custom_op(
    "fewkeys::attention_backward",
    _attend_backward,
    mutates_args=(),
    schema=f"(Tensor grad, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)
"""The gradients of query, key and value. Computes the output again: it keeps nothing but the inputs."""


@contextmanager
def _autograd() -> Iterator[None]:
    """Autograd inside an operator, where it is switched off."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradOther", "AutogradCPU", "AutogradCUDA", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    included = torch._C._dispatch_tls_local_include_set()
    with torch.enable_grad(), torch._C._ForceDispatchKeyGuard(included, excluded):
        yield


@attend_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.rest = inputs[5:]


def _pull(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    found = attend_backward(grad, *ctx.saved_tensors, *ctx.rest)
    return (*found, *[None] * 7)


attend.register_autograd(_pull, setup_context=_keep)
