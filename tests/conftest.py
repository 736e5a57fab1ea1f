"""Settings of the whole suite."""

import shutil

import pytest
import torch
from filelock import FileLock
from hypothesis import HealthCheck, settings

from fewkeys.execute.native import recorded

# Tests are many tiny operations, for which threads would only wait for each other.
torch.set_num_threads(1)
# Examples are drawn the same way in every run, so that a red run can be repeated.
settings.register_profile(
    "fewkeys", max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fewkeys")


@pytest.fixture(autouse=True)
def no_recordings():
    """Every test begins without the kernels that others recorded, which would run in place of what it looks at."""
    recorded._recordings.clear()


QUICK = 2
"""Cases of a test that `--quick` runs: the first and one from the middle of its table."""


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help=f"run {QUICK} cases of every test, no long tests: a minute")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--quick"):
        return
    cases = {}
    for item in items:
        cases.setdefault((item.path, getattr(item, "originalname", item.name)), []).append(item)
    chosen = (tests[i * len(tests) // QUICK] for tests in cases.values() for i in range(min(QUICK, len(tests))))
    kept = {id(item) for item in chosen}
    quick = [item for item in items if id(item) in kept and not item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=[*set(items).difference(quick)])
    items[:] = quick


@pytest.fixture(scope="session")
def once(tmp_path_factory, worker_id):
    """`once(name, fill)`: a folder that `fill(folder)` filled in the first process of the suite that asked for it."""
    base = tmp_path_factory.getbasetemp()
    base = base if worker_id == "master" else base.parent

    def filled(name, fill):
        folder = base / name
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                folder.mkdir()
                try:
                    fill(folder)
                except BaseException:
                    shutil.rmtree(folder)
                    raise
        return folder

    return filled
