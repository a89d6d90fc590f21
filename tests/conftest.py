"""Settings of every test: one thread per process, hypothesis profiles, and a seed for the global RNG."""

import os

import hypothesis
import pytest
import torch

# Two worker processes share two cores; more threads would make them wait for each other.
torch.set_num_threads(1)

# Examples come from a fixed seed, so that a run says the same everywhere; HYPOTHESIS_PROFILE=explore looks further.
hypothesis.settings.register_profile("default", max_examples=20, deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("explore", max_examples=300, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def seed() -> None:
    """Weights and noise come from the global RNG: every test starts it at the same place."""
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Names with a memory address differ between parallel workers, which then refuse to run."""
    named = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if named:
        raise pytest.UsageError(f"Give these tests ids without addresses: {named}")
