"""The parts of the campaign that ask for numbers: derivatives by `torch.func`, and inputs of any magnitude."""

import random

import torch

import fewkeys as fk
from cases import CASES, PLANS, RUNNING_PLANS

EVERY = {**PLANS, **RUNNING_PLANS}
SMOOTH = {name: plan for name, plan in EVERY.items() if not CASES[name].draws and "clusters" not in name}
"""Those that draw nothing, and that fit heads of any dimension."""
STREAMED = {
    **{f"{name}, stream": plan for name, plan in RUNNING_PLANS.items() if not CASES[name].draws},
    "scan, stream": fk.Plan(fk.KeyScan(9), fk.BlockMeans(3)),
    "window, stream": fk.Plan(fk.Window(9) | fk.Sinks(2)),
}


def _plan(draw, table):
    """A plan of the table, or a recommended one, and whether it is causal."""
    if draw.random() < 0.3:
        causal = draw.random() < 0.5
        how = {"memory": draw.choice(["constant", "all"])} if causal else {"cohorts": draw.choice([1, None])}
        return fk.budget(draw.choice([4, 16, 40]), is_causal=causal, **how).never_exact(), causal
    plan = table[draw.choice(sorted(table))].never_exact()
    return plan, plan.rest.needs_causal or (plan.keep.causal and plan.rest.causal and draw.random() < 0.3)


def derivatives(seed):
    """`torch.func` of random plans and shapes (grad, vjp, jvp, jacrev, second derivatives) equals autograd; inside
    `vmap` it raises an error.
    """
    draw, g = random.Random(seed), torch.Generator().manual_seed(seed)
    plan, causal = _plan(draw, SMOOTH)
    tokens, dim, heads, ratio = draw.randint(1, 90), draw.randint(1, 9), draw.choice([1, 2]), draw.choice([1, 2])
    shapes = ((ratio * heads, dim), (heads, dim), (heads, draw.randint(1, 9)))
    rows = [torch.randn(1, count, tokens, size, generator=g, dtype=torch.float64) for count, size in shapes]
    impl = draw.choice(["auto", "torch", "reference"])
    options = {"plan": plan, "is_causal": causal, "impl": impl}
    real = torch.ones(tokens, 1, dtype=torch.bool)
    if draw.random() < 0.3:
        options["lengths"] = torch.tensor([draw.randint(1, tokens)])
        real = torch.arange(tokens)[:, None] < options["lengths"]

    def square(*tensors, **options):
        """The sum of all squares but those at padding, whose outputs mean nothing."""
        return (fk.attention(*tensors, **options) * real).square().sum()

    def loss(*tensors):
        return square(*tensors, **options)

    leaves = [x.clone().requires_grad_() for x in rows]
    want = torch.autograd.grad(loss(*leaves), leaves, materialize_grads=True)
    places = sorted(draw.sample(range(3), draw.randint(1, 3)))
    along = [torch.randn(x.shape, generator=g, dtype=x.dtype) for x in rows]

    # A gradient can be zero up to rounding, as that of a single key: the loss's other gradients give the scale.
    scale = max(float(one.abs().max()) for one in want) + 1e-3

    def off(actual, wanted):
        return max(float((one - other).abs().max()) for one, other in zip(actual, wanted, strict=True)) / scale

    way = draw.choice(["grad", "vjp", "jvp", "jacrev", "second", "vmap"])
    if way == "grad":
        wrong = off(torch.func.grad(loss, tuple(places))(*rows), [want[place] for place in places])
    elif way == "vjp":
        output, back = torch.func.vjp(loss, *rows)
        wrong = off(back(torch.ones_like(output)), want)
    elif way == "jvp":
        _, change = torch.func.jvp(loss, tuple(rows), tuple(along))
        total = sum((x * y).sum() for x, y in zip(along, want, strict=True))
        terms = sum(float((x * y).abs().sum()) for x, y in zip(along, want, strict=True))
        wrong = float((change - total).abs()) / (terms + 1e-3)
    elif way == "jacrev":
        place = places[0]
        actual = torch.func.jacrev(loss, place)(*rows)
        wrong = off([actual], [want[place]])
    elif way == "second":
        actual = []
        for one in ({**options}, {**options, "impl": "reference"}):
            leaves = [x.clone().requires_grad_(place in places) for place, x in enumerate(rows)]
            inner = [leaves[place] for place in places]
            first = torch.autograd.grad(square(*leaves, **one), inner, create_graph=True, materialize_grads=True)
            total = sum((x * along[place]).sum() for x, place in zip(first, places, strict=True))
            if not total.requires_grad:
                return None
            actual.append(torch.autograd.grad(total, inner, materialize_grads=True))
        wrong = off(*actual)
    else:
        try:
            torch.vmap(lambda x: fk.attention(x, *rows[1:], **options))(rows[0][None])
        except ValueError as error:
            return None if "vmap" in str(error) else str(error)
        return f"{plan}: vmap chose keys"
    return None if wrong < 1e-6 else f"{way} of {plan}, {impl}, causal {causal}: {wrong:.2g} off"


def magnitudes(seed):
    """Queries, keys, values and scales of any magnitude, which may change within the sequence: outputs are finite where
    those of exact attention are, for the whole sequence and in pieces, and `explain` agrees.
    """
    draw, g = random.Random(seed), torch.Generator().manual_seed(seed)
    streamed = draw.random() < 0.6
    plan, causal = _plan(draw, STREAMED if streamed else SMOOTH)
    causal = causal or streamed
    streamed = streamed and plan.keep.causal and plan.rest.causal
    if causal and not (plan.keep.causal and plan.rest.causal):
        causal = False
    tokens, dim = draw.randint(1, 200), draw.choice([1, 4, 8, 33])
    rows = [torch.randn(2, count, tokens, dim, generator=g) for count in (4, 2, 2)]
    dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16, torch.float64])
    rows = [x.to(dtype) for x in rows]
    for x, most in zip(rows, (37, 37, 37), strict=True):
        for _ in range(draw.randint(0, 2)):
            start, head = draw.randrange(tokens), draw.choice([slice(None), slice(0, 1)])
            power = 10.0 ** draw.uniform(-35, most)
            x[:, head, start:] = (x[:, head, start:].double() * power).clamp(-1e37, 1e37).to(dtype)
    scale = draw.choice([None, None, 1.0]) or draw.choice([1, -1]) * 10.0 ** draw.uniform(-30, 30)
    exact = fk.attention(*rows, weights=plan.weights, is_causal=causal, scale=scale)
    sound = exact.isfinite().all(-1)
    if streamed:
        stream, parts, left = fk.stream(plan, scale=scale), [], tokens
        while left:
            size = min(left, draw.choice([1, 7, 64, 200]))
            query, key, value = (x[:, :, tokens - left : tokens - left + size] for x in rows)
            stream.append(key, value)
            parts.append(stream.attend(query))
            left -= size
        output = torch.cat(parts, 2)
    else:
        if not bool(sound.all()):
            return None
        output = fk.attention(*rows, plan=plan, is_causal=causal, scale=scale)
        fk.explain(*rows, plan=plan, is_causal=causal, scale=scale)
    if not bool(output[sound].isfinite().all()):
        return f"{plan}, {dtype}, scale {scale}, causal {causal}, stream {streamed}: not finite"
    most = 8 * float(rows[2].double().abs().max())
    return None if bool((output[sound].double().abs() <= most).all()) else f"{plan}: beyond 8 max |v|"
