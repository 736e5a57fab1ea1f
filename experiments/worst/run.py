"""Inputs and heads on which each recommended plan is worst, and what a spot check says of them.

    python -m experiments.worst.run --text FILE [--model FOLDER [--gguf FILE]] [--files whisper=DIR ...]

Three searches for every plan: inputs constructed to break it (`inputs.py`), inputs made worse by gradient ascent on the
error, and the worst of thousands of heads of trained models (`heads.py`). The models are all-MiniLM-L6-v2 and the
decoder on pieces of a text, and the encoders of `experiments.encoders` that `--files` names. Writes
results/worst.json, a table and a picture.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from experiments.decoders.decoder import load, read_text
from experiments.encoders.models import ENCODERS
from experiments.worst.heads import Heads
from experiments.worst.inputs import MADE, STARTS, Rows, Search
from experiments.worst.report import save_picture, table

import fewkeys as fk
from fewkeys.bench.machine import machine, versions
from fewkeys.captures.capture import AttentionInputs
from fewkeys.core.files import read_json, write_json
from fewkeys.demo import model_folder
from fewkeys.integrations.loading import quiet
from fewkeys.integrations.transformers import load_model

RESULTS = Path(__file__).parent / "results"
FILE = "worst.json"
TOKENS = 512
QUERIES = 32
"""Queries of a head that a spot check answers exactly."""
BOTH = {f"budget({slots})": fk.budget(slots).never_exact() for slots in (64, 192)}
CAUSAL = {
    "budget(256, is_causal=True)": fk.budget(256, is_causal=True).never_exact(),
    'budget(256, is_causal=True, memory="constant")': fk.budget(256, is_causal=True, memory="constant").never_exact(),
}
SLOTS = {name: int(name.partition("(")[2].partition(")")[0].partition(",")[0]) for name in BOTH | CAUSAL}


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="what the text models read, plain or .gz")
    parser.add_argument("--model", help="folder of a Hugging Face decoder")
    parser.add_argument("--gguf", help="its file of quantised weights, if it has no others")
    parser.add_argument("--files", nargs="+", default=[], metavar="NAME=PATH", help="of experiments.encoders")
    parser.add_argument("--pieces", type=int, nargs=2, default=[60, 20], help="of the text, by encoder and decoder")
    parser.add_argument("--steps", type=int, default=150, help="of the search")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--draw", action="store_true", help="measure nothing; draw the committed figures")
    options = parser.parse_args(arguments)
    data: dict[str, Any] = read_json(options.out, FILE) if (options.out / FILE).is_file() else {}
    if not options.draw:
        data |= {"machine": machine(), "versions": versions(), "steps": options.steps}
        data["inputs"] = {name: _made(name, plan, options.steps) for name, plan in (BOTH | CAUSAL).items()}
        write_json(options.out, FILE, data)
        if options.text is not None:
            data["heads"] = _trained(options)
            write_json(options.out, FILE, data)
    (options.out / "table.md").write_text(table(data))
    if "heads" in data:
        save_picture(data, options.out / "worst.png")
    print(table(data))
    return 0


def _made(name: str, plan: fk.Plan, steps: int) -> list[dict[str, Any]]:
    """Rows for the constructed inputs, and for those of the search that starts from two of them."""
    causal, rows = name in CAUSAL, []
    for title, make in MADE.items():
        start = make(TOKENS, torch.Generator().manual_seed(0))
        rows.append({"input": title} | _judged(name, plan, start, causal))
        if title in STARTS:
            worse = Search(steps)(plan, start, causal)
            rows.append({"input": f"{title}, made worse by search"} | _judged(name, plan, worse, causal))
        print(f"{name}: {rows[-1]['input']} {rows[-1]['error']:.3g}", file=sys.stderr, flush=True)
    return rows


def _trained(options: argparse.Namespace) -> dict[str, Any]:
    """By plan, errors of all heads and the worst of them."""
    words, (pieces, stretches) = read_text(options.text), options.pieces
    both, causal = Heads(BOTH), Heads(CAUSAL)
    model, tokenizer = load_model(model_folder())
    for piece, ids in enumerate(_pieces(tokenizer, words, pieces, TOKENS)):
        both.read(model, f"all-MiniLM-L6-v2, piece {piece}", input_ids=ids)
    paths = {name: Path(path) for name, _, path in (pair.partition("=") for pair in options.files)} | {
        "text": options.text
    }
    for name, encoder in ENCODERS.items():
        if name != "minilm" and set(encoder.needs) <= set(paths):
            reader, batches = encoder.read(paths, max(encoder.lengths))
            for batch in batches:
                both.read(reader.get_encoder() if encoder.part else reader, encoder.title, **batch)
    if options.model is not None:
        decoder, tokenizer = load(options.model, options.gguf)
        for piece, ids in enumerate(_pieces(tokenizer, words, stretches, 2 * TOKENS)):
            causal.read(decoder, f"{Path(options.gguf or options.model).stem}, piece {piece}", input_ids=ids)
    return {name: _summary(name, plan, causal if name in CAUSAL else both) for name, plan in (BOTH | CAUSAL).items()}


def _pieces(tokenizer: Any, words: str, count: int, length: int) -> list[torch.Tensor]:
    """`count` pieces of `length` tokens, spread over the text."""
    with quiet():
        parts = [words[len(words) * i // count :][: 8 * length] for i in range(count)]
        ids = [tokenizer(part, return_tensors="pt", truncation=True, max_length=length).input_ids for part in parts]
    return [tokens for tokens in ids if tokens.shape[1] == length]


def _summary(name: str, plan: fk.Plan, heads: Heads) -> dict[str, Any] | None:
    if name not in heads.errors:
        return None
    errors = torch.tensor(heads.errors[name], dtype=torch.float64)
    worst = [
        {"head": title} | _judged(name, plan, (call.query, call.key, call.value), call.is_causal, call)
        for _, _, title, call in sorted(heads.worst[name], key=lambda entry: -entry[0])
    ]
    shares = {str(share): float(errors.quantile(share)) for share in (0.5, 0.9, 0.99, 0.999, 1.0)}
    return {"heads": len(errors), "mean": float(errors.mean()), "quantiles": shares, "worst": worst}


@torch.no_grad()
def _judged(
    name: str, plan: fk.Plan, rows: Rows, is_causal: bool, call: AttentionInputs | None = None
) -> dict[str, Any]:
    """The plan's error, its mean over the worst hundredth of queries, the error of each query's best keys, and the
    result of a spot check.
    """
    options = {"is_causal": is_causal} if call is None else call.options()
    exact = fk.attention(*rows, **options)
    error, best = (
        fk.metrics.relative_error(fk.attention(*rows, plan=tried, **options), exact).flatten().double()
        for tried in (plan, fk.Plan(fk.TopK(SLOTS[name])))
    )
    worst = error.topk(max(1, len(error) // 100)).values
    figures = {"error": float(error.mean()), "worst queries": float(worst.mean()), "best keys": float(best.mean())}
    options["generator"] = torch.Generator().manual_seed(0)
    check = fk.spot_check(*rows, plan=plan, queries=QUERIES, **options)
    return figures | {"spot check": [check.error, check.low, check.high]}


if __name__ == "__main__":
    sys.exit(main())
