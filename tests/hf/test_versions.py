"""What is said where transformers is too old, or not there."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from recurrent_depth.hf import versions

SCRIPT = """
from importlib import metadata
metadata.version = lambda name: {}
import recurrent_depth.hf
"""


@pytest.mark.parametrize(
    "found, said",
    [("'4.57.1'", r"needs transformers 5.8.1 or newer, below 6, but 4.57.1 is installed"), ("1 / 0", "ZeroDivision")],
    ids=["old", "control"],
)
def test_an_old_release_is_refused_before_anything_else_is_imported(found: str, said: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(found)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert said in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("found", ["5.8.1", "5.9.0.dev0", "5.24.0", "5.10"])
def test_newer_releases_are_taken(found: str) -> None:
    versions.require_floor(found)


def test_the_floor_is_the_packages() -> None:
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    floor = ".".join(map(str, versions.FLOOR))
    assert any(said.startswith(f"transformers>={floor},") for said in extras["hf"])
