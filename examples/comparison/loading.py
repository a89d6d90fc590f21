"""Finds the cells of a comparison: a module by its name, or a file by its path."""

import sys
import traceback
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from comparison.parts import Comparison


def load_cells(cells: str) -> Comparison:
    """The comparison that a module or a file of cells makes.

    Raises:
        ValueError: if there is no such module or file, it fails, or it makes no comparison.
    """
    comparison = getattr(_module(cells), "COMPARISON", None)
    if not isinstance(comparison, Comparison):
        raise ValueError(f"cells is {cells}, but that module has no COMPARISON.")
    return comparison


def _module(cells: str) -> ModuleType:
    path = Path(cells).resolve()
    is_path = path.suffix == ".py"
    if is_path and not path.is_file():
        raise ValueError(f"cells is {cells}, but there is no such file.")
    try:
        return _from_file(path) if is_path else import_module(cells)
    except Exception as error:  # whatever the file of cells does wrong, it is the user's
        told = f"{type(error).__name__}: {error}"
        raise ValueError(f"cells is {cells}, but must be {_wanted(path, error)} ({told}).") from error


def _from_file(path: Path) -> ModuleType:
    # Behind the folder of `compare.py`, whose own modules a file of the same name must not hide.
    sys.path.insert(1, str(path.parent))
    spec = spec_from_file_location(str(path), path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def _wanted(path: Path, error: Exception) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    if lines:
        return f"a file that runs: line {lines[-1]} fails"
    return "the path of a Python file, or a module that can be imported, such as comparison.language"
