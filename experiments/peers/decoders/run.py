"""Output error against slots on a decoder, for every rival that serves decoders.

    python -m experiments.peers.decoders.run --model FOLDER [--gguf FILE] --text FILE [--length 2048] [--out DIR]

The inputs are queries, keys and values of `--layers` on one stretch of text; the error is that of its second half,
against exact attention to the same past. Paid are kept keys, drawn keys, stand-ins, and every mean or page scored. Each
figure is written to DIR/smollm2.json at once, so a stopped run goes on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from experiments.causal.eviction import attention_so_far, unlikeness
from experiments.cells import opened
from experiments.decoders.attend import ByRule, Rule
from experiments.decoders.decoder import load, options as decoder_options, read_text
from experiments.decoders.methods import RULES as OTHERS
from experiments.decoders.rivals import Evicting
from experiments.peers.decoders.express import Express
from experiments.peers.decoders.retroinfer import RetroInfer
from experiments.peers.decoders.scored import Scored, compactor, expected, votes
from experiments.peers.decoders.vattention import VAttention
from experiments.peers.picture import save_slots
from torch import Tensor, nn

import fewkeys as fk
from fewkeys.bench.machine import machine, versions
from fewkeys.captures.capture import AttentionInputs
from fewkeys.core.files import write_json

FILE = "smollm2.json"
PLANS: dict[str, Callable[[int], fk.Plan]] = {
    "fewkeys": lambda slots: fk.budget(slots, is_causal=True).never_exact(),
    "fewkeys, constant memory": lambda slots: fk.budget(slots, is_causal=True, memory="constant").never_exact(),
    "sinks + window": lambda slots: fk.Plan(fk.Sinks(4) | fk.Window(slots - 4)),
}
RULES: dict[str, Callable[[int], Rule]] = {
    **{name: OTHERS[name] for name in ("Quest", "Quest, scoring free", "Multipole", "Multipole, scoring free")},
    "RetroInfer": RetroInfer,
    "RetroInfer, scoring free": lambda slots: RetroInfer(slots, free=True),
    "vAttention": lambda slots: VAttention(slots // 2, epsilon=0.3, delta=0.2),
    "SnapKV": lambda slots: Scored(slots, votes),
    "Expected Attention": lambda slots: Scored(slots, expected),
    "Compactor": lambda slots: Scored(slots, compactor),
    "KeyDiff": lambda slots: Evicting(slots, unlikeness),
    "accumulated attention": lambda slots: Evicting(slots, attention_so_far),
    "Express": lambda slots: Express(max(2, slots // 8 * 2)),
    **{name: OTHERS[name] for name in ("key norm", "random keys", "oracle")},
}
SLOTS = (64, 128, 256)


def play(rule: Rule, query: Tensor, key: Tensor, value: Tensor, first: int) -> tuple[Tensor, float]:
    """Output (Hkv, G, N, Dv) and slots paid by queries from `first` on, of scaled queries (Hkv, G, N, D)."""
    inputs = AttentionInputs(query.flatten(0, 1)[None], key[None], value[None], scale=1.0, is_causal=True)
    by_rule = ByRule(rule, first)
    out = by_rule(0, nn.Identity(), inputs)
    return out[0].unflatten(0, query.shape[:2]), by_rule.paid


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit code."""
    parser = decoder_options(__doc__)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--layers", type=int, nargs="+", default=[3, 12, 21])
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    options = parser.parse_args(arguments)
    try:
        calls = _calls(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    data = {"length": options.length, "layers": options.layers, **opened(options.out, FILE, "rows")}
    judged = {(row["peer"], row["slots"]) for row in data["rows"]}
    data |= {"machine": machine(), "versions": versions()}
    for slots in SLOTS:
        for name in (*PLANS, *RULES):
            if (name, slots) in judged:
                continue
            error, paid = judge(name, slots, calls)
            data["rows"].append({"peer": name, "slots": slots, "error": round(error, 5), "paid": round(paid, 2)})
            write_json(options.out, FILE, data)
            print(f"{name} {slots}: error {error:.3f}, {paid:.0f} paid", file=sys.stderr, flush=True)
    save_slots(data, options.out / "smollm2.png")
    return 0


@torch.no_grad()
def judge(name: str, slots: int, calls: list[AttentionInputs]) -> tuple[float, float]:
    """Mean relative error over the second half, heads and layers, and slots paid; for a plan its number of slots."""
    errors, payments = [], []
    for call in calls:
        first = call.query.shape[2] // 2
        exact = fk.attention(call.query, call.key, call.value, **call.options())[:, :, first:]
        if name in PLANS:
            out = fk.attention(call.query, call.key, call.value, plan=PLANS[name](slots), **call.options())
            paid = float(slots)
        else:
            query = (call.query[0] * call.scale).unflatten(0, (call.key.shape[1], -1))
            part, paid = play(RULES[name](slots), query, call.key[0], call.value[0], first)
            out = part.flatten(0, 1)[None]
        errors.append(fk.metrics.output_error(out[:, :, first:], exact))
        payments.append(paid)
    return sum(errors) / len(errors), sum(payments) / len(payments)


def _calls(options: argparse.Namespace) -> list[AttentionInputs]:
    model, tokenizer = load(options.model, options.gguf)
    tokens = tokenizer(read_text(options.text)[: 8 * options.length], return_tensors="pt").input_ids[
        :, : options.length
    ]
    capture = fk.capture(model, [{"input_ids": tokens}])
    return [next(iter(capture.calls(layer))) for layer in options.layers]


if __name__ == "__main__":
    sys.exit(main())
