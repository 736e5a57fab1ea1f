"""Why one selection does better than another at inference only, on the softmax-trained models of vit.py.

    python experiments/levattention/vit.py --data mnist --folder MNIST --out RESULTS --checkpoints MODELS
    python experiments/levattention/vit_evidence.py --data mnist --folder MNIST --out RESULTS --checkpoints MODELS

Writes RESULTS/vit-DATA-evidence.json and prints it as a table. Means over images, heads and models (seeds), per layer:

    mass, class mass   softmax weight on the kept keys, of all queries and of the class token's
    error              relative error of the attention output
    ink                share of the kept keys whose patch shows some ink (of all keys: `ink` of the layer)
    agrees             rank correlation of the selection's score with the softmax weight that a key receives in total
                       (beside it, above the rows, that of the weight the key could expect of Gaussian queries)
    alone              accuracy with the selection in this layer and full attention in the others
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import vit_data
from torch import Tensor
from torch.nn.functional import max_pool2d
from vit import SETTINGS
from vit_plans import PLANS
from vit_train import accuracy

import fewkeys as fk
from fewkeys.core.files import write_json
from fewkeys.papers import levattention

ROWS = ("leverage", "leverage, centred", "key norm", "random", "window", "fewkeys budget")
STUDIED, TESTED = 128, 500
"""Images whose attention is looked at, and images for the accuracy with one layer replaced."""


def main() -> int:
    """Exit status 2 and one line on bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=("mnist", "digits"), required=True)
    parser.add_argument("--folder", type=Path, help="mnist: the IDX .gz files")
    parser.add_argument("--checkpoints", type=Path, required=True, help="where vit.py kept its models")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.folder is None and options.data == "mnist":
        parser.error("--folder: needed with --data mnist")
    folders = sorted(options.checkpoints.glob(f"vit-{options.data}-softmax-seed*"))
    if not folders:
        print(f"vit_evidence.py: --checkpoints: no model of {options.data} in {options.checkpoints}", file=sys.stderr)
        return 2
    try:
        found = [study(folder, int(folder.name.partition("seed")[2]), options) for folder in folders]
    except ValueError as error:
        print(f"vit_evidence.py: {error}", file=sys.stderr)
        return 2
    table = {"data": options.data, "k": SETTINGS[options.data].main, "seeds": len(found), "layers": _mean(found)}
    write_json(options.out, f"vit-{options.data}-evidence.json", table)
    print(text(table))
    return 0


def study(folder: Path, seed: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The layers of one model."""
    from transformers import ViTForImageClassification

    print(f"{folder.name} ...", file=sys.stderr)
    model = ViTForImageClassification.from_pretrained(folder).eval()
    _, test = vit_data.mnist(options.folder) if options.data == "mnist" else vit_data.digits(seed)
    setting = SETTINGS[options.data]
    pixels = test.pixels[:STUDIED]
    paper = pixels.amin() + 0.2 * (pixels.amax() - pixels.amin())
    ink = max_pool2d(pixels, setting.model["patch_size"]).flatten(1) > paper
    ink = torch.cat([torch.zeros(len(ink), 1, dtype=torch.bool), ink], 1)  # the class token shows nothing
    capture = fk.capture(model, [pixels])
    tested = torch.arange(min(TESTED, test.size))
    layers = []
    for layer in range(capture.layers):
        (call,) = capture.calls(layer)
        weights = (call.query @ call.key.mT * call.scale).softmax(-1)
        exact = weights @ call.value
        entropy = -(weights * weights.clamp_min(1e-30).log()).sum(-1)
        top = weights.topk(setting.main, -1).values.sum(-1)
        leverage = levattention.leverage_scores(call.key)
        record: dict[str, Any] = {
            "ink": _of(ink),
            "keys_by_entropy": _of(entropy.exp()),
            "oracle_mass": _of(top),
            "top_leverage": _of(leverage.topk(setting.main, -1).values.sum(-1) / leverage.sum(-1)),
            "expected_agrees": _agreement(_expected(call.query * call.scale, call.key), weights),
        }
        for name in ROWS:
            plan = PLANS[name](setting.main)
            kept = plan.keep.graph(call.query, call.key, call.value, scale=call.scale).to_mask()
            output = fk.attention(call.query, call.key, call.value, plan=plan.never_exact(), scale=call.scale)
            mass = fk.metrics.mass(weights, kept)
            by_layer = [plan if other == layer else fk.Plan() for other in range(capture.layers)]
            record[name] = {
                "mass": _of(mass),
                "class_mass": _of(mass[..., 0]),
                "error": fk.metrics.output_error(output, exact),
                "ink": float((kept & ink[:, None, None]).sum() / kept.sum()),
                "agrees": _agreement(_score(name, call.key), weights),
                "alone": accuracy(model, test, by_layer, seed, tested),
            }
        layers.append(record)
    return layers


def _score(name: str, key: Tensor) -> Tensor | None:
    """What the selection orders the keys by, None where it is not a score of keys."""
    if name == "leverage":
        return levattention.leverage_scores(key)
    if name == "leverage, centred":
        return levattention.leverage_scores(key - key.mean(-2, keepdim=True))
    return key.norm(dim=-1) if name == "key norm" else None


def _expected(query: Tensor, key: Tensor) -> Tensor:
    """`log E_q[exp(q . k)] = m . k + k^T C k / 2` for Gaussian q with the queries' mean m and covariance C."""
    middle = query.mean(-2, keepdim=True)
    spread = query - middle
    covariance = spread.mT @ spread / query.shape[-2]
    return (key @ middle.mT).squeeze(-1) + ((key @ covariance) * key).sum(-1) / 2


def _agreement(score: Tensor | None, weights: Tensor) -> float | None:
    """Spearman's rank correlation of a score of keys with the weight they receive, per head and image, averaged."""
    if score is None:
        return None
    ranks = [values.argsort(-1).argsort(-1).float() for values in (score, weights.sum(-2))]
    one, other = (rank - rank.mean(-1, keepdim=True) for rank in ranks)
    return _of((one * other).sum(-1) / (one.norm(dim=-1) * other.norm(dim=-1)))


def _of(values: Tensor) -> float:
    return float(values.double().mean())


def _mean(records: list[Any]) -> Any:
    """The mean over models of records of one shape."""
    first = records[0]
    if isinstance(first, dict):
        return {name: _mean([record[name] for record in records]) for name in first}
    if isinstance(first, list):
        return [_mean(list(layer)) for layer in zip(*records, strict=True)]
    return None if first is None else mean(records)


def text(table: dict[str, Any]) -> str:
    lines = [f"{table['data']}, k = {table['k']}, {table['seeds']} models"]
    for number, layer in enumerate(table["layers"]):
        lines += [
            "",
            f"layer {number + 1}: attention as wide as {layer['keys_by_entropy']:.0f} equal keys; ink on "
            f"{layer['ink']:.2f} of the keys; of the mass, each query's own {table['k']} best keys hold "
            f"{layer['oracle_mass']:.2f}",
            f"of the leverage, the {table['k']} largest scores hold {layer['top_leverage']:.2f}; the weight that a key "
            f"could expect agrees {layer['expected_agrees']:.2f}",
            f"{'':20}{'mass':>12}{'class mass':>12}{'error':>12}{'ink':>12}{'agrees':>12}{'alone':>12}",
        ]
        for name in ROWS:
            row = layer[name]
            cells = (
                "-" if row[c] is None else f"{row[c]:.2f}" for c in ("mass", "class_mass", "error", "ink", "agrees")
            )
            lines.append(f"{name:20}" + "".join(f"{cell:>12}" for cell in cells) + f"{row['alone']:>12.3f}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
