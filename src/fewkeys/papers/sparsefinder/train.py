"""Training the projections of one layer. An interrupted fit goes on with the first layer that is not finished.

The seed, the layer and the epoch determine all random numbers of an epoch. What was learned of a layer is one
safetensors file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fewkeys.captures.capture import AttentionInputs, Capture
from fewkeys.core import tensor_files
from fewkeys.core.entmax import entmax
from fewkeys.core.graph import visible
from fewkeys.core.records import build
from fewkeys.core.tensor_files import Form
from fewkeys.papers.sparsefinder.loss import has_pairs, hinge, signs
from fewkeys.papers.sparsefinder.settings import Settings
from fewkeys.tuning.score import problem_of

KIND = "fit"
PAIRS = 2**24
"""Pairs of a query and a key whose scores are in memory at once."""


@dataclass(frozen=True)
class Losses:
    """The mean loss of every epoch, and after every epoch that of the held-out sequences."""

    loss: list[float]
    validation: list[float]


def learn(
    capture: Capture,
    held_out: Capture | None,
    layer: int,
    settings: Settings,
    folder: Path | None,
    done: Callable[[int], None],
) -> tuple[Tensor, Losses]:
    """The maps (1 or 2, Hq, D, r) of a layer, of queries and of keys or one for both, and how they were learned.

    Adam on the mean hinge of all queries and heads; with `held_out` sequences the maps kept are those of the epoch
    whose loss on these is least, and `patience` epochs without a smaller one end it. `done` is called with the number
    of sequences passed. `folder`: for the file of the layer.
    """
    shape = (1 if settings.shared else 2, capture.query_heads, capture.head_dim, settings.rank)
    path = None if folder is None else folder / _name(capture, held_out, layer, settings)
    if path is not None and (finished := _read(path, shape)) is not None:
        return finished
    # Both maps begin as the same uniform draw in +- 1 / sqrt(D).
    draw = torch.rand((1, *shape[1:]), generator=generator(settings.seed, layer, "start")) * 2 - 1
    maps = (draw * capture.head_dim**-0.5).repeat(shape[0], 1, 1, 1).requires_grad_()
    adam = torch.optim.Adam([maps], lr=settings.lr)
    calls = list(capture.calls(layer))  # mapped files, not memory
    kept_out = [] if held_out is None else list(held_out.calls(layer))
    best, losses = maps.detach().clone(), Losses([], [])
    for epoch in range(settings.epochs):
        losses.loss.append(_epoch(maps, adam, calls, settings, generator(settings.seed, layer, "epoch", epoch), done))
        if kept_out:
            # The same random keys after every epoch.
            loss = _mean_loss(maps, kept_out, settings, generator(settings.seed, layer, "validation"))
            if loss < min(losses.validation, default=torch.inf):
                best = maps.detach().clone()
            losses.validation.append(loss)
            if epoch - losses.validation.index(min(losses.validation)) >= settings.patience:
                break
        else:
            best = maps.detach().clone()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        tensor_files.write(path, KIND, asdict(losses), {"maps": best})
    return best, losses


def generator(*facts: object) -> torch.Generator:
    """A generator seeded by a hash of these facts."""
    number = hashlib.sha256("/".join(map(str, facts)).encode()).digest()[:8]
    return torch.Generator("cpu").manual_seed(int.from_bytes(number, "little"))


def _epoch(
    maps: Tensor,
    adam: torch.optim.Adam,
    calls: Sequence[AttentionInputs],
    settings: Settings,
    draw: torch.Generator,
    done: Callable[[int], None],
) -> float:
    """One pass over all batches in random order; the mean loss of a query, each before its batch's step."""
    batches = [
        (call, slice(start, start + settings.batch))
        for call in calls
        for start in range(0, len(call.query), settings.batch)
    ]
    total = queries = 0.0
    for index in torch.randperm(len(batches), generator=draw).tolist():
        call, rows = batches[index]
        loss, count = 0.0, 0
        for piece in pieces(call, rows):
            sums, with_pairs = _loss(maps, piece, settings, draw)
            if with_pairs:
                sums.backward()
            loss, count = loss + float(sums.detach()), count + with_pairs
        if count and maps.grad is not None:
            maps.grad /= count
            adam.step()
            adam.zero_grad()
        total, queries = total + loss, queries + count
        done(len(range(len(call.query))[rows]))
    return total / max(1.0, queries)


@torch.no_grad()
def _mean_loss(maps: Tensor, calls: Sequence[AttentionInputs], settings: Settings, draw: torch.Generator) -> float:
    total, queries = 0.0, 0
    for call in calls:
        for piece in pieces(call, slice(None)):
            loss, count = _loss(maps, piece, settings, draw)
            total, queries = total + float(loss), queries + count
    return total / max(1, queries)


def pieces(call: AttentionInputs, index: slice) -> Iterator[AttentionInputs]:
    """The sequences at `index` of a call, in pieces of at most `PAIRS` pairs (or one sequence)."""
    _, heads, queries, _ = call.query.shape
    step = max(1, PAIRS // (heads * queries * call.key.shape[2]))
    rows = range(len(call.query))[index]
    for start in range(rows.start, rows.stop, step):
        yield call.rows(slice(start, min(start + step, rows.stop)))


def _loss(maps: Tensor, call: AttentionInputs, settings: Settings, draw: torch.Generator) -> tuple[Tensor, int]:
    """The sum of the losses of all queries and heads, and the number of queries with both gold keys and others."""
    query, key, gold, seen = gold_graph(call, settings.alpha)
    sign = signs(gold, seen, draw)
    loss = hinge(query @ maps[0], key @ maps[-1], sign, settings.margin)
    return loss.sum(), int(has_pairs(sign).sum())


def gold_graph(call: AttentionInputs, alpha: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries and keys (B, Hq, N, D) float32, a row of keys for every query head; the gold edges and the visible pairs.

    Padded queries have no gold edges.
    """
    x = problem_of(call)
    query, key = x.query.float(), x.key.float().repeat_interleave(x.gqa_ratio, 1)
    seen = visible(x, 0, x.queries)
    gold = entmax((query * x.scale @ key.mT).masked_fill_(~seen, -torch.inf), alpha) > 0
    real = x.valid_queries if call.query_mask is None else call.query_mask
    if real is not None:
        gold &= real[:, None, :, None]
    return query, key, gold, seen


def _name(capture: Capture, held_out: Capture | None, layer: int, settings: Settings) -> str:
    """A name from everything that the training of a layer depends on."""
    facts: list[Any] = [part.digest(layer) for part in (capture, held_out) if part is not None]
    facts += [{**asdict(settings), "sample": 0}, torch.__version__]
    return f"layer-{layer:03d}-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]}.safetensors"


def _read(path: Path, shape: tuple[int, ...]) -> tuple[Tensor, Losses] | None:
    """The maps in a file; None if there is no such file or it is damaged."""
    try:
        losses, tensors = tensor_files.read(path, KIND)
        tensor_files.check(tensors, {"maps": Form(shape, torch.float32)})
        return tensors["maps"], build(Losses, losses)
    except (OSError, ValueError):
        return None
