"""The parts of the campaign: each tries one thing with one seed, and says in a line what went wrong, or nothing."""

import copy
import math
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

import fewkeys as fk
from campaign.calls import calls
from campaign.hostile import reports
from campaign.kernels import kernels
from campaign.models import Caches, Commands
from campaign.numbers import derivatives, magnitudes
from distributed_faults import CALLS, LOST, OTHERS, meet, wrong
from fewkeys.core.records import parse
from fewkeys.memory import Stream
from parts.test_loaders import WRITTEN, damaged

SCAN = fk.Plan(fk.KeyScan(40), fk.BlockMeans(3))
STREAMS = [
    fk.Plan(fk.select.RecentBlocks(32) | fk.Sinks(2), fk.rest.RunningMeans(6)),
    fk.budget(32, is_causal=True, memory="constant"),
    fk.Plan(fk.Window(9) | fk.Sinks(3)),
    SCAN,
]


def streams(seed):
    """Random operations on a stream give the outputs of attention over the whole sequence, or raise an error that says
    why not.
    """
    draw, g = random.Random(seed), torch.Generator().manual_seed(seed)
    plan, batch, dim = draw.choice(STREAMS), 2, 8
    stream = fk.stream(plan)
    query, key, value = (torch.zeros(batch, heads, 0, dim, dtype=torch.float64) for heads in (4, 2, 2))
    for _ in range(draw.randint(2, 8)):
        action = draw.choice(["append", "append", "attend", "crop", "select", "save", "copy"])
        if action in ("append", "attend"):
            count = draw.choice([1, 1, 7, 32, 90])
            new = [torch.randn(batch, heads, count, dim, generator=g, dtype=torch.float64) for heads in (4, 2, 2)]
            query, key, value = (torch.cat(pair, 2) for pair in zip((query, key, value), new, strict=True))
            stream.append(new[1], new[2])
            actual = stream.attend(new[0])
            want = fk.attention(query, key, value, plan=plan.never_exact(), is_causal=True, impl="torch")[:, :, -count:]
            if not torch.allclose(actual, want, atol=1e-6):
                return f"{plan}: {(actual - want).abs().max():.2g} off after {key.shape[2]}"
        elif action == "crop" and key.shape[2]:
            length = max(0, key.shape[2] - draw.randint(0, 40))
            try:
                stream.crop(length)
            except ValueError:
                continue
            query, key, value = (x[:, :, :length] for x in (query, key, value))
        elif action == "select" and key.shape[2]:
            index = torch.tensor([draw.randrange(batch) for _ in range(batch)])
            stream.select(index)
            query, key, value = (x[index] for x in (query, key, value))
        elif action == "copy":
            stream = copy.deepcopy(stream)
        elif action == "save":
            with tempfile.TemporaryDirectory() as folder:
                stream.save(Path(folder) / "stream")
                stream = Stream.load(Path(folder) / "stream")
    return None


class Files:
    """A mutated file of any format gives the data that were saved, or raises `ValueError`."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory()
        self.held = {}
        for name, (write, load, inner) in WRITTEN.items():
            folder = Path(self.folder.name) / name
            folder.mkdir()
            write(folder)
            self.held[name] = {path: path.read_bytes() for path in (folder / inner).iterdir()}, folder / inner, load

    def __call__(self, seed):
        draw = random.Random(seed)
        held, folder, load = self.held[draw.choice(sorted(self.held))]
        path = draw.choice(sorted(held))
        data = damaged(held[path], draw)
        path.write_bytes(data)
        try:
            load(folder)
        except (ValueError, FileNotFoundError):
            return None
        except Exception as error:
            return f"{path.name}: {type(error).__name__} {error}"
        finally:
            path.write_bytes(held[path])
        same = parse(data) == parse(held[path]) if path.suffix == ".json" else data == held[path]
        return None if same else f"{path.name}: damaged, and taken"


SAVE = """
import sys, torch, fewkeys as fk
from pathlib import Path
folder, stream = Path(sys.argv[1]), fk.stream(fk.budget(32, is_causal=True))
print("ready", flush=True)
number = 0
while True:
    number += 1
    rows = torch.full((1, 1, 1, 4), float(number))
    stream.append(rows, rows)
    stream.save(folder / "stream")
    fk.Plan(fk.Window(number)).save_pretrained(folder / "plan")
"""


def kills(seed):
    """A process that saves again and again is killed at a random moment: the file is complete."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        process = subprocess.Popen([sys.executable, "-c", SAVE, name], stdout=subprocess.PIPE, text=True)
        process.stdout.readline()
        time.sleep(random.Random(seed).uniform(0.0, 0.3))
        process.kill()
        process.wait()
        process.stdout.close()
        try:
            for path, load in (
                (folder / "stream", Stream.load),
                (folder / "plan", fk.Plan.from_pretrained),
            ):
                if path.exists() and (path.is_file() or any(not p.name.startswith(".") for p in path.iterdir())):
                    load(path)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return None


def crowds(seed):
    """Threads of a process and of its fork attend, save and load one plan: the outputs are the same bits, and every
    load gives one of the saved plans.
    """
    wrong, rows = [], torch.randn(1, 2, 200, 16, generator=torch.Generator().manual_seed(seed))
    plan = fk.budget(16).never_exact()
    want = fk.attention(rows, rows, rows, plan=plan)
    with tempfile.TemporaryDirectory() as folder:
        fk.Plan(fk.Window(1)).save_pretrained(folder)

        def work(number):
            try:
                for turn in range(20):
                    fk.Plan(fk.Window(100 * number + turn + 1)).save_pretrained(folder)
                    fk.Plan.from_pretrained(folder)
                    if not torch.equal(fk.attention(rows, rows, rows, plan=plan), want):
                        wrong.append("other bits")
            except Exception as error:
                wrong.append(f"{type(error).__name__}: {error}")

        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)  # those of the parent are not here
        every = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for one in every:
            one.start()
        for one in every:
            one.join()
        if child == 0:
            os._exit(bool(wrong))
        wrong += ["in the other process"] * (os.waitpid(child, 0)[1] != 0)
        left = [path.name for path in Path(folder).iterdir() if path.name != "plan.json"]
        return (wrong + [f"left {name}" for name in left] + [None])[0]


def full_disks(seed):
    """On a full disk the old file stays, and no other file is left."""
    stream = fk.stream(fk.budget(32, is_causal=True))
    rows = torch.randn(1, 1, 100, 8, generator=torch.Generator().manual_seed(seed))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stream"
        stream.save(path)
        before = path.read_bytes()
        stream.append(rows, rows)
        limits, old = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (random.Random(seed).randint(0, 5000), limits[1]))
        try:
            stream.save(path)
        except OSError:
            pass
        else:
            return "a file beyond the limit was written"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, old)
        if path.read_bytes() != before or os.listdir(folder) != ["stream"]:
            return f"the old file is gone, or a draft is left: {os.listdir(folder)}"
    return None


def folders(seed):
    """Saving into a folder that cannot be written or opened raises `OSError` and changes nothing."""
    draw = random.Random(seed)
    saves = {
        "stream": lambda path: fk.stream(fk.budget(32, is_causal=True)).save(path / "stream"),
        "plan": lambda path: fk.Plan(fk.Window(3)).save_pretrained(path),
        "model plan": lambda path: fk.ModelPlan(((fk.Plan(fk.Window(3)),),)).save_pretrained(path),
        "below": lambda path: fk.Plan(fk.Window(3)).save_pretrained(path / "a" / "b"),
    }
    name = draw.choice(sorted(saves))
    with tempfile.TemporaryDirectory() as parent:
        os.chmod(parent, 0o755)
        folder = Path(parent) / "folder"
        folder.mkdir()
        if draw.random() < 0.5 and name != "below":
            saves[name](folder)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        folder.chmod(draw.choice([0o555, 0o000]))
        child = os.fork()
        if child == 0:
            code = 1
            try:
                if os.getuid() == 0:  # who may write everywhere
                    os.setresgid(65534, 65534, 65534), os.setresuid(65534, 65534, 65534)
                saves[name](folder)
            except OSError:
                code = 0
            finally:
                os._exit(code)
        code = os.waitpid(child, 0)[1]
        folder.chmod(0o755)
        if code or {path.name: path.read_bytes() for path in folder.iterdir()} != before:
            return f"{name}: no OSError, or something was written"
    return None


class Soak:
    """Forward passes with random plans do not increase the memory."""

    def __init__(self):
        self.done, self.first = 0, math.inf

    def __call__(self, seed):
        draw, g = random.Random(seed), torch.Generator().manual_seed(seed)
        causal = draw.random() < 0.5
        plan = fk.budget(draw.choice([16, 32, 64]), is_causal=causal)
        tokens = draw.choice([100, 500])
        q, k, v = (torch.randn(1, 2, tokens, 16, generator=g) for _ in range(3))
        fk.attention(q, k, v, plan=plan.never_exact(), is_causal=causal)
        self.done += 1
        pages = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        if self.done == 200:
            self.first = pages
        return f"{(pages - self.first) >> 20} MB more than after 200" if pages > self.first + (64 << 20) else None


class Ranks:
    """One of two or three ranks is killed, stopped, late, gone, or makes another call: every other rank raises an error
    that names it.
    """

    def __init__(self):
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["distributed_faults"])

    def __call__(self, seed):
        draw = random.Random(seed)
        fault, world = draw.choice([*LOST, *OTHERS]), draw.choice([2, 3])
        call, victim = "lists" if fault in OTHERS else draw.choice(sorted(CALLS)), draw.randrange(world)
        with tempfile.TemporaryDirectory() as name:
            promise_of = (world, Path(name), fault, call, victim, seed)
            ranks = [self.context.Process(target=meet, args=(rank, *promise_of)) for rank in range(world)]
            for rank in ranks:
                rank.start()
            for number, rank in enumerate(ranks):
                if number != victim or fault in OTHERS:
                    rank.join(60)
            for rank in ranks:
                rank.kill()
                rank.join()
            return wrong(Path(name), world, fault, call, victim)


PARTS = {
    "kernels": lambda: kernels,
    "calls": lambda: calls,
    "streams": lambda: streams,
    "caches": Caches,
    "derivatives": lambda: derivatives,
    "magnitudes": lambda: magnitudes,
    "files": Files,
    "reports": lambda: reports,
    "kills": lambda: kills,
    "commands": Commands,
    "crowds": lambda: crowds,
    "full disks": lambda: full_disks,
    "folders": lambda: folders,
    "ranks": Ranks,
    "soak": Soak,
}
"""What makes each part."""
SHARES = {"files": 5, "kernels": 2, "calls": 3, "kernels, sanitized": 2, "streams": 2, "caches": 2}
"""Of the time, where it is not one."""


def promise_of(part):
    """What a part promises, in a line."""
    made = PARTS[part]
    text = (made if isinstance(made, type) else made()).__doc__
    return " ".join(text.split()).rstrip(".")
