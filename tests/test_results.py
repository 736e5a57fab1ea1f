"""No committed result is older than the method that it judges.

`fewkeys.bench.machine.versions` names the errors of the recommended plans on fixed inputs. Every result of a run holds
them, and they must be today's: who changes a recommended plan runs its experiments again.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from experiments.cells import TOLERANCE, is_of_todays_plans

from fewkeys.bench.machine import error_on_fixed_inputs, versions
from fewkeys.plan import budget

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks/results", "docs/results", "experiments")
WITHOUT = {
    "experiments/levattention/": "selectors of the paper",
    "experiments/sparsefinder/": "graphs of the paper",
    "experiments/value_aware/results/results.json": "methods of the paper",
    "experiments/families/": "exact plans in every type of model",
    "experiments/causal/": "means of the past in constant memory",
    "benchmarks/results/decode.json": "decoding in constant memory",
    "benchmarks/results/levattention.json": "selectors of the paper",
    "benchmarks/results/campaign.json": "counts of failures",
    "docs/results/fit.json": "Sparsefinder, fitted",
    "docs/results/tuned/model_plan.json": "a plan; the run is in tuned.json",
}
"""Results of which no row is a plan among the recommended ones that `versions` names."""


def results() -> list[str]:
    listed = subprocess.run(["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True)
    names = [name for name in listed.stdout.split() if name.endswith(".json") and "/results/" in name]
    assert len(names) > 20
    return [name for name in names if not any(name.startswith(start) for start in WITHOUT)]


def versions_in(data: Any) -> Iterator[dict[str, str]]:
    """Every "versions" in results, of a run or of each of its rows."""
    if isinstance(data, dict):
        yield from (value for name, value in data.items() if name == "versions")
        data = list(data.values())
    if isinstance(data, list):
        for value in data:
            yield from versions_in(value)


@pytest.mark.parametrize("name", results())
def test_results_are_of_todays_plans(name):
    stamps = list(versions_in(json.loads((ROOT / name).read_text())))
    assert stamps
    assert all(map(is_of_todays_plans, stamps))


def test_another_method_has_another_version():
    today = versions()
    assert is_of_todays_plans(today)
    first, *others = today["plans"].split()
    for other in (budget(64, cohorts=32), budget(56)):
        error = error_on_fixed_inputs(other.never_exact())
        assert abs(error / float(first) - 1) > 2 * TOLERANCE
        assert not is_of_todays_plans(today | {"plans": " ".join([f"{error:.3g}", *others])})
    assert not is_of_todays_plans({"fewkeys": "0.1.0"})
