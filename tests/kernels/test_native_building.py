"""Compiling the kernels, and keeping them: whole, trusted, once. Without a compiler that works, torch does the work."""

import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys

import pytest
import torch

import fewkeys as fk
from cases import SHAPES
from fewkeys import native
from fewkeys.native import build, sets
from native_cases import MEANS, needs_compiler

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def wheel(once):
    """The folder of a wheel's libraries, with that of the highest set: the one that all tests run, and its checksum."""
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
    assert native.missing() is None
    assert f"compiling the kernels for {sets.chosen()}" in caplog.text
    assert str(tmp_path / "cache") in caplog.text
    (file,) = (tmp_path / "cache").glob("*.so")
    assert file.name.startswith("kernels-")
    build._load.cache_clear()
    monkeypatch.setattr(build, "_compile", None)
    assert native.missing() is None


def test_a_library_that_is_damaged_is_compiled_again(tmp_path):
    assert native.missing() is None
    (file,) = (tmp_path / "cache").glob("*.so")
    whole = file.read_bytes()
    assert file.stat().st_mode & 0o777 == 0o755
    for damaged in (b"", whole[:1000], whole[:-1], whole[:-40] + b"x" + whole[-39:]):
        file.write_bytes(damaged)
        assert build._kept(file, sets.chosen()) is None
    build._load.cache_clear()
    assert native.missing() is None
    assert build._kept(file, sets.chosen()).place == file


def test_the_same_sources_elsewhere_are_not_compiled_again(tmp_path, monkeypatch):
    """As in another environment, or a copy of the package."""
    assert native.missing() is None
    build._load.cache_clear()
    monkeypatch.setattr(sets, "HERE", shutil.copytree(sets.HERE, tmp_path / "copy"))
    monkeypatch.setattr(build, "_compile", None)
    assert native.missing() is None
    with (tmp_path / "copy" / sets.SOURCES[-1]).open("a") as source:
        source.write("// another one")
    build._load.cache_clear()
    with pytest.raises(TypeError):
        native.missing()


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
        assert "none of which this processor" in native.missing()


@pytest.mark.parametrize(("name", "reason"), [("v4", "which this processor lacks"), ("v5", "no instruction set")])
def test_an_instruction_set_that_cannot_run_is_refused(monkeypatch, name, reason):
    monkeypatch.setattr(sets, "_flags", lambda: sets._V3)
    monkeypatch.setenv(sets.FORCED, name)
    with pytest.raises(ValueError, match=rf"FEWKEYS_ISA: expected one of v2, v3, got '{name}', .*{reason}"):
        native.missing()


def test_kernels_that_are_asked_for_by_name_are_not_done_without(monkeypatch):
    monkeypatch.setenv(sets.FORCED, str(sets.possible()[0]))
    monkeypatch.setenv("CXX", "/nowhere")
    with pytest.raises(RuntimeError, match=r"FEWKEYS_ISA=.*: expected kernels of this set, got none"):
        native.missing()


def test_a_wheels_libraries_need_no_compiler(wheel, tmp_path, monkeypatch):
    """Taken as they are, but for those of another set, unless kernels are to be compiled or to count."""
    monkeypatch.setattr(build, "LIBRARIES", wheel)
    monkeypatch.setenv("CXX", "/nowhere")
    assert native.missing() is None
    assert build.place().parent == wheel
    assert native.instruction_set() == str(sets.chosen())
    assert build.identity().startswith(f"{sets.chosen()}-")
    for name, value in ((build.SWITCH, "jit"), (build.COUNT, "1")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            build._load.cache_clear()
            assert "/nowhere" in native.missing()
    build._load.cache_clear()
    other = sets.InstructionSet("other", "", frozenset(), ())
    monkeypatch.setattr(build, "LIBRARIES", tmp_path)
    shutil.copy(wheel / f"{sets.chosen()}.so", tmp_path / "other.so")
    monkeypatch.setattr(sets, "chosen", lambda: other)
    with pytest.raises(RuntimeError, match=r"expected those of other in .*other.so, got those of"):
        native.missing()


def test_a_wheels_library_that_is_damaged_is_named(wheel, tmp_path, monkeypatch):
    """A loader that maps a truncated one dies."""
    (whole,) = wheel.iterdir()
    damaged = tmp_path / whole.name
    monkeypatch.setattr(build, "LIBRARIES", tmp_path)
    for size in (0, 1000, whole.stat().st_size - 1):
        damaged.write_bytes(whole.read_bytes()[:size])
        build._load.cache_clear()
        assert native.missing() == f"{damaged} is damaged; install fewkeys again"


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
    assert "no C++ compiler" in native.missing()


def test_a_compiler_that_fails(monkeypatch, tmp_path, compiler):
    for name, lines in (("broken", "exit 1"), ("liar", "[ $1 = --version ] && exit 0; echo 'cannot' >&2; exit 1")):
        monkeypatch.setenv("CXX", compiler(name, lines))
        build._load.cache_clear()
        assert "failed" in native.missing()
    assert "cannot" in native.missing()
    assert not list((tmp_path / "cache").glob("*.so"))
    q, k, v = SHAPES["plain"].draw(dtype=torch.float32)
    actual = fk.attention(q, k, v, plan=MEANS[0], impl="auto")
    torch.testing.assert_close(actual, fk.attention(q, k, v, plan=MEANS[0], impl="reference"), rtol=1e-4, atol=1e-5)


def test_a_folder_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEWKEYS_CACHE", str(tmp_path / "file" / "below"))
    assert native.missing() is None


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The file of a library that was compiled and is kept, but was not loaded from there yet."""
    folder = tmp_path / "above" / "cache"
    monkeypatch.setattr(build, "spare_folder", lambda: tmp_path / "spare")
    assert native.missing() is None
    build._load.cache_clear()
    folder.parent.mkdir()
    (tmp_path / "cache").rename(folder)
    monkeypatch.setenv("FEWKEYS_CACHE", str(folder))
    (file,) = folder.glob("*.so")
    return file


def _belongs_to_another(file, monkeypatch):
    fstat, number = os.fstat, file.stat().st_ino

    def as_another(descriptor):
        status = fstat(descriptor)
        return os.stat_result((*status[:4], os.getuid() + 4711, *status[5:10])) if status.st_ino == number else status

    monkeypatch.setattr(os, "fstat", as_another)


def _is_a_link(file, monkeypatch):
    file.rename(file.with_suffix(".kept"))
    file.symlink_to(file.with_suffix(".kept"))


def _lies_behind_a_link_of_a_shared_folder(file, monkeypatch):
    shared = file.parent.parent.parent / "shared"
    shared.mkdir()
    (shared / "link").symlink_to(file.parent)
    shared.chmod(0o777)
    monkeypatch.setenv("FEWKEYS_CACHE", str(shared / "link"))


OPEN_TO_OTHERS = {
    "its group writes it": lambda file, _: file.chmod(0o775),
    "all write it": lambda file, _: file.chmod(0o757),
    "the group writes its folder": lambda file, _: file.parent.chmod(0o775),
    "all add to its folder": lambda file, _: file.parent.chmod(0o1777),
    "the group writes the folder above": lambda file, _: file.parent.parent.chmod(0o775),
    "another user": _belongs_to_another,
    "a link": _is_a_link,
    "behind a link": _lies_behind_a_link_of_a_shared_folder,
}


@pytest.mark.parametrize("opened", OPEN_TO_OTHERS.values(), ids=OPEN_TO_OTHERS)
def test_a_library_that_others_may_have_written_is_not_loaded(opened, kept, monkeypatch, caplog):
    """The hash beside it is no secret: whoever writes the file writes that, too."""
    opened(kept, monkeypatch)
    caplog.clear()
    assert native.missing() is None
    assert "compiling the kernels" in caplog.text


def test_a_library_below_a_sticky_folder_is_loaded(kept, caplog):
    """As in /tmp: others may add names there, but not take ours."""
    kept.parent.parent.chmod(0o1777)
    caplog.clear()
    assert native.missing() is None
    assert build.place() == kept
    assert "compiling" not in caplog.text


def test_what_is_loaded_is_what_was_checked(kept, monkeypatch):
    """Another file takes the place of the one whose hash was found right, before the library is loaded."""
    digest = hashlib.sha256

    def swap(*data):
        kept.with_suffix(".other").write_bytes(b"another library")
        os.replace(kept.with_suffix(".other"), kept)
        return digest(*data)

    monkeypatch.setattr(build, "_fingerprint", lambda *_: kept.stem.removeprefix("kernels-"))
    monkeypatch.setattr(build.hashlib, "sha256", swap)
    assert native.missing() is None


@pytest.mark.parametrize("in_memory", [True, False])
def test_two_libraries_are_two(in_memory, wheel, monkeypatch):
    """The loader knows libraries by their paths; where there is no memory to load from, by those of private copies."""
    if not in_memory:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    (path,) = wheel.iterdir()
    library = path.read_bytes()
    first, second = build._load_bytes(library), build._load_bytes(library)
    assert first._handle != second._handle


def test_a_lock_that_is_held_is_waited_for_with_a_limit(kept, monkeypatch):
    fcntl, sleep, turns = pytest.importorskip("fcntl"), build.time.sleep, iter(range(50))
    monkeypatch.setattr(build, "WAIT", 0.1)
    monkeypatch.setattr(build.time, "sleep", lambda seconds: [sleep(seconds), next(turns)])
    kept.unlink()
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert native.missing() is None


@pytest.mark.long
def test_no_home(tmp_path):
    """A user whom the system does not know, as in many containers."""
    code = "from pathlib import Path\n"
    code += "def home(): raise RuntimeError('Could not determine home directory.')\n"
    code += "Path.home = home\nfrom fewkeys import native\nfrom fewkeys.native import build\n"
    code += "print(native.missing(), build.place())"
    keep = {name: value for name, value in os.environ.items() if name not in ("HOME", "FEWKEYS_CACHE")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=keep | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"None {tmp_path}/fewkeys-{os.getuid()}/kernels-")


def test_a_folder_that_cannot_be_written_compiles_once_for_all_processes(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEWKEYS_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(build, "spare_folder", lambda: tmp_path / "spare")
    assert native.missing() is None
    build._load.cache_clear()
    monkeypatch.setattr(build, "_compile", None)
    assert native.missing() is None
    assert not stat.S_IMODE((tmp_path / "spare").stat().st_mode) & 0o022
    (tmp_path / "spare").chmod(0o777)
    assert build._folder_to_keep() is None


def test_where_nothing_can_be_kept_kernels_are_compiled_for_this_process(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEWKEYS_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(build, "spare_folder", lambda: tmp_path / "file" / "spare")
    assert native.missing() is None
    assert build.place() is None
    assert "kept in no folder" in caplog.text


def test_processes_and_threads_compile_once(tmp_path, compiler):
    """A compiler that counts its calls, and takes long enough for both processes to want it."""
    calls = tmp_path / "calls"
    count = compiler("count", f'case "$*" in *kernels.cpp*) echo 1 >> {calls}; sleep 1;; esac')
    code = "import threading\nfrom fewkeys import native\n"
    code += "every = [threading.Thread(target=native.missing) for _ in range(4)]\nprint(flush=True)\ninput()\n"
    code += "[one.start() for one in every], [one.join() for one in every]\nassert native.missing() is None"
    env, pipes = os.environ | {"CXX": count, "FEWKEYS_CACHE": str(tmp_path / "shared")}, {"text": True}
    pipes |= dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    every = [subprocess.Popen([sys.executable, "-c", code], env=env, **pipes) for _ in range(2)]
    assert [one.stdout.readline() for one in every] == ["\n", "\n"]  # both stand before the first call
    for one in every:
        one.stdin.write("\n")
        one.stdin.flush()
    for one in every:
        one.communicate()
    assert [one.returncode for one in every] == [0, 0]
    assert calls.read_text().split() == ["1"]


def test_a_compiler_that_was_killed_leaves_nothing(tmp_path, monkeypatch, compiler):
    monkeypatch.setenv("CXX", compiler("killed", 'case "$*" in *kernels.cpp*) kill -9 $$;; esac'))
    assert "failed" in native.missing()
    assert not list((tmp_path / "cache").glob("*.so"))


def test_the_switch(monkeypatch):
    monkeypatch.setenv("FEWKEYS_NATIVE", "0")
    q, k, v = SHAPES["plain"].draw(dtype=torch.float32)
    with pytest.raises(ValueError, match=r"impl='native': expected .*FEWKEYS_NATIVE=0.*; use impl='torch'"):
        fk.attention(q, k, v, keep=fk.Window(5), impl="native")
    assert native.missing() == "FEWKEYS_NATIVE=0 turns them off"
    assert not native.suits(torch.ones(1))
