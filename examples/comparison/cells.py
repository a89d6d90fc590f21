"""Published cells: what came out of a run as one file, from which others can check it or go on."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from comparison.parts import Comparison, Run
from comparison.planning import read_result, runs_by_name
from comparison.running import FIRST_STEPS


class Cell(NamedTuple):
    """A run, its result at each budget that is done, and the losses of its first steps."""

    run: Run
    budgets: list[dict[str, Any]]
    first_losses: list[float]


def cell_files(comparison: Comparison, out: Path) -> dict[str, str]:
    """Each run that has a result as one file, by its name."""
    cells = {name: _cell(comparison, out, run) for name, run in runs_by_name(comparison, out).items()}
    return {f"cells/{name}.json": _written(cell) for name, cell in cells.items() if cell.budgets}


def _cell(comparison: Comparison, out: Path, run: Run) -> Cell:
    results = [read_result(comparison, out, run, budget) for budget in comparison.protocol.budgets]
    done = [result for result in results if result is not None]
    first = done[0].get("first_losses", []) if done else []
    budgets = [{key: value for key, value in result.items() if key != "first_losses"} for result in done]
    return Cell(run, budgets, [round(loss, 5) for loss in first])


def _written(cell: Cell) -> str:
    return json.dumps({**cell._asdict(), "run": cell.run._asdict()}) + "\n"


def read_cell(comparison: Comparison, argument: str, path: Path) -> Cell:
    """A published cell, of a method of the comparison or of another one.

    Raises:
        ValueError: naming the argument that the path was given as, if no cell can be read there or it is damaged.
    """
    try:
        cell = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{argument} is {path}, but no published cell can be read there: {error}") from None
    run, budgets, losses = (cell.get(key) if isinstance(cell, dict) else None for key in Cell._fields)
    most = min(FIRST_STEPS, comparison.protocol.fork(comparison.protocol.budgets[0]))
    told = {
        f"run is {run}": _is_run(run),
        "budgets are no list of results": _are_results(budgets),
        f"first_losses are not up to {most} numbers": _are_numbers(losses) and len(losses) <= most,
    }
    wrong = [reason for reason, fits in told.items() if not fits]
    if wrong:
        raise ValueError(f"{argument} is {path}, but that is no published cell of this comparison: {wrong[0]}.")
    return Cell(Run(**run), budgets, losses)


def _is_run(run: object) -> bool:
    if not isinstance(run, dict) or run.keys() != set(Run._fields) or not isinstance(run["method"], str):
        return False
    counts = (run["seed"], run["num_budgets"])
    return _are_numbers([run["rate"]]) and run["rate"] > 0 and all(type(n) is int and n >= 0 for n in counts)


def _are_results(budgets: object) -> bool:
    return isinstance(budgets, list) and bool(budgets) and all(map(_is_result, budgets))


def _is_result(result: object) -> bool:
    return isinstance(result, dict) and isinstance(result.get("config"), dict) and type(result.get("budget")) is int


def _are_numbers(values: object) -> bool:
    return isinstance(values, list) and all(type(n) in (int, float) and math.isfinite(n) for n in values)
