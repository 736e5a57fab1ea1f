"""Keys split over ranks: the same answers as one process, bytes that do not grow, and no rank that waits for ever."""

import json
import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fewkeys.distributed as fkd
from distributed_faults import OTHERS, meet, wrong
from distributed_worker import CHECKS, TIMEOUT, lose_a_rank, run_checks

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def launch():
    """Starts the ranks of a group as processes forked from one that has imported torch; ranks end or are killed."""
    context = multiprocessing.get_context("forkserver")
    # What the ranks need, with what assert_close imports.
    context.set_forkserver_preload(["fewkeys.distributed", "hypothesis", "pytest", "torch.distributed.tensor"])
    started = []

    def begin(target, world, folder, *more):
        ranks = [context.Process(target=target, args=(rank, world, folder, *more)) for rank in range(world)]
        for rank in ranks:
            rank.start()
        started.extend(ranks)
        return ranks

    yield begin
    for rank in started:
        rank.kill()
        rank.join()


@pytest.fixture(scope="module")
def failures(launch, once):
    """What the ranks of a group found wrong, by world size."""

    def of(world):
        def run(folder):
            for rank in launch(run_checks, world, folder):
                rank.join(120)

        folder = once(f"ranks{world}", run)
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]

    return of


@pytest.mark.long
@pytest.mark.parametrize("world", [3])
@pytest.mark.parametrize("check", CHECKS)
def test_on_every_rank(check, world, failures):
    wrong = [
        f"rank {rank} of {world}: {actual[check]}" for rank, actual in enumerate(failures(world)) if check in actual
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "how", "moment"), [(4, "dies", "forward"), (2, "hangs", "forward"), (2, "dies", "backward")]
)
def test_a_lost_rank_is_an_error_within_the_timeout(world, how, moment, launch, tmp_path):
    ranks = launch(lose_a_rank, world, tmp_path, how, moment)
    for rank in ranks[1:]:
        rank.join(60)
        assert rank.exitcode == 0
    for rank in range(1, world):
        first, second = json.loads((tmp_path / f"{rank}.json").read_text())
        assert waited(first, rank, world) < TIMEOUT + 5
        if moment == "forward":
            # The operation ended with the wait. In the background it would keep the process from its end.
            assert waited(second, rank, world) < TIMEOUT / 2


FAULTS = [(fault, "lists", 1) for fault in OTHERS] + [
    ("killed", "lists", 2),
    ("stopped", "scan", 0),
    ("late", "set", 2),
]


@pytest.mark.long
@pytest.mark.parametrize(("fault", "call", "victim"), FAULTS)
def test_a_rank_that_is_lost_or_does_something_else_is_an_error(fault, call, victim, launch, tmp_path):
    ranks = launch(meet, 3, tmp_path, fault, call, victim, 9)  # killed in the middle of a call
    for rank, process in enumerate(ranks):
        if rank != victim or fault in OTHERS:
            process.join(30)
    assert wrong(tmp_path, 3, fault, call, victim) is None


def waited(message, rank, world):
    """The seconds that a message speaks of."""
    start = rf"distributed: rank {rank} of {world} waited (\S+) s for an all-\w+ of \d+ \w+ and got no answer"
    actual = re.match(rf"{start}.*; a rank has failed or is slower than timeout={TIMEOUT}; ", message)
    assert actual, message
    return float(actual[1])


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match=r"^distributed: expected an initialised process group, got none; start"):
        fkd.leverage_scores(torch.ones(1, 1, 3, 2))


@pytest.mark.long
def test_the_documented_example_runs_under_torchrun(tmp_path):
    page = (ROOT / "docs" / "distributed.md").read_text()
    script = tmp_path / "script.py"
    script.write_text(re.search(r"```python\n(.*?)```", page, re.S)[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):  # both may write to the same line
        assert re.search(rf"rank {rank} of 2: \(1, 4, 512, 32\), \d+ bytes sent", done.stdout), done.stdout
