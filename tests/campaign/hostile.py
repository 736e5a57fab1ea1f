"""The parts of the campaign in which others interfere: users who write caches or hold locks, bad files."""

import contextlib
import copy
import functools
import hashlib
import io
import json
import operator
import os
import random
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import torch

import fewkeys as fk
from fewkeys import cli, native
from fewkeys.core import trust
from fewkeys.native import build, sets
from integrations.test_report import BYTES, VALUES, Skipped, places, report

NOBODY = 65534


def in_a_child(work):
    """What `work` says in a forked process, in a line; nothing where it says nothing."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            torch.set_num_threads(1)  # the parent's threads are not here
            message = work() or ""
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
        os.write(writing, message[:1000].encode() + b".")
        os._exit(0)
    os.close(writing)

    def wait():
        with open(reading, "rb") as pipe:
            message = pipe.read().decode()
        code = os.waitpid(child, 0)[1]
        return message[:-1] or None if message.endswith(".") else f"ended with {code}"

    return wait


def swap(folder, file, theirs, turn):
    """Another file, a link to one, or another folder in place of what is there, where that is allowed; and back."""
    ours = f"{theirs}/{turn}"
    with contextlib.suppress(OSError):
        if turn % 3 == 2:
            os.rename(folder, f"{folder}.kept")
            os.symlink(theirs, folder) if turn % 2 else os.rename(theirs, folder)
        else:
            os.symlink(theirs / file.name, ours) if turn % 3 else shutil.copy(theirs / file.name, ours)
            os.rename(file, f"{file}.kept")
            os.rename(ours, file)
    for path in (file, folder):
        with contextlib.suppress(OSError):
            if path == folder and os.path.exists(f"{folder}.kept") and turn % 3 == 2:
                os.unlink(folder) if turn % 2 else os.rename(folder, theirs)
            os.rename(f"{path}.kept", path)
    with contextlib.suppress(OSError):
        os.unlink(ours)


class Libraries:
    """Kernels are correct and are never loaded from a file that another user or group could write, also if the file is
    replaced during the load or another process or user holds the lock.
    """

    def __init__(self):
        self.held = tempfile.TemporaryDirectory()
        home = Path(self.held.name)
        home.chmod(0o755)
        if (reason := native.missing()) is not None:
            raise RuntimeError(f"the campaign needs compiled kernels, and there are none: {reason}")
        self.rows = torch.randn(1, 2, 200, 16, generator=torch.Generator().manual_seed(0))
        self.plan = fk.budget(16).never_exact()
        self.want = self.attend()
        chosen = next(path for path in map(shutil.which, sets.COMPILERS) if path)
        subprocess.run(sets.command([chosen], sets.chosen(), str(home / "library.so"), "-O0"), check=True)
        self.library = (home / "library.so").read_bytes()
        copies = f'while [ "$1" != -o ]; do shift; done; exec cp {home / "library.so"} "$2"'
        compiler = home / "compiler"
        compiler.write_text(f'#!/bin/sh\ncase "$*" in *kernels.cpp*) {copies};; esac\nexec {chosen} "$@"\n')
        compiler.chmod(0o755)
        os.environ["CXX"], self.compiler = os.environ.get("CXX", ""), str(compiler)
        if not os.environ["CXX"]:
            del os.environ["CXX"]
        folder = home / "first"
        wait = in_a_child(lambda: self.tried(folder, 60.0))
        if message := wait():
            raise RuntimeError(message)
        (self.name,) = (path.name for path in folder.glob("*.so"))

    def attend(self):
        return fk.attention(self.rows, self.rows, self.rows, plan=self.plan, impl="native")

    def tried(self, folder, limit):
        """In a process of its own: what is wrong with kernels that may be kept in a folder."""
        os.environ |= {"CXX": self.compiler, "FEWKEYS_CACHE": str(folder), "FEWKEYS_NATIVE": "jit"}
        build.WAIT = limit
        build.spare_folder = lambda: Path(folder).parent / "spare"
        build._load.cache_clear()
        build._LOG.disabled = True
        if (reason := native.missing()) is not None:
            return f"no kernels: {reason}"
        if hashlib.sha256(self.library).hexdigest()[:16] not in build.identity():
            return "the library of another user was loaded"
        return None if torch.allclose(self.attend(), self.want, atol=1e-5) else "other answers"

    def raced(self, draw, above, file):
        """Another user swaps file and folder without end, while they are looked at and loaded."""
        folder, good = file.parent, self.library + hashlib.sha256(self.library).digest()
        theirs, other = above.parent / "theirs", self.library + b"another user's"
        theirs.mkdir()
        (theirs / file.name).write_bytes(other + hashlib.sha256(other).digest())
        for path in (theirs, theirs / file.name):
            os.chown(path, NOBODY, NOBODY)
        file.write_bytes(good)
        folder.chmod(draw.choice([0o755, 0o775, 0o777, 0o1777]))
        above.chmod(draw.choice([0o755, 0o777, 0o1777]))
        os.chown(folder, -1, NOBODY)
        swapper = os.fork()
        if not swapper:
            with contextlib.suppress(BaseException):
                os.setgroups([]), os.setresgid(NOBODY, NOBODY, NOBODY), os.setresuid(NOBODY, NOBODY, NOBODY)
                for turn in range(10**9):
                    swap(folder, file, theirs, turn)
            os._exit(0)
        try:
            for turn in range(draw.randint(100, 2000)):
                if turn % 10 == 0 and draw.random() < 0.5:  # somebody shuts the folder, or opens it
                    with contextlib.suppress(OSError):
                        os.chmod(folder, draw.choice([0o755, 0o777]))
                if trust.read_trusted(file) not in (None, good):
                    return "the bytes of another user were read"
            return in_a_child(lambda: self.tried(folder, 0.1))()
        finally:
            os.kill(swapper, signal.SIGKILL)
            os.waitpid(swapper, 0)

    def __call__(self, seed):
        draw = random.Random(seed)
        with tempfile.TemporaryDirectory() as parent:
            above = Path(parent) / "above"
            folder = above / "cache"
            folder.mkdir(parents=True)
            os.chmod(parent, 0o755)
            if os.getuid() == 0 and draw.random() < 0.3:
                return self.raced(draw, above, folder / self.name)
            file, lock = folder / self.name, (folder / self.name).with_suffix(".lock")
            other = self.library + b"another user's"
            file.write_bytes(other + hashlib.sha256(other).digest())
            root, holder, undo = os.getuid() == 0, None, [(above, 0o755), (folder, 0o755)]
            opened = draw.choice(["file", "folder", "above", "link", "group", *["owner"] * root])
            mode = draw.choice([0o775, 0o757, 0o777])
            if opened == "owner":
                os.chown(draw.choice([file, folder, above]), NOBODY, -1)
            elif opened == "group":
                os.chown(file, -1, NOBODY) if root else None
                file.chmod(0o664)
            elif opened == "link":
                file.rename(above / "other.so")
                file.symlink_to(above / "other.so")
            else:
                {"file": file, "folder": folder, "above": above}[opened].chmod(mode)
            locked = draw.choice([None, "process", "user", "folder", "pipe", "unwritable"])
            if locked in ("process", "user"):
                lock.touch()
                if locked == "user" and root:
                    os.chown(lock, NOBODY, NOBODY)
                holder = subprocess.Popen(["flock", "--no-fork", str(lock), "sleep", "600"])
            elif locked == "folder":
                lock.mkdir()
            elif locked == "pipe":
                os.mkfifo(lock)
            elif locked == "unwritable":
                folder.chmod(folder.stat().st_mode & 0o577)  # of others, as it was
            wait = in_a_child(lambda: self.tried(folder, draw.uniform(0.0, 0.3)))
            message = wait()
            if holder is not None:
                holder.kill()
                holder.wait()
            for path, usual in undo:
                path.chmod(usual)
            return message and f"{opened} {mode:o}, lock: {locked}: {message}"


def reports(seed):
    """`fewkeys report` of a results file with missing or changed values shows them or refuses them in one line."""
    draw = random.Random(seed)
    data = report(skipped=[Skipped("window", 16, "because")]).with_settings(text=["a.txt"]).to_dict()
    for _ in range(draw.randint(1, 4)):
        *way, last = draw.choice(places(data)[1:])
        inner = functools.reduce(operator.getitem, way, data)
        if draw.random() < 0.4:
            del inner[last]
        else:
            inner[last] = copy.deepcopy(
                draw.choice([*VALUES, *map(str, VALUES), draw.uniform(-1e9, 1e9), data.get("rows")])
            )
    content = draw.choice(BYTES) if draw.random() < 0.02 else json.dumps(data).encode()
    if draw.random() < 0.1:
        content = content[: draw.randrange(len(content) + 1)]
    out, err = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        path.write_bytes(content)
        more = ["--html", str(Path(folder) / "page.html")] if draw.random() < 0.1 else []
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(["report", str(path), *more])
    message = err.getvalue()
    if code not in (0, 2) or (code == 2) != bool(message) or message.count("\n") > 1:
        return f"code {code}: {message[:200]!r}"
    return None
