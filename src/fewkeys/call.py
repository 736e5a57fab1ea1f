"""`fewkeys.attention`, the public function around `fewkeys.flow`."""

from collections.abc import Sequence
from typing import Never

import torch
from torch import Tensor

from fewkeys import flow
from fewkeys.core.impl import Impl
from fewkeys.core.validation import Options, unknown_option
from fewkeys.core.weights import Softmax, Weights
from fewkeys.guard.fallback import Guard
from fewkeys.plan import Plan
from fewkeys.rest import Drop, Rest
from fewkeys.select import Selector


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
    distance_bias: Tensor | None = None,
    **unknown: Never,
) -> Tensor:
    """Attention with few keys.

    `o_i = sum_{j in keep(i)} A_ij v_j + sum_c A_ic value_c`, where the stand-ins c represent the keys that query i does
    not keep, and `A_i` is normalised over both.

    Args:
        query: (B, Hq, Nq, D), float64, float32, bfloat16 or float16.
        key: (B, Hkv, Nk, D), Hq a multiple of Hkv: query head h reads key head h // (Hq // Hkv).
        value: (B, Hkv, Nk, Dv).
        keep: the keys attended to exactly, for example `Leverage(16) | Window(17)`; None: all, exact attention.
        rest: what stands in for the others; default `Drop()`: nothing.
        weights: how scores become weights; default `Softmax()`.
        plan: the three together, or one plan for each key head, as `fewkeys.tune` finds them.
        is_causal: query i sees keys 0 .. i + query_offset only.
        scale: factor on the scores; default 1 / sqrt(D).
        lengths: (B,) integers: how many keys of each sequence, the first ones, are real. Nq = Nk queries without an
            offset are taken for those of the same tokens: the output at padded ones is meaningless. If they belong to
            other tokens (cross-attention), append one more padded key.
        key_mask: bool (B, Nk), True for real keys, wherever they are; instead of `lengths`.
        query_offset: position of the first query among the keys (0 aligns upper-left, as torch's SDPA does; Nk - Nq
            for decoding with a cache).
        generator: source of randomness for plans that draw; default: seed 0 at every call.
        impl: the code for statistics and attention; refused with the reason where it cannot run.
            "reference": dense, the definition. "torch": operations of torch, without an n x n tensor. "native":
            C++ compiled on this machine, for softmax on the CPU in float32 and bfloat16, with gradients, over all but
            extra edges, lists of single queries or blocks, rules beside a `KeyScan`, and `distance_bias`.
            "auto": "native" where it can, else "torch". All but "reference" answer exactly where the plan keeps every
            key. For plans with `exact_if_faster` (those of `budget`), "auto" also does so where exact attention is
            faster, by a model of this machine: its measurements are kept for 30 days, or an hour if other work
            disturbed them.
        max_error: answer exactly for each sequence and head where the plan's mean relative error, estimated from 32
            queries computed exactly, is above this. A `fewkeys.Guard` in place of the number counts how often that
            happens; its docstring says what it costs and means.
        distance_bias: (Hq, 2 R + 1), added to the scores: `distance_bias[h, clamp(j - i, -R, R) + R]` for key j and a
            query at place i (its number plus `query_offset`), as T5's relative positions are. Exact on kept keys; for
            stand-ins as in `fewkeys.core.distances`. Oracles and lists of cohorts choose keys with it, other rules
            without. For plans of windows and lists with nothing or `ClusterMeans` beside them; not by "native".

    Returns:
        (B, Hq, Nq, Dv) in the input's dtype. A query that sees no key gives zeros.

    Raises:
        TypeError, ValueError: malformed input, naming the argument, what was expected, what came, and the fix.

    Gradients flow through kept keys, values, stand-ins and the bias, not through the selection. `torch.compile` breaks
    its graph at the call. Cost O(n (slots)(D + Dv)) after the selection: O(n D (D + clusters)) for `budget(slots)`, and
    O(n^2 D) for oracles and for the scan of `budget(slots, is_causal=True)`.
    """
    if unknown:
        raise unknown_option(next(iter(unknown)))
    if plan is None:
        plan = Plan(keep, rest or Drop(), weights or Softmax())
    elif keep is not None or rest is not None or weights is not None:
        raise ValueError("plan: expected either a plan or keep, rest and weights, got both; change the plan instead")
    flow.check_plan(plan)
    options: Options = {"is_causal": is_causal, "scale": scale, "lengths": lengths, "key_mask": key_mask}
    options |= {"query_offset": query_offset, "generator": generator, "impl": impl, "distance_bias": distance_bias}
    if torch.compiler.is_dynamo_compiling():
        from fewkeys.uncompiled import outside

        output: Tensor = outside(attention, query, key, value, plan=plan, max_error=max_error, **options)
        return output
    inputs = flow.checked(query, key, value, plan, **options)
    guard = max_error if isinstance(max_error, Guard | None) else Guard(max_error)
    if guard is not None:
        guard.count_call()
    return flow.attend(inputs, plan, guard)
