"""The search for the r values to combine where no exact method is known: solvers choose them, `refit` their weights."""

from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from fewkeys.papers.value_aware.caratheodory import caratheodory
from fewkeys.papers.value_aware.simplex import factorise, nearest_in_hull


class Mixtures(NamedTuple):
    """Rows of attention weights over the same values, float64."""

    points: Tensor  # (N, d)
    weights: Tensor  # (R, N), on the simplex
    target: Tensor  # (R, d), weights @ points
    visible: Tensor  # (R, N) bool: the values that a solution may use


class Fit(NamedTuple):
    """At most r values per row and their weights."""

    indices: Tensor  # (R, r); arbitrary in slots of weight zero
    weights: Tensor  # (R, r), on the simplex
    error: Tensor  # (R,), squared distance of the combination to the target


def refit(rows: Mixtures, index: Tensor, start: Tensor) -> Fit:
    """The best weights on `index` (R, r), never worse than `start` (R, r)."""
    points = rows.points[index] - rows.target[:, None]
    weights = nearest_in_hull(points, rows.visible.gather(1, index), start)
    new, old = (Fit(index, w, (w[:, None] @ points)[:, 0].square().sum(1)) for w in (weights, start))
    return better(new, old)


def better(first: Fit, second: Fit) -> Fit:
    """Row by row the closer fit; the first on a tie, the second where an error is NaN."""
    wins = first.error <= second.error
    indices, weights = (torch.where(wins[:, None], a, b) for a, b in zip(first[:2], second[:2], strict=True))
    return Fit(indices, weights, torch.where(wins, first.error, second.error))


def nearest(rows: Mixtures) -> Fit:
    """The value nearest to each row's output: optimal for r = 1."""
    # Differences, not the expanded square: near a value, cancellation would make the choice random.
    distance = torch.cdist(rows.target, rows.points, compute_mode="donot_use_mm_for_euclid_dist")
    value, index = distance.masked_fill(~rows.visible, torch.inf).min(1, keepdim=True)
    return Fit(index, torch.ones_like(value), value[:, 0].square())


def oblivious(rows: Mixtures, r: int) -> Fit:
    """The best weights on the r largest: never worse than either form of `value_oblivious`."""
    top = rows.weights.topk(min(r, rows.weights.shape[1]), 1)
    return refit(rows, top.indices, top.values / top.values.sum(1, keepdim=True))


def extend(rows: Mixtures, fit: Fit) -> Fit:
    """One more slot, with the value towards which an exact step reduces the error most."""
    output = (fit.weights[:, None] @ rows.points[fit.indices])[:, 0]
    gain, move = _gain(rows.points, output[:, None], (output - rows.target)[:, None])
    gain = gain[:, 0].masked_fill(~rows.visible, -torch.inf).scatter(1, fit.indices, -torch.inf)
    best, new = gain.max(1, keepdim=True)
    # Without an unused visible value the slot has weight zero.
    move = move[:, 0].gather(1, new).masked_fill(best.isneginf(), 0.0)
    start = torch.cat([fit.weights * (1 - move), move], 1)
    return refit(rows, torch.cat([fit.indices, new], 1), start)


def greedy(rows: Mixtures, r: int) -> Fit:
    """The nearest value, extended to r."""
    fit = nearest(rows)
    for _ in range(r - 1):
        fit = extend(rows, fit)
    return fit


def eliminations(rows: Mixtures, r: int) -> dict[int, tuple[Tensor, Tensor]]:
    """Indices and feasible weights of 2..r values by size, by elimination from the Caratheodory solution.

    Each step removes the value that costs least when the others may take any weights of sum one. Without value a the
    squared error grows by `w_a^2 / P_aa`, P the inverse of the Gram matrix on weights of sum zero, downdated each time.
    """
    count, dim = rows.points.shape
    weights, index = caratheodory(rows.weights, rows.points).topk(min(count, dim + 1), 1)
    active = weights > 0
    weights = weights / weights.sum(1, keepdim=True)
    inverse = _constrained_inverse(rows.points[index] - rows.target[:, None], active)
    all_rows = torch.arange(weights.shape[0], device=weights.device)
    result = {}
    for size in range(weights.shape[1], 1, -1):
        if size <= r:
            order = (weights + active).topk(size, 1).indices
            result[size] = index.gather(1, order), weights.gather(1, order)
        diagonal = inverse.diagonal(dim1=1, dim2=2).clamp_min(1e-300)
        removed = torch.where(active, weights.square() / diagonal, torch.inf).argmin(1)
        # Rows with fewer values already do not change.
        shrinking = active.sum(1) >= size
        step = inverse[all_rows, removed] / diagonal[all_rows, removed][:, None]
        moved = (weights - step * weights.gather(1, removed[:, None])).clamp_min(0.0)
        moved[all_rows, removed] = 0.0
        weights = torch.where(shrinking[:, None], moved / moved.sum(1, keepdim=True), weights)
        active[all_rows[shrinking], removed[shrinking]] = False
        inverse = inverse - (step * shrinking[:, None])[:, :, None] * inverse[all_rows, removed][:, None]
        inverse = inverse * (active[:, :, None] & active[:, None, :])
    return result


def eliminate(rows: Mixtures, r: int) -> Fit:
    """What the elimination leaves."""
    return refit(rows, *eliminations(rows, r)[r])


def exchange(rows: Mixtures, fit: Fit, rounds: int, tries: int) -> Fit:
    """Swap one value for another while that helps. Memory O(R r N).

    A round estimates every pair (value out, value in): the others re-balance as if any sign were allowed, then the best
    step is taken towards the new one. The `tries` most promising pairs are re-fitted.
    """
    count, slots = rows.points.shape[0], fit.indices.shape[1]
    if count <= slots:
        return fit
    size = rows.points.square().sum(1).amax()
    todo = torch.arange(fit.error.shape[0], device=fit.error.device)
    for _ in range(rounds):
        todo = todo[fit.error[todo] > 1e-24 * size]
        if todo.numel() == 0:
            break
        part = Mixtures(rows.points, rows.weights[todo], rows.target[todo], rows.visible[todo])
        old = Fit(*(tensor[todo] for tensor in fit))
        new = _best_swap(part, old, min(tries, slots * (count - slots)))
        improved = new.error < old.error * (1 - 1e-9)
        todo = todo[improved]
        fit = Fit(*(tensor.index_copy(0, todo, swapped[improved]) for tensor, swapped in zip(fit, new, strict=True)))
    return fit


def _best_swap(rows: Mixtures, fit: Fit, tries: int) -> Fit:
    """The best of the `tries` most promising swaps, or `fit`."""
    count, slots = rows.points.shape[0], fit.indices.shape[1]
    chosen = rows.points[fit.indices]
    active = fit.weights > 0
    inverse = _constrained_inverse(chosen - rows.target[:, None], active)
    diagonal = inverse.diagonal(dim1=1, dim2=2)
    # Row a of `without`: the weights after the removal of a.
    factor = torch.where(active & (diagonal > 0), fit.weights / diagonal.clamp_min(1e-300), 0.0)
    without = (fit.weights[:, None] - factor[:, :, None] * inverse).clamp_min(0.0)
    without = without.masked_fill(torch.eye(slots, dtype=torch.bool, device=without.device), 0.0)
    total = without.sum(2, keepdim=True)
    without = torch.where(total > 0, without / total.clamp_min(1e-300), 0.0)
    output = without @ chosen
    error = output - rows.target[:, None]
    gain, move = _gain(rows.points, output, error)
    value = error.square().sum(2)[..., None] - gain
    # In place of a row's only value the new one takes all weight.
    alone = total <= 0
    if bool(alone.any()):
        distance = (rows.points - rows.target[:, None]).square().sum(2)
        value = torch.where(alone, distance[:, None], value)
        move = move.masked_fill(alone, 1.0)
    taken = (~rows.visible).scatter(1, fit.indices, torch.ones_like(active))
    value = value.masked_fill(taken[:, None], torch.inf).flatten(1)
    guess, pair = value.topk(tries, 1, largest=False)
    best = fit
    for t in range(tries):
        swap, possible = pair[:, t : t + 1], guess[:, t : t + 1].isfinite()
        out, new = swap[:, 0] // count, swap % count
        hot = torch.nn.functional.one_hot(out, slots).bool() & possible
        step = move.flatten(1).gather(1, swap)
        start = torch.where(hot, step, without[torch.arange(len(out), device=out.device), out] * (1 - step))
        index = torch.where(hot, new, fit.indices)
        best = better(best, refit(rows, index, torch.where(possible, start, fit.weights)))
    return best


def search(rows: Mixtures, r: int) -> Fit:
    """The best of all solvers for every size up to r.

    Candidates of size k: the solution of size k - 1 with one more slot, so that the error never increases with r; the
    elimination; the k largest weights. `exchange` improves the best, and with few keys, where a bad local optimum costs
    more, all of them.
    """
    fit, eliminated = nearest(rows), eliminations(rows, r)
    for size in range(2, r + 1):
        candidates = [extend(rows, fit), oblivious(rows, size)]
        if size in eliminated:
            candidates.append(refit(rows, *eliminated[size]))
        if rows.points.shape[0] <= 64:
            candidates = [exchange(rows, candidate, rounds=8, tries=4) for candidate in candidates]
        fit = exchange(rows, reduce(better, candidates), rounds=2, tries=2)
    return fit


def _gain(points: Tensor, output: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """The decrease of the squared error by the best step from `output` (R, a, d) towards each point, and its length.

    `e + t (y_j - x)` is shortest at `t = e (x - y_j) / |x - y_j|^2`, clamped to [0, 1].
    """
    along = (output * error).sum(-1, keepdim=True) - error @ points.mT
    length = points.square().sum(-1) - 2 * (output @ points.mT) + output.square().sum(-1, keepdim=True)
    along, length = along.clamp_min_(0.0), length.clamp_min_(1e-300)
    move = (along / length).clamp_max_(1.0)
    return move * (2 * along - move * length), move


def _constrained_inverse(points: Tensor, active: Tensor) -> Tensor:
    """The inverse of the Gram matrix of the active points on weights of sum zero; zero elsewhere: (R, S, S)."""
    size = (points.square().sum(2) * active).amax(1)
    full = torch.cholesky_inverse(factorise(points, active)) / torch.where(size > 0, size, 1.0)[:, None, None]
    full = full * (active[:, :, None] & active[:, None, :])
    sums = full.sum(2, keepdim=True)
    total = sums.sum(1, keepdim=True)
    return full - sums * sums.mT / torch.where(total > 0, total, 1.0)
