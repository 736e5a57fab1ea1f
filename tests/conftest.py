"""Settings of the whole suite."""

import pytest
import torch
from hypothesis import HealthCheck, settings

# Tests are many tiny operations, for which threads would only wait for each other.
torch.set_num_threads(1)
# Examples are drawn the same way in every run, so that a red run can be repeated.
settings.register_profile(
    "fewkeys", max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fewkeys")


@pytest.fixture(scope="module")
def one_thread():
    """For tests of many tiny operations, where threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
