"""How often the intervals of `fewkeys.spot_check` hold the true error, on a real encoder and where it is hard.

    python experiments/value_aware/spot_check_coverage.py --text FILE [FILE ...]

A trial is one spot check with a fresh sample. The plan's error at every query is computed once, and a trial reads the
sampled queries' errors from there, through the sampling and interval code of the library; one real `spot_check` per
plan proves that this gives the same numbers. The control is the textbook interval: a simple random sample of as many
queries, mean +- 1.96 s. Writes `results/spot_check.json` beside this file.
"""

from __future__ import annotations

import argparse
import gzip
import sys
from pathlib import Path

import torch
from torch import Tensor

import fewkeys as fk
from fewkeys.bench.machine import machine, versions
from fewkeys.captures import Capture
from fewkeys.core.files import write_json
from fewkeys.core.inputs import Inputs
from fewkeys.core.metrics import relative_error
from fewkeys.demo import NAME, model_folder
from fewkeys.guard.interval import pool
from fewkeys.guard.sample import Estimates, draw, uniform
from fewkeys.integrations.text import batches
from fewkeys.integrations.transformers import load_model
from fewkeys.judge.spot_check import check_tensors

POPULATIONS = ("count", "drawn", "heads", "mean", "variance", "third")
"""The tensors of `Estimates` that have an entry for each population."""
CONFIDENCE = 0.95
BLOCK = 100
"""Trials in one run of the acceptance rule "at least 93 of 100"."""

PLANS = {
    "budget(64, cohorts=1)": (fk.budget(64, cohorts=1), False),
    "window 64": (fk.Plan(fk.Window(64)), False),
    "leverage 64": (fk.Plan(fk.select.Leverage(64)), False),
    "top-64 oracle": (fk.Plan(fk.TopK(64)), False),
    'budget(64, is_causal=True, memory="constant")': (fk.budget(64, is_causal=True, memory="constant"), True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", required=True, type=Path, help="text files, plain or .gz")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--queries", type=int, default=32)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    try:
        texts = [read(path) for path in options.text]
        model, tokenizer = load_model(model_folder())
        tokens = batches(texts, tokenizer, sequences=options.sequences, length=options.length)
    except (OSError, ValueError) as error:
        sys.exit(f"spot_check_coverage: {error}")
    rows = []
    with torch.no_grad():
        calls = list(first_calls(fk.capture(model, tokens)))
        for name, (plan, is_causal) in PLANS.items():
            errors = plan_errors(calls, plan, is_causal)
            prove(calls[0], plan, is_causal, errors[0], options.queries)
            layers, _, heads, length = errors.shape
            flat = errors.transpose(0, 1).reshape(-1, length)
            for kind, size in (("one head", 1), ("one layer", heads), ("all layers", layers * heads)):
                rows.append({"plan": name, "check": kind, **judge(flat, size, options)})
                show(rows[-1])
        for name, errors in synthetic(options.length).items():
            rows.append({"plan": name, "check": "made up", **judge(errors, 1, options)})
            show(rows[-1])
    settings = {"model": NAME, "texts": [path.name for path in options.text], "confidence": CONFIDENCE}
    settings |= {key: getattr(options, key) for key in ("sequences", "length", "queries", "trials")}
    record = {"settings": settings, "rows": rows, "versions": versions(), "machine": machine()}
    write_json(options.out, "spot_check.json", record)


def read(path: Path) -> str:
    if path.suffix == ".gz":
        with gzip.open(path, "rt", encoding="utf-8") as stream:
            return stream.read()
    return path.read_text(encoding="utf-8")


def first_calls(capture: Capture):
    """The call of each layer, all batches in one: query, key, value, scale."""
    for layer in range(capture.layers):
        found = list(capture.calls(layer))
        yield (*(torch.cat([getattr(c, name) for c in found]) for name in ("query", "key", "value")), found[0].scale)


def plan_errors(calls, plan: fk.Plan, is_causal: bool) -> Tensor:
    """The error at every query, (layers, sequences, heads, queries)."""
    found = []
    for query, key, value, scale in calls:
        few = fk.attention(query, key, value, plan=plan.never_exact(), scale=scale, is_causal=is_causal)
        exact = fk.attention(query, key, value, scale=scale, is_causal=is_causal)
        found.append(relative_error(few, exact).double())
    return torch.stack(found)


def prove(call, plan: fk.Plan, is_causal: bool, errors: Tensor, queries: int) -> None:
    """A real spot check and one read from `errors` (sequences, heads, queries) must agree."""
    query, key, value, scale = call
    options = {"queries": queries, "scale": scale, "is_causal": is_causal}
    real = check_tensors(query, key, value, plan, **options, generator=torch.Generator().manual_seed(7))
    places = uniform((*errors.shape[:2], queries), torch.Generator().manual_seed(7), errors.device)
    read_off = pool([trials(errors, places)], CONFIDENCE)
    torch.testing.assert_close(
        torch.tensor(read_off), torch.tensor([real.error, real.low, real.high]), rtol=1e-3, atol=0
    )


def trials(errors: Tensor, places: Tensor) -> Estimates:
    """The estimates of samples at `places` (B, H, m) of errors (B, H, queries)."""
    size = (*errors.shape, 1)
    nothing = torch.zeros(1, 1, 1, 1).expand(size)
    sample = draw(Inputs(nothing, nothing, nothing, 1.0), places)
    return sample.estimates(errors.gather(-1, sample.index))


def judge(errors: Tensor, size: int, options: argparse.Namespace) -> dict[str, float | int]:
    """Coverage of checks that pool `size` neighbouring rows of `errors` (rows, queries)."""
    generator = torch.Generator().manual_seed(0)
    count, queries = options.trials, options.queries
    truth = errors.mean(-1).view(-1, size).mean(-1)
    held = torch.zeros(len(truth), count, dtype=torch.bool)
    above, width, plain = torch.zeros(len(truth), count), torch.zeros(len(truth), count), torch.zeros(len(truth), count)
    for i, rows in enumerate(errors.split(size)):
        places = torch.rand(count, size, queries, generator=generator, dtype=torch.float64)
        every = trials(rows.expand(count, -1, -1), places)
        parts = {name: getattr(every, name).split(size) for name in POPULATIONS}
        for t in range(count):
            one = Estimates(**{name: part[t] for name, part in parts.items()}, freedom=every.freedom)
            _, low, high = pool([one], CONFIDENCE)
            held[i, t] = low <= truth[i] <= high
            above[i, t] = high < truth[i]
            width[i, t] = (high - low) / 2 / truth[i]
        plain[i] = textbook(rows, truth[i], count, queries, generator)
    blocks = held[:, : count // BLOCK * BLOCK].view(-1, BLOCK).sum(-1)
    by_row = held.double().mean(-1)
    return {
        "populations": len(truth),
        "trials": held.numel(),
        "coverage": float(by_row.mean()),
        "coverage_p10": float(by_row.quantile(0.1)),
        "coverage_worst": float(by_row.min()),
        "blocks_with_93": float((blocks >= 93).double().mean()),
        "truth_above": float(above.mean()),
        "half_width": float(width.median()),
        "textbook_coverage": float(plain.mean()),
    }


def textbook(rows: Tensor, truth: Tensor, count: int, queries: int, generator: torch.Generator) -> Tensor:
    """Whether the normal interval of a simple random sample holds the truth, for `count` samples."""
    held = torch.zeros(count)
    for t in range(count):
        index = torch.rand(rows.shape, generator=generator).argsort(-1)[:, :queries]
        drawn = rows.gather(-1, index)
        spread = drawn.var(-1).mul((1 - queries / rows.shape[-1]) / queries).sum().sqrt() / len(rows)
        held[t] = (drawn.mean() - truth).abs() <= 1.96 * spread
    return held


def synthetic(length: int) -> dict[str, Tensor]:
    """Errors (20 populations, length) that are hard in a known way."""
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(20, length, generator=generator, dtype=torch.float64)
    chance = torch.rand(20, length, generator=generator, dtype=torch.float64)
    place = torch.linspace(0, 1, length, dtype=torch.float64)
    return {
        "lognormal, sigma 0.5": (0.5 * normal).exp(),
        "lognormal, sigma 1": normal.exp(),
        "lognormal, sigma 1.5": (1.5 * normal).exp(),
        "10 % of the queries have all the error": (chance < 0.1).double(),
        "2 % of the queries have all the error": (chance < 0.02).double(),
        "grows along the text": place * (0.2 * normal).exp(),
        "zero, then one": (place > 0.5).double().expand(20, -1),
    }


def show(row: dict[str, object]) -> None:
    print(
        f"{row['plan']:40s} {row['check']:10s} {row['trials']:8,d} trials  coverage {row['coverage']:.3f}  "
        f"p10 {row['coverage_p10']:.3f}  worst {row['coverage_worst']:.3f}  >= 93 of 100: {row['blocks_with_93']:.2f}  "
        f"half width {row['half_width']:.3f}  textbook {row['textbook_coverage']:.3f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
