"""What is said where an optional package is missing."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import hosts
import pytest

from recurrent_depth.hf import layer_report, lm_eval

WANTED = r"the extra '{}' brings; in a checkout: pip install -c constraints.txt -e '\.\[{}\]'"


def test_a_plot_says_which_extra_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = layer_report(hosts.host("llama"), hosts.tokens())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match="needs matplotlib, which " + WANTED.format("train", "train")):
        report.plot(tmp_path / "layers.png")


def test_the_harness_says_which_extra_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "recurrent_depth.hf.harness", raising=False)
    with pytest.raises(ModuleNotFoundError, match="needs lm_eval, which " + WANTED.format("eval", "eval")):
        importlib.import_module("recurrent_depth.hf.harness")
    monkeypatch.setattr(sys, "argv", ["lm_eval", "--tasks", "any"])
    with pytest.raises(SystemExit, match="^error: .* needs lm_eval, which " + WANTED.format("eval", "eval")):
        lm_eval.main()


def test_the_graft_example_says_what_to_install() -> None:
    folder = Path(__file__).parents[2] / "examples"
    code = f"import sys; sys.modules['tyro'] = None; sys.path.insert(0, {str(folder)!r})"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; import graft"], capture_output=True, text=True, check=False, env=os.environ
    )
    assert done.returncode == 1
    said = 'error: tyro missing. In the checkout: pip install -c constraints.txt -e ".[train,hf]" peft'
    assert done.stderr.strip() == said
