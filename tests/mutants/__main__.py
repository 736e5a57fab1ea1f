"""Changes the code of some rooms, one small thing at a time, and sees whether the tests of the room notice.

    make mutants                                    # a sample of every room: an hour and a half
    python -m mutants --rooms past --each 40 --seed 1
    python -m mutants --only "past/scan.py" --each 1000
    python -m mutants --rooms graph --seed 1 --number 12   # one again, with what the tests say

Nothing is written: a process that has everything imported forks, the fork puts the changed code into the functions, and
runs the tests of `mutants/table.py`, of which it takes a part. A change that no test notices is a law that is missing,
code that is not needed, or one that `EQUIVALENT` explains.
"""

import argparse
import contextlib
import functools
import gc
import io
import json
import os
import random
import signal
import sys
import time
import types
from pathlib import Path

import pytest

import fewkeys
from mutants.changes import changed, changes
from mutants.table import EQUIVALENT, ROOMS, TABLED

HERE, PACKAGE = Path(__file__).parents[1], Path(fewkeys.__file__).parent
PATIENCE = 120
"""Seconds after which a change counts as noticed: the tests would not end."""


class Some:
    """Of every test function, at most `most` cases, spread over the table: those whose names have one of `words`.

    Beside the laws, a function none of whose cases bears such a name is not of the table: of it, any.
    """

    def __init__(self, most, words=()):
        self.most, self.words = most, words

    def some(self, own):
        return own[:: max(1, -(-len(own) // self.most))]

    def pytest_collection_modifyitems(self, items):
        found = {}
        for item in items:
            name, table = item.name.partition("[")[2].lower(), "laws" in item.path.parts or item.path.stem in TABLED
            fits = not (name and table and self.words) or any(word in name for word in self.words)
            found.setdefault((item.path, item.originalname), ([], []))[fits].append(item)
        chosen = [own or ([] if "laws" in others[0].path.parts else others) for others, own in found.values()]
        spread = [own if own and "refusals" in own[0].path.stem else self.some(own) for own in chosen]
        items[:] = sorted((item for own in spread for item in own), key=items.index)


def every_test(room):
    return [*ROOMS[room].tests, *(test for more in ROOMS[room].more.values() for test in more)]


def files_of(room):
    return sorted({path for pattern in ROOMS[room].files for path in PACKAGE.glob(pattern)})


def tests(room, file, *options):
    """Run the tests that hold a file; the exit code."""
    some = Some(ROOMS[room].most, ROOMS[room].words.get(file.stem, ()))
    more = ROOMS[room].more.get(file.stem, ())
    arguments = ["-n0", "-x", "-p", "no:cacheprovider", *options, *more, *ROOMS[room].tests]
    return pytest.main(arguments, plugins=[some])


def put(code):
    """Give the functions of a module the code that they have in another version of it."""

    def inner(own):
        for part in own.co_consts:
            if isinstance(part, types.CodeType):
                yield part
                yield from inner(part)

    new = {(part.co_qualname, part.co_firstlineno): part for part in inner(code)}
    taken = 0
    for one in gc.get_objects():
        if type(one) is types.FunctionType and one.__code__.co_filename == code.co_filename:
            with contextlib.suppress(KeyError, ValueError):  # other variables of the function around it
                one.__code__ = new[one.__code__.co_qualname, one.__code__.co_firstlineno]
                taken += 1
        if type(one) is functools._lru_cache_wrapper:
            one.cache_clear()
    return taken


def judged(room, file, change, *, loud=False):
    """What becomes of a change: "noticed", "missed"."""
    child = os.fork()
    if child == 0:
        code = 3
        try:
            if change is not None:
                put(changed(file.read_text(), change.number, str(file)))
            if not loud:
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, 1), os.dup2(null, 2)
            code = int(tests(room, file, *(["--tb=short"] if loud else ["--tb=no"])))
        finally:
            os._exit(code)
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return "missed" if os.waitstatus_to_exitcode(status) == 0 else "noticed"
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "noticed"


def sample(room, each, seed, only=None):
    """Some of the changes that the files of a room can have, (file, change)."""
    found = [(file, change) for file in files_of(room) for change in every(file)]
    found = [one for one in found if only is None or str(one[0]).endswith(only)]
    return len(found), random.Random(seed).sample(found, min(each, len(found)))


def every(file):
    return changes(file.read_text())


def told(file, change):
    return f"{file.relative_to(PACKAGE)} {change} (line {change.line})"


def judge(room, given):
    """After each change of a room, what was tried and missed so far; with reasons where there is nothing to notice."""
    possible, chosen = sample(room, given.each, given.seed, given.only)
    # Files with the same tests need them once.
    own = {(ROOMS[room].words.get(file.stem), ROOMS[room].more.get(file.stem)): file for file, _ in chosen}
    for file in own.values():
        begun = time.monotonic()
        if judged(room, file, None) != "missed":
            judged(room, file, None, loud=True)
            raise RuntimeError(f"{file}: expected its tests to pass on sound code, within {PATIENCE} s")
        print(f"sound    {room} {file.relative_to(PACKAGE)} {time.monotonic() - begun:.1f} s", flush=True)
    found = {"seed": given.seed, "possible": possible, "tried": 0, "noticed": 0, "equivalent": [], "missed": []}
    for number, (file, change) in enumerate(chosen):
        if given.number in (None, number):
            count(found, room, file, change, loud=given.number is not None)
            yield found


def judge_again(room, found):
    """What was missed in another run: after a test was mended, or the code."""
    places = [(file, change) for file in files_of(room) for change in every(file)]
    there = {told(*place).rpartition(" (")[0]: place for place in places}
    before, found["missed"] = found["missed"], []
    for number, line in enumerate(before):
        name, reason = line.rpartition(" (")[0], explained(line)
        if reason is not None:
            found["equivalent"].append(f"{line}: {reason}")
        else:
            found["tried"] -= 1
            if name in there:  # else the code is gone
                count(found, room, *there[name])
        yield found | {"missed": found["missed"] + before[number + 1 :]}


def explained(name):
    return next((why for start, why in EQUIVALENT.items() if name.startswith(start)), None)


def count(found, room, file, change, *, loud=False):
    """Judge a change, and add it to what was found."""
    verdict, name = judged(room, file, change, loud=loud), told(file, change)
    reason = explained(name)
    found["tried"] += 1
    found["noticed"] += verdict == "noticed"
    if verdict == "missed":
        found["missed" if reason is None else "equivalent"].append(name if reason is None else f"{name}: {reason}")
    print(f"{verdict:8} {room} {found['tried']} {name}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", default=",".join(ROOMS))
    parser.add_argument("--each", type=int, default=60, help="changes of every room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="files whose paths end so")
    parser.add_argument("--number", type=int, help="this change of the sample alone, with what the tests say")
    parser.add_argument("--again", action="store_true", help="those that `--out` says were missed")
    parser.add_argument("--out", type=Path, help="where the JSON goes; rooms that it has already stay there")
    given = parser.parse_args()
    given.out = given.out and given.out.resolve()
    os.chdir(HERE)
    results = json.loads(given.out.read_text()) if given.out and given.out.exists() else {}
    rooms = given.rooms.split(",")
    for room in [room for room in rooms if room in results] if given.again else rooms:
        with contextlib.redirect_stdout(io.StringIO()):
            pytest.main(["-n0", "--co", "-p", "no:cacheprovider", *every_test(room)])  # imports them
        for found in judge_again(room, results[room]) if given.again else judge(room, given):
            results[room] = found
            if given.out:
                given.out.parent.mkdir(parents=True, exist_ok=True)
                given.out.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
