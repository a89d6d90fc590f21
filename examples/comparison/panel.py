"""The second panel, where depth is needed: a few methods on a puzzle, and its report."""

import json
import math
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from comparison.figures import STYLE, as_png, look
from comparison.language import FIRST
from comparison.parts import Comparison, Full, Protocol, Run, Trials
from comparison.planning import best_rate, read_result, score
from comparison.published import run_files
from comparison.publishing import what_ran, write
from comparison.puzzles import Puzzle, PuzzleData

SEEDS = (0, 1)


def panel(puzzle: Puzzle) -> Comparison:
    """The first four methods on one puzzle."""
    trials = [Trials(name) for name in FIRST]
    return Comparison(
        data=PuzzleData(puzzle),
        methods=FIRST,
        protocol=Protocol(budgets=(1464, 2928)),
        plan=(*trials, *(Full(name, seed) for seed in SEEDS for name in FIRST)),
        dim=64,
        num_heads=2,
        baseline="dense-12",
        floor="three-blocks",
        publish=publish,
    )


def publish(comparison: Comparison, out: Path, folder: Path) -> str:
    """Writes accuracy by steps asked for and steps taken: a table, JSON, a plot. Returns the table."""
    cells, done = run_files(comparison, out), _accuracies(comparison, out)
    text = what_ran(comparison, out, len(cells)) + "\n\n" + _table(comparison, done)
    told = json.dumps(done, indent=1) + "\n"
    plot = as_png(_drawn(comparison, done))
    write(folder, {"tables.md": text, "results.json": told, "accuracy.png": plot, **cells})
    return text


def _accuracies(comparison: Comparison, out: Path) -> dict[str, dict[int, dict]]:
    """The mean over seeds of (depth, hops), by method and budget; of those that are done."""
    budgets = comparison.protocol.budgets
    found = {
        name: {budget: _accuracy(comparison, out, name, budget) for budget in budgets} for name in comparison.methods
    }
    some = {name: {budget: one for budget, one in of.items() if _has_run(one)} for name, of in found.items()}
    return {name: of for name, of in some.items() if of}


def _accuracy(comparison: Comparison, out: Path, name: str, budget: int) -> dict:
    rate, last = best_rate(comparison, out, name), len(comparison.protocol.budgets)
    runs = [] if rate is None else [Run(name, rate, seed, last) for seed in SEEDS]
    results = [read_result(comparison, out, run, budget) for run in runs]
    done = [result for result in results if result is not None]
    measured = [result["measured"] for result in done if score(comparison, result) < math.inf]
    counted = {"num_seeds": len(measured), "num_diverged": len(done) - len(measured)}
    if not measured:
        return counted
    mean = np.mean([one["accuracy"] for one in measured], axis=0).tolist()
    return {**counted, "accuracy": mean, "full": measured[0]["full"]}


def _has_run(one: dict) -> bool:
    return one["num_seeds"] + one["num_diverged"] > 0


def _table(comparison: Comparison, done: dict[str, dict[int, dict]]) -> str:
    hops = range(1, _puzzle(comparison).max_hops + 1)
    lines = ["| method, at full depth | trained for | seeds | " + " | ".join(f"k = {k}" for k in hops) + " |"]
    lines.append("|" + " --- |" * (len(hops) + 3))
    for name, method in comparison.methods.items():
        for budget in comparison.protocol.budgets:
            one = done.get(name, {}).get(budget, {"num_seeds": 0, "num_diverged": 0})
            none = "diverged" if one["num_diverged"] == len(SEEDS) else "open"
            accuracy = one["accuracy"][one["full"] - 1] if "accuracy" in one else [none] * len(hops)
            cells = [value if isinstance(value, str) else f"{value:.3f}" for value in accuracy]
            diverged = f", {one['num_diverged']} diverged" if one["num_diverged"] else ""
            seeds = f"{one['num_seeds']} of {len(SEEDS)}{diverged}"
            lines.append(f"| {method.label} | {budget:,} steps | {seeds} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _drawn(comparison: Comparison, done: dict[str, dict[int, dict]]) -> Figure:
    budgets, puzzle = comparison.protocol.budgets, _puzzle(comparison)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 4.2 * len(budgets)), layout="constrained")
        rows = figure.subplots(len(budgets), 2, sharey=True, squeeze=False)
        for budget, (left, right) in zip(budgets, rows, strict=True):
            for number, (name, of) in enumerate(done.items()):
                if of.get(budget, {}).get("num_seeds"):
                    _draw_one(left, right, comparison.methods[name].label, of[budget], look(number))
            for axes in (left, right):
                axes.axhline(puzzle.chance(), color="gray", linestyle=":")
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            trained = f"{puzzle.name()}, {budget:,} optimizer steps"
            left.set(xlabel="steps k that the question asks for", ylabel="accuracy", title=f"{trained}: full depth")
            right.set(xlabel="steps of the loop taken", title="mean over k; rings at full depth")
            if left.get_legend_handles_labels()[0]:
                left.legend(edgecolor="none")
        return figure


def _draw_one(left: Axes, right: Axes, label: str, one: dict, look: dict[str, Any]) -> None:
    full, accuracy = one["full"], one["accuracy"]
    left.plot(range(1, len(accuracy[0]) + 1), accuracy[full - 1], label=label, **look)
    means = [sum(of_depth) / len(of_depth) for of_depth in accuracy]
    if len(means) == 1:
        right.axhline(means[0], color=look["color"], linestyle=look["linestyle"])
        return
    right.plot(range(1, len(means) + 1), means, **look)
    right.plot([full], [means[full - 1]], "o", color=look["color"], markersize=13, fillstyle="none")


def _puzzle(comparison: Comparison) -> Puzzle:
    return comparison.data.puzzle
