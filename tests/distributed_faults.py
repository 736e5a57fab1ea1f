"""What ranks do when one of them is lost, late, or does something else; `tests/campaign` draws these without end."""

import json
import os
import random
import re
import signal
import time

import torch.distributed as dist

import fewkeys as fk
import fewkeys.distributed as fkd
from distributed_worker import TIMEOUT, problem, shard, start

MEANS = fk.Plan(fk.Outliers(4, 6, cohorts=2) | fk.Window(5), fk.ClusterMeans(6, cohorts=2))
SCAN = fk.Plan(fk.KeyScan(5), fk.BlockMeans(2))


def attend(plan, is_causal=False):
    def call(q, k, v, group):
        return fkd.attention(q, k, v, keep=plan.keep, rest=plan.rest, is_causal=is_causal, group=group)

    return call


CALLS = {
    "scores": lambda q, k, v, group: fkd.leverage_scores(k, group=group),
    "set": lambda q, k, v, group: fkd.universal_set(k, 0.1, group=group),
    "lists": attend(fk.Plan(fk.select.Leverage(5))),
    "means": attend(MEANS),
    "scan": attend(SCAN, is_causal=True),
}
OTHERS = {
    "another plan": lambda q, k, v, group: attend(fk.Plan(fk.select.Leverage(6)))(q, k, v, group),
    "another call": lambda q, k, v, group: fkd.universal_set(k, 0.3, group=group),
    "other heads": lambda q, k, v, group: CALLS["lists"](q[:, :2], k[:, :1], v[:, :1], group),
    "another dimension": lambda q, k, v, group: CALLS["lists"](q[..., :5], k[..., :5], v, group),
    "another dtype": lambda q, k, v, group: CALLS["lists"](q.float(), k.float(), v.float(), group),
    "another batch": lambda q, k, v, group: CALLS["lists"](q[:1], k[:1], v[:1], group),
    "no number": lambda q, k, v, group: CALLS["lists"](q, k * float("nan"), v, group),
}
"""What one rank does where the others do "lists"."""
LOST = ("killed", "stopped", "late", "gone")


def meet(rank, world, folder, fault, call, victim, seed):
    """Every rank but a lost one writes what it got, and after how many seconds."""
    start(rank, world, folder)
    draw, group = random.Random(seed), fkd.Communicator(timeout=TIMEOUT if fault in LOST else 60.0)
    q, k, v = (shard(tensor, rank, world, "even") for tensor in problem())
    CALLS[call](q, k, v, None)
    dist.barrier()
    call_of_fault = CALLS[call]
    if rank == victim and fault in OTHERS:
        call_of_fault = OTHERS[fault]
    elif rank == victim:
        time.sleep(draw.uniform(0.0, 0.02))
        if fault == "killed" and draw.random() < 0.5:  # in the middle of a call
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.001, 0.02))
        elif fault in ("killed", "stopped"):
            os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
        elif fault == "late":
            time.sleep(2 * TIMEOUT)
        else:
            os._exit(0)
    begun, message = time.monotonic(), "no error"
    try:
        for _ in range(1 if fault in OTHERS else 200):
            call_of_fault(q, k, v, group)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - begun
    (folder / f"{rank}.json").write_text(json.dumps([message, seconds]))
    time.sleep(0.5)  # the operation itself may time out a little after the wait for it
    os._exit(0)


def wrong(folder, world, fault, call, victim):
    """What is not as it must be: every rank that is there ends with an error, in bounded time.

    What one rank does otherwise is said with its number.
    """
    for rank in range(world):
        if rank == victim and fault in LOST:
            continue
        file = folder / f"{rank}.json"
        if not file.exists():
            return f"{fault}, {call}: rank {rank} of {world} did not end"
        message, seconds = json.loads(file.read_text())
        kind = "RuntimeError" if fault in (*LOST, "another call") else "ValueError"
        named = fault in LOST or rank == victim or re.search(rf"ranks? ([0-9], )*{victim}\b", message)
        if not message.startswith(kind) or not named or seconds > 2 * TIMEOUT + 5:
            return f"{fault} on rank {victim}, {call}: rank {rank} of {world} after {seconds:.1f} s: {message}"
    return None
