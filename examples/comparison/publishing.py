"""Writes what came out: the tables as Markdown, everything as JSON, the plots, and each cell's own result."""

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch
from journal import read_journal

from comparison import tables
from comparison.collecting import Table, collect
from comparison.files import read_json
from comparison.parts import Comparison
from comparison.planning import known_runs, read_result
from comparison.text import TOLD


def publish(comparison: Comparison, out: Path, folder: Path) -> str:
    """Writes to `folder`, however little is done yet; returns the tables."""
    from comparison.figures import draw

    folder.mkdir(parents=True, exist_ok=True)
    num_cells, hours = copy_cells(comparison, out, folder / "cells")
    table = collect(comparison, out)
    text = _report(comparison, out, table, num_cells, hours)
    (folder / "tables.md").write_text(text)
    (folder / "results.json").write_text(json.dumps(_as_json(comparison, table), indent=1) + "\n")
    draw(comparison, table, folder)
    return text


def copy_cells(comparison: Comparison, out: Path, folder: Path) -> tuple[int, float]:
    """Writes the results of each run as one file; returns how many there are, and the core-hours of all steps."""
    folder.mkdir(parents=True, exist_ok=True)
    number, seconds = 0, 0.0
    for name, run in {run.name: run for run in known_runs(comparison, out)}.items():
        results = [read_result(comparison, out, run, budget) for budget in comparison.protocol.budgets]
        done = [result for result in results if result is not None]
        records = [record for path in (out / name).glob("*/log.jsonl") for record in read_journal(path)]
        seconds += sum(record["seconds"] for record in records)
        if done:
            number += 1
            first = [round(loss, 5) for loss in done[0].pop("first_losses", [])]
            budgets = [{key: value for key, value in result.items() if key != "first_losses"} for result in done]
            written = {"run": run._asdict(), "budgets": budgets, "first_losses": first}
            (folder / f"{name}.json").write_text(json.dumps(written) + "\n")
    return number, seconds / 3600


def _report(comparison: Comparison, out: Path, table: Table, num_cells: int, hours: float) -> str:
    parts = {
        "Methods": tables.methods_table(comparison, table),
        "Headroom": tables.headroom_table(comparison, table),
        f"Less {comparison.methods[comparison.baseline].label}": tables.baseline_table(comparison, table),
        "Differences": tables.pairs_table(comparison, table),
        "Depth gain": tables.depth_table(comparison, table),
        "By exit": tables.exits_table(comparison, table),
        "Learning rates": tables.trials_table(comparison, table),
    }
    ran = f"{num_cells} runs, {hours:.1f} core-hours of steps. {_machine()}"
    head = [*_text(out), ran]
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
    return f"{os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}, one thread a run."


def _as_json(comparison: Comparison, table: Table) -> dict[str, Any]:
    lean = {name: row._asdict() for name, row in table.rows.items()}
    for row in lean.values():
        row["trials"] = {rate: "diverged" if loss == float("inf") else loss for rate, loss in row["trials"].items()}
        row["budgets"] = [[_lean(result) for result in group] for group in row["budgets"]]
    pairs = {f"{a} less {b}": [table.difference(a, b, n) for n in _numbers_of(comparison)] for a, b in comparison.pairs}
    gains = {name: [table.depth_gain(name, n) for n in _numbers_of(comparison)] for name in table.rows}
    return {"methods": lean, "differences": pairs, "depth_gains": gains, "spreads": table.spreads}


def _lean(result: dict[str, Any]) -> dict[str, Any]:
    measured = {"exits": result["measured"]["exits"]}
    kept = {key: value for key, value in result.items() if key not in ("config", "first_losses")}
    return {**kept, "measured": measured}


def _numbers_of(comparison: Comparison) -> range:
    return range(len(comparison.protocol.budgets))
