"""Attention with few keys as one operator of torch, so that compiled and exported graphs hold one node.

Inside `torch.compile` a call of `fewkeys.attention` becomes `torch.ops.fewkeys.attention`: no graph break, whatever the
plan and the data decide, and recompilation for new shapes only. The operator takes a plan as text, the JSON of
`Plan.to_dict`; learned tensors in it are found in the process that compiled the graph.
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
_by_fingerprint: WeakValueDictionary[str, Learned] = WeakValueDictionary()
"""The learned values of compiled plans by fingerprint, while references to them exist."""
_latest: deque[Learned] = deque(maxlen=LEARNED)
"""References to the last of them, so that compiled code may outlive its plan."""


def compiled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Plan | Sequence[Plan],
    max_error: float | Guard | None,
    options: Options,
) -> Tensor:
    """`fewkeys.attention` inside `torch.compile`: the operator, or a graph break if it cannot hold the plan."""
    output: Tensor
    if all(option is None for option in (options["generator"], options["distance_bias"], max_error)) and holds(plan):
        o, name = options, name_of(plan)
        rest = (o["is_causal"], o["scale"], o["query_offset"], o["impl"])
        output = attend(query, key, value, o["lengths"], o["key_mask"], name, *rest)
    else:
        output = _outside(query, key, value, plan=plan, max_error=max_error, **options)
    return output


_outside = torch.compiler.disable(attention)


def holds(plan: Plan | Sequence[Plan]) -> bool:
    """Whether the operator can hold such a plan: all its selectors are in the catalogue."""
    plans = (plan,) if isinstance(plan, Plan) else plan
    return all(type(part) in SELECTORS for head_plan in plans for part in head_plan.parts)


def name_of(plan: Plan | Sequence[Plan]) -> str:
    """The text from which the operator makes a plan: its `to_dict` as JSON, or one line for the plan of each key head.

    `torch.compile` can trace this code, also for plans that the compiled code makes itself.
    """
    if isinstance(plan, Plan):
        return _line(plan)
    return "".join([_line(head_plan) + "\n" for head_plan in plan])


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
        return f"{int(value)}"  # `int` makes `torch.compile` specialise on the number
    if isinstance(value, float):
        return f"{value}"
    if isinstance(value, tuple):
        return "[" + ", ".join([_text(part) for part in value]) + "]"
    entries = [f', "{name}": {_text(getattr(value, name))}' for name in type(value).__match_args__]
    return f'{{"type": "{type(value).__name__}"' + "".join(entries) + "}"


def _remembered(value: Learned) -> str:
    _by_fingerprint[value.fingerprint] = value
    _latest.append(value)
    return json.dumps(pack(value))


_learned = cast("Callable[[Learned], str]", torch.compiler.assume_constant_result(_remembered))


@lru_cache(PLANS)
def plan_of(name: str) -> Plan | tuple[Plan, ...]:
    """The plan of such a name. `ValueError` if it has learned tensors that this process has not seen."""
    plans = tuple(Plan.from_dict(json.loads(line), _by_fingerprint) for line in name.splitlines())
    return plans if name.endswith("\n") else plans[0]


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
    return output.clone(memory_format=torch.contiguous_format)  # an operator's output must not be a view of its inputs


attend = torch.library.custom_op("fewkeys::attention", _attend, mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor")
"""The output (B, Hq, Nq, Dv) of `fewkeys.attention`."""


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> Tensor:
    return query.new_empty((*query.shape[:3], value.shape[3]))


def _attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    leaves = [rows.detach().requires_grad_() for rows in (query, key, value)]
    with _autograd():
        output = _attention(*rest)(*leaves)
        gradients = torch.autograd.grad(output, leaves, grad, materialize_grads=True)
    query, key, value = (part.clone(memory_format=torch.contiguous_format) for part in gradients)
    return query, key, value


attend_backward = torch.library.custom_op(
    "fewkeys::attention_backward",
    _attend_backward,
    mutates_args=(),
    schema=f"(Tensor grad, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)
"""The gradients of query, key and value. Recomputes the output: only the inputs are kept."""


@contextmanager
def _autograd() -> Iterator[None]:
    """Enable autograd inside an operator, where torch disables it."""
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
    gradients = attend_backward(grad, *ctx.saved_tensors, *ctx.rest)
    return (*gradients, *[None] * 7)


attend.register_autograd(_pull, setup_context=_keep)
