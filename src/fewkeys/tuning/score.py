"""The errors of candidate plans in every head of one layer, by which tuning chooses: means over the real queries.

With `e_h = o~_h - o_h` the error of head h at a query, W_h the slice of the output projection that reads it (the
identity where unknown), and g_h the gradient of the model's predictions (where captured):

    relative       |e_h| / |o_h|                             the error that reports show
    added          |W_h e_h|^2 / |sum_g W_g o_g|^2           what the head adds to the squared relative error of the
                                                             layer's output, up to products of different heads
    output_change  (g_h . e_h)^2                             what it does to the model's predictions, up to products of
                                                             different heads and queries (integrations/sensitivity.py)
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fewkeys.captures.capture import AttentionInputs, Capture
from fewkeys.core.inputs import Inputs
from fewkeys.core.metrics import relative_error
from fewkeys.core.weights import Softmax
from fewkeys.execute import exact
from fewkeys.flow import attend
from fewkeys.plan import Plan
from fewkeys.sketch.clusters import frame
from fewkeys.tuning.candidates import Candidate


class Scores(NamedTuple):
    """Errors (key heads, K), float64: means over queries and over query heads that share keys. `output_change` is zero
    without captured gradients.
    """

    relative: Tensor
    added: Tensor
    output_change: Tensor


def score_layer(
    capture: Capture, layer: int, candidates: Sequence[Candidate], *, seed: int, done: Callable[[], None]
) -> Scores:
    """Run every candidate in every head of a layer, over all batches. `done` is called after each candidate and batch.

    Candidates share query moments, and clusters of the same number. Memory: one batch and one candidate.
    """
    projection = capture.projection(layer)
    total = torch.zeros(3, capture.kv_heads, len(candidates), dtype=torch.float64)
    queries = 0.0
    by_clusters = sorted(enumerate(candidates), key=lambda pair: pair[1].plan.rest.clusters)
    for call in capture.calls(layer):
        generator = torch.Generator(call.query.device).manual_seed(0)
        common = call.checked(generator)
        truth, real = exact.attend(common, Softmax()).float(), _real(call)
        squared_size = torch.linalg.vector_norm(_layer_output(truth, projection), dim=-1).square().clamp_min(1e-30)
        frame(common)
        clusters, problem = -1, common
        for index, candidate in by_clusters:
            if candidate.plan.rest.clusters != clusters:
                clusters, problem = candidate.plan.rest.clusters, common.branch()
            generator.manual_seed(seed)
            output = attend(problem, candidate.plan.never_exact()).float()
            errors = _errors(output, truth, squared_size.unsqueeze(1), call.gradient, projection)
            sums = torch.stack([(error * real.unsqueeze(1)).double().sum((0, 2)) for error in errors])
            total[:, :, index] += sums.view(3, capture.kv_heads, -1).mean(2)
            done()
        queries += float(real.sum())
    return Scores(*(total / queries))


def layer_error(capture: Capture, layer: int, plans: Sequence[Plan], *, seed: int) -> tuple[float, float]:
    """The mean relative errors of the heads, and of the layer's output, under one plan per key head."""
    projection = capture.projection(layer)
    heads = whole = queries = 0.0
    for call in capture.calls(layer):
        problem = problem_of(call, seed)
        truth = exact.attend(problem, Softmax()).float()
        output = attend(problem, [plan.never_exact() for plan in plans]).float()
        real = _real(call)
        heads += float((relative_error(output, truth).mean(1) * real).double().sum())
        of_layer = relative_error(_layer_output(output, projection), _layer_output(truth, projection))
        whole += float((of_layer * real).double().sum())
        queries += float(real.sum())
    return heads / queries, whole / queries


def problem_of(call: AttentionInputs, seed: int = 0) -> Inputs:
    """The `Inputs` of a captured call, with a generator of their own."""
    return call.checked(torch.Generator(call.query.device).manual_seed(seed))


def _real(call: AttentionInputs) -> Tensor:
    """(B, Nq), 1 at the queries of real tokens."""
    if call.real_queries is None:
        return torch.ones_like(call.query[:, 0, :, 0], dtype=torch.float32)
    return call.real_queries.float()


def _errors(
    output: Tensor, truth: Tensor, squared_size: Tensor, gradient: Tensor | None, projection: Tensor | None
) -> Iterator[Tensor]:
    """The `Scores` (B, Hq, N) of an output. squared_size (B, 1, N): of the layer's exact output."""
    error = output - truth
    relative = relative_error(output, truth)
    yield relative
    if projection is None:
        added = error.square().sum(-1)
    else:
        by_head = projection.float().transpose(0, 1)
        added = ((error @ (by_head.mT @ by_head)) * error).sum(-1).clamp_min(0.0)
    yield added / squared_size
    yield torch.zeros_like(relative) if gradient is None else (gradient * error).sum(-1).square()


def _layer_output(output: Tensor, projection: Tensor | None) -> Tensor:
    """The layer's output (B, N, out) from those of its heads (B, Hq, N, Dv)."""
    by_token = output.transpose(1, 2).flatten(2)
    return by_token if projection is None else by_token @ projection.float().flatten(1).mT
