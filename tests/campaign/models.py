"""The parts of the campaign that need a model: caches, and the commands."""

import copy
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch

import fewkeys as fk
from fewkeys.captures import Capture
from fewkeys.papers import sparsefinder
from tiny_models import llama

SCAN = fk.budget(64, is_causal=True).never_exact()
SMALL = fk.Plan(fk.select.RecentBlocks(16) | fk.Sinks(2), fk.rest.RunningMeans(5))
WINDOW = fk.Plan(fk.Window(9) | fk.Sinks(2))
CACHED = {
    "scan": (SCAN, "model"),
    "small": (SMALL, None),
    "window": (WINDOW, None),
    "by layer": ([SMALL, SCAN, WINDOW], "model"),
    "by head": ([(SCAN, SMALL), (SMALL, SMALL), (WINDOW, SCAN)], "model"),
    "int8": ([SCAN, SMALL, SCAN], "int8"),
}
"""Plans, and how scans hold their keys."""
MOST = 320
"""Tokens of one try."""


class Caches:
    """Random operations on a cache of left-padded sequences give the outputs of the applied plan over all tokens, or
    raise an error that says why not.
    """

    def __init__(self):
        self.model = llama().double()

    @torch.no_grad()
    def __call__(self, seed):
        draw, g = random.Random(seed), torch.Generator().manual_seed(seed)
        name = draw.choice(sorted(CACHED))
        with tempfile.TemporaryDirectory() as folder:
            self.name = name
            cache, (ids, real) = self.empty(), torch.zeros(2, 2, 0, dtype=torch.int64)
            pad = draw.choice([0, 0, 3, 40])
            for _ in range(draw.randint(2, 9)):
                action = draw.choice(["forward", "forward", "forward", "crop", "select", "repeat", "save", "copy"])
                if action == "forward" and ids.shape[1] < MOST:
                    new = torch.randint(1, 60, (len(ids), draw.choice([1, 1, 2, 30, 110])), generator=g)
                    kept = torch.ones_like(new)
                    if not ids.shape[1]:
                        kept[0, : min(pad, kept.shape[1] - 1)] = 0
                    ids, real = torch.cat([ids, new], 1), torch.cat([real, kept], 1)
                    actual = self.logits(ids, real, new.shape[1], cache)
                    want = self.wanted(ids, real, new.shape[1])
                    off = (actual - want)[kept.bool()].abs().max().item()
                    if not off <= 1e-6:
                        return f"{name}: {off:.2g} off after {ids.shape[1]}"
                elif action == "crop" and ids.shape[1]:
                    back = draw.randint(0, min(ids.shape[1] - 1, 150))
                    try:
                        cache.crop(-back)
                    except ValueError:
                        continue
                    ids, real = (part[:, : ids.shape[1] - back] for part in (ids, real))
                elif action == "select" and ids.shape[1]:
                    index = torch.tensor([draw.randrange(len(ids)) for _ in range(draw.randint(1, 3))])
                    cache.batch_select_indices(index)
                    ids, real = ids[index], real[index]
                elif action == "repeat" and ids.shape[1] and len(ids) < 3:
                    cache.batch_repeat_interleave(2)
                    ids, real = (part.repeat_interleave(2, 0) for part in (ids, real))
                elif action == "save":
                    cache.save(Path(folder) / "cache")
                    cache = self.empty()
                    cache.load(Path(folder) / "cache")
                elif action == "copy":
                    cache = copy.deepcopy(cache)
        return None

    def empty(self):
        plan, leaves = CACHED[self.name]
        return fk.cache(self.model, plan, leaves=leaves)

    def logits(self, ids, real, count, cache):
        """Of the last `count` tokens, the others being in the cache."""
        place = (real.cumsum(1) - 1).clamp_min(0)[:, -count:]
        arguments = {"attention_mask": real, "position_ids": place, "past_key_values": cache, "use_cache": True}
        return self.model(ids[:, -count:], **arguments).logits

    def wanted(self, ids, real, count):
        """From the whole sequence: leaves that are rounded in one piece, others by the applied plan."""
        plan, leaves = CACHED[self.name]
        if leaves == "int8":
            return self.logits(ids, real, ids.shape[1], fk.cache(self.model, plan, leaves=leaves))[:, -count:]
        plans = [plan] * 3 if isinstance(plan, fk.Plan) else plan
        always = tuple(
            tuple(one.never_exact() for one in (plan * 2 if len(plan) == 1 else plan))
            for plan in ((one,) if isinstance(one, fk.Plan) else one for one in plans)
        )
        with fk.apply(self.model, fk.ModelPlan(always)):
            place = (real.cumsum(1) - 1).clamp_min(0)
            out = self.model(ids, attention_mask=real, position_ids=place, use_cache=False).logits
        return out[:, -count:]


def _command(arguments):
    """The command line, silent, in a process of its own."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1), os.dup2(null, 2)
    torch.set_num_threads(1)
    from fewkeys import cli

    sys.exit(cli.main(arguments))


def _every_call(folder):
    capture = Capture.load(folder)
    return [list(capture.calls(layer)) for layer in range(capture.layers)]


def _results(folder):
    from fewkeys.judge.result import Report

    Report.load(folder / "results.json")


def _page(folder):
    if not (folder / "page.html").read_text().rstrip().endswith("</html>"):
        raise ValueError("half a page")


LOADS = {
    "capture": _every_call,
    "compare": _results,
    "tune": fk.ModelPlan.from_pretrained,
    "fit": sparsefinder.Sparsefinder.from_pretrained,
    "report": _page,
}
"""What reads what a command wrote."""


class Commands:
    """A command that writes files is killed at a random moment: the files are complete, and the command succeeds when
    it is run again.
    """

    def __init__(self):
        from transformers import BertConfig, BertModel

        from encoders import tokenizer
        from integrations.test_cli import SMALL as SIZES, TEXT

        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["campaign.models", "fewkeys.cli.fit", "integrations.test_cli", "sklearn"])
        self.held = tempfile.TemporaryDirectory()
        home = Path(self.held.name)
        torch.manual_seed(0)
        BertModel(BertConfig(**SIZES, vocab_size=15, max_position_embeddings=64)).save_pretrained(home / "model")
        tokenizer().save_pretrained(home / "model")
        (home / "words.txt").write_text(TEXT * 2)
        self.seconds = {}
        for name in LOADS:
            self.run(name, home / name)  # the first imports
            if name == "capture":
                shutil.rmtree(home / name)
            begun = time.monotonic()
            self.run(name, home / name)
            self.seconds[name] = time.monotonic() - begun

    def start(self, name, out):
        home = Path(self.held.name)
        text = [f"--model={home / 'model'}", f"--text={home / 'words.txt'}", "--sequences=4", "--length=32"]
        options = {
            "capture": [*text, f"--out={out}"],
            "compare": [*text, "--slots=4", f"--out={out}"],
            "tune": [*text, "--slots=8", f"--out={out}"],
            "fit": [*text, "--epochs=2", f"--out={out}"],
            "report": [str(home / "compare"), f"--html={out / 'page.html'}"],
        }
        process = self.context.Process(target=_command, args=([name, *options[name]],))
        process.start()
        return process

    def run(self, name, out):
        process = self.start(name, out)
        process.join()
        if process.exitcode:
            raise RuntimeError(f"fewkeys {name}: expected exit code 0, got {process.exitcode}")

    def __call__(self, seed):
        draw = random.Random(seed)
        name = draw.choice(sorted(LOADS))
        with tempfile.TemporaryDirectory(dir=self.held.name) as folder:
            out = Path(folder) / "out"
            if old := name != "capture" and draw.random() < 0.7:
                shutil.copytree(Path(self.held.name) / name, out)
            process = self.start(name, out)
            process.join(draw.uniform(0.0, 1.1) * self.seconds[name])
            process.kill()
            process.join()
            there = out.exists() and any(not path.name.startswith(".") for path in out.iterdir())
            try:
                if old or there:
                    LOADS[name](out)
                if name != "capture" or not there:
                    self.run(name, out)
                    LOADS[name](out)
            except Exception as error:
                return f"{name}: {type(error).__name__} {error}"
        return None
