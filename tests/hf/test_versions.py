"""What is said where transformers is too old, or not there."""

import contextlib
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


@pytest.mark.parametrize("older, found", [("5.8.0", "5.8.1"), ("4.57.1", "5.9.0.dev0"), ("5.7.9", "5.10")])
def test_releases_are_told_apart_by_their_numbers(older: str, found: str) -> None:
    taken = []
    for release in (found, older):
        with contextlib.suppress(ImportError):
            versions.require_floor(release)
            taken.append(release)
    assert taken == [found]


def test_the_floor_is_the_packages() -> None:
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    floor = ".".join(map(str, versions.FLOOR))
    assert any(said.startswith(f"transformers>={floor},") for said in extras["hf"])
