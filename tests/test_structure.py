"""Which module imports which: no circles, and arrows that point down the table of packages in CONTRIBUTING.md."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = {
    ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "src").rglob("*.py")
}


def imported(path: Path) -> Iterator[str]:
    """The modules of ours that a file names anywhere: at its head, within functions, for type checkers alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in FILES)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: expected whole names"
            named = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in {name if name in FILES else node.module for name in named} if name in FILES)


@cache
def arrows() -> dict[str, set[str]]:
    return {name: set(imported(path)) - {name} for name, path in FILES.items()}


def room(module: str) -> str:
    """The folder of a module, or the file that lies beside the folders."""
    name = module.split(".")[1]
    return f"{name}/" if (ROOT / "src" / "fewkeys" / name).is_dir() else f"{name}.py"


def test_no_module_imports_itself_through_others():
    TopologicalSorter(arrows()).prepare()


def test_rooms_import_only_what_lies_below_them():
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("| package | holds |")[2].partition("\n\n")[0]
    rows = [re.findall(r"`([\w./]+)`", line.split("|")[1]) for line in text.splitlines() if "`" in line]
    height = {name: -row for row, names in enumerate(rows) for name in names}
    modules = {name for name in FILES if name not in {"fewkeys", "fewkeys.__main__"}}
    assert {room(name) for name in modules} == set(height)
    between = {(room(a), room(b)) for a in modules for b in arrows()[a] & modules if room(a) != room(b)}
    assert not {(a, b) for a, b in between if height[a] < height[b]}
    TopologicalSorter({a: {b for start, b in between if start == a} for a in height}).prepare()


def test_only_commands_import_the_papers():
    """Others run their parts as a stranger's: as selectors, rests and graphs, found by name in the catalogues."""
    outside = set(FILES) - {"fewkeys"} - {name for name in FILES if name.startswith("fewkeys.papers")}
    importing = {name for name in outside if any(arrow.startswith("fewkeys.papers") for arrow in arrows()[name])}
    assert {room(name) for name in importing} <= {"cli/"}


def test_files_are_written_in_one_place():
    """By `core.files.write_whole`: whole or not at all."""
    writes = re.compile(r"\.write_(text|bytes)\(|open\([^()]*\"[wax]b?\"")
    writers = {path.name for path in FILES.values() if writes.search(path.read_text())}
    assert writers == {"files.py"}
