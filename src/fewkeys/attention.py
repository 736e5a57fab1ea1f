"""The whole flow on one screen: check the inputs, select the keys, summarise the rest, attend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from fewkeys.crossover import exact_is_faster
from fewkeys.execute import exact, linear, reference
from fewkeys.inputs import Inputs
from fewkeys.plan import Plan
from fewkeys.rest import Drop, Rest
from fewkeys.select import Selector
from fewkeys.validation import check_inputs
from fewkeys.weights import Softmax, Weights

Impl = Literal["auto", "torch", "reference"]


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
            "auto": "torch", except that exact attention answers where the plan keeps every key, and, for plans with
            `exact_if_faster` (those of `budget`), where it would be faster than the plan.

    Returns:
        (B, Hq, Nq, Dv) in the input's dtype. A query that sees no key gives zeros.

    Raises:
        TypeError, ValueError: malformed input, naming the argument, what was expected, what came, and the fix.

    Gradients flow through the kept keys and values and through the stand-ins; the selection carries none.
    Cost O(n (slots)(D + Dv)) after a selection of O(n D (D + clusters)).
    """
    chosen = _plan(plan, keep, rest, weights)
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
    if impl not in ("auto", "torch", "reference"):
        raise ValueError(f"impl: expected 'auto', 'torch' or 'reference', got {impl!r}")
    return run(inputs, chosen, impl)


def run(inputs: Inputs, plan: Plan | Sequence[Plan], impl: Impl) -> Tensor:
    """The output of a plan, or of one plan for each key head, on checked inputs."""
    if not isinstance(plan, Plan):
        parts = [(run(part, own, impl), heads) for own, heads, part in by_plan(inputs, plan)]
        output = torch.cat([out.unflatten(1, (-1, inputs.groups)) for out, _ in parts], 1)
        order = torch.cat([heads for _, heads in parts]).argsort()
        return output[:, order].flatten(1, 2)
    plan.check(inputs)
    if plan.keep is None or (impl != "reference" and plan.keep.covers(inputs)):
        if impl == "reference":
            return reference.attend_exact(inputs, plan.weights)
        return exact.attend(inputs, plan.weights)
    if impl == "auto" and plan.exact_if_faster and exact_is_faster(inputs, plan):
        return exact.attend(inputs, plan.weights)
    with torch.no_grad():
        graph = plan.keep.select(inputs)
    stand_ins = plan.rest.prepare(inputs, graph, plan.weights)
    execute = reference.attend if impl == "reference" else linear.attend
    return execute(inputs, graph, stand_ins, plan.weights)


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
    for one in (plan,) if isinstance(plan, Plan) or not isinstance(plan, Sequence) else plan:
        if not isinstance(one, Plan):
            raise TypeError(f"plan: expected a fewkeys.Plan, got {type(one).__name__}; budget(slots) makes one")
    return plan
