"""Perplexity of a decoder whose attention is replaced in all layers, over that of exact attention, and slots paid.

    python experiments/trees/perplexity.py --model FOLDER [--gguf FILE] --text FILE [--length 2048] [--place 1/3]

One stretch of `--length` tokens that begins at the share `--place` of the text (gzipped or plain); the second half is
judged. Prints a line for each number of slots and each memory. KL: the mean over tokens of KL(exact || plan).
"""

from __future__ import annotations

import argparse
import gzip
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor

import fewkeys as fk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a Hugging Face decoder")
    parser.add_argument("--gguf", help="its file of quantised weights, if it has no others")
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--place", type=Fraction, default=Fraction(0))
    parser.add_argument("--slots", type=int, nargs="+", default=[256, 128])
    parser.add_argument("--memory", nargs="+", default=["all"], choices=["all", "constant"])
    options = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = {"gguf_file": options.gguf} if options.gguf else {}
    tokenizer = AutoTokenizer.from_pretrained(options.model, **found)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, **found).eval()
    raw = options.text.read_bytes()
    text = (gzip.decompress(raw) if options.text.suffix == ".gz" else raw).decode()
    begin, length = int(len(text) * options.place), options.length
    tokens = tokenizer(text[begin : begin + 8 * length], return_tensors="pt").input_ids[:, :length]

    def answer() -> Tensor:
        with torch.no_grad():
            return model(tokens).logits[0, length // 2 : -1].float().log_softmax(-1)

    exact, told = answer(), tokens[0, length // 2 + 1 :, None]
    print(f"exact: perplexity {(-exact.gather(1, told).mean()).exp().item():.2f}", flush=True)
    heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
    dim = getattr(model.config, "head_dim", None) or model.config.hidden_size // heads
    query, key = torch.randn(1, heads, length, dim), torch.randn(1, kv_heads, length, dim)
    for slots in options.slots:
        for memory in options.memory:
            plan = fk.budget(slots, is_causal=True, memory=memory)
            with fk.apply(model, plan):
                few = answer()
            # How many keys and nodes a query meets does not depend on what they hold.
            paid = plan.slots(plan.keep.graph(query, key, is_causal=True).slots(), dim, dim)
            ratio = (exact - few).gather(1, told).mean().exp().item()
            apart = (exact.exp() * (exact - few)).sum(-1).mean().item()
            print(f"{slots} slots, memory {memory}: {paid:.1f} paid, ratio {ratio:.3f}, KL {apart:.4f}", flush=True)


if __name__ == "__main__":
    main()
