"""Which runs the plan asks for, and which of them can be begun: a full run needs the trials that choose its rate."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from comparison.describing import require_same, settings
from comparison.files import read_json
from comparison.parts import Comparison, Full, Run, Trials
from comparison.running import result_path


def read_result(comparison: Comparison, out: Path, run: Run, budget: int) -> dict[str, Any] | None:
    """The result of a run at a budget, if it is there.

    Raises:
        ValueError: if it is damaged, or was trained with another method, protocol or size than the cells say now.
    """
    path = result_path(out / run.name, budget)
    if not path.exists():
        return None
    result = read_json(path, "config", "budget")
    if "method" in result["config"]:  # absent in what was trained before methods were described: that is taken as it is
        require_same(path, result["config"], settings(comparison, run), "run", "protocol", "sizes", "method")
    return result


def score(comparison: Comparison, result: dict[str, Any]) -> float:
    """How good a result is, lower is better; infinite where the run diverged."""
    found = math.inf if "diverged" in result else comparison.data.score(result["measured"])
    return math.inf if math.isnan(found) else found


def is_done(comparison: Comparison, out: Path, run: Run) -> bool:
    """Whether all of its budgets have a result."""
    budgets = comparison.protocol.budgets[: run.num_budgets]
    return all(result_path(out / run.name, budget).exists() for budget in budgets)


def trials(comparison: Comparison, method: str) -> list[Run]:
    """The trials of the learning rate that a method goes by: its own, or those of the method that it varies."""
    owner = comparison.methods[method].rate_of or method
    return [Run(owner, rate, _trial_seed(comparison, owner), 1) for rate in comparison.protocol.rates]


def best_rate(comparison: Comparison, out: Path, method: str) -> float | None:
    """The rate of the best trial; None until all are done."""
    first = comparison.protocol.budgets[0]
    results = [(run, read_result(comparison, out, run, first)) for run in trials(comparison, method)]
    if any(result is None for _, result in results):
        return None
    scores = {run.rate: score(comparison, result) for run, result in results if result is not None}
    return min(scores, key=lambda rate: scores[rate])


def runs_of(comparison: Comparison, out: Path, cell: Trials | Full) -> list[Run] | None:
    """The runs that a cell of the plan stands for; None while its learning rate is not known."""
    if isinstance(cell, Trials):
        return trials(comparison, cell.method)
    rate = best_rate(comparison, out, cell.method)
    return (
        None
        if rate is None
        else [Run(cell.method, rate, cell.seed, cell.num_budgets or len(comparison.protocol.budgets))]
    )


def known_runs(comparison: Comparison, out: Path) -> Iterator[Run]:
    """All runs that can be named by now, in the plan's order."""
    for cell in comparison.plan:
        yield from runs_of(comparison, out, cell) or ()


def results(comparison: Comparison, out: Path) -> list[dict[str, Any]]:
    """All that is there of the runs that can be named by now.

    Raises:
        ValueError: if one is damaged, or of other cells.
    """
    runs = {run.name: run for run in known_runs(comparison, out)}.values()
    found = [read_result(comparison, out, run, budget) for run in runs for budget in comparison.protocol.budgets]
    return [result for result in found if result is not None]


def missing_runs(comparison: Comparison, out: Path) -> list[Run]:
    """Those that are not done, each once: one that goes on further down the plan waits for its turn there."""
    missing: dict[str, Run] = {}
    for run in known_runs(comparison, out):
        if not is_done(comparison, out, run):
            missing.setdefault(run.name, run)
    return list(missing.values())


def find_run(comparison: Comparison, out: Path, name: str) -> Run:
    """The run of this name, with as many budgets as the plan asks for.

    Raises:
        ValueError: if there is none.
    """
    known = list(known_runs(comparison, out))
    found = [run for run in known if run.name == name]
    if not found:
        names = sorted({run.name for run in known}, key=lambda each: (not each.startswith(name), each))
        raise ValueError(f"only is {name}, but the runs that can be begun are {', '.join(names[:6])}, ...")
    return max(found, key=lambda run: run.num_budgets)


def _trial_seed(comparison: Comparison, method: str) -> int:
    seeds = [cell.seed for cell in comparison.plan if isinstance(cell, Full) and cell.method == method]
    return seeds[0] if seeds else 0
