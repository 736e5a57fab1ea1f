"""The whole flow on one screen: check the inputs, select the keys, summarise the rest, attend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from fewkeys.core.inputs import Inputs
from fewkeys.core.validation import check_inputs
from fewkeys.core.weights import Softmax, Weights
from fewkeys.cost.crossover import exact_is_faster
from fewkeys.execute import exact, reference
from fewkeys.execute.torch import attend as linear
from fewkeys.execute.triton import launch as fused
from fewkeys.guard.fallback import Guard
from fewkeys.plan import Plan
from fewkeys.rest import Drop, Rest
from fewkeys.rest.base import StandIns
from fewkeys.select import Selector
from fewkeys.sketch.backend import by_triton

Impl = Literal["auto", "torch", "triton", "reference"]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    keep: Selector | None = None,
    rest: Rest | None = None,
    weights: Weights | None = None,
    plan: Plan | Sequence[Plan] | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    lengths: Tensor | None = None,
    key_mask: Tensor | None = None,
    query_offset: int = 0,
    generator: torch.Generator | None = None,
    impl: Impl = "auto",
    max_error: float | Guard | None = None,
) -> Tensor:
    """Attention with few keys.

    `o_i = sum_{j in keep(i)} A_ij v_j + sum_c A_ic value_c`, where the stand-ins c speak for the keys that query i
    does not keep, and `A_i` is normalised over both.

    Args:
        query: (B, Hq, Nq, D), float64, float32, bfloat16 or float16.
        key: (B, Hkv, Nk, D), Hq a multiple of Hkv: query head h reads key head h // (Hq // Hkv).
        value: (B, Hkv, Nk, Dv).
        keep: the keys attended to exactly, for example `Leverage(16) | Window(17)`; None: all, exact attention.
        rest: what stands in for the others; default `Drop()`: nothing.
        weights: how scores become weights; default `Softmax()`.
        plan: the three together, instead of `keep`, `rest` and `weights`; or one plan for each key head, as
            `fewkeys.tune` finds them.
        is_causal: query i sees keys 0 .. i + query_offset only.
        scale: factor on the scores; default 1 / sqrt(D).
        lengths: (B,) integers: the first so many keys of each sequence are real. The output at padded queries of
            self-attention is defined but meaningless.
        key_mask: bool (B, Nk), True for real keys, wherever they stand; instead of `lengths`.
        query_offset: position of the first query among the keys (0 aligns upper-left, as torch's SDPA does; Nk - Nq
            for decoding with a cache).
        generator: source of randomness for plans that draw; default: seed 0 at every call.
        impl: "reference": dense, the definition itself. "torch": linear time and memory (oracle selectors excepted).
            "triton": kernels on CUDA, for softmax over a window, a shared list and cluster means, and for softmax and
            entmax (alpha <= 2) inside groups, one for each token, beside a window and a shared list.
            "auto": "torch", except that exact attention answers where the plan keeps every key, and, for plans with
            `exact_if_faster` (those of `budget`), where it would be faster than the plan.
        max_error: answer exactly for each sequence and head where the plan's mean relative error, estimated from 32
            queries computed exactly, is above this; `fewkeys.Guard` says what that costs and means. A `Guard` in place
            of the number counts how often it happens.

    Returns:
        (B, Hq, Nq, Dv) in the input's dtype. A query that sees no key gives zeros.

    Raises:
        TypeError, ValueError: malformed input, naming the argument, what was expected, what came, and the fix.

    Gradients flow through the kept keys and values and through the stand-ins; the selection carries none.
    `torch.compile` takes the call as one operator, without a graph break (with `generator`, `max_error` or a selector
    of your own: it breaks the graph, and runs as without it); its gradient computes the output a second time.
    Cost O(n (slots)(D + Dv)) after a selection of O(n D (D + clusters)).
    """
    chosen = _plan(plan, keep, rest, weights)
    if torch.compiler.is_compiling():
        from fewkeys import operator  # loads torch's compiler

        return operator.compiled(
            query, key, value, chosen, lengths, key_mask, is_causal, scale, query_offset, impl, generator, max_error
        )
    inputs = check_inputs(
        query,
        key,
        value,
        is_causal=is_causal,
        scale=scale,
        lengths=lengths,
        key_mask=key_mask,
        query_offset=query_offset,
        generator=generator,
    )
    if impl not in get_args(Impl):
        raise ValueError(f"impl: expected one of {', '.join(get_args(Impl))}, got {impl!r}")
    if max_error is None:
        return run(inputs, chosen, impl)
    guard = max_error if isinstance(max_error, Guard) else Guard(max_error)
    guard.count_call()
    return run(inputs, chosen, impl, guard)


def run(inputs: Inputs, plan: Plan | Sequence[Plan], impl: Impl, guard: Guard | None = None) -> Tensor:
    """The output of a plan, or of one plan for each key head, on checked inputs; corrected by the guard, if any."""
    if not isinstance(plan, Plan):
        parts = [(run(part, own, impl, guard), heads) for own, heads, part in by_plan(inputs, plan)]
        output = torch.cat([out.unflatten(1, (-1, inputs.groups)) for out, _ in parts], 1)
        order = torch.cat([heads for _, heads in parts]).argsort()
        return output[:, order].flatten(1, 2)
    plan.check(inputs)
    # As many exact rows as queries are the exact answer: then the check is the answer, and needs no plan.
    checked_whole = guard is not None and inputs.queries <= guard.queries
    if plan.keep is None or checked_whole or answers_exactly(inputs, plan, impl):
        if impl == "reference":
            return reference.attend_exact(inputs, plan.weights)
        return exact.attend(inputs, plan.weights)
    if plan.rest.needs_causal and inputs.offset:
        # Stand-ins of the past are made block by block from the first token on.
        return run(inputs.from_start(), plan, impl, guard)[:, :, inputs.offset :]
    with by_triton() if impl == "triton" else nullcontext():
        with torch.no_grad():
            graph = plan.keep.select(inputs)
        stand_ins = plan.rest.prepare(inputs, graph, plan.weights)
    if impl == "triton":
        reason = fused.unsupported(inputs, graph, stand_ins, plan.weights)
        if reason is not None:
            raise ValueError(f"impl='triton': {reason}; use impl='torch'")
        output = fused.attend(inputs, graph, cast("StandIns | None", stand_ins), plan.weights)
    else:
        execute = reference.attend if impl == "reference" else linear.attend
        output = execute(inputs, graph, stand_ins, plan.weights)
    return output if guard is None else guard.correct(inputs, plan.weights, output)


def answers_exactly(inputs: Inputs, plan: Plan, impl: Impl) -> bool:
    """Whether `run` answers such inputs with exact attention, whatever the data."""
    if plan.keep is None:
        return True
    if impl == "reference":
        return False
    return plan.keep.covers(inputs) or (impl == "auto" and plan.exact_if_faster and exact_is_faster(inputs, plan))


def by_plan(inputs: Inputs, plans: Sequence[Plan]) -> Iterator[tuple[Plan, Tensor, Inputs]]:
    """The distinct plans of the key heads, each with its heads (H,) and the problem of these heads alone."""
    if len(plans) != inputs.kv_heads:
        raise ValueError(f"plan: expected one plan for each of {inputs.kv_heads} key heads, got {len(plans)}")
    heads: dict[Plan, list[int]] = {}
    for head, plan in enumerate(plans):
        heads.setdefault(plan, []).append(head)
    for plan, own in heads.items():
        index = torch.tensor(own, device=inputs.key.device)
        yield plan, index, inputs if len(heads) == 1 else inputs.heads(index)


def _plan(
    plan: Plan | Sequence[Plan] | None, keep: Selector | None, rest: Rest | None, weights: Weights | None
) -> Plan | Sequence[Plan]:
    if plan is None:
        return Plan(keep, rest or Drop(), weights or Softmax())
    if keep is not None or rest is not None or weights is not None:
        raise ValueError("plan: expected either a plan or keep, rest and weights, got both; change the plan instead")
    check_plan(plan)
    return plan


def check_plan(plan: object) -> None:
    """Raise `TypeError` for what is neither a plan nor a sequence of plans."""
    for one in (plan,) if isinstance(plan, Plan) or not isinstance(plan, Sequence) else plan:
        if not isinstance(one, Plan):
            raise TypeError(f"plan: expected a fewkeys.Plan, got {type(one).__name__}; budget(slots) makes one")
