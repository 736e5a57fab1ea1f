"""Softmax over a shared list, a band and stand-ins, without gradients: the same answer in fewer passes over memory.

What all queries of a head share stands side by side, list and stand-ins, so that its scores are one matrix product and
its values another, whose last columns sum up what the first-order term and the normaliser need. The scale goes into the
keys and the bias of a stand-in into its values, so that queries are read where they lie.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.execute.sources import Band, Chunk, Means, SharedList, Source
from fewkeys.inputs import Inputs
from fewkeys.sketch.gram import working
from fewkeys.weights import Softmax, Weights


def supports(inputs: Inputs, sources: list[Source], weights: Weights) -> bool:
    """Whether `Inference` knows such a plan, and nobody asks for gradients."""
    if not isinstance(weights, Softmax) or not sources:
        return False
    tensors = [inputs.query, inputs.key, inputs.value]
    for source in sources:
        if isinstance(source, Means):
            if source.curvature is not None:
                return False
            tensors += [source.key, source.value]
        elif isinstance(source, SharedList):
            if inputs.is_causal:
                return False
        elif not isinstance(source, Band):
            return False
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))


class Inference:
    """Attends for the queries of one chunk of one head after the other."""

    def __init__(self, inputs: Inputs, sources: list[Source]) -> None:
        shared = next((source for source in sources if isinstance(source, SharedList)), None)
        self.band = next((source for source in sources if isinstance(source, Band)), None)
        self.means = next((source for source in sources if isinstance(source, Means)), None)
        self.scale = inputs.scale
        self.first_order: Tensor | None = None
        self.listed, self.hidden_list = 0, None
        keys, values = [], []
        if shared is not None:
            self.listed, self.hidden_list = shared.width, shared.hidden
            keys.append(shared.key)
            # Columns after the values: the factor of the first-order term, and one for the normaliser.
            values.append(pad(pad(shared.value, (0, 1)), (0, 1), value=1.0))
        if self.means is not None:
            means = self.means
            keys.append(means.key)
            value = pad(means.value, (0, 1)) if means.left is None else means.value
            value = pad(value, (0, 1), value=1.0)
            values.append(value if means.bias is None else value * means.bias.exp().unsqueeze(-1))
            if means.left is not None:
                self.first_order = (means.left if means.right is None else means.left @ means.right) * inputs.scale
        self.shared = ((torch.cat(keys, 1) * inputs.scale).mT, torch.cat(values, 1)) if keys else None
        # Numbers below the normal ones are slow, in exp and in products. Weights of the square root of the least normal
        # one, beside the row's largest of 1, round to nothing as well.
        self.lowest = 0.5 * math.log(torch.finfo(working(inputs.key).dtype).tiny)
        self.may_be_blind = self.shared is None or (self.hidden_list is not None and self.means is None)
        if self.band is not None:
            inside = self.band.inside
            self.inside = inside.to(working(inputs.key).dtype)
            self.outside = torch.zeros_like(self.inside).masked_fill_(~inside, -math.inf)
            self.hidden = _hidden(inputs, self.band, shared)

    def attend(self, head: int, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Weighted sums (1, M, Dv) and their normalisers (1, M, 1), for queries that are not scaled yet."""
        shared = near = mixed = None
        total = chunk.query.new_zeros(())
        if self.shared is not None:
            key, value = (part[chunk.heads] for part in self.shared)
            shared = chunk.query @ key
            if self.hidden_list is not None:
                shared[..., : self.listed].masked_fill_(self.hidden_list[chunk.heads].unsqueeze(1), -math.inf)
            top = shared.amax(-1, keepdim=True)
        if self.band is not None:
            near = self._near(self.band, head, chunk)
            flat = near.view(1, -1, near.shape[-1])
            highest = flat.amax(-1, keepdim=True)
            top = highest if shared is None else torch.maximum(top, highest)
        blind = top == -math.inf if self.may_be_blind else None
        top.clamp_min_(torch.finfo(top.dtype).min)
        if shared is not None:
            shared.sub_(top).clamp_min_(self.lowest).exp_()
            if self.means is not None:
                shared[..., self.listed :].mul_(self._multiplicity(self.means, chunk))
            mixed = shared @ value
            total = mixed[..., -1:]
        if near is not None and self.band is not None:
            flat.sub_(top).clamp_min_(self.lowest).exp_()
            own = flat.sum(-1, keepdim=True)
            total = total + own
            values = working(self.band.stretch(self.band.value, chunk))[0].mT
            if mixed is None:
                output = torch.bmm(near, values).view(1, -1, values.shape[-1])
            else:
                first = mixed[0, :, :-2].unflatten(0, near.shape[:2])
                output = torch.baddbmm(first, near, values).view(1, -1, values.shape[-1])
        elif mixed is not None:
            output = mixed[..., :-2]
        if self.first_order is not None and mixed is not None:
            output = torch.addcmul(output, mixed[..., -2:-1], chunk.query @ self.first_order[chunk.heads])
        if blind is not None:
            output = output.masked_fill(blind, 0.0)
        return output, total

    def _near(self, band: Band, head: int, chunk: Chunk) -> Tensor:
        """The band's scores (blocks, groups x size, width)."""
        first = chunk.first_key
        hidden = self.hidden[head, first : first + chunk.blocks * chunk.size + band.left + band.right]
        near = torch.baddbmm(
            hidden.unfold(0, band.width, chunk.size).unsqueeze(1),
            chunk.by_block(chunk.query)[0],
            working(band.stretch(band.key, chunk))[0],
            alpha=self.scale,
        )
        near.unflatten(1, (chunk.groups, chunk.size)).add_(self.outside)
        return near

    def _multiplicity(self, means: Means, chunk: Chunk) -> Tensor:
        """How many keys each stand-in speaks for, (1, M or 1, C)."""
        total = means.total[chunk.heads]
        if self.band is None or not means.near:
            return total
        held = torch.matmul(self.inside, self.band.stretch(means.member, chunk)[0].mT)
        left = torch.sub(total, held)
        # A stand-in all of whose keys are kept must vanish exactly, not up to rounding.
        left.masked_fill_(left <= 1e-5 * total, 0.0)
        return left.unsqueeze(1).expand(-1, chunk.groups, -1, -1).reshape(1, -1, total.shape[-1])


def _hidden(inputs: Inputs, band: Band, shared: SharedList | None) -> Tensor:
    """(Heads, left + positions + right): -inf where a position is no key, padding, or on the list of its head."""
    x, dtype = inputs, working(inputs.key).dtype
    reach = max(x.keys, x.offset + -(-x.queries // band.size) * band.size)
    hidden = torch.full(
        (x.batch * x.kv_heads, band.left + reach + band.right), -math.inf, dtype=dtype, device=x.key.device
    )
    real = hidden[:, band.left : band.left + x.keys]
    real.zero_()
    if band.hidden_keys is not None:
        real.masked_fill_(band.hidden_keys, -math.inf)
    if shared is not None:
        listed = hidden.new_full(shared.index.shape, -math.inf)
        if shared.hidden is not None:
            listed.masked_fill_(shared.hidden, 0.0)
        real.scatter_reduce_(-1, shared.index, listed, "amin")
    return hidden
