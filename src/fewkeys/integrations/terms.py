"""Translates what models add to softmax attention (caps, sinks, biases, packed rows) into terms that plans support.

A soft cap becomes the weight function `Softcap`, and a bias that depends on distance a table.

A learned sink becomes one more key, before all others, with value zero. Rows get one more dimension: query head h holds
its sink s_h there, the sink key 1 / scale, and all other keys 0. So the sink's score is s_h and no other score changes.
Every query keeps this key; under a scan it may choose it like any other.

Sequences packed into one row, as for flash attention, become rows, padded at their ends. `cu_seq_lens_q` holds the
place where each begins, and last the number of tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fewkeys.call import attention
from fewkeys.captures.capture import AttentionInputs
from fewkeys.core.distances import DistanceBias
from fewkeys.core.gaps import has_interior_padding
from fewkeys.core.impl import Impl
from fewkeys.core.weights import Softcap, Softmax
from fewkeys.guard.fallback import Guard
from fewkeys.plan import Plan
from fewkeys.select import Sinks, Window

_HONOURED = {
    *("cache_position", "dropout", "encoder_attention_mask", "encoder_hidden_states", "is_causal", "labels"),
    *("logits_to_keep", "num_items_in_batch", "output_hidden_states", "output_router_logits", "past_key_values"),
    *("position_bias", "position_embeddings", "position_ids", "return_dict", "s_aux", "scaling", "sliding_window"),
    *("softcap", "token_type_ids", "tokenizer", "use_cache"),
}
"""Options of attention calls that are supported, or do not change the output."""
_PACKED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
"""Options of packed sequences; only the first is read."""


def check_honoured(module: nn.Module, options: Mapping[str, Any], has_stream: bool) -> None:
    """Raise `ValueError` for an option that is not honoured. Streams take no packed sequences."""
    if dropout := options.get("dropout"):
        raise ValueError(f"dropout: expected 0, got {dropout}; call model.eval(), or configure no attention dropout")
    honoured = _HONOURED if has_stream or options.get("cu_seq_lens_q") is None else _HONOURED | _PACKED
    for name, value in options.items():
        if name not in honoured and value is not None and value is not False:
            raise ValueError(
                f"{name}: {type(module).__name__} passes this argument to its attention, which fewkeys does not "
                "support; call without it, or model.set_attn_implementation('eager')"
            )


def with_sink(inputs: AttentionInputs) -> AttentionInputs:
    """The same call with its learned sink as a key."""
    if inputs.sink is None:
        return inputs
    query, key = inputs.query, pad(inputs.key, (0, 1, 1, 0))
    sink = inputs.sink.to(query.dtype).view(1, -1, 1, 1).expand(*query.shape[:3], 1)
    key[:, :, 0, -1] = 1 / inputs.scale
    mask = None if inputs.key_mask is None else pad(inputs.key_mask, (1, 0), value=True)
    offset = inputs.query_offset + 1  # every key stands one place later
    query, value = torch.cat([query, sink], -1), pad(inputs.value, (0, 0, 1, 0))
    return replace(inputs, query=query, key=key, value=value, key_mask=mask, query_offset=offset, sink=None)


def distance_bias(bias: Tensor | None, offset: int) -> Tensor | None:
    """The table (Hq, 2 R + 1) of a bias (B or 1, Hq, Nq, Nk) of a call whose first query stands at `offset`.

    None where it is zero, as in T5's cross-attention; `ValueError` where it depends on more than distances. Without
    gradients the table ends where the bias is constant, and is stored with the tensor, which all layers share.
    """
    if bias is None:
        return None
    stored: dict[int, Tensor] = vars(bias).setdefault("_fewkeys_tables", {})
    if not bias.requires_grad:
        if offset in stored:
            return stored[offset]
        if not bool(bias.any()):
            return None
    by_distance = torch.equal(bias[..., 1:, 1:], bias[..., :-1, :-1]) and torch.equal(bias, bias[:1].expand_as(bias))
    queries, keys = bias.shape[2:]
    if not by_distance or not 0 <= offset <= max(0, keys - 1):
        raise ValueError("position_bias: expected a bias that depends on the distance alone, as plans support it")
    line = torch.cat([bias[0, :, 1:, 0].flip(-1), bias[0, :, 0]], -1)  # from the last query to the last key
    before, after = offset + queries - 1, keys - 1 - offset
    table = pad(line, (max(0, after - before), max(0, before - after)), mode="replicate")
    if not bias.requires_grad:
        first, last = (table != table[:, :1]).any(0), (table != table[:, -1:]).any(0)
        constant = min(int(part.int().argmax()) for part in (first, last.flip(0)))
        whole = DistanceBias(table)
        table = stored[offset] = whole.reaching(0, whole.reach - max(0, constant - 1)).table
    return table


def attend(
    inputs: AttentionInputs,
    plan: Plan | Sequence[Plan] | None,
    *,
    impl: Impl = "auto",
    generator: torch.Generator | None = None,
    max_error: float | Guard | None = None,
) -> Tensor:
    """The call answered by a plan, or by the plans of its key heads; None: exact attention."""
    call, plans = with_sink(inputs), in_terms(inputs, plan)
    options = call.options(generator, impl)
    return attention(call.query, call.key, call.value, plan=plans, max_error=max_error, **options)


def in_terms(inputs: AttentionInputs, plan: Plan | Sequence[Plan] | None) -> Plan | tuple[Plan, ...]:
    """The plan, or those of the key heads, for `with_sink(inputs)`. A layer's window replaces what they keep."""
    if inputs.window is not None:
        if window_has_gaps(inputs):
            raise gaps_error(inputs.window)
        weights = plan.weights if isinstance(plan, Plan) else Softmax()
        plan = Plan(Window(inputs.window), weights=weights)
    several = plan if isinstance(plan, Sequence) else [plan or Plan()]
    plans = tuple(_plan_in_terms(inputs, head_plan) for head_plan in several)
    return plans[0] if len(plans) == 1 else plans


def window_has_gaps(inputs: AttentionInputs) -> bool:
    """Whether a causal window has padding between real keys: the layer's window counts it, a plan's does not."""
    mask = inputs.key_mask if inputs.window is not None and inputs.is_causal else None
    return mask is not None and has_interior_padding(mask)


def gaps_error(window: int) -> ValueError:
    """The error of a window that would count padding."""
    what = f"got some between its tokens, which this model's window of {window} tokens would count"
    return ValueError(f"attention_mask: expected padding at the ends of a sequence, {what}")


def _plan_in_terms(inputs: AttentionInputs, plan: Plan) -> Plan:
    if inputs.softcap is not None:
        if not isinstance(plan.weights, Softmax):
            raise ValueError(f"plan: expected Softmax() weights for a model that caps its scores, got {plan.weights}")
        plan = replace(plan, weights=Softcap(inputs.softcap))
    if inputs.sink is None or plan.keep is None:
        return plan
    remembered = plan.keep.remembered
    if remembered is not None and (remembered.first or remembered.scan):
        return plan
    return replace(plan, keep=plan.keep | Sinks(1))


def plain(inputs: AttentionInputs) -> bool:
    """Whether the call is softmax attention over its keys, within a window or not, and nothing else."""
    return inputs.softcap is None and inputs.sink is None and inputs.distance_bias is None


def by_sequence(inputs: AttentionInputs, starts: Tensor | None, answer: Callable[[AttentionInputs], Tensor]) -> Tensor:
    """The output of `answer`, which gets a row for each packed sequence. starts: `cu_seq_lens_q`."""
    tokens = inputs.query.shape[2]
    if starts is None or starts.tolist() == [0, tokens]:
        return answer(inputs)
    lengths = starts.diff()
    is_row = inputs.query.shape[0] == 1 and inputs.key.shape[2] == tokens == int(starts[-1]) and int(starts[0]) == 0
    if not is_row or bool((lengths < 0).any()) or inputs.key_mask is not None or inputs.distance_bias is not None:
        wanted = f"places from 0 to the {tokens} tokens of one row, without padding and distance bias"
        raise ValueError(f"cu_seq_lens_q: expected {wanted}, got {starts.tolist()} for {inputs.query.shape[0]} rows")
    real = torch.arange(int(lengths.max()), device=starts.device) < lengths[:, None]

    def in_rows(packed: Tensor) -> Tensor:
        rows = packed.new_zeros(*real.shape, packed.shape[1], packed.shape[3])
        rows[real] = packed[0].transpose(0, 1)
        return rows.transpose(1, 2)

    query, key, value = map(in_rows, (inputs.query, inputs.key, inputs.value))
    key_mask = None if bool(real.all()) else real
    output = answer(replace(inputs, query=query, key=key, value=value, key_mask=key_mask))
    return output.transpose(1, 2)[real].transpose(0, 1)[None]
