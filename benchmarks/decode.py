"""Decoding without end: `python benchmarks/decode.py` decodes 100,000 tokens and shows that nothing grows.

A small Llama with random weights (2 layers, 4 query heads and 2 key heads of 64 dimensions) decodes greedily, token
by token, with `fewkeys.cache(model, budget(256))`, and beside it, for as many tokens as take the same time, with
transformers' DynamicCache. Milliseconds per token are medians over stretches of 2,500 tokens; bytes are those of the
caches; the peak is the process's. Writes benchmarks/results/decode.json.
"""

import argparse
import json
import resource
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

import fewkeys as fk
from fewkeys.bench.machine import machine, versions
from fewkeys.core.files import write_json

RESULTS = Path(__file__).parent / "results"
SLOTS, STRETCH = 256, 2560


def small_llama(tokens):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": tokens + 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()


@torch.no_grad()
def decode(model, cache, tokens, held, seconds=None):
    """One row per stretch: tokens so far, milliseconds per token, bytes held, peak of the process."""
    token, rows, times, began = torch.zeros(1, 1, dtype=torch.int64), [], [], perf_counter()
    for count in range(1, tokens + 1):
        start = perf_counter()
        token = model(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
        times.append(perf_counter() - start)
        if count % STRETCH == 0 or count == tokens:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            row = {"tokens": count, "milliseconds": 1e3 * median(times), "bytes": held(), "peak_kilobytes": peak}
            rows.append(row)
            times = []
            print(json.dumps(row), flush=True)
            if seconds is not None and perf_counter() - began > seconds:
                break
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    from transformers import DynamicCache

    model = small_llama(options.tokens)
    cache = fk.cache(model, fk.budget(SLOTS, is_causal=True, memory="constant"))
    began = perf_counter()
    ours = decode(model, cache, options.tokens, cache.memory)
    took = perf_counter() - began
    cache.close()
    exact = DynamicCache()

    def held():
        return sum(t.numel() * t.element_size() for layer in exact.layers for t in (layer.keys, layer.values))

    theirs = decode(model, exact, options.tokens, held, took)
    results = {"slots": SLOTS, "fewkeys": ours, "dynamic cache": theirs}
    write_json(options.out, "decode.json", {**results, "machine": machine(), "versions": versions()})


if __name__ == "__main__":
    sys.exit(main())
