"""Writes what came out: the tables as Markdown, everything as JSON, the plots, and each cell's own result.

All is made before any is written: where something cannot be made, what was published before stays as it is.
"""

import json
import math
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from comparison import tables
from comparison.collecting import Table, collect
from comparison.files import read_json
from comparison.parts import Comparison
from comparison.planning import read_result, runs_by_name
from comparison.published import num_results, run_files
from comparison.statistics import Estimate, Spread
from comparison.text import TOLD


def publish(comparison: Comparison, out: Path, folder: Path) -> str:
    """Writes to `folder`, however little is done yet; returns the tables."""
    from comparison.figures import draw

    cells, table = run_files(comparison, out), collect(comparison, out)
    text = _report(comparison, out, table, len(cells))
    told = json.dumps(_as_json(comparison, table), indent=1) + "\n"
    write(folder, {"tables.md": text, "results.json": told, **cells, **draw(comparison, table)})
    return text


def write(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Puts files there by their names.

    Raises:
        ValueError: if no folder can be made there, or what was published there has results that these files lack.
    """
    _require_nothing_lost(folder, files)
    try:
        (folder / "cells").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"publish is {folder}, but no folder can be made there ({error}).") from None
    for name, content in files.items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def _require_nothing_lost(folder: Path, files: Mapping[str, str | bytes]) -> None:
    now = {name: num_results(str(content)) for name, content in files.items() if name.startswith("cells/")}
    before = {
        f"cells/{path.name}": num_results(path.read_text(errors="replace"))
        for path in (folder / "cells").glob("*.json")
    }
    lost = [name for name in sorted(before) if before[name] > now.get(name, 0)]
    if lost:
        raise ValueError(
            f"publish is {folder}, but {len(lost)} cells there have results that are not here, such as {lost[0]}: take "
            f"them in with --restore {folder}, delete them, or publish to another folder."
        )


def what_ran(comparison: Comparison, out: Path, num_cells: int) -> str:
    """How many runs, their time, and the machine's size."""
    hours = _hours(comparison, out)
    return f"{num_cells} runs, {hours:.1f} core-hours of steps, one thread a run. Published from {_machine()}."


def _hours(comparison: Comparison, out: Path) -> float:
    """What the steps behind all results took of one core, to a percent or two; runs that diverged say nothing.

    Budgets share their trunk: all of the longest counts, of the others their cooldowns.
    """
    runs = runs_by_name(comparison, out).values()
    found = [[read_result(comparison, out, run, budget) for budget in comparison.protocol.budgets] for run in runs]
    taken = [[one["training"]["seconds"] for one in results if one and "training" in one] for results in found]
    return sum(times[-1] + comparison.protocol.cooldown * sum(times[:-1]) for times in taken if times) / 3600


def _report(comparison: Comparison, out: Path, table: Table, num_cells: int) -> str:
    parts = {
        "Methods": tables.methods_table(comparison, table),
        "Headroom": tables.headroom_table(comparison, table),
        f"Less {comparison.methods[comparison.baseline].label}": tables.baseline_table(comparison, table),
        "Differences": tables.pairs_table(comparison, table),
        "Depth gain": tables.depth_table(comparison, table),
        "By exit": tables.exits_table(comparison, table),
        "Learning rates": tables.trials_table(comparison, table),
    }
    head = [*_text(out), what_ran(comparison, out, num_cells)]
    return "\n\n".join([" ".join(head), *(f"## {title}\n\n{part.strip()}" for title, part in parts.items())]) + "\n"


def _text(out: Path) -> list[str]:
    said = read_json(out / "text" / "text.json", *TOLD)
    size = said["held_out_tokens"] * said["bytes_per_token"]
    return [
        f"{said['train_tokens']:,} tokens to train on, {said['held_out_tokens']:,} held out ({size:,.0f} bytes; "
        f"{said['bytes_per_token']:.2f} bytes per token; checksum {said['checksum'][:16]}).",
        "Losses are bits per byte of held-out text, lower is better; in brackets, how many of the seeds are done.",
    ]


def _machine() -> str:
    """The machine's size."""
    return f"{os.cpu_count()} cores ({platform.machine()}) with torch {torch.__version__}"


def _as_json(comparison: Comparison, table: Table) -> dict[str, Any]:
    lean = {name: row._asdict() for name, row in table.rows.items()}
    for row in lean.values():
        row["trials"] = {rate: "diverged" if loss == float("inf") else loss for rate, loss in row["trials"].items()}
        row["budgets"] = [[_lean(result) for result in group] for group in row["budgets"]]
    numbers = range(len(comparison.protocol.budgets))
    pairs = {f"{a} less {b}": [_named(table.difference(a, b, n)) for n in numbers] for a, b in comparison.pairs}
    gains = {name: [_named(table.depth_gain(name, n)) for n in numbers] for name in table.rows}
    equal = {
        row.name: _named(table.at_equal_flops(row.name, comparison.baseline))
        for row in table.rows.values()
        if row.longest
    }
    spreads = [_named(spread) for spread in table.spreads]
    return {"methods": lean, "differences": pairs, "at_equal_flops": equal, "depth_gains": gains, "spreads": spreads}


def _named(found: Estimate | Spread | None) -> dict[str, float | None] | None:
    """By name, and null for endless degrees of freedom, which JSON has no number for."""
    return found and {name: None if value == math.inf else value for name, value in found._asdict().items()}


def _lean(result: dict[str, Any]) -> dict[str, Any]:
    measured = {"exits": result["measured"]["exits"]}
    kept = {key: value for key, value in result.items() if key not in ("config", "first_losses")}
    return {**kept, "measured": measured}
