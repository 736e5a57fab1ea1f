"""Time and memory of embedding long documents on a CPU, in the shape of ModernBERT-base.

    python -m experiments.long_documents.run --text wikitext.txt.gz --layers 6 --documents 1 --slots 192

The weights are random: only time and memory count. Documents are consecutive pieces of the text. Writes
experiments/long_documents/results/modernbert.json. What a trained encoder keeps is judged by
experiments/long_encoder.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from experiments.decoders.decoder import read_text
from experiments.long_documents.peak import PeakMemory
from torch import Tensor

import fewkeys as fk
from fewkeys.bench.machine import machine, versions

OUT = Path(__file__).parent / "results" / "modernbert.json"


def modernbert(tokens: int, layers: int) -> Any:
    """A sentence-transformer with random weights in ModernBERT-base's shape and MiniLM's tokenizer."""
    from transformers import AutoTokenizer, ModernBertConfig, ModernBertModel

    from fewkeys.demo import model_folder

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    special = {"cls_token_id": tokenizer.cls_token_id, "sep_token_id": tokenizer.sep_token_id, "pad_token_id": 0}
    special |= {"bos_token_id": tokenizer.cls_token_id, "eos_token_id": tokenizer.sep_token_id}
    config = ModernBertConfig(num_hidden_layers=layers, vocab_size=len(tokenizer), **special)
    model = ModernBertModel(config).eval()

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        @torch.no_grad()
        def encode(self, texts: list[str], **_: Any) -> Tensor:
            batches = [tokenizer(text, truncation=True, max_length=tokens, return_tensors="pt") for text in texts]
            return torch.cat([model(batch["input_ids"]).last_hidden_state.mean(1) for batch in batches])

    return Encoder()


def documents_of(text: str, count: int, tokens: int) -> list[str]:
    """`count` consecutive pieces of the text, each of at least `tokens` tokens."""
    words = text.split()
    return [" ".join(words[i * tokens : (i + 1) * tokens]) for i in range(count)]


def measured(encoder: Any, documents: list[str]) -> dict[str, float]:
    """The seconds per document, and the peak of memory without the model in MB for the first one."""
    encoder.encode(documents[:1])
    start = perf_counter()
    for document in documents:
        encoder.encode([document])
    seconds = (perf_counter() - start) / len(documents)
    with PeakMemory() as memory:
        encoder.encode(documents[:1])
    return {"seconds": seconds, "megabytes": memory.peak / 1e6}


def run(encoder: Any, documents: list[str], slots: list[int]) -> list[dict[str, Any]]:
    """One row for exact attention and for each number of slots."""
    rows: list[dict[str, Any]] = [{"plan": "exact", **measured(encoder, documents)}]
    for count in slots:
        with fk.apply(encoder, fk.budget(count, cohorts=1).never_exact()):
            rows.append({"plan": f"budget({count}, cohorts=1)", **measured(encoder, documents)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--slots", type=int, nargs="+", default=[64, 192])
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    encoder = modernbert(options.tokens, options.layers)
    rows = run(encoder, documents_of(read_text(options.text), options.documents, options.tokens), options.slots)
    for row in rows:
        print("  ".join(f"{value:>10.4g}" if isinstance(value, float) else f"{value:>12}" for value in row.values()))
    settings = {name: getattr(options, name) for name in ("tokens", "layers", "documents")}
    result = {"shape": "modernbert", **settings, "rows": rows}
    result |= {"machine": machine(), "versions": versions()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
