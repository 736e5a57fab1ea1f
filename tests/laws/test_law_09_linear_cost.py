"""Law 9: time and memory grow linearly in n; no n x n tensor for any plan without an oracle.

Operations of torch are counted as they run: multiplications and additions, and the elements that every operation
touches, so that sorting, comparing and gathering are seen. Compiled kernels count for themselves.
"""

import shutil
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

import fewkeys as fk
from cases import CASES, CAUSAL_PLANS, PLANS, RUNNING_PLANS
from executors import Way, ways
from fewkeys.core.graph import Columns, Graph
from fewkeys.core.work import Work
from fewkeys.native import build, sets
from fewkeys.select import Selector
from largest import Largest
from native_cases import needs_compiler

LINEAR = {n: p for n, p in PLANS.items() if not p.keep.is_oracle and not CASES[n].grows}
BOTH = [(n, False) for n in LINEAR] + [
    (n, True) for n, p in CAUSAL_PLANS.items() if not p.keep.is_oracle and not CASES[n].grows
]
SIZES = (1024, 4096)
SHORT = (256, 1024)
"""For plans whose means torch moves on block by block, a hundred operations for each."""
LONG = {"more cohorts than queries": (2048, 8192)}
"""For a plan whose number of cohorts grows with short inputs, up to 1,366 tokens."""
LIMIT = 4.6
"""How much more a four times longer sequence may take: what is paid once makes it less, filled up blocks a little
more, and what begins after s tokens (4096 - s) / (1024 - s): where s = 134, the tokens that a plan keeps, 4.45."""


def inputs(tokens, dtype=torch.float32, gradient=False):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(1, 1, tokens, 8, generator=g).to(dtype).requires_grad_(gradient) for _ in range(3)]


def torch_cost(plan, tokens, is_causal):
    q, k, v = inputs(tokens)
    with torch.no_grad(), Largest() as largest:
        fk.attention(q, k, v, plan=plan, is_causal=is_causal, impl="torch")
    return {"largest": largest.numel, "touched": largest.touched, "operations": largest.operations}


def native_cost(plan, tokens, is_causal, dtype=torch.float32, gradient=False):
    """What the kernels count, and what torch does around them."""
    rows, around = inputs(tokens, dtype, gradient), Largest()
    build.counters()  # what was counted before is nobody's
    with torch.set_grad_enabled(gradient), around:
        output = fk.attention(*rows, plan=plan, is_causal=is_causal, impl="native")
        if gradient:
            torch.autograd.grad(output.sum(), rows)
    return build.counters() | {"largest": around.numel, "touched": around.touched}


def assert_linear(small, large, seen, longest=SIZES[1]):
    """Nothing grows faster than the sequence, and what must be `seen` is there: else 0 would be compared with 0."""
    for name in seen:
        assert small[name] > 0, f"{name}: nothing was counted"
    for name in small:
        assert large[name] <= LIMIT * small[name], f"{name}: grew {large[name] / max(1, small[name]):.1f} times"
    assert large["largest"] < longest**2 / 8


@pytest.mark.parametrize(("name", "is_causal"), BOTH, ids=[f"{n}{', causal' * c}" for n, c in BOTH])
def test_memory_and_operations_are_linear(name, is_causal):
    sizes = SHORT if name in RUNNING_PLANS and not CASES[name].draws else LONG.get(name, SIZES)
    small, large = (torch_cost(CASES[name].part, tokens, is_causal) for tokens in sizes)
    # A window alone multiplies, too, unless it is weighed element by element.
    assert_linear(small, large, ["touched", "largest"], sizes[1])


@pytest.fixture(scope="module")
def counting():
    """The kernels in a build that counts; it is compiled once and kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(build.COUNT, "1")
        if (reason := build.missing()) is not None:
            pytest.skip(reason)
        yield patch


def native_runs():
    for name, is_causal in BOTH:
        if Way("native", torch.float32) in ways(name, is_causal):
            yield pytest.param(name, is_causal, id=f"{name}{', causal' * is_causal}")


@needs_compiler
@pytest.mark.parametrize(("name", "is_causal"), list(native_runs()))
def test_compiled_kernels_are_linear(name, is_causal, counting):
    small, large = (native_cost(CASES[name].part, tokens, is_causal) for tokens in LONG.get(name, SIZES))
    assert_linear(small, large, ["multiply_adds", "bytes", "touched"])


GRADIENTS = [
    ("outliers + window, first-order means, softmax", False, torch.float32),
    ("sinks + window, drop, softmax", True, torch.bfloat16),
]


@needs_compiler
@pytest.mark.parametrize(("name", "is_causal", "dtype"), GRADIENTS, ids=str)
def test_compiled_gradients_are_linear(name, is_causal, dtype, counting):
    small, large = (native_cost(CASES[name].part, tokens, is_causal, dtype, gradient=True) for tokens in SIZES)
    assert_linear(small, large, ["multiply_adds", "bytes", "touched"])


@dataclass(frozen=True)
class Quadratic(Selector):
    """The keys with the largest sums of something over all pairs of keys, done in one of the ways there are."""

    how: str

    def select(self, inputs):
        key = inputs.key
        if self.how == "product":
            score = (key @ key.mT).sum(-1)
        elif self.how == "comparison":
            score = (key[..., None, 0] > key[..., None, :, 0]).sum(-1).float()
        elif self.how == "a view":
            score = key[..., 0].unsqueeze(-2).expand(-1, -1, inputs.keys, -1).sum(-1)
        else:  # piece by piece, so that nothing large is ever there
            pieces = key[..., 0].split(64, -1)
            score = torch.cat([(p[..., None] > key[..., None, :, 0]).sum(-1).float() for p in pieces], -1)
        index = score.topk(4).indices
        return Graph(inputs, columns=Columns.shared(index, torch.ones_like(index, dtype=torch.bool), inputs.queries))

    def covers(self, inputs):
        return False

    def work(self, inputs):
        return Work(4.0)


@pytest.mark.parametrize("how", ["product", "comparison", "a view", "pieces"])
def test_a_quadratic_selector_is_seen(how):
    small, large = (torch_cost(fk.Plan(Quadratic(how)), tokens, False) for tokens in SIZES)
    with pytest.raises(AssertionError, match=r"touched: grew|operations: grew|largest: grew"):
        assert_linear(small, large, ["touched"])
    assert large["touched"] > 10 * small["touched"]


EVERY_KEY = {
    "begin(std::clamp<int64_t>(position - p.left, 0, p.keys)) {": "begin(0) {",
    "count = std::clamp<int64_t>(position + rows + p.right, begin, p.keys) - begin;": "count = p.keys;",
    "return std::clamp<int64_t>(p.left + p.right + rows, 0, p.keys);": "return p.keys;",
}
"""Every tile of queries reads all keys, not those that its band reaches; the answer is the same."""


@pytest.mark.long
@needs_compiler
def test_a_quadratic_kernel_is_seen(counting, tmp_path):
    """The same kernels but for `EVERY_KEY`, in a copy that is compiled without optimisation, to be quick."""
    plan, sizes = fk.Plan(fk.Window(9)), (512, 2048)
    sound = [native_cost(plan, tokens, False) for tokens in sizes]
    expected = fk.attention(*inputs(512), plan=plan, impl="native")
    for source in sets.SOURCES:
        shutil.copy(sets.HERE / source, tmp_path)
    text = (tmp_path / "near.h").read_text()
    for line, other in EVERY_KEY.items():
        assert text.count(line) == 1
        text = text.replace(line, other)
    (tmp_path / "near.h").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sets, "HERE", tmp_path)
        patch.setattr(sets, "FLAGS", tuple("-O0" if flag == "-O3" else flag for flag in sets.FLAGS))
        patch.setenv("FEWKEYS_CACHE", str(tmp_path / "cache"))
        build._load.cache_clear()
        try:
            assert build.missing() is None
            actual = fk.attention(*inputs(512), plan=plan, impl="native")
            broken = [native_cost(plan, tokens, False) for tokens in sizes]
        finally:
            build._load.cache_clear()
    torch.testing.assert_close(actual, expected)  # no law that looks at answers could see it
    assert_linear(*sound, ["multiply_adds", "bytes"])
    with pytest.raises(AssertionError, match=r"multiply_adds: grew|bytes: grew"):
        assert_linear(*broken, ["multiply_adds", "bytes"])
    assert broken[1]["multiply_adds"] > 10 * broken[0]["multiply_adds"]


@pytest.mark.parametrize("keep", [fk.select.KeyNorm(64), fk.select.Leverage(64)], ids=str)
def test_causal_rules_read_keys_as_models_store_them(keep):
    """A token's rows of all heads are side by side in a model; they are not copied again for every block."""
    touched = []
    stored = torch.randn(1, 1024, 4, 8).transpose(1, 2)
    for rows in (stored, stored.contiguous()):
        with torch.no_grad(), Largest() as largest:
            keep.graph(rows, rows, is_causal=True)
        touched.append(largest.touched)
    assert touched[0] < 1.2 * touched[1]


def test_nothing_counted_is_no_proof():
    none = dict.fromkeys(("touched", "largest", "operations"), 0)
    with pytest.raises(AssertionError, match="nothing was counted"):
        assert_linear(none, none, ["touched"])


@pytest.mark.long
def test_long_sequence_fits_in_a_gigabyte():
    """n = 65,536, budget 192, one head of 64: the peak above the inputs, in a process of its own."""
    code = """
import resource, torch, fewkeys as fk
q, k, v = (torch.randn(1, 1, 65536, 64) for _ in range(3))
with torch.no_grad():
    fk.attention(q[:, :, :512], k[:, :, :512], v[:, :, :512], plan=fk.budget(64).never_exact())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    fk.attention(q, k, v, plan=fk.budget(192).never_exact())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2**20  # kilobytes
