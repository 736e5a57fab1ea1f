"""Training the projections of one layer: gold keys should be near, other keys far.

For query i with gold keys P and as many other keys N, drawn at random,

    loss_i = max(0, margin + sum_P |q'_i - k'_j|^2 - sum_N |q'_i - k'_j|^2)

(Treviso et al., arXiv 2109.12188, section 3.2). With signs s_ij = 1 on P and -|P| / |N| on N, which add up to zero,
`loss_i = max(0, margin + sum_j s_ij |k'_j|^2 - 2 q'_i . sum_j s_ij k'_j)`: no n x n tensor carries a gradient.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fewkeys.captures.capture import AttentionInputs, Capture
from fewkeys.core.entmax import check_alpha, entmax
from fewkeys.core.graph import visible
from fewkeys.core.tensor_files import Form, LayerFile
from fewkeys.core.validation import check_count, check_real
from fewkeys.tuning.score import problem_of

PAIRS = 2**24
"""Pairs whose scores are in memory at once."""


@dataclass(frozen=True)
class Settings:
    """The arguments of `Sparsefinder.fit` of the same names."""

    rank: int = 4
    alpha: float = 1.5
    shared: bool = True
    margin: float = 1.0
    lr: float = 1e-3
    epochs: int = 3
    batch: int = 32
    validation: float = 0.1
    patience: int = 3
    sample: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rank", "epochs", "batch", "patience", "sample"):
            check_count(name, getattr(self, name))
        check_count("seed", self.seed, least=0)
        check_alpha(self.alpha)
        check_real("margin", self.margin, above=0.0)
        check_real("lr", self.lr, above=0.0)
        if not isinstance(self.shared, bool):
            raise TypeError(f"shared: expected True or False, got {self.shared!r}")
        if self.validation != 0:
            check_real("validation", self.validation, above=0.0, below=1.0)


def learn(
    capture: Capture,
    held_out: Capture | None,
    layer: int,
    settings: Settings,
    folder: Path | None,
    done: Callable[[int], None],
) -> tuple[Tensor, dict[str, list[float]]]:
    """The maps (1 or 2, Hq, D, r) of a layer, of queries and of keys or one for both, and the mean losses by epoch.

    Adam on the mean loss of all queries and heads. With `held_out` sequences the maps are those of the epoch with the
    least loss there, and `patience` epochs without a smaller one end it. `done` is called with the number of sequences
    of every batch.
    """
    shape = (1 if settings.shared else 2, capture.query_heads, capture.head_dim, settings.rank)
    facts: list[Any] = [part.digest(layer) for part in (capture, held_out) if part is not None]
    facts += [{**asdict(settings), "sample": 0}, torch.__version__]
    file = LayerFile(folder, "fit", f"layer-{layer:03d}", facts)
    if (finished := file.read({"maps": Form(shape, torch.float32)})) is not None:
        return finished[1]["maps"], finished[0]
    # Both maps begin as the same uniform draw in +- 1 / sqrt(D).
    start = torch.rand((1, *shape[1:]), generator=generator(settings.seed, layer, "start")) * 2 - 1
    maps = (start * capture.head_dim**-0.5).repeat(shape[0], 1, 1, 1).requires_grad_()
    adam = torch.optim.Adam([maps], lr=settings.lr)
    calls = list(capture.calls(layer))  # mapped files, not memory
    held_out_calls = [] if held_out is None else list(held_out.calls(layer))
    best = maps.detach().clone()
    losses: dict[str, list[float]] = {"loss": [], "validation": []}
    validation = losses["validation"]
    for epoch in range(settings.epochs):
        draw = generator(settings.seed, layer, "epoch", epoch)
        losses["loss"].append(_epoch(maps, adam, calls, settings, draw, done))
        if not held_out_calls:
            best = maps.detach().clone()
            continue
        # The same random keys after every epoch.
        loss = _mean_loss(maps, held_out_calls, settings, generator(settings.seed, layer, "validation"))
        if loss < min(validation, default=torch.inf):
            best = maps.detach().clone()
        validation.append(loss)
        if epoch - validation.index(min(validation)) >= settings.patience:
            break
    file.write(losses, {"maps": best})
    return best, losses


def generator(*facts: object) -> torch.Generator:
    """A generator seeded by these facts."""
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
    """One pass over all batches in random order; the mean loss of a query, before its batch's step."""
    batches = [batch for call in calls for batch in _parts(call, settings.batch)]
    total = queries = 0.0
    for index in torch.randperm(len(batches), generator=draw).tolist():
        loss, count = 0.0, 0
        for piece in pieces(batches[index]):
            sums, with_pairs = _loss(maps, piece, settings, draw)
            if with_pairs:
                sums.backward()
            loss += float(sums.detach())
            count += with_pairs
        if count and maps.grad is not None:
            maps.grad /= count
            adam.step()
            adam.zero_grad()
        total += loss
        queries += count
        done(len(batches[index].query))
    return total / max(1.0, queries)


@torch.no_grad()
def _mean_loss(maps: Tensor, calls: Sequence[AttentionInputs], settings: Settings, draw: torch.Generator) -> float:
    losses = [_loss(maps, piece, settings, draw) for call in calls for piece in pieces(call)]
    return sum(float(loss) for loss, _ in losses) / max(1, sum(count for _, count in losses))


def pieces(call: AttentionInputs) -> Iterator[AttentionInputs]:
    """The sequences of a call, in pieces of at most `PAIRS` pairs (or one sequence)."""
    _, heads, queries, _ = call.query.shape
    return _parts(call, max(1, PAIRS // (heads * queries * call.key.shape[2])))


def _parts(call: AttentionInputs, size: int) -> Iterator[AttentionInputs]:
    return (call.rows(slice(start, start + size)) for start in range(0, len(call.query), size))


def _loss(maps: Tensor, call: AttentionInputs, settings: Settings, draw: torch.Generator) -> tuple[Tensor, int]:
    """The sum of the losses of all queries and heads, and the number of queries with gold keys and others."""
    query, key, gold, seen = gold_graph(call, settings.alpha)
    sign = signs(gold, seen, draw)
    loss = hinge(query @ maps[0], key @ maps[-1], sign, settings.margin)
    return loss.sum(), int((sign != 0).any(-1).sum())


def gold_graph(call: AttentionInputs, alpha: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries and keys (B, Hq, N, D), float32; the gold edges, none of padded queries; the visible pairs."""
    x = problem_of(call)
    query, key = x.query.float(), x.key.float().repeat_interleave(x.gqa_ratio, 1)
    seen = visible(x, 0, x.queries)
    gold = entmax((query * x.scale @ key.mT).masked_fill_(~seen, -torch.inf), alpha) > 0
    if call.real_queries is not None:
        gold &= call.real_queries[:, None, :, None]
    return query, key, gold, seen


def signs(gold: Tensor, seen: Tensor, source: torch.Generator) -> Tensor:
    """1 at gold edges, minus their share at random others that are `seen`: (B, H, N, M) float32, rows adding up to 0.

    A row has as many others as gold keys, or fewer that count more; without others it is zero. Cost O(N M log M).
    """
    others, gold_count = seen & ~gold, gold.sum(-1)
    number = torch.minimum(gold_count, others.sum(-1))
    draw = torch.rand(gold.shape, generator=source).masked_fill_(~others, -1.0)
    index = draw.topk(int(number.max()), -1).indices
    rate = (gold_count / number.clamp_min(1)).unsqueeze(-1)
    drawn = torch.arange(index.shape[-1]) < number.unsqueeze(-1)
    sign = gold.float().scatter_add_(-1, index, -(drawn * rate))
    return sign.masked_fill_((number == 0).unsqueeze(-1), 0.0)


def hinge(query: Tensor, key: Tensor, sign: Tensor, margin: float) -> Tensor:
    """The loss (B, H, N) of projected queries and keys; 0 for rows of `sign` (B, H, N, M) that are 0."""
    size = key.square().sum(-1, keepdim=True)
    sums = sign.to(key.dtype) @ torch.cat([size, key], -1)
    excess = sums[..., 0] - 2 * (query * sums[..., 1:]).sum(-1)
    return (margin + excess).clamp_min(0.0) * (sign != 0).any(-1)
