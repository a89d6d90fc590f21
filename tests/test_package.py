"""The package as a user meets it: what an import costs and loads, what is public, what holds without the hook."""

import inspect
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import recurrent_depth as rd

SOURCE = Path(rd.__file__).parent
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
ENVIRONMENT["PYTHONPATH"] = str(SOURCE.parent)


def run(*arguments: str) -> str:
    """What a fresh Python process prints."""
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=True, env=ENVIRONMENT
    ).stdout


def test_an_import_loads_nothing_that_it_does_not_need():
    code = "import sys; before = set(sys.modules); import recurrent_depth; print(*sorted(set(sys.modules)))"
    loaded = {name.partition(".")[0] for name in run("-c", code).split()}
    assert "torch" in loaded
    heavy = {"transformers", "matplotlib", "safetensors", "accelerate", "tyro", "tensorboard", "tokenizers", "pandas"}
    assert not loaded & heavy


def test_an_import_costs_at_most_three_tenths_of_a_second_beyond_torch():
    # Processor time: a busy machine changes it little, so the limit needs no margin. The first run writes bytecode.
    code = "import time, torch; start = time.process_time(); import recurrent_depth; print(time.process_time() - start)"
    assert statistics.median([float(run("-c", code)) for _ in range(4)][1:]) < 0.3


def test_what_is_public_is_there_and_described():
    for name in rd.__all__:
        assert inspect.getdoc(getattr(rd, name)), name


def test_types_are_shipped():
    assert (SOURCE / "py.typed").exists()


@pytest.mark.parametrize("file", ["test_bad_input.py", "test_refusals.py"])
def test_refusals_hold_without_the_hook_of_the_tests(file):
    path = Path(__file__).parent / file
    printed = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "--jaxtyping-packages=", str(path))
    assert "passed" in printed
    assert "skipped" not in printed


def test_no_module_postpones_its_annotations():
    # It would switch off the shape checks of that module, without a word.
    for module in SOURCE.rglob("*.py"):
        assert "from __future__ import annotations" not in module.read_text(), module.name
