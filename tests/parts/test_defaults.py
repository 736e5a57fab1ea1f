"""What torch is told to take where nothing is said decides nothing here: every tensor says what it is."""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fewkeys as fk
from captures import captured
from cases import CAUSAL_SHAPES, PLANS, RUNNING_PLANS, SHAPES
from executors import in_turns
from fewkeys.memory import Stream
from fewkeys.papers import levattention, sparsefinder, value_aware

ALL = {**PLANS, **RUNNING_PLANS}


@pytest.fixture(scope="module")
def capture():
    return captured(layers=1, size=1, heads=2)


def elsewhere(call):
    """What it gives under another default dtype and device, which were there from the beginning."""
    forget()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            return call()
    finally:
        torch.set_default_dtype(torch.float32)


def forget():
    """What is drawn or counted once and kept, as at the start of a process."""
    for name, module in list(sys.modules.items()):
        if name.startswith("fewkeys.") and not name.startswith("fewkeys.native"):
            for part in list(vars(module).values()):
                if hasattr(part, "cache_clear"):
                    part.cache_clear()


@pytest.mark.parametrize(("name", "impl"), in_turns(ALL, ["auto", "torch"]))
def test_default_device_and_dtype_change_nothing(name, impl):
    shape = SHAPES["padded"]
    lengths, tensors = torch.tensor(shape.lengths), shape.draw(dtype=torch.float32)
    if ALL[name].rest.needs_causal:
        tensors, lengths = CAUSAL_SHAPES["causal padded"].draw(dtype=torch.float32), torch.tensor([150, 71])
    causal = ALL[name].rest.needs_causal

    def call(lengths):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        output = fk.attention(*leaves, plan=ALL[name], impl=impl, lengths=lengths, is_causal=causal)
        output.square().sum().backward()
        return [output.detach(), *(tensor.grad for tensor in leaves)]

    for real in (lengths, None):
        want = call(real)
        actual = elsewhere(lambda real=real: call(real))
        for one, other in zip(actual, want, strict=True):
            if other is not None:
                assert torch.equal(one, other)


SHORT = SHAPES["plain"].draw(dtype=torch.float32)
LONG = CAUSAL_SHAPES["causal"].draw(dtype=torch.float32)


def a_stream(plan):
    """Appended to, saved, loaded, chosen from and cropped."""

    def run():
        q, k, v = LONG
        stream = fk.stream(plan)
        stream.append(k, v)
        with tempfile.TemporaryDirectory() as folder:
            stream.save(Path(folder) / "stream")
            stream = Stream.load(Path(folder) / "stream")
        stream.select(torch.tensor([1, 0], device="cpu"))
        stream.crop(149)
        stream.append(k[:, :, :3], v[:, :, :3])
        return stream.attend(q[:, :, :3])

    return run


def heads_of_two_plans():
    _, k, v = LONG
    stream = Stream([fk.Plan(fk.Window(9) | fk.Sinks(2)), fk.Plan(fk.Window(5) | fk.Sinks(2))], scale=0.3)
    stream.append(k, v)
    return stream.attend(k)


def a_table(capture):
    report = fk.compare(capture, [fk.budget(24)])
    row = report.rows[0]
    return [row.error, row.slots, row.mass, row.error_p90, row.per_head, row.kept, report.sample]


def learned(capture):
    return list(sparsefinder.Sparsefinder.fit(capture, epochs=1, sample=32).tensors.values())


def predicted(capture):
    finder = sparsefinder.Sparsefinder.raw(capture, sample=32)
    finder = replace(finder, shape=replace(finder.shape, kind="causal"))  # so that buckets have learned edges
    groupings = (sparsefinder.Buckets(3), sparsefinder.Clusters(3), sparsefinder.ClusterPairs(3, 1.0))
    return [tensor for rule in groupings for tensor in finder.selector(0, rule).fitted.tensors.values()]


WITHOUT_CAPTURE = {
    "stream": a_stream(fk.budget(32, is_causal=True)),
    "stream of fixed size": a_stream(fk.budget(32, is_causal=True, memory="constant")),
    "heads of two plans": heads_of_two_plans,
    "oracle": lambda: value_aware.value_aware((SHORT[0] @ SHORT[1].mT).softmax(-1)[0, :, :4], SHORT[2][0], 5),
    "heavy entries": lambda: levattention.heavy_entries(SHORT[0], SHORT[1], 0.05).values,
    "recall": lambda: fk.metrics.recall(SHORT[0] > 0, SHORT[1] > 0),
    "lengths in a list": lambda: fk.attention(*SHORT, plan=fk.budget(24).never_exact(), lengths=[70, 9]),
    "spot check": lambda: str(fk.spot_check(*SHORT, plan=fk.budget(24))),
}
WITH_CAPTURE = {
    "compare": a_table,
    "tune": lambda capture: str(fk.tune(capture, slots=24).layers),
    "fit": learned,
    "selectors": predicted,
}


@pytest.mark.parametrize("name", [*WITHOUT_CAPTURE, *WITH_CAPTURE])
def test_nor_do_they_change_anything_else(name, capture):
    call = WITHOUT_CAPTURE.get(name) or (lambda: WITH_CAPTURE[name](capture))
    want = call()
    actual = elsewhere(call)
    for one, other in zip(*((x if isinstance(x, list) else [x]) for x in (actual, want)), strict=True):
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
        else:
            assert one == other
