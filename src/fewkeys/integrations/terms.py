"""What some models add to their scores, said in terms that every plan knows: caps, learned sinks, windows, biases.

A soft cap is another kernel, `Softcap`. A learned sink is one more key before all others, that every query keeps, or,
under a scan, may choose like any other key: with one more dimension, in which query head h holds its sink s_h, the sink
key 1 / scale and all other keys 0, its score is s_h and those of the others are what they were; its value is zero.

A bias of every key is one more dimension, too: queries hold 1 there, and key j its bias / scale. So is ALiBi, causal
attention whose score at distance i - j has -m_h (i - j) added: softmax sees m_h j alone. Kept keys are exact. A
stand-in has the bias of the (weighted) mean place of its keys, and what stand-ins know of their keys' spread (tilts,
radii, first order), they know of places, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.captures.capture import AttentionInputs
from fewkeys.core.distances import DistanceBias
from fewkeys.core.weights import Softcap, Softmax
from fewkeys.plan import Plan
from fewkeys.select import Sinks, Window


def with_sink(inputs: AttentionInputs) -> AttentionInputs:
    """The same call, its learned sink become a key."""
    if inputs.sink is None:
        return inputs
    query, key = inputs.query, pad(inputs.key, (0, 1, 1, 0))
    sink = inputs.sink.to(query.dtype).view(1, -1, 1, 1).expand(*query.shape[:3], 1)
    key[:, :, 0, -1] = 1 / inputs.scale
    mask = None if inputs.key_mask is None else pad(inputs.key_mask, (1, 0), value=True)
    offset = inputs.query_offset + 1  # every key stands one place later
    query, value = torch.cat([query, sink], -1), pad(inputs.value, (0, 0, 1, 0))
    return replace(inputs, query=query, key=key, value=value, key_mask=mask, query_offset=offset, sink=None)


def with_key_bias(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float, *, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a call whose key j has `bias` (B or 1, Hq, Nk) added to its scores.

    centred: biases are taken relative to the last key's, so that scores of near keys lose no digits to their place;
    not where keys of other calls join these. Query heads that share keys get keys of their own.
    """
    if centred:
        bias = bias - bias[..., -1:]
    ratio = query.shape[1] // key.shape[1]
    if ratio > 1:
        key, value = (rows.repeat_interleave(ratio, 1) for rows in (key, value))
    column = (bias / scale).to(key.dtype).expand(*key.shape[:3]).unsqueeze(-1)
    return pad(query, (0, 1), value=1.0), torch.cat([key, column], -1), value


def distance_bias(bias: Tensor, offset: int) -> Tensor | None:
    """The table (Hq, 2 R + 1) of a bias (B or 1, Hq, Nq, Nk) of a call whose first query stands at `offset`.

    None where it is zero, as T5's cross-attention has it; `ValueError` where it does not depend on distances alone.
    Without gradients the table ends where the bias is constant. The table stays with the tensor, which all layers
    of a model share.
    """
    at, remembered = vars(bias).get(_TABLE, (None, None))
    if at == offset and not bias.requires_grad:
        table: Tensor = remembered
        return table
    if not bool(bias.any()) and not bias.requires_grad:
        return None
    even = torch.equal(bias[..., 1:, 1:], bias[..., :-1, :-1]) and torch.equal(bias, bias[:1].expand_as(bias))
    queries, keys = bias.shape[2:]
    if not even or not 0 <= offset <= max(0, keys - 1):
        raise ValueError(
            "position_bias: expected a bias that depends on the distance alone, the same for all sequences, got "
            f"another, {tuple(bias.shape)}, which no plan supports"
        )
    line = torch.cat([bias[0, :, 1:, 0].flip(-1), bias[0, :, 0]], -1)  # from the last query to the last key
    low, high = offset + queries - 1, keys - 1 - offset
    whole = DistanceBias(pad(line, (max(0, high - low), max(0, low - high)), mode="replicate"))
    if not bias.requires_grad:
        differs = (whole.table != whole.table[:, :1]).any(0), (whole.table != whole.table[:, -1:]).any(0)
        ends = [int(part.int().argmax()) for part in (differs[0], differs[1].flip(0))]
        whole = whole.reaching(0, max(0, whole.reach - min(ends) + 1) if min(ends) else whole.reach)
        vars(bias)[_TABLE] = offset, whole.table
    return whole.table


_TABLE = "_fewkeys_table"


def in_terms(inputs: AttentionInputs, plan: Plan | Sequence[Plan] | None) -> Plan | tuple[Plan, ...]:
    """The plan, or the plans of the key heads, for `with_sink(inputs)`; None: exact attention.

    A window of the layer's own takes the plan's place.
    """
    if inputs.window is not None:
        plan = Plan(Window(inputs.window))
    if plan is None or isinstance(plan, Plan):
        return _plan_in_terms(inputs, plan or Plan())
    return tuple(_plan_in_terms(inputs, one) for one in plan)


def _plan_in_terms(inputs: AttentionInputs, plan: Plan) -> Plan:
    if inputs.softcap is not None:
        if not isinstance(plan.weights, Softmax):
            raise ValueError(f"plan: expected Softmax() weights for a model that caps its scores, got {plan.weights}")
        plan = replace(plan, weights=Softcap(inputs.softcap))
    if inputs.sink is None or plan.keep is None:
        return plan
    held = plan.keep.remembered
    if held is not None and (held.first or held.scan):
        return plan
    return replace(plan, keep=plan.keep | Sinks(1))


def plain(inputs: AttentionInputs) -> bool:
    """Whether the call is softmax attention over its keys and nothing else, within a window or not."""
    return inputs.softcap is None and inputs.sink is None and inputs.distance_bias is None


def check_sink(sink: Tensor, heads: int) -> Tensor:
    """The sinks (Hq,) as a model hands them down."""
    if sink.numel() != heads:
        raise ValueError(f"s_aux: expected one number for each of {heads} query heads, got shape {tuple(sink.shape)}")
    return sink.reshape(-1)
