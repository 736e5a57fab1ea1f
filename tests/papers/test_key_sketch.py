"""A sketch of a stream knows its universal set and its scores, in memory independent of the stream, and can be cut
and merged anywhere."""

import pytest
import torch
from hypothesis import given, strategies as st

from fewkeys.papers import levattention
from fewkeys.papers.levattention import key_sketch, leverage_scores, universal_set
from fewkeys.papers.levattention.key_sketch import KeySketch
from fewkeys.papers.levattention.lewis import tensor_bounds
from odd_keys import KINDS, keys


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Prune often, so that short streams exercise it."""
    monkeypatch.setattr(key_sketch, "BLOCK", 16)


def sketched(stream, pieces, eps, power=2.0):
    sketch = KeySketch(eps, power)
    for part in stream.tensor_split(pieces, 2):
        sketch.update(part)
    return sketch


@pytest.mark.parametrize("eps", [0.02, 0.1, 0.4])
@pytest.mark.parametrize("kind", KINDS)
def test_one_pass_finds_the_universal_set(kind, eps):
    k = keys(kind, n=300)
    actual = sketched(k, 7, eps).universal_set()
    assert torch.equal(actual.to_mask(), universal_set(k, eps))
    b, h, n = actual.indices
    assert torch.equal(actual.keys, k[b, h, n])
    torch.testing.assert_close(actual.scores, leverage_scores(k)[b, h, n], rtol=1e-6, atol=1e-9)


@given(seed=st.integers(0, 1000), cuts=st.lists(st.integers(0, 150), max_size=6), grow=st.floats(-4, 4))
def test_cuts_and_growing_keys_do_not_matter(seed, cuts, grow):
    """Late keys may be far larger or smaller than early ones: early candidates must survive, or go, all the same."""
    g = torch.Generator().manual_seed(seed)
    k = torch.randn(1, 1, 150, 5, generator=g, dtype=torch.float64) * torch.logspace(0, grow, 150).double()[:, None]
    assert torch.equal(sketched(k, sorted(cuts), 0.07).universal_set().to_mask(), universal_set(k, 0.07))


def test_no_prefix_loses_a_heavy_key():
    k = keys("heavy tail", n=200)
    sketch = KeySketch(0.05)
    for end in range(1, 201):
        sketch.update(k[:, :, end - 1 : end])
        if end % 10 == 3:
            assert torch.equal(sketch.universal_set().to_mask(), universal_set(k[:, :, :end], 0.05))


def test_larger_eps_may_be_asked_later():
    k = keys("heavy tail", n=200)
    sketch = sketched(k, 5, 0.02)
    assert torch.equal(sketch.universal_set(0.3).to_mask(), universal_set(k, 0.3))
    with pytest.raises(ValueError, match=r"^eps: expected at least the sketch's 0.02, got 0.01"):
        sketch.universal_set(0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_second_pass_gives_the_scores(kind):
    k = keys(kind, n=150)
    sketch = sketched(k, 4, 0.1)
    scores = torch.cat([sketch.scores(part) for part in k.split(40, 2)], -1)
    # What float64 leaves of a Gram matrix of this condition, where the rank is full.
    kappa = torch.linalg.cond(k).amax().item() if kind in ("heavy tail", "offset") else 1.0
    torch.testing.assert_close(scores, leverage_scores(k), rtol=1e-6 + 6 * 2e-16 * kappa**2, atol=1e-9)


def test_even_powers():
    k = keys("plain", n=300, d=3)
    sketch = sketched(k, 6, 0.05, 4.0)
    expected = tensor_bounds(k, 2)
    torch.testing.assert_close(sketch.scores(k), expected, rtol=1e-7, atol=1e-10)
    assert torch.equal(sketch.universal_set().to_mask(), expected >= 0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_sketches_are_the_sketch_of_the_whole(kind):
    k = keys(kind, n=300)
    parts = [sketched(part, 3, 0.05) for part in k.tensor_split([10, 10, 170], 2)]
    total = KeySketch(0.05)
    for part in parts:
        before = part.count, part.nbytes
        total.merge(part)
        assert (part.count, part.nbytes) == before
    assert total.count == k.shape[2]
    assert torch.equal(total.universal_set().to_mask(), universal_set(k, 0.05))
    total.update(k)
    assert torch.equal(total.universal_set().to_mask(), universal_set(torch.cat([k, k], 2), 0.05))


@pytest.mark.parametrize("power", [2.0, 4.0, 8.0])
def test_weak_directions_down_to_the_stated_size_count(power):
    """In its direction the last key has all attention."""
    g = torch.Generator().manual_seed(0)
    k = torch.randn(1, 1, 500, 3, generator=g, dtype=torch.float64)
    k[..., 2], k[:, :, -1] = 0, torch.tensor([0, 0, 30 * 1e-7 ** (2 / power)])
    k = k @ torch.linalg.qr(torch.randn(3, 3, generator=g, dtype=k.dtype)).Q
    assert sketched(k, 3, 0.1, power).universal_set().to_mask()[0, 0, -1]


@pytest.mark.parametrize("power", [2.0, 4.0])
@pytest.mark.parametrize("size", [1e-310, 1e-170, 1e160, 3e307])
def test_sizes_of_keys_do_not_matter(size, power):
    """Also where their squares leave the range of float64, and where larger keys follow or precede tiny ones."""
    stream = keys("plain", d=4, seed=5)
    expected, none = universal_set(stream, 0.1, power), torch.zeros(stream.shape[:3], dtype=torch.bool)
    assert expected.any()
    assert torch.equal(universal_set(stream * size, 0.1, power), expected)
    tiny, sized = KeySketch(0.1, power), KeySketch(0.1, power)
    tiny.update(stream * 1e-323)
    sized.update(stream * size)
    sized.merge(tiny)
    tiny.update(stream * size)
    assert torch.equal(sized.universal_set().to_mask(), torch.cat([expected, none], 2))
    assert torch.equal(tiny.universal_set().to_mask(), torch.cat([none, expected], 2))


def test_memory_does_not_grow():
    g = torch.Generator().manual_seed(0)
    sketch, most = KeySketch(0.1), {}
    for step in range(256):
        sketch.update(torch.randn(1, 2, 32, 4, generator=g))
        if step >= 8:
            most[step // 64] = max(most.get(step // 64, 0), sketch.nbytes)
    # At most 2 rank / eps + 2 blocks of keys, 4 float32 numbers and a position each, and the Gram matrices.
    assert max(most.values()) <= 2 * (2 * 4 / 0.1 + 3 * 16) * (4 * 4 + 8) + 2 * 16 * 8
    assert most[3] <= most[0]


def test_bad_input_is_named():
    k = keys("plain")
    sketch = sketched(k, 2, 0.1)
    refusals = {
        r"eps: expected a finite number": lambda: KeySketch(1.0),
        r"power: expected an even number up to 60, got 3.0": lambda: KeySketch(0.1, 3.0),
        r"power: expected an even number up to 60, got 62": lambda: KeySketch(0.1, 62),
        r"power: expected at most 2500 monomials, got 46376": lambda: KeySketch(0.1, 8).update(torch.ones(1, 1, 2, 31)),
        r"keys: expected \(batch, heads, dim\) = \(1, 2, 6\)": lambda: sketch.update(k[..., :5]),
        r"keys: expected \(batch, heads, dim\) = .* in torch.float64 .* got .*float32": lambda: sketch.update(
            k.float()
        ),
        r"keys: expected shape": lambda: sketch.update(k[0]),
        r"keys: expected finite": lambda: sketch.update(k / 0),
        r"keys: expected keys of the stream": lambda: KeySketch(0.1).scores(k),
        r"universal_set: expected some keys": lambda: KeySketch(0.1).universal_set(),
        r"other: expected a KeySketch": lambda: sketch.merge(k),
        r"other: expected eps=0.1": lambda: sketch.merge(KeySketch(0.2)),
    }
    for message, call in refusals.items():
        with pytest.raises((ValueError, TypeError), match=f"^{message}"):
            call()
    assert torch.equal(sketch.universal_set().to_mask(), levattention.universal_set(k, 0.1))
