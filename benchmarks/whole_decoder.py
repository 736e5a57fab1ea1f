"""A whole decoder of SmolLM2-135M's shape under a plan: `python benchmarks/whole_decoder.py` (some minutes).

Random weights in float32 and in bfloat16, the type in which SmolLM2 is stored and loaded: 30 layers, 9 query and 3 key
heads of 64. `prefill`: one forward of a prompt, with transformers' DynamicCache and with
`fk.cache(model, fk.budget(256, is_causal=True))`, in turns; the fastest counts. `compiled`: the longest prompt with
the model in float32 under `torch.compile(model, dynamic=True)` and frozen weights, both ways.
`token`: medians of single tokens after so many others, in turns; the caches hold random keys and values, since times do
not depend on them. `empty`: the same with an empty cache, which no attention can be faster than. Writes
benchmarks/results/whole_decoder.json.
"""

import argparse
import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import fewkeys as fk
from fewkeys.bench.machine import machine, versions
from fewkeys.core.clock import clock
from fewkeys.core.files import write_whole

RESULTS = Path(__file__).parent / "results" / "whole_decoder.json"
PLAN = fk.budget(256, is_causal=True)
PROMPTS, CONTEXTS, TOKENS = {2048: 6, 8192: 2}, (8192, 32768), 48
"""The lengths of prompts, each with its number of turns; the lengths before a token; the tokens at each length."""


def smollm2() -> LlamaForCausalLM:
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2 * max(CONTEXTS)}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True)).eval()


def caches(model: LlamaForCausalLM) -> dict[str, Any]:
    return {"exact": DynamicCache(config=model.config), "plan": fk.cache(model, PLAN)}


def timed(call: Callable[..., Any], ids: torch.Tensor, cache: Any) -> float:
    return clock(lambda: call(input_ids=ids, past_key_values=cache, logits_to_keep=1), ids.device)


def prefill(model: LlamaForCausalLM, tokens: int, turns: int, call: Callable[..., Any]) -> dict[str, Any]:
    """A row of prompts; `call` is the model, or the model compiled."""
    ids = torch.randint(1000, (1, tokens), generator=torch.Generator().manual_seed(0))
    orders = ((*caches(model).items(),)[:: 1 - turn % 2 * 2] for turn in range(turns))  # none is always the first
    times = [{name: timed(call, ids, cache) for name, cache in order} for order in orders]
    return _row(model, tokens, {name: min(turn[name] for turn in times) for name in times[0]})


def token(model: LlamaForCausalLM, context: int) -> dict[str, Any]:
    generator, held = torch.Generator().manual_seed(0), caches(model)
    for number, layer in enumerate(held["plan"].layers):
        key, value = torch.randn(2, 1, 3, context, 64, generator=generator).to(model.dtype).unbind()
        held["exact"].update(key, value, number)
        layer.calls[0].append(key, value)
    ids = torch.zeros(1, 1, dtype=torch.int64)
    held["empty"] = DynamicCache(config=model.config)
    times = [{name: timed(model, ids, cache) for name, cache in held.items()} for _ in range(TOKENS)]
    return _row(model, context, {name: median(turn[name] for turn in times[4:]) for name in times[0]})


def _row(model: LlamaForCausalLM, tokens: int, ms: dict[str, float]) -> dict[str, Any]:
    dtype = str(model.dtype).removeprefix("torch.")
    row = {"dtype": dtype, "tokens": tokens, "ms": ms, "ratio": ms["exact"] / ms["plan"]}
    print(json.dumps(row), flush=True)
    return row


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    path = parser.parse_args().out
    model = smollm2()
    models = (model, deepcopy(model).bfloat16())
    result: dict[str, Any] = {"machine": machine(), "versions": versions()}
    result["prefill"] = [prefill(one, tokens, turns, one) for one in models for tokens, turns in PROMPTS.items()]
    torch._inductor.config.freezing = True
    torch._dynamo.config.recompile_limit = 64  # a layer's number is a constant of its code
    compiled, longest = torch.compile(model, dynamic=True), max(PROMPTS)
    result["compiled"] = [prefill(model, longest, PROMPTS[longest] + 1, compiled)]  # the first turns compile
    result["token"] = [token(one, context) for one in models for context in CONTEXTS]
    write_whole(path, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
