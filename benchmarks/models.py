"""Whole models with exact attention and under `fk.apply`: `python benchmarks/models.py [--models NAME,...]`.

Random weights of real shapes, float32, one sequence without padding: an encoder of MiniLM's size (6 layers, 384 wide,
12 heads of 32), one of BERT-base's (12, 768, 12 of 64), and the decoder SmolLM2-135M (30, 576, 9 query and 3 key heads
of 64), its prefill without the head over the vocabulary. Encoders run `budget(64)`, the decoder `budget(256)` for
causal attention. Both ways take turns; times are medians, ratios medians of the ratios turn by turn, and attention's
share is of the same calls: the time inside the functions that transformers calls for attention, over the whole.

Models that are not measured keep what the JSON says of them.
"""

import argparse
import json
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import AttentionInterface, BertConfig, BertModel, LlamaConfig, LlamaModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import fewkeys as fk
from fewkeys.bench.machine import machine, versions
from fewkeys.core.files import write_whole
from fewkeys.integrations.interface import NAME

RESULTS = Path(__file__).parent / "results" / "models.json"
TURNS, SECONDS = 9, 4.0
VOCABULARY = 1000
LLAMA = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}


def _encoder(layers: int, width: int, length: int) -> BertModel:
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": 4 * width}
    config = BertConfig(vocab_size=VOCABULARY, **sizes, num_attention_heads=12, max_position_embeddings=length)
    return BertModel(config, add_pooling_layer=False).eval()


MODELS = {
    "MiniLM-size": (lambda n: _encoder(6, 384, n), fk.budget(64), (512, 1024, 2048, 4096)),
    "base-size": (lambda n: _encoder(12, 768, n), fk.budget(64), (512, 1024, 2048)),
    "SmolLM2-135M": (
        lambda n: LlamaModel(
            LlamaConfig(vocab_size=VOCABULARY, **LLAMA, intermediate_size=1536, max_position_embeddings=n)
        ).eval(),
        fk.budget(256, is_causal=True),
        (1024, 2048),
    ),
}


class Watch:
    """Adds up the time inside the attention function of this name."""

    def __init__(self, name: str) -> None:
        self.spent, self.attend = 0.0, ALL_ATTENTION_FUNCTIONS[name]
        AttentionInterface.register(name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        found = self.attend(*args, **kwargs)
        self.spent += perf_counter() - start
        return found


def timed(model: torch.nn.Module, ids: torch.Tensor, watch: Watch) -> tuple[float, float]:
    """Milliseconds of a call, and attention's share of them."""
    watch.spent, start = 0.0, perf_counter()
    model(input_ids=ids)
    whole = perf_counter() - start
    return 1000 * whole, watch.spent / whole


@torch.no_grad()
def measure(name: str, exact: Watch) -> list[dict[str, Any]]:
    make, plan, lengths = MODELS[name]
    rows = []
    for length in lengths:
        torch.manual_seed(0)
        model, ids = make(length), torch.randint(VOCABULARY, (1, length))
        found: dict[str, list[tuple[float, float]]] = {"exact": [], "plan": []}
        start = perf_counter()
        for turn in range(TURNS):
            if turn > 2 and perf_counter() - start > SECONDS:
                break
            first = timed(model, ids, exact)
            with fk.apply(model, plan):  # tells transformers the function anew
                second = timed(model, ids, Watch(NAME))
            if turn:  # the first one warms up
                found["exact"].append(first)
                found["plan"].append(second)
        ratio = median(a[0] / b[0] for a, b in zip(found["exact"], found["plan"], strict=True))
        parts = {
            way: {"ms": median(t for t, _ in own), "share": median(s for _, s in own)} for way, own in found.items()
        }
        rows.append({"length": length, "ratio": ratio, **parts})
        print(name, rows[-1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), metavar="NAME,...", help="default: all")
    given = parser.parse_args()
    result = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"models": {}}
    exact = Watch("sdpa")
    for name in given.models.split(","):
        result["models"][name] = {"plan": str(MODELS[name][1]), "rows": measure(name, exact)}
        result |= {"machine": machine(), "versions": versions(with_transformers=True)}
        write_whole(RESULTS, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
