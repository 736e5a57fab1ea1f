"""The part of the campaign that calls `fewkeys.attention` in every way there is, in every state of torch."""

import contextlib
import random

import torch

import fewkeys as fk
from campaign.kernels import ULPS, compared, without_padding
from campaign.numbers import SMOOTH
from parts.test_defaults import forget

PLANS = {**SMOOTH, "scan": fk.Plan(fk.KeyScan(9), fk.BlockMeans(3)), "exact": fk.Plan()}
PLANS |= {f"budget({slots})": fk.budget(slots) for slots in (8, 24, 64)}
PLANS |= {f"budget({slots}), causal": fk.budget(slots, is_causal=True) for slots in (8, 64)}
PLANS |= {f"budget({slots}), constant": fk.budget(slots, is_causal=True, memory="constant") for slots in (16, 40)}
ROUNDINGS = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 2**-5, torch.float16: 2**-8}
LAYOUTS = {
    "plain": lambda x: x,
    "tokens first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "dimensions first": lambda x: x.mT.contiguous().mT,
    "every other number": lambda x: torch.stack([x, x + 1], -1)[..., 0],
    "part of a longer one": lambda x: torch.cat([x[:, :, :1] + 1, x, x + 1], 2)[:, :, 1 : x.shape[2] + 1],
    "beside another": lambda x: torch.cat([x, x + 1], -1)[..., : x.shape[-1]],
    "one head for all": lambda x: x[:, :1].expand(-1, x.shape[1], -1, -1),
    "one sequence for all": lambda x: x[:1].expand(x.shape[0], -1, -1, -1),
    "one token for all": lambda x: x[:, :, :1].expand(-1, -1, x.shape[2], -1),
}
"""Views of a tensor: how its numbers lie."""


@contextlib.contextmanager
def of(get, put, value):
    """A setting of torch, for a time."""
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


STATES = {
    "as it is": contextlib.nullcontext,
    "inference": torch.inference_mode,
    "without gradients": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default float64": lambda: of(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "default bfloat16": lambda: of(torch.get_default_dtype, torch.set_default_dtype, torch.bfloat16),
    "default device": lambda: torch.device("meta"),
    "one thread": lambda: of(torch.get_num_threads, torch.set_num_threads, 1),
    "three threads": lambda: of(torch.get_num_threads, torch.set_num_threads, 3),
    "compiled": contextlib.nullcontext,
}
HELD = ("inference", "without gradients")
"""States in which nothing has a gradient."""


class Call:
    """A random call."""

    def __init__(self, seed):
        draw, self.g = random.Random(seed), torch.Generator().manual_seed(seed)
        self.name = draw.choice(sorted(PLANS))
        self.plan = PLANS[self.name] if draw.random() < 0.3 else PLANS[self.name].never_exact()
        part = self.plan
        causal = part.rest.needs_causal or part.is_causal or draw.random() < 0.4
        ratio, heads, batch = draw.choice([1, 1, 2, 3]), draw.choice([1, 2, 3]), draw.choice([1, 2, 3])
        keys, dim, value_dim = draw.choice([1, 2, draw.randint(1, 200)]), draw.randint(1, 40), draw.randint(1, 40)
        queries = draw.choice([keys, keys, 0, 1, draw.randint(1, 200)])
        self.options = {"is_causal": causal}
        if draw.random() < 0.4:
            self.options["query_offset"] = draw.choice([max(0, keys - queries), draw.randint(0, 2 * keys), 10**6])
        if draw.random() < 0.3:
            self.options["scale"] = draw.choice([1.0, -0.5, 0.0, 0.1])
        mask = draw.choice([None, None, "lengths", "left", "any"])
        if mask == "lengths":
            self.options["lengths"] = torch.tensor([draw.randint(0, keys) for _ in range(batch)])
        elif mask:
            start = torch.tensor([[draw.randint(0, keys)] for _ in range(batch)])
            seen = torch.arange(keys) >= start if mask == "left" else torch.rand(batch, keys, generator=self.g) < 0.6
            self.options["key_mask"] = seen
        self.dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64])
        self.impl = draw.choice(["auto", "auto", "torch", "native"])
        self.layouts = [draw.choice(["plain", *LAYOUTS]) for _ in range(3)]
        self.state = draw.choice(["as it is", *sorted(set(STATES) - {"compiled"})])
        if draw.random() < 0.03 and queries:
            self.state = "compiled"
        self.wanted = [] if self.state in HELD or draw.random() < 0.5 else draw.sample(range(3), draw.randint(1, 3))
        if self.dtype != torch.float64:
            # Sums of gradients over what is one: of all that was rounded, little may be left.
            for place in self.wanted:
                self.layouts[place] = self.layouts[place].partition("one ")[0] or "plain"
        if self.wanted and self.layouts[0] == "one token for all":
            # The gradient of a key sums over queries that are one: which of them share a cohort is a tie.
            self.layouts[0] = "plain"
        shapes = ((ratio * heads, queries, dim), (heads, keys, dim), (heads, keys, value_dim))
        rows = [torch.randn(batch, *shape, generator=self.g, dtype=torch.float64).to(self.dtype) for shape in shapes]
        self.rows = [rows[0] * draw.choice([0.1, 1.0, 1.0, 5.0]), *rows[1:]]
        self.out = torch.bfloat16 if self.state == "autocast" and self.dtype != torch.float64 else self.dtype
        self.rows = [x.to(self.out).to(self.dtype) for x in self.rows]
        grad = torch.randn(batch, ratio * heads, queries, value_dim, generator=self.g, dtype=torch.float64)
        self.grad = grad.to(self.out).double()

    def __str__(self):
        options = {name: x if not isinstance(x, torch.Tensor) else tuple(x.shape) for name, x in self.options.items()}
        shapes = [tuple(x.shape) for x in self.rows]
        how = f"{self.name}, {self.dtype}, {self.impl}, {self.layouts}, {self.state}"
        return f"{how}, {shapes}, {options}, {self.wanted}"

    def answer(self, rows, impl, state="as it is", plan=None, ulps=0):
        """The output, and the gradients where they are asked for; `ulps`: how far each number of each token is moved,
        so that tokens which are one are so no more, and other choices among them are made.
        """
        rows = [x.detach().requires_grad_(place in self.wanted) for place, x in enumerate(rows)]
        laid = [LAYOUTS[layout](x) if x.numel() else x for layout, x in zip(self.layouts, rows, strict=True)]
        if ulps:
            by = ulps * torch.finfo(torch.float32).eps
            laid = [x * (1 + by * torch.randn(x.shape, generator=self.g, dtype=x.dtype)) for x in laid]

        def call(*laid):
            return fk.attention(*laid, plan=plan or self.plan, impl=impl, **self.options)

        with STATES[state]():
            output = (torch.compile(call, backend="eager") if state == "compiled" else call)(*laid)
        if self.rows[0].shape[2] == self.rows[1].shape[2]:
            output = without_padding(output, **self.options)
        inner = [rows[place] for place in self.wanted]
        if not output.requires_grad:
            return [output, *map(torch.zeros_like, inner)]
        grad = self.grad.to(output.dtype)
        return [output.detach(), *torch.autograd.grad(output, inner, grad, materialize_grads=True)]

    def right(self):
        """What is right, as in `campaign.kernels`."""
        exact = [x.double() for x in self.rows]
        for impl in ("reference", "torch"):
            yield self.answer(exact if self.dtype == torch.float64 else [x.float() for x in self.rows], impl)
        if self.impl == "auto" and self.plan.exact_if_faster:
            yield self.answer(exact, "reference", plan=fk.Plan(weights=self.plan.weights))
        for ulps in () if self.dtype == torch.float64 else ULPS:
            yield self.answer(exact, "reference", ulps=ulps)


def calls(seed):
    """Random calls (plan, dtype, masks, offsets, no or one token, groups of heads, strides, gradients of a part of the
    inputs, modes and defaults of torch, `torch.compile`) give the outputs of the reference in float64 and change
    nothing else.
    """
    call = Call(seed)
    forget()
    before, random_state, refusal, answers, again = [x.clone() for x in call.rows], torch.get_rng_state(), None, [], []
    try:
        answers = call.answer(call.rows, call.impl, call.state)
        again = call.answer(call.rows, call.impl, "as it is" if call.state == "compiled" else call.state)
    except ValueError as error:
        refusal = str(error)
    finally:
        if call.state == "compiled":
            torch._dynamo.reset()
    if refusal and "impl='native'" in refusal:
        return None
    try:
        want = call.answer([x.double() for x in call.rows], "reference")
    except ValueError as error:
        return None if refusal == str(error) else f"{call}: the reference refuses alone: {error}"
    if refusal:
        return f"{call}: the reference does not refuse: {refusal}"
    if not all(map(torch.equal, call.rows, before)):
        return f"{call}: inputs have changed"
    if not torch.equal(torch.get_rng_state(), random_state):
        return f"{call}: torch's random numbers have moved on"
    if call.state != "compiled" and not all(map(torch.equal, answers, again)):
        return f"{call}: another answer at the second time"
    if answers[0].dtype != call.out:
        return f"{call}: {answers[0].dtype}"
    if not answers[0].numel():
        return None
    wrong = compared(
        [x.double() for x in answers], want, call.right(), ROUNDINGS[call.out], 1e-2, averaged=call.rows[2].to(call.out)
    )
    return wrong and f"{call}: {wrong}"
