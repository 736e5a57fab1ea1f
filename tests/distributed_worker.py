"""What one rank of the tests in test_distributed.py does. Every rank knows the whole problem and takes its shard."""

import functools
import json
import os
import re
import time
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import fewkeys as fk
import fewkeys.distributed as fkd
from fewkeys.distributed.communicator import RECORD
from fewkeys.papers import levattention
from odd_keys import KINDS, keys

U = torch.finfo(torch.float64).eps
TIMEOUT = 1.5
POWERS = {"heavy tail": 1.0, "rank deficient": 3.0, "plain": 4.0, "duplicates": 4.0}  # tried besides 2


def shares(world, kind):
    """The shards' relative lengths."""
    return {"even": [1] * world, "uneven": [1, 6, 2, 4][:world], "empty": [0, 2, 0, 1][:world]}[kind]


def shard(tensor, rank, world, kind="uneven"):
    """The tokens of a rank."""
    parts, n = shares(world, kind), tensor.shape[2]
    start, stop = (n * sum(parts[:r]) // sum(parts) for r in (rank, rank + 1))
    return tensor[:, :, start:stop]


def leaves(tensors, rank, world, kind="uneven"):
    """The tokens of a rank, with gradients of their own."""
    return [shard(tensor, rank, world, kind).detach().requires_grad_() for tensor in tensors]


def rounding(key, power=2.0):
    """The relative tolerance stated by `leverage_scores`: a few `D u kappa^2`, magnified by the Lewis iteration."""
    columns = key.double() / key.double().norm(dim=-2, keepdim=True).clamp_min(1e-300)
    sizes = torch.linalg.svdvals(columns)
    smallest = torch.where(sizes > 1e-9 * sizes.amax(-1, keepdim=True), sizes, torch.inf).amin(-1)
    kappa = float((sizes.amax(-1) / smallest).amax())
    return 20 * key.shape[-1] * U * kappa**2 * max(1, 2 / power, power / 2)


def problem(seed=0, n=75, heads=(4, 2), d=6, dv=5, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    shapes = ((2, heads[0], n, d), (2, heads[1], n, d), (2, heads[1], n, dv))
    q, k, v = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes)
    k = (k + 0.5) * (0.3 + torch.rand(k.shape[:3], generator=g, dtype=k.dtype).unsqueeze(-1))
    return [tensor.to(dtype) for tensor in (q, k, v)]


def leverage_scores_are_those_of_one_process(rank, world):
    for kind in KINDS:
        k = keys(kind, d=4)
        for power in {2.0, POWERS.get(kind, 2.0)}:
            expected = levattention.leverage_scores(k, power)
            tolerance = 1e-6 if power == 4 else rounding(k, power)
            assert tolerance <= 1e-6, (kind, power)
            for share in ("even", "uneven", "empty") if kind == "plain" else ("empty",):
                actual = levattention.shard_scores(shard(k, rank, world, share), power)
                target = shard(expected, rank, world, share)
                torch.testing.assert_close(actual, target, rtol=tolerance, atol=0, msg=label(kind, power, share))
    # Shards in different directions: what is zero throughout a shard is not zero throughout.
    k = keys("plain", d=4)
    k[:, :, :60, 2:] = k[:, :, 60:, :2] = 0
    for power in (1.0, 2.0):
        actual = levattention.shard_scores(shard(k, rank, world, "even"), power)
        torch.testing.assert_close(actual, shard(levattention.leverage_scores(k, power), rank, world, "even"))


def float32_scores_are_the_float64_ones_rounded(rank, world):
    for dtype in (torch.float32, torch.bfloat16):
        k = keys("heavy tail").to(dtype)
        for power in (2.0, 3.0):
            actual = levattention.shard_scores(shard(k, rank, world), power)
            assert actual.dtype == torch.float32
            exact = shard(levattention.leverage_scores(k.float().double(), power), rank, world)
            torch.testing.assert_close(actual.double(), exact, rtol=1.2e-7, atol=0)


def the_universal_set_is_the_very_same(rank, world):
    for kind in KINDS:
        for eps in (0.03, 0.2):
            for power in {2.0, POWERS.get(kind, 2.0) if eps == 0.03 else 2.0}:
                k = keys(kind, d=4, seed=int(100 * eps)).to(torch.float32 if power == 2 else torch.float64)
                actual = levattention.shard_set(shard(k, rank, world, "empty"), eps, power)
                shards = shard(levattention.universal_set(k, eps, power), rank, world, "empty")
                assert torch.equal(actual, shards), (kind, eps, power)


def assert_of_one_process(rank, world, tensors, cases, kinds, output_limit, gradient_limit, **options):
    """Attention and its gradients are those of one process, within limits, which may depend on the whole tensor."""
    whole = [tensor.clone().requires_grad_() for tensor in tensors]
    g = torch.Generator().manual_seed(5)
    direction = torch.randn((*whole[0].shape[:3], whole[2].shape[3]), generator=g, dtype=torch.float64)
    for name, case in cases.items():
        expected = fk.attention(*whole, **parts(case), **options)
        gradients = torch.autograd.grad((expected * direction).sum(), whole)
        for kind in kinds:
            shards = leaves(tensors, rank, world, kind)
            actual = fkd.attention(*shards, **parts(case), **options)
            got = torch.autograd.grad((actual * shard(direction, rank, world, kind)).sum(), shards)
            limits = (output_limit, *[gradient_limit] * 3)
            for result, full, limit in zip((actual, *got), (expected, *gradients), limits, strict=True):
                target = shard(full, rank, world, kind)
                torch.testing.assert_close(result, target, **limit(full), msg=label(name, kind))


def parts(plan):
    return {"keep": plan.keep, "rest": plan.rest, "weights": plan.weights}


LISTS = {
    "leverage": fk.Plan(fk.select.Leverage(9)),
    "leverage, power weights": fk.Plan(fk.select.Leverage(9), weights=fk.weights.Power(2.0)),
    "leverage, entmax": fk.Plan(fk.select.Leverage(9), weights=fk.weights.Entmax(1.5)),
    "centred": fk.Plan(fk.select.Leverage(9, centre=True)),
    "power 1": fk.Plan(levattention.Sensitivity(9, power=1.0)),
    "power 4": fk.Plan(levattention.Sensitivity(9, power=4.0)),
    "universal set": fk.Plan(fk.select.Leverage(eps=0.15), weights=fk.weights.Power(2.0)),
    "universal set of power 3": fk.Plan(levattention.Sensitivity(eps=0.3, power=3.0), weights=fk.weights.Power(3.0)),
    "nobody": fk.Plan(fk.select.Leverage(eps=0.99)),
    "more than there are": fk.Plan(fk.select.Leverage(80)),
    "key norm": fk.Plan(fk.select.KeyNorm(9)),
    "random keys": fk.Plan(fk.RandomKeys(9)),
}
MEANS = {
    "budget": fk.budget(32),
    "one cohort": fk.budget(32, cohorts=1),
    "one cohort, power weights": fk.Plan(fk.Outliers(5, 6) | fk.Window(9), fk.ClusterMeans(6), fk.weights.Power(2.0)),
    "two cohorts": fk.Plan(fk.Outliers(5, 6, cohorts=2), fk.ClusterMeans(6, cohorts=2)),
    "a window wider than the sequence": fk.Plan(
        fk.Outliers(5, 6, cohorts=2) | fk.Window(999), fk.ClusterMeans(6, cohorts=2)
    ),
    "cohorts, wide window": fk.Plan(
        fk.Outliers(5, 6, cohorts=4) | fk.Window(60), fk.ClusterMeans(6, rank=2, cohorts=4)
    ),
    "lists of cohorts": fk.Plan(fk.Outliers(9, 5, cohorts=8), weights=fk.weights.Power(2.0)),
    "scan": fk.Plan(fk.KeyScan(9), fk.BlockMeans(2)),
    "scan + window": fk.Plan(fk.KeyScan(9) | fk.Window(11)),
}
CAUSAL = {
    "scan": fk.Plan(fk.KeyScan(9), fk.BlockMeans(3)),
    "scan alone": fk.Plan(fk.KeyScan(5)),
}


def attention_is_that_of_one_process(rank, world):
    q, k, v = problem()
    # The bound of the docstring for the outputs; a gradient is a sum of as many terms for each query.
    bound = (2 * q.shape[3] * 0.7 * (q.abs() @ k.abs().repeat_interleave(2, 1).mT).amax() + k.shape[2]) * U
    limits = (
        lambda _: {"rtol": 0, "atol": float(bound * v.abs().amax())},
        lambda full: {"rtol": 0, "atol": float(10 * q.shape[2] * bound * (1 + full.abs().amax()))},
    )
    assert_of_one_process(rank, world, (q, k, v), LISTS, ("uneven", "empty"), *limits, scale=0.7)


def windows_and_means_are_those_of_one_process(rank, world):
    limits = (lambda _: {"rtol": 1e-7, "atol": 1e-8}, lambda _: {"rtol": 1e-6, "atol": 1e-7})
    assert_of_one_process(rank, world, problem(n=91), MEANS, ("even", "uneven", "empty"), *limits, scale=0.7)


def causal_attention_is_that_of_one_process(rank, world):
    limits = (lambda _: {"rtol": 1e-8, "atol": 1e-9}, lambda _: {"rtol": 1e-7, "atol": 1e-8})
    kinds = ("even", "uneven", "empty")
    assert_of_one_process(rank, world, problem(n=91), CAUSAL, kinds, *limits, scale=0.7, is_causal=True)


def large_entries_are_rescaled_alike(rank, world):
    """A score is of a query and a key of two ranks: neither rank alone may see that squares would overflow."""
    plans = LISTS["key norm"], LISTS["leverage"], MEANS["two cohorts"], MEANS["scan"]
    for factors in ((1, 1e22, 1), (1, 1, 1e30), (1e12, 1e12, 1), (1e20, 1e20, 1e20)):
        rows = [rows * factor for rows, factor in zip(problem(n=91, dtype=torch.float32), factors, strict=True)]
        rows[0][:, :, :60], rows[1][:, :, 60:] = rows[0][:, :, :60] / factors[0], rows[1][:, :, 60:] / factors[1]
        for plan in plans:
            value = rows[2].clone().requires_grad_()
            expected = fk.attention(rows[0], rows[1], value, **parts(plan))
            (gradient,) = torch.autograd.grad(expected.sum(), value)
            for kind in ("uneven", "empty"):
                shards = leaves(rows, rank, world, kind)
                actual = fkd.attention(*shards, **parts(plan))
                got = torch.autograd.grad(actual.sum(), shards[2])
                for result, full in zip((actual, *got), (expected, gradient), strict=True):
                    limit = {"rtol": 1e-5, "atol": 1e-5 * float(full.abs().amax())}
                    torch.testing.assert_close(
                        result, shard(full, rank, world, kind), **limit, msg=label(factors, plan, kind)
                    )


def the_bytes_of_means_do_not_grow(rank, world):
    sent = []
    for n in (1600, 6400, 16000):
        shards = [shard(tensor, rank, world) for tensor in problem(n=n, dtype=torch.float32)]
        comm = fkd.Communicator()
        fkd.attention(*shards, **parts(MEANS["budget"]), group=comm)
        sent.append(comm.bytes_sent)
    # The sample of Lloyd's steps has 16 to 32 keys per cluster.
    assert max(sent) < 2 * min(sent), sent


def label(*where):
    return lambda text: f"{where}: {text}"


def low_precision_is_kept_and_rounded_once(rank, world):
    """Outputs and gradients are those of float32 on the same numbers, rounded at the end by half a unit at most."""
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = problem(seed=3, dtype=dtype)
        whole = [tensor.float().requires_grad_() for tensor in (q, k, v)]
        expected = fk.attention(*whole, keep=fk.select.KeyNorm(12))
        sign = torch.where(torch.arange(expected.numel()) % 3 > 0, 1.0, -1.0).view_as(expected)  # exact in any dtype
        gradients = torch.autograd.grad((expected * sign).sum(), whole)
        shards = leaves((q, k, v), rank, world)
        actual = fkd.attention(*shards, keep=fk.select.KeyNorm(12))
        with torch.no_grad():
            without = fkd.attention(*shards, keep=fk.select.KeyNorm(12))  # which rounds in another order
        torch.testing.assert_close(without, actual, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
        got = torch.autograd.grad((actual.float() * shard(sign, rank, world)).sum(), shards)
        half, single = torch.finfo(dtype).eps / 2, 100 * torch.finfo(torch.float32).eps
        for result, full in zip([actual, *got], [expected, *gradients], strict=True):
            assert result.dtype == dtype
            target = shard(full, rank, world)
            torch.testing.assert_close(
                result.float(), target, rtol=half + single, atol=single * float(full.abs().amax())
            )


def a_gradient_wanted_by_one_rank_arrives(rank, world):
    """The other ranks' tensors need no gradients; their backward pass brings it all the same."""
    q, k, v = problem(n=91)
    value = v.clone().requires_grad_()
    for plan, is_causal in ((LISTS["key norm"], False), (CAUSAL["scan"], True)):
        whole = fk.attention(q, k, value, **parts(plan), is_causal=is_causal)
        (expected,) = torch.autograd.grad(whole.sum(), value)
        for who in (0, world - 1):
            shards = [shard(tensor, rank, world).detach() for tensor in (q, k, v)]
            shards[2].requires_grad_(rank == who)
            fkd.attention(*shards, **parts(plan), is_causal=is_causal).sum().backward()
            if rank == who:
                torch.testing.assert_close(shards[2].grad, shard(expected, rank, world))
    assert not fkd.attention(q, k, v, keep=fk.select.KeyNorm(9)).requires_grad


def queries_may_be_lazily_negated_and_all_of_them_missing(rank, world):
    q, k, v = (shard(tensor, rank, world) for tensor in problem(dtype=torch.float32))
    for plan in (LISTS["key norm"], MEANS["two cohorts"], MEANS["scan"]):
        negated = (torch.complex(part, -part).conj().imag for part in (q, k, v))
        assert torch.equal(fkd.attention(*negated, **parts(plan)), fkd.attention(q, k, v, **parts(plan))), plan
        key = k.clone().requires_grad_()
        none = fkd.attention(q[:, :, :0], key, v, **parts(plan))
        none.sum().backward()
        assert none.shape == (*q.shape[:2], 0, v.shape[3])
        assert not key.grad.any()


def bytes_are_as_stated_and_do_not_grow(rank, world):
    header = (world - 1) * (8 + RECORD)
    for n in (160, 1600, 16000):
        q, k, v = problem(n=n, dtype=torch.float32)
        shards = [shard(tensor, rank, world) for tensor in (q, k, v)]
        comm = fkd.Communicator()
        fkd.universal_set(shards[1], 0.1, group=comm)
        gram = 2 * (8 * 4 * 36) * (world - 1) // world
        assert comm.bytes_sent == header + 2 * gram
        comm = fkd.Communicator()
        fkd.attention(*shards, keep=fk.RandomKeys(10), group=comm)
        # The scores and positions of candidates; keys and values, as an all-reduce sends them.
        kept = 2 * (4 * 4 * 10 * 11) * (world - 1) // world
        assert comm.bytes_sent == header + (world - 1) * (8 + 4 * 4 * 10 + 8 + 8 * 4 * 10) + kept
        comm = fkd.Communicator()
        shards = leaves((q, k, v), rank, world)
        out = fkd.attention(*shards, keep=fk.select.Leverage(10), group=comm)
        assert comm.bytes_sent == header + 2 * gram + (world - 1) * (8 + 8 * 4 * 10 + 8 + 8 * 4 * 10) + kept
        # The shards padded to the longest, as an all-gather sends them.
        longest = max(shard(k, r, world).shape[2] for r in range(world))
        assert n == 160 or comm.bytes_sent < (world - 1) * 4 * 4 * longest * 11
        forward = comm.bytes_sent
        out.sum().backward()
        assert comm.bytes_sent - forward == header + kept


def raises(kind, text, call):
    with pytest.raises(kind, match=re.escape(text)):
        call()


NORM = fk.select.KeyNorm(3)


def differing_arguments_are_an_error_on_every_rank(rank, world):
    q, k, v = (shard(tensor, rank, world) for tensor in problem())
    last = rank == world - 1
    differing = [
        ("key (batch, heads, dim): expected the same on every rank", lambda: fkd.leverage_scores(k[..., : 6 - last])),
        ("key (batch, heads, dim): expected", lambda: fkd.universal_set(k[:, : 2 - last], 0.1)),
        ("key dtype: expected the same", lambda: fkd.universal_set(k.float() if last else k, 0.1)),
        ("eps: expected the same on every rank, got 0.1 on rank 0", lambda: fkd.universal_set(k, 0.2 if last else 0.1)),
        ("power: expected the same", lambda: levattention.shard_scores(k, 2.0 + last)),
        ("query (heads): expected", lambda: fkd.attention(q[:, : 4 - 2 * last], k, v, keep=NORM)),
        ("value (dim): expected", lambda: fkd.attention(q, k, v[..., : 5 - last], keep=NORM)),
        ("keep, rest, weights: expected", lambda: fkd.attention(q, k, v, keep=fk.select.KeyNorm(3 + last))),
        ("scale: expected", lambda: fkd.attention(q, k, v, keep=NORM, scale=0.1 + last)),
    ]
    for text, call in differing:
        raises(ValueError, text, call)
    with torch.set_grad_enabled(last):
        raises(ValueError, "torch.is_grad_enabled(): expected", lambda: fkd.attention(q, k, v, keep=NORM))
    other = fkd.leverage_scores if last else lambda key: fkd.universal_set(key, 0.1)
    raises(RuntimeError, "distributed: expected every rank in the same call", lambda: other(k))
    # One refuses its own arguments, and the others need not wait for it.
    bad = k * torch.nan if last else k
    refused = "key: expected finite numbers" if last else f"rank {world - 1} of {world} refused its arguments: key: exp"
    for call in (
        lambda: fkd.leverage_scores(bad),
        lambda: fkd.universal_set(bad, 0.1),
        lambda: fkd.attention(q, bad, v, keep=NORM),
    ):
        raises(ValueError, refused, call)
    refused = "eps: expected a finite number in (0.0, 1.0)" if last else "refused its arguments: eps: expected"
    raises(ValueError, refused, lambda: fkd.universal_set(k, 2.0 if last else 0.1))
    refused = "key: expected a torch.Tensor" if last else "refused its arguments: key: expected a torch.Tensor"
    raises(TypeError if last else ValueError, refused, lambda: fkd.leverage_scores(None if last else k))
    # And the group works on.
    leverage_scores = fkd.leverage_scores(k)
    torch.testing.assert_close(leverage_scores, shard(levattention.leverage_scores(problem()[1]), rank, world))


def what_is_not_supported_is_said(rank, world):
    q, k, v = (shard(tensor, rank, world) for tensor in problem())
    scan, forgets = fk.KeyScan(3), fk.budget(64, is_causal=True, memory="constant")
    for keep, rest, is_causal in (
        (fk.TopK(3), None, False),
        (fk.select.Leverage(3) | fk.Window(8), None, False),
        (fk.Outliers(3, 2, cohorts=2) | fk.Sinks(1), None, False),
        (NORM, fk.ClusterMeans(2), False),
        (NORM, fk.rest.UniformSample(3), False),
        # Its statistics would be those of a shard alone.
        (fk.Outliers(3, 2), fk.rest.UniformSample(3), False),
        # Their statistics would be those of this rank's queries.
        (scan | fk.Outliers(3, 2), None, False),
        (fk.Window(3), None, True),
        (forgets.keep, forgets.rest, True),
        (None, None, False),
    ):
        attend = functools.partial(fkd.attention, q, k, v, keep=keep, rest=rest, is_causal=is_causal)
        raises(ValueError, "keep, rest: expected what works over ranks, KeyScan alone or beside", attend)
        raises(ValueError, f"got {fk.Plan(keep, rest or fk.Drop())}{', is_causal=True' * is_causal};", attend)
    few = [shard(tensor, rank, world, "empty") for tensor in problem()]
    future = "is_causal: KeyScan(count=3) | Leverage(count=None, eps=0.2"
    raises(ValueError, future, lambda: fkd.attention(*few, keep=scan | fk.select.Leverage(eps=0.2), is_causal=True))
    raises(ValueError, "query: expected", lambda: fkd.attention(q[:, :, 1:], k, v, keep=scan, is_causal=True))
    flag = "is_causal: expected True or False"
    raises(TypeError, flag, lambda: fkd.attention(q, k, v, keep=scan, is_causal="False"))
    cohorts = fk.Outliers(3, 2, cohorts=2) | fk.Window(3)
    raises(ValueError, "query: expected", lambda: fkd.attention(q[:, :, 1:], k, v, keep=cohorts))
    raises(TypeError, "keep: expected a selector or None, got str", lambda: fkd.attention(q, k, v, keep="leverage"))
    raises(ValueError, "value: expected", lambda: fkd.attention(q, k[:, :, :0], v, keep=NORM))
    raises(ValueError, "key: expected at least one token on some rank", lambda: fkd.leverage_scores(k[:, :, :0]))
    raises(ValueError, "key: expected a tensor whose numbers can be read", lambda: fkd.leverage_scores(k.to("meta")))
    raises(ValueError, "timeout: expected a finite number in (0.0", lambda: fkd.Communicator(timeout=0))


def a_part_of_the_ranks_may_be_the_group(rank, world):
    members = list(range(1, world))
    group = dist.new_group(members)
    if rank not in members:
        raises(TypeError, "group: expected a process group with this process in it", lambda: fkd.Communicator(group))
        return
    k, comm = problem()[1], fkd.Communicator(group)
    actual = fkd.leverage_scores(shard(k, rank - 1, world - 1, "even"), group=comm)
    torch.testing.assert_close(actual, shard(levattention.leverage_scores(k), rank - 1, world - 1, "even"))
    # Nothing here keeps a group alive: one that is there at the interpreter's end can abort it.
    dist.destroy_process_group(group)
    group = None
    raises(RuntimeError, "weakly-referenced object no longer exists", lambda: comm.all_reduce(torch.ones(1)))


CHECKS = {
    check.__name__: check
    for check in (
        leverage_scores_are_those_of_one_process,
        float32_scores_are_the_float64_ones_rounded,
        the_universal_set_is_the_very_same,
        attention_is_that_of_one_process,
        windows_and_means_are_those_of_one_process,
        large_entries_are_rescaled_alike,
        the_bytes_of_means_do_not_grow,
        causal_attention_is_that_of_one_process,
        low_precision_is_kept_and_rounded_once,
        a_gradient_wanted_by_one_rank_arrives,
        queries_may_be_lazily_negated_and_all_of_them_missing,
        bytes_are_as_stated_and_do_not_grow,
        differing_arguments_are_an_error_on_every_rank,
        what_is_not_supported_is_said,
        a_part_of_the_ranks_may_be_the_group,
    )
}


def start(rank, world, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=20))


def run_checks(rank, world, folder):
    """Writes what failed, by check, to `<rank>.json`. A check that ends on some ranks only ends the run."""
    start(rank, world, folder)
    failures = dict.fromkeys(CHECKS, "not run")
    for name, check in CHECKS.items():
        try:
            check(rank, world)
            del failures[name]
        except (Exception, pytest.fail.Exception):
            failures[name] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(failures))
        dist.barrier()
    dist.destroy_process_group()


def lose_a_rank(rank, world, folder, how, moment):
    """Rank 0 dies or hangs before the others call `universal_set`, or between forward and backward of `attention`.

    They write two messages: that of this call, and that of one more.
    """
    start(rank, world, folder)
    comm = fkd.Communicator(timeout=TIMEOUT)
    q, k, v = leaves(problem(), rank, world)
    out = fkd.attention(q, k, v, keep=fk.select.Leverage(5), group=comm)
    dist.barrier()
    if rank == 0:
        if how == "hangs":
            time.sleep(120)
        os._exit(1)
    messages = []
    for call in (out.sum().backward if moment == "backward" else lambda: fkd.universal_set(k, 0.1, group=comm),) * 2:
        try:
            call()
            messages.append("no error")
        except RuntimeError as error:
            messages.append(str(error))
        time.sleep(0.5)  # the operation itself may time out a little after the wait for it
    (folder / f"{rank}.json").write_text(json.dumps(messages))
    dist.destroy_process_group()
