"""The option `--require-assets`: what is not installed fails a test that needs it, which otherwise skips it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

MISSING = ("no_such_package", "--no-deps no-such-package==1.0")
NEEDS = f"""
def test_of_a_model(installed):
    installed{MISSING}


def test_of_nothing_special(installed):
    assert installed("json", "python").name == "json"
"""


def test_what_is_missing_is_skipped_without_the_option(installed, pytestconfig, monkeypatch):
    monkeypatch.setattr(pytestconfig.option, "require_assets", False)  # the slow suite is run with it
    with pytest.raises(pytest.skip.Exception, match=r"needs no_such_package: pip install --no-deps no-such-pack.*"):
        installed(*MISSING)


def test_what_is_missing_fails_with_the_option(tmp_path):
    (tmp_path / "test_needs.py").write_text(NEEDS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    run = [sys.executable, "-m", "pytest", "-rfE", "-p", "no:cacheprovider", "-p", "conftest", "--require-assets"]
    tests = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    ran = subprocess.run(run, cwd=tmp_path, env=tests, capture_output=True, text=True)
    assert ran.returncode == 1, ran.stdout
    assert "1 failed, 1 passed" in ran.stdout
    assert "needs no_such_package: pip install --no-deps no-such-package==1.0" in ran.stdout
