"""No committed result is older than the method that it judges.

`fewkeys.bench.machine.versions` names the errors of the recommended plans on fixed inputs. Every result of a run holds
them, and they must be today's: who changes a recommended plan runs its experiments again.
"""

import json
import subprocess
from pathlib import Path

import pytest

from fewkeys.bench.machine import error_on_fixed_inputs, versions
from fewkeys.plan import budget

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks/results", "docs/results", "experiments")
TOLERANCE = 0.03
"""Relative: errors have three digits, and processors round differently."""

WITHOUT = {
    "experiments/levattention/": "selectors of the paper",
    "experiments/sparsefinder/": "graphs of the paper",
    "experiments/value_aware/results/results.json": "methods of the paper",
    "experiments/families/": "exact plans in every type of model",
    "benchmarks/results/grouped.json": "attention by Sparsefinder's groups",
    "benchmarks/results/levattention.json": "selectors of the paper",
    "benchmarks/results/campaign.json": "counts of failures",
    "docs/results/fit.json": "Sparsefinder, fitted",
    "docs/results/tuned/model_plan.json": "a plan; the run is in tuned.json",
}
"""Results of which no row is a recommended plan."""


def results() -> list[str]:
    listed = subprocess.run(["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True)
    names = [name for name in listed.stdout.split() if name.endswith(".json") and "/results/" in name]
    assert len(names) > 20
    return [name for name in names if not any(name.startswith(start) for start in WITHOUT)]


def numbers(text: str) -> list[float]:
    return [float(number) for number in text.split()]


@pytest.mark.parametrize("name", results())
def test_results_are_of_todays_plans(name):
    data = json.loads((ROOT / name).read_text())
    assert numbers(data["versions"]["plans"]) == pytest.approx(numbers(versions()["plans"]), rel=TOLERANCE)


def test_another_method_has_another_version():
    today = numbers(versions()["plans"])
    assert error_on_fixed_inputs(budget(64, cohorts=32).never_exact()) > (1 + 2 * TOLERANCE) * today[0]
    assert error_on_fixed_inputs(budget(56).never_exact()) > (1 + 2 * TOLERANCE) * today[0]
