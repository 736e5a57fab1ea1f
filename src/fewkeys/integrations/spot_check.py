"""`fewkeys.spot_check`: the error of a plan in one attention call, or in every layer of a model."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack, overload

import torch
from torch import Tensor, nn

from fewkeys.captures.capture import AttentionInputs
from fewkeys.core.validation import Options
from fewkeys.guard.fallback import QUERIES
from fewkeys.guard.sample import Estimates
from fewkeys.integrations.capture import Batch, check_readable, exact_passes
from fewkeys.integrations.interface import attention_modules, unwrapped
from fewkeys.integrations.transformers import Plans, plans_per_layer
from fewkeys.judge.spot_check import SpotCheck, check_call, check_options, check_tensors, overall
from fewkeys.plan import Plan


@overload
def spot_check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Plan | Sequence[Plan],
    *,
    queries: int = ...,
    confidence: float = ...,
    **options: Unpack[Options],
) -> SpotCheck: ...


@overload
def spot_check(
    model: nn.Module,
    batches: Batch | Iterable[Batch],
    plan: Plans,
    *,
    queries: int = ...,
    confidence: float = ...,
    generator: torch.Generator | None = ...,
) -> SpotCheck: ...


def spot_check(*args: Any, **options: Any) -> SpotCheck:
    """Estimate a plan's output error on live input from a few queries answered exactly.

        fk.spot_check(query, key, value, plan, queries=32)      # one attention call
        fk.spot_check(model, batches, plan, queries=32)         # every layer of a model, in one pass

    An unbiased estimate of the mean of `|o~_i - o_i| / |o_i|` over sequences, heads and real queries: the error that
    `fewkeys.compare` reports. The plan runs on the whole input, also where exact attention is faster. In each of
    `queries` equal stretches of a sequence one query of each head is drawn at random and answered exactly. The interval
    (`fewkeys.guard.interval`) assumes that no single query holds most of the error (docs/quality-control.md).

    Args:
        query, key, value, plan, is_causal, scale, lengths, key_mask, query_offset: as in `fewkeys.attention`.
        model: a transformers model in eval mode. Every layer gets its input in the exact model, so that errors do not
            add up. `per_layer` of the result has an entry for each.
        batches: input_ids (B, N), or a mapping as a tokenizer returns it, or an iterable of these.
        plan: with a model as in `fewkeys.apply`.
        queries: exact queries per sequence and head, at least 2; all queries of sequences with fewer.
        confidence: of the interval, in (0, 1).
        generator: source of the sample and, before that, of plans that draw; default: fixed seeds.

    `TypeError` or `ValueError` for malformed input, and whatever the plan or the model refuse. No gradients.

    Cost: that of the plan (and of the model's pass), plus O(queries n (D + Dv)) per sequence and head.
    """
    if (args and isinstance(args[0], nn.Module | str)) or "model" in options:
        return _check_model(*args, **options)
    return check_tensors(*args, **options)


def _check_model(
    model: nn.Module,
    batches: Batch | Iterable[Batch],
    plan: Plans,
    *,
    queries: int = QUERIES,
    confidence: float = 0.95,
    generator: torch.Generator | None = None,
) -> SpotCheck:
    check_options(queries, confidence)
    model = unwrapped(model)
    check_readable(model)
    plans = plans_per_layer(plan, attention_modules(model))
    checks: defaultdict[tuple[int, int], list[Estimates]] = defaultdict(list)
    calls = Counter[int]()
    # One source for all calls: samples that repeat each other would not be independent.
    source = torch.Generator("cpu").manual_seed(0) if generator is None else generator

    def on_attention(layer: int, call: AttentionInputs, output: Tensor) -> Tensor:
        plan, place = plans[layer], (layer, calls[layer])  # layers may share a module (ALBERT)
        calls[layer] += 1
        if call.window is None:
            checks[place] += check_call(call.checked(generator), plan, queries, source)
        return output

    if isinstance(batches, Tensor | Mapping):
        batches = [batches]
    for _ in exact_passes(model, batches, on_attention):
        calls.clear()
    if not checks:
        raise ValueError("batches: expected at least one batch, and a model with layers that see every key")
    return overall([checks[place] for place in sorted(checks)], confidence)
