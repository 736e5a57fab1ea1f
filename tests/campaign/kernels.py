"""The part of the campaign that asks compiled kernels: random problems, and what is right where a choice is a tie."""

import itertools
import random

import torch

import fewkeys as fk
from cases import PLANS, RUNNING_PLANS

CAUSAL = {**RUNNING_PLANS, "scan": fk.Plan(fk.KeyScan(40), fk.BlockMeans(3))}
ROUNDINGS = {torch.float32: 1e-3, torch.bfloat16: 2**-5}
"""How far answers and gradients may be off, as a part of the largest one."""
ULPS = (1, 1, 1, 1, 4, 4, 4, 4, 16, 16, 16, 16, 64, 64, 64, 64)
"""How far inputs are moved where answers differ: float32 rounds sums of hundreds of terms."""


class Problem:
    """Random inputs of a random plan."""

    def __init__(self, seed):
        draw, g = random.Random(seed), torch.Generator().manual_seed(seed)
        causal = draw.random() < 0.5
        self.name = draw.choice(sorted(CAUSAL if causal else PLANS))
        self.plan = (CAUSAL if causal else PLANS)[self.name].never_exact()
        ratio, heads, batch = draw.choice([1, 2, 3]), draw.choice([1, 2]), draw.choice([1, 2])
        tokens, dim, value_dim = draw.randint(1, 300), draw.randint(1, 70), draw.randint(1, 70)
        strength = draw.choice([0.1, 1.0, 1.0, 5.0])
        shapes = ((ratio * heads, dim), (heads, dim), (heads, value_dim))
        tensors = [torch.randn(batch, count, tokens, size, generator=g) for count, size in shapes]
        tensors[0] *= strength
        self.apart = draw.random() < 0.3
        self.options = {"is_causal": causal}
        if draw.random() < 0.3:
            self.options["lengths"] = torch.tensor([draw.randint(0, tokens) for _ in range(batch)])
        self.dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16])
        self.tensors = [x.to(self.dtype) for x in tensors]
        out_shape = (batch, ratio * heads, tokens, value_dim)
        self.grad = torch.randn(out_shape, generator=g) if draw.random() < 0.4 else None
        self.g = g

    def answer(self, tensors, impl):
        """The output, and the gradients where they are asked for."""
        if self.apart:  # tokens first
            tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
        tensors = [x.detach().requires_grad_(self.grad is not None) for x in tensors]
        out = without_padding(fk.attention(*tensors, plan=self.plan, impl=impl, **self.options), **self.options)
        if self.grad is None:
            return [out]
        return [out.detach(), *torch.autograd.grad(out, tensors, self.grad.to(out.dtype), materialize_grads=True)]

    def right(self):
        """What is right: the reference in float64; where a choice hangs on rounding (keys before there are as many as
        dimensions have all one leverage), other choices: those of the reference and of torch in float32, and those of
        inputs that differ by rounding.
        """
        exact = [x.double() for x in self.tensors]
        yield self.answer(exact, "reference")
        for impl in ("reference", "torch"):
            yield self.answer([x.float() for x in self.tensors], impl)
        for ulps in ULPS:
            by = ulps * torch.finfo(torch.float32).eps
            moved = [x * (1 + by * torch.randn(x.shape, generator=self.g, dtype=x.dtype)) for x in exact]
            yield self.answer(moved, "reference")


def without_padding(output, lengths=None, key_mask=None, query_offset=0, **_):
    """Outputs of self-attention; zero at padding, where they mean nothing."""
    if lengths is not None:
        key_mask = torch.arange(output.shape[2]) < lengths[:, None]
    if key_mask is None or query_offset or key_mask.shape[1] != output.shape[2]:
        return output
    return output * key_mask[:, None, :, None]


def kernels(seed):
    """Random plans, shapes, dtypes and layouts: compiled kernels give the outputs and gradients of the reference in
    float64 and access no address out of bounds.
    """
    problem = Problem(seed)
    try:
        actual, right = problem.answer(problem.tensors, "native"), problem.right()
        want = next(right)
    except ValueError as error:
        return None if "impl='native'" in str(error) or "expected" in str(error) else str(error)
    wrong = compared(actual, want, right, ROUNDINGS[problem.dtype], averaged=problem.tensors[2])
    return wrong and f"{problem.name}, {problem.dtype}: {wrong}"


def compared(actual, want, right, rounding, least=1e-3, *, averaged):
    """What is wrong with an output and gradients. `want`: of the reference; `right`: others that are right, too, in
    float32 first; `rounding`: what may be off, as a part of the largest one, of a gradient at least of `least` times
    the largest of all. `averaged`: the values. With weights of 16 bits, an output that is small because values cancel
    is as exact as their mean size allows.
    """
    if not all(x.isfinite().all() for x in actual):
        return "not finite"
    plain = next(right)
    largest = max(x.abs().max() for x in want).clamp_min(1e-6)
    sizes = [x.abs().max().clamp_min(least * largest) for x in want]
    if averaged.dtype in (torch.bfloat16, torch.float16):
        sizes[0] = sizes[0].clamp_min(averaged.double().abs().mean() / 4)

    def parts_off(one, other):
        return [(x - y).abs().amax(-1) / size for x, y, size in zip(one, other, sizes, strict=True)]

    # Row by row: every query and every head has choices of its own. A row of which float32 says less has more room, but
    # not one of which it says something else.
    allowed = [rounding + 4 * x.where(x < 0.1, 0.0) for x in parts_off(plain, want)]
    off = [torch.full(x.shape, torch.inf) for x in allowed]
    for one in itertools.chain((want, plain), right):
        off = [torch.minimum(before, x) for before, x in zip(off, parts_off(actual, one), strict=True)]
        if all((x <= most).all() for x, most in zip(off, allowed, strict=True)):
            return None
    kinds = ("output", "first gradient", "second gradient", "third gradient")
    return "off by " + ", ".join(f"{kind} {x.max().item():.2g}" for kind, x in zip(kinds, off, strict=False))
