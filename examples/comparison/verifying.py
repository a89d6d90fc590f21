"""Trains the first steps of a published cell again, and compares."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from comparison.describing import differences
from comparison.parts import Comparison, Run
from comparison.running import FIRST_STEPS, DivergedError, Running, Stage


def verify(comparison: Comparison, published: Path, out: Path, *, tolerance: float, say: Callable[[str], None]) -> int:
    """The exit code: 0 if every loss is within `tolerance` nats of the published one.

    A method that is described in other words than here is told, and trained all the same: with another version of the
    library its parts may be called otherwise, and on another processor its weights differ in their last bits.

    Raises:
        ValueError: if the cell cannot be read, is of other settings, of no method of these cells or of other text than
            here, or training diverges here.
    """
    cell = _read(published)
    run, expected = _run(comparison, published, cell), cell["first_losses"]
    found: list[float] = []
    with TemporaryDirectory(prefix="verify-") as folder:
        (Path(folder) / "text").symlink_to((out / "text").resolve())
        comparison.data.open(out / "text")
        running = Running(comparison, run, Path(folder))
        config = cell["budgets"][0]["config"]
        _require_same(config, running.config)
        other = differences(config, running.config, "method")
        if other:
            say(f"{run.name}: the published cell is of another method than the cells describe: {other}.")
        trunk, _ = running.stages(comparison.protocol.budgets[0])
        try:
            running.advance(Stage(trunk.folder, 0, len(expected), trunk.factor), watch=found.append)
        except DivergedError as error:
            raise ValueError(f"verify is {published}, but here its training diverges: {error}.") from None
    off = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    fits = off <= tolerance
    say(
        f"{run.name}: {len(found)} steps, losses at most {off:.2g} nats from the published ones, "
        f"{'within' if fits else 'more than'} {tolerance:g}."
    )
    return 0 if fits else 1


def _read(path: Path) -> dict[str, Any]:
    try:
        cell = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"verify is {path}, but no published cell can be read there: {error}") from None
    if not isinstance(cell, dict) or not cell.get("first_losses"):
        raise ValueError(f"verify is {path}, but it holds no first_losses.")
    return cell


def _run(comparison: Comparison, path: Path, cell: dict[str, Any]) -> Run:
    """The run of a cell that has all that is needed."""
    run, losses, budgets = cell.get("run"), cell["first_losses"], cell.get("budgets")
    most = min(FIRST_STEPS, comparison.protocol.fork(comparison.protocol.budgets[0]))
    told = {
        f"run is {run}": _is_run(run),
        f"method is no string or none of {', '.join(comparison.methods)}": _names_method(comparison, run),
        "budgets are no list of results": _are_results(budgets),
        f"first_losses are not 1 to {most} numbers": _are_numbers(losses) and len(losses) <= most,
    }
    wrong = [reason for reason, fits in told.items() if not fits]
    if wrong:
        raise ValueError(f"verify is {path}, but that is no published cell of this comparison: {wrong[0]}.")
    return Run(**run)


def _is_run(run: object) -> bool:
    if not isinstance(run, dict) or run.keys() != set(Run._fields):
        return False
    counts = (run["seed"], run["num_budgets"])
    return _are_numbers([run["rate"]]) and run["rate"] > 0 and all(type(n) is int and n >= 0 for n in counts)


def _names_method(comparison: Comparison, run: object) -> bool:
    return isinstance(run, dict) and isinstance(run.get("method"), str) and run["method"] in comparison.methods


def _are_results(budgets: object) -> bool:
    return isinstance(budgets, list) and bool(budgets) and isinstance(budgets[0], dict) and _has_config(budgets[0])


def _has_config(result: dict[str, Any]) -> bool:
    return isinstance(result.get("config"), dict)


def _are_numbers(values: object) -> bool:
    return isinstance(values, list) and all(type(n) in (int, float) and math.isfinite(n) for n in values)


def _require_same(found: dict, expected: dict) -> None:
    # How its modules print may change with the library; whether they compute the same, the losses tell.
    names = [name for name in expected if name not in ("built", "method")]
    different = [name for name in names if found.get(name) != json.loads(json.dumps(expected[name]))]
    if different:
        told = "; ".join(f"{name} is {found.get(name)} there, {expected[name]} here" for name in different)
        raise ValueError(f"The published cell is of another run: {told}.")
