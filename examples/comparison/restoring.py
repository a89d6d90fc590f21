"""Takes what was published as done, so that a comparison goes on where no run of it lies."""

import json
from pathlib import Path
from typing import Any

from comparison.cells import Cell, read_cell
from comparison.describing import differences, settings
from comparison.files import write_json
from comparison.parts import Comparison
from comparison.planning import score
from comparison.running import result_path


def restore(comparison: Comparison, published: Path, out: Path) -> str:
    """Puts the results of published cells where their runs would have put them; says what was taken.

    A result that is there already stays, and cells of other methods than the comparison's are left. Checkpoints are not
    published: a run of which more is asked begins anew, and adds what it lacks.

    Raises:
        ValueError: if there are no cells, or one is damaged, or of another method, protocol, size or text than here.
    """
    paths = sorted((published / "cells").glob("*.json"))
    if not paths:
        raise ValueError(f"restore is {published}, but there is no published cell in {published / 'cells'}.")
    cells = {path: read_cell(comparison, "restore", path) for path in paths}
    ours = {path: cell for path, cell in cells.items() if cell.run.method in comparison.methods}
    data = comparison.data.open(out / "text")
    for path, cell in ours.items():
        for result in cell.budgets:
            _require_ours(comparison, path, cell, result, data)
    added = sum(_write(cell, out) for cell in ours.values())
    left = f"; {len(cells) - len(ours)} cells are of other methods" if len(ours) < len(cells) else ""
    return f"{added} results of {len(ours)} cells taken from {published}{left}"


def _require_ours(comparison: Comparison, path: Path, cell: Cell, result: dict[str, Any], data: dict[str, Any]) -> None:
    """What is left out of a description, because it was written before there were any, is taken as it is."""
    expected = json.loads(json.dumps({"data": data, **settings(comparison, cell.run)}))
    told = differences(result["config"], expected, *expected)
    where = f"restore is {path.parents[1]}, but {path.name} there"
    if told:
        raise ValueError(f"{where} is of another run: {told}. Text, sizes and methods must be the published ones.")
    try:
        score(comparison, result)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{where} holds no measurement at budget {result['budget']}: {error!r}.") from None


def _write(cell: Cell, out: Path) -> int:
    folder = out / cell.run.name
    results = {result_path(folder, result["budget"]): result for result in cell.budgets}
    missing = {path: result for path, result in results.items() if not path.exists()}
    for path, result in missing.items():
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, {**result, "first_losses": cell.first_losses})
    return len(missing)
