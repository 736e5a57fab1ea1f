"""Codes of keys in two bits a number: what they hold, which keys they find, and what stands in for the others."""

import pytest
import torch

import fewkeys as fk
from fewkeys.core.validation import check_inputs
from fewkeys.sketch import codes
from fewkeys.sketch.codes import BLOCK, Frame, best, encode, rotated, rounded


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("dim", [1, 7, 8, 64, 80])
def test_rotations_keep_inner_products(dim):
    matrix = rotated(torch.eye(dim, dtype=torch.float64))
    wide = codes.width(dim)
    assert matrix.shape == (dim, wide)
    assert wide >= dim
    torch.testing.assert_close(matrix @ matrix.mT, wide * torch.eye(dim, dtype=torch.float64))


@pytest.mark.parametrize("dim", [3, 8, 20, 64])
def test_levels_are_those_of_the_definition(dim):
    key = drawn(2, 3, 45, dim)
    first = key[:, :, :32].mean(2, keepdim=True)
    turned = rotated(key - first)
    actual = encode(key, Frame.of(key))
    assert actual.packed.shape[2] == 2
    level = actual.levels()[:, :, :45].double()
    distance = (key - first).norm(dim=-1)
    spread = distance[:, :, :32].square().mean(2, keepdim=True).sqrt()
    assert torch.equal(actual.sigma[:, :, :45].double(), (4096 * distance / spread).round())
    assert (actual.sigma[:, :, 45:] == 0).all()
    size = turned / distance[..., None]
    expected = torch.where(size.abs() < 1, 1.0, 3.0) * torch.where(size < 0, -1.0, 1.0)
    assert torch.equal(level, expected.double())


def test_a_code_depends_on_its_key_and_the_first_block_alone():
    key = drawn(1, 1, 100, 16)
    whole = encode(key, Frame.of(key)).levels()
    changed = key.clone()
    changed[:, :, 50:] *= -2
    other = encode(changed, Frame.of(changed)).levels()
    assert torch.equal(whole[:, :, :50], other[:, :, :50])
    assert not torch.equal(whole[:, :, 50:100], other[:, :, 50:100])


def test_keys_at_the_middle_have_no_size():
    """Also where all keys of the first block are equal."""
    key = drawn(1, 1, 100, 16)
    key[:, :, :BLOCK] = 0.5
    held = encode(key, Frame.of(key))
    assert (held.sigma[:, :, :BLOCK] == 0).all()
    assert (held.sigma[:, :, BLOCK:100] > 0).all()


@pytest.mark.parametrize("dim", [64, 1024, 1025, 4096])
def test_heads_of_any_dimension(dim):
    """A fifth of the keys have more than half of the largest scores."""
    key, query = drawn(1, 1, 100, dim), drawn(1, 1, 40, dim, seed=1)
    index = best(encode(key, Frame.of(key)), rounded(query), torch.full((40,), 100), None, 20).long()
    largest = (query @ key.mT).topk(20, -1).indices
    assert (index.unsqueeze(-1) == largest.unsqueeze(-2)).double().sum((-2, -1)).mean() > 10


@pytest.mark.parametrize("piece", [1, 2**22])
def test_the_best_are_those_of_a_stable_sort(piece, monkeypatch):
    """With equal keys, hidden keys, fewer keys than asked for, and several queries that share them."""
    monkeypatch.setattr(codes, "at_once", lambda tensor: piece)
    key = drawn(2, 2, 90, 8).round()
    key[:, :, 40:60] = key[:, :, 20:40]
    query = rounded(drawn(2, 4, 70, 8, seed=1))
    seen = torch.arange(70).sub(1).clamp_min(0) // BLOCK * BLOCK
    real = torch.rand(2, 90, generator=torch.Generator().manual_seed(2)) < 0.8
    held = encode(key, Frame.of(key))
    actual = best(held, query, seen, real, 9)
    level = held.levels()[:, :, :90].repeat_interleave(2, 1)
    total = (query.float() @ level.mT).int() * 64  # 16 numbers
    score = total * held.sigma[:, :, None, :90].repeat_interleave(2, 1) + 2**14 >> 15
    for b in range(2):
        for h in range(4):
            for i in range(70):
                places = [j for j in range(int(seen[i])) if real[b, j]]
                order = sorted(places, key=lambda j: -int(score[b, h, i, j]))
                expected = sorted(order[:9]) + [-1] * (9 - min(9, len(places)))
                assert actual[b, h, i].tolist() == expected


def test_codes_find_what_exact_scores_find():
    """Of keys without any structure, 48 of 2,048: nearly the mass of the 48 best. Signs alone would lose a fifth."""
    key, query = drawn(1, 1, 2048, 64), 3 * drawn(1, 1, 64, 64, seed=1)
    weight = (query @ key.mT / 8).softmax(-1)
    most = weight.topk(48, -1).values.sum(-1).mean()
    index = fk.KeyScan(48).select(check_inputs(query, key, key)).scan.index.long()
    assert weight.gather(-1, index).sum(-1).mean() > 0.9 * most
    signs = (rounded(query).double() @ rotated(key).sign().mT).topk(48, -1).indices
    assert weight.gather(-1, signs).sum(-1).mean() < 0.8 * most


@pytest.mark.parametrize(("count", "keys"), [(1, 500), (3, 97), (12, 2048), (40, 321)])
def test_ranges_hold_every_key_before_the_own_block_once(count, keys):
    query, key = drawn(1, 1, keys, 4), drawn(1, 1, keys, 4, seed=1)
    inputs = check_inputs(query, key, key, is_causal=True)
    keep, rest = fk.KeyScan(5), fk.BlockMeans(count)
    graph = keep.select(inputs)
    ranges = rest.prepare(inputs, graph, fk.Softmax())
    assert ranges.edges.shape == (-(-keys // BLOCK), count + 1)
    assert (ranges.edges.diff(dim=-1) >= 0).all()
    assert (ranges.edges[:, 0] == 0).all()
    assert torch.equal(ranges.edges[:, -1], graph.scan.seen[::BLOCK])
    for step, edges in enumerate(ranges.edges.tolist()):
        for c in range(count):
            start, stop = edges[c : c + 2]
            assert ranges.size[0, step, c] == stop - start
            if stop > start:
                torch.testing.assert_close(ranges.key[0, 0, step, c], key[0, 0, start:stop].mean(0))
    # As many ranges as there can be hold a key.
    steps = torch.arange(len(ranges.edges))
    assert torch.equal((ranges.edges.diff(dim=-1) > 0).sum(-1), steps.clamp_max(count))
    # The latest range is one block, and no range is shorter than the next one.
    lengths = ranges.edges[-1].diff()
    assert (lengths[:-1].masked_fill(lengths[:-1] == 0, keys) >= lengths[1:]).all()


def test_means_need_a_scan():
    for keep in (fk.Window(5), fk.KeyScan(5) | fk.Window(5)):
        with pytest.raises(
            ValueError, match=r"^keep: BlockMeans stands for what KeyScan\(count\) alone does not choose"
        ):
            fk.Plan(keep, fk.BlockMeans(3))


def test_two_scans_do_not_join():
    query = drawn(1, 1, 70, 4)
    with pytest.raises(ValueError, match=r"^keep: expected one KeyScan, got two"):
        fk.attention(query, query, query, keep=fk.KeyScan(5) | fk.KeyScan(6))
