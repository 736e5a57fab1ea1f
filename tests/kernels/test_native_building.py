"""Compiling the kernels, and keeping them where only this user writes. Without a compiler, torch does the work."""

import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import fewkeys as fk
from cases import SHAPES
from fewkeys.native import build, sets, tensors
from native_cases import MEANS, needs_compiler

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def wheel(once):
    """The folder of a wheel's libraries, with that of the highest set: the one that all tests run."""
    return once("libraries", lambda folder: shutil.copy(build.place(), folder / f"{sets.chosen()}.so"))


@pytest.fixture
def compiler(wheel, tmp_path):
    """Makes compilers that do as `lines` of shell say before they compile; what comes out was compiled before."""
    (library,) = wheel.iterdir()
    chosen = next(path for path in map(shutil.which, sets.COMPILERS) if path)
    copies = f'while [ "$1" != -o ]; do shift; done; exec cp {library} "$2"'

    def made(name, lines):
        path = tmp_path / name
        path.write_text(f'#!/bin/sh\n{lines}\ncase "$*" in *kernels.cpp*) {copies};; esac\nexec {chosen} "$@"\n')
        path.chmod(0o755)
        return str(path)

    return made


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path, compiler):
    monkeypatch.setenv("FEWKEYS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", compiler("quick", ""))
    build._load.cache_clear()
    yield
    build._load.cache_clear()


@pytest.mark.long
def test_a_processor_is_told_by_what_the_system_says_of_it(monkeypatch):
    monkeypatch.setattr(sets, "cpuinfo", lambda *names: [])
    monkeypatch.setattr("platform.processor", lambda: "its name")
    assert sets.processor() == "its name"
    monkeypatch.setattr(sets, "cpuinfo", lambda *names: ["flags: a", "model name: b", "flags: a"])
    assert sets.processor() == "flags: a\nmodel name: b"


def test_kernels_are_compiled_once(tmp_path, monkeypatch, caplog):
    assert build.missing() is None
    assert f"compiling the kernels for {sets.chosen()}" in caplog.text
    assert str(tmp_path / "cache") in caplog.text
    assert build.place().parent == tmp_path / "cache" / "kernels"
    assert build.place().stat().st_mode & 0o777 == 0o755
    caplog.clear()
    build._load.cache_clear()
    assert build.missing() is None
    assert "compiling" not in caplog.text


def test_the_same_sources_elsewhere_are_not_compiled_again(tmp_path, monkeypatch):
    """As in another environment, or a copy of the package."""
    assert build.missing() is None
    first = build.place()
    build._load.cache_clear()
    monkeypatch.setattr(sets, "HERE", shutil.copytree(sets.HERE, tmp_path / "copy"))
    assert build.place() == first
    with (tmp_path / "copy" / sets.SOURCES[-1]).open("a") as source:
        source.write("// another one")
    build._load.cache_clear()
    assert build.place() not in (None, first)


def test_every_source_decides_what_is_kept():
    """A file that is left out would be compiled, but not again once it changes."""
    included = {name for file in sets.SOURCES for name in re.findall('#include "(.+)"', (sets.HERE / file).read_text())}
    assert included | {"kernels.cpp"} == set(sets.SOURCES)


@pytest.mark.parametrize(
    ("machine", "flags", "names"),
    [
        ("x86_64", sets._V2, ["v2"]),
        ("x86_64", sets._V3 | {"aes"}, ["v2", "v3"]),
        # Registers that the system does not save: Linux then names none of AVX's flags.
        ("x86_64", sets._V4 - {"avx512f"}, ["v2", "v3"]),
        ("AMD64", sets._V4, ["v2", "v3", "v4"]),
        ("x86_64", sets._VNNI, ["v2", "v3", "v4", "vnni"]),
        ("x86_64", sets._AMX, ["v2", "v3", "v4", "vnni", "amx"]),
        ("x86_64", frozenset({"sse2"}), []),
        ("x86_64", None, ["v2"]),
        ("aarch64", None, ["neon"]),
        ("riscv64", None, []),
    ],
)
def test_the_processors_flags_tell_its_instruction_sets(monkeypatch, machine, flags, names):
    monkeypatch.setattr(sets.platform, "machine", lambda: machine)
    monkeypatch.setattr(sets, "_flags", lambda: flags)
    monkeypatch.delenv(sets.FORCED, raising=False)
    assert [str(one) for one in sets.possible()] == names
    assert str(sets.chosen()) == (names or ["None"])[-1]
    if not names:
        assert "none of which this processor" in build.missing()


@pytest.mark.parametrize(("name", "reason"), [("v4", "which this processor lacks"), ("v5", "no instruction set")])
def test_an_instruction_set_that_cannot_run_is_refused(monkeypatch, name, reason):
    monkeypatch.setattr(sets, "_flags", lambda: sets._V3)
    monkeypatch.setenv(sets.FORCED, name)
    with pytest.raises(ValueError, match=rf"FEWKEYS_ISA: expected one of v2, v3, got '{name}', .*{reason}"):
        build.missing()


def test_kernels_that_are_asked_for_by_name_are_not_done_without(monkeypatch):
    monkeypatch.setenv(sets.FORCED, str(sets.possible()[0]))
    monkeypatch.setenv("CXX", "/nowhere")
    with pytest.raises(RuntimeError, match=r"FEWKEYS_ISA=.*: expected kernels of this set, got none"):
        build.missing()


def test_a_wheels_libraries_need_no_compiler(wheel, monkeypatch):
    """Taken as they are, unless kernels are to be compiled or to count."""
    monkeypatch.setattr(build, "LIBRARIES", wheel)
    monkeypatch.setenv("CXX", "/nowhere")
    assert build.missing() is None
    assert build.place().parent == wheel
    assert build.instruction_set() == str(sets.chosen())
    assert build.identity().startswith(f"{sets.chosen()}-")
    for name, value in ((build.SWITCH, "jit"), (build.COUNT, "1")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            build._load.cache_clear()
            assert "/nowhere" in build.missing()


@pytest.mark.parametrize("threads", [build._threads(), None], ids=["torch's", "its own"])
def test_threads_are_those_of_torch_or_its_own(threads, wheel, monkeypatch):
    assert build._threads() is not None
    monkeypatch.setattr(build, "LIBRARIES", wheel)
    monkeypatch.setattr(build, "_threads", lambda: threads)
    q, k, v = SHAPES["plain"].draw(dtype=torch.float32)
    before, actual = torch.get_num_threads(), []
    for number in (1, 3):
        torch.set_num_threads(number)
        actual.append(fk.attention(q, k, v, plan=MEANS[0], impl="native"))
    torch.set_num_threads(before)
    assert torch.equal(*actual)


def test_no_compiler(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert "no C++ compiler" in build.missing()


def test_a_compiler_that_fails(monkeypatch, tmp_path, compiler):
    for name, lines in (("broken", "exit 1"), ("liar", "[ $1 = --version ] && exit 0; echo 'cannot' >&2; exit 1")):
        monkeypatch.setenv("CXX", compiler(name, lines))
        build._load.cache_clear()
        assert "failed" in build.missing()
    assert "cannot" in build.missing()
    assert not list((tmp_path / "cache").rglob("*.so"))
    q, k, v = SHAPES["plain"].draw(dtype=torch.float32)
    actual = fk.attention(q, k, v, plan=MEANS[0], impl="auto")
    torch.testing.assert_close(actual, fk.attention(q, k, v, plan=MEANS[0], impl="reference"), rtol=1e-4, atol=1e-5)


def _made_by_another(folder, monkeypatch):
    lstat = os.lstat

    def as_another(path, **options):
        status = lstat(path, **options)
        return os.stat_result((*status[:4], os.getuid() + 4711, *status[5:10])) if path == folder else status

    monkeypatch.setattr(Path, "lstat", as_another)


OPEN_TO_OTHERS = {
    "the group writes it": lambda folder, _: folder.chmod(0o775),
    "all add to it": lambda folder, _: folder.chmod(0o1777),
    "another user": _made_by_another,
    "a link": lambda folder, _: folder.rename(folder.with_name("other")).parent.joinpath("kernels").symlink_to("other"),
}


@pytest.mark.parametrize("opened", OPEN_TO_OTHERS.values(), ids=OPEN_TO_OTHERS)
def test_a_library_that_others_may_have_written_is_not_loaded(opened, tmp_path, monkeypatch, caplog):
    """Kernels are compiled for this process, and are kept nowhere."""
    assert build.missing() is None
    build._load.cache_clear()
    opened(tmp_path / "cache" / "kernels", monkeypatch)
    caplog.clear()
    assert build.missing() is None
    assert "kept in no folder" in caplog.text
    assert build.place() is None


def test_a_folder_of_root_is_read(tmp_path, monkeypatch, caplog):
    """As in the image of a container, whose processes run as another user."""
    assert build.missing() is None
    build._load.cache_clear()
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    if (tmp_path / "cache" / "kernels").stat().st_uid == 0:
        caplog.clear()
        assert build.missing() is None
        assert "compiling" not in caplog.text


@pytest.mark.long
def test_no_home(tmp_path):
    """A user whom the system does not know, as in many containers."""
    code = "from pathlib import Path\n"
    code += "def home(): raise RuntimeError('Could not determine home directory.')\n"
    code += "Path.home = home\nfrom fewkeys.native import build\n"
    code += "print(build.missing(), build.place())"
    keep = {name: value for name, value in os.environ.items() if name not in ("HOME", "FEWKEYS_CACHE")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=keep | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"None {tmp_path}/fewkeys-{os.getuid()}/kernels/")


@pytest.mark.parametrize("what", ["cannot be made", "is full"])
def test_where_nothing_can_be_kept_kernels_are_compiled_for_this_process(what, tmp_path, monkeypatch):
    if what == "is full":
        monkeypatch.setattr(os, "fsync", lambda *_: os.write(-1, b""))
    else:
        (tmp_path / "cache").write_text("")
    assert build.missing() is None
    assert build.place() is None


@pytest.mark.long
def test_threads_compile_once(tmp_path, monkeypatch, compiler):
    calls = tmp_path / "calls"
    monkeypatch.setenv("CXX", compiler("count", f'case "$*" in *kernels.cpp*) echo 1 >> {calls}; sleep 1;; esac'))
    every = [threading.Thread(target=build.missing) for _ in range(4)]
    [one.start() for one in every]
    [one.join() for one in every]
    assert build.missing() is None
    assert calls.read_text().split() == ["1"]


def test_a_compiler_that_was_killed_leaves_nothing(tmp_path, monkeypatch, compiler):
    monkeypatch.setenv("CXX", compiler("killed", 'case "$*" in *kernels.cpp*) kill -9 $$;; esac'))
    assert "failed" in build.missing()
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_the_switch(monkeypatch):
    monkeypatch.setenv("FEWKEYS_NATIVE", "0")
    q, k, v = SHAPES["plain"].draw(dtype=torch.float32)
    with pytest.raises(ValueError, match=r"impl='native': expected .*FEWKEYS_NATIVE=0.*; use impl='torch'"):
        fk.attention(q, k, v, keep=fk.Window(5), impl="native")
    assert build.missing() == "FEWKEYS_NATIVE=0 turns them off"
    assert not tensors.suits(torch.ones(1))
