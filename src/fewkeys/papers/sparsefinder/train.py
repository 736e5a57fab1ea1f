"""Training the projections of one layer, epoch by epoch. An interrupted fit resumes with the same bits.

The seed, the layer and the epoch determine all random numbers of an epoch, so the state after an epoch is the maps,
the moments of Adam and the losses so far. It is one safetensors file, replaced whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
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

PAIRS = 2**24
"""Pairs of a query and a key whose scores are in memory at once."""


@dataclass(eq=False)
class Learning:
    """The state of one layer between epochs. `maps` (1 or 2, Hq, D, r): of queries and keys, or one for both."""

    maps: Tensor
    best: Tensor
    first_moment: Tensor
    second_moment: Tensor
    steps: int = 0
    losses: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)

    @property
    def epoch(self) -> int:
        """Epochs done."""
        return len(self.losses)

    def is_done(self, settings: Settings) -> bool:
        """Whether all epochs are done, or the validation loss has stopped falling for `patience` of them."""
        seen = self.validation
        stalled = bool(seen) and len(seen) - 1 - seen.index(min(seen)) >= settings.patience
        return self.epoch >= settings.epochs or stalled


def learn(
    capture: Capture,
    held_out: Capture | None,
    layer: int,
    settings: Settings,
    folder: Path | None,
    done: Callable[[int], None],
) -> Learning:
    """Train the maps of a layer on `capture`, with early stopping on `held_out`.

    `done` is called with the number of sequences passed. `folder`: for the state after each epoch.
    """
    path = None if folder is None else folder / _name(capture, held_out, layer, settings)
    state = _read(path, capture, settings) or _start(capture, layer, settings)
    done(capture.sequences * state.epoch)
    calls = list(capture.calls(layer))  # mapped files, not memory
    kept_out = [] if held_out is None else list(held_out.calls(layer))
    while not state.is_done(settings):
        _epoch(state, calls, layer, settings, done)
        if kept_out:
            loss = _validation_loss(state.maps, kept_out, layer, settings)
            if loss < min(state.validation, default=torch.inf):
                state.best = state.maps.clone()
            state.validation.append(loss)
        else:
            state.best = state.maps.clone()
        if path is not None:
            _write(path, state)
    return state


def generator(*facts: object) -> torch.Generator:
    """A generator seeded by a hash of these facts."""
    number = hashlib.sha256("/".join(map(str, facts)).encode()).digest()[:8]
    return torch.Generator("cpu").manual_seed(int.from_bytes(number, "little"))


def _start(capture: Capture, layer: int, settings: Settings) -> Learning:
    """The initial state: both maps are the same uniform draw in +- 1 / sqrt(D)."""
    shape = (1, capture.query_heads, capture.head_dim, settings.rank)
    draw = torch.rand(shape, generator=generator(settings.seed, layer, "start")) * 2 - 1
    maps = (draw * capture.head_dim**-0.5).repeat(1 if settings.shared else 2, 1, 1, 1)
    return Learning(maps, maps.clone(), torch.zeros_like(maps), torch.zeros_like(maps))


def _epoch(
    state: Learning, calls: Sequence[AttentionInputs], layer: int, settings: Settings, done: Callable[[int], None]
) -> None:
    draw = generator(settings.seed, layer, "epoch", state.epoch)
    maps = state.maps.requires_grad_()
    adam = torch.optim.Adam([maps], lr=settings.lr)
    moments = {"exp_avg": state.first_moment, "exp_avg_sq": state.second_moment}
    adam.state[maps] = {"step": torch.tensor(float(state.steps)), **moments}
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
    state.maps = maps.detach()
    kept = adam.state[maps]
    state.first_moment, state.second_moment, state.steps = kept["exp_avg"], kept["exp_avg_sq"], int(kept["step"])
    state.losses.append(total / max(1.0, queries))


@torch.no_grad()
def _validation_loss(maps: Tensor, calls: Sequence[AttentionInputs], layer: int, settings: Settings) -> float:
    """The mean loss on held-out calls, with the same random keys after every epoch."""
    draw, total, queries = generator(settings.seed, layer, "validation"), 0.0, 0
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
    """A name from everything that the training of a layer depends on, except the number of epochs."""
    facts: list[Any] = [part.digest(layer) for part in (capture, held_out) if part is not None]
    facts += [{**asdict(settings), "epochs": 0, "patience": 0, "sample": 0}, torch.__version__]
    return f"layer-{layer:03d}-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]}.safetensors"


KIND = "fit"
TENSORS = ("maps", "best", "first_moment", "second_moment")


def _write(path: Path, state: Learning) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = {"steps": state.steps, "losses": state.losses, "validation": state.validation}
    tensor_files.write(path, KIND, numbers, {name: getattr(state, name) for name in TENSORS})


@dataclass(frozen=True)
class _Numbers:
    """The header of a file."""

    steps: int
    losses: list[float]
    validation: list[float]


def _read(path: Path | None, capture: Capture, settings: Settings) -> Learning | None:
    """The state in a file; None if there is no such file or it is damaged."""
    if path is None:
        return None
    shape = (1 if settings.shared else 2, capture.query_heads, capture.head_dim, settings.rank)
    try:
        facts, tensors = tensor_files.read(path, KIND)
        numbers = build(_Numbers, facts)
        tensor_files.check(tensors, dict.fromkeys(TENSORS, Form(shape, torch.float32)))
    except (OSError, ValueError):
        return None
    return Learning(**tensors, steps=numbers.steps, losses=numbers.losses, validation=numbers.validation)
