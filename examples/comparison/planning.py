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


def missing_budgets(comparison: Comparison, out: Path, run: Run) -> list[int]:
    """Those of its budgets that have no result."""
    budgets = comparison.protocol.budgets[: run.num_budgets]
    return [budget for budget in budgets if not result_path(out / run.name, budget).exists()]


def is_done(comparison: Comparison, out: Path, run: Run) -> bool:
    """Whether all of its budgets have a result."""
    return not missing_budgets(comparison, out, run)


def possible_trials(comparison: Comparison, method: str) -> list[Run]:
    """One for each learning rate, in ascending order: of the method, or of the one that it varies."""
    owner = comparison.methods[method].rate_of or method
    return [Run(owner, rate, _trial_seed(comparison, owner), 1) for rate in sorted(comparison.protocol.rates)]


def trials(comparison: Comparison, out: Path, method: str) -> list[Run]:
    """The trials that choose the learning rate, as far as they can be named by now.

    The two rates in the middle, then outward from the best one until both of its neighbours are tried.
    """
    runs = possible_trials(comparison, method)
    low = (len(runs) - 1) // 2
    high = min(low + 1, len(runs) - 1)
    while None not in (scores := [trial_score(comparison, out, run) for run in runs[low : high + 1]]):
        best = low + scores.index(min(score for score in scores if score is not None))
        if best == low and low > 0:
            low -= 1
        elif best == high and high < len(runs) - 1:
            high += 1
        else:
            break
    return runs[low : high + 1]


def trial_score(comparison: Comparison, out: Path, trial: Run) -> float | None:
    """None while it is open, infinite where it diverged."""
    result = read_result(comparison, out, trial, comparison.protocol.budgets[0])
    return None if result is None else score(comparison, result)


def best_rate(comparison: Comparison, out: Path, method: str) -> float | None:
    """The rate of the best trial; None until all are done."""
    scores = {run.rate: trial_score(comparison, out, run) for run in trials(comparison, out, method)}
    done = {rate: score for rate, score in scores.items() if score is not None}
    return min(done, key=lambda rate: done[rate]) if len(done) == len(scores) else None


def runs_of(comparison: Comparison, out: Path, cell: Trials | Full) -> list[Run] | None:
    """The runs that a cell of the plan stands for; None while its learning rate is not known."""
    if isinstance(cell, Trials):
        return trials(comparison, out, cell.method)
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


def runs_by_name(comparison: Comparison, out: Path) -> dict[str, Run]:
    """Those of the plan, and before them all trials: some may have been made that the choice of a rate did not need."""
    tried = [run for cell in comparison.plan for run in possible_trials(comparison, cell.method)]
    return {run.name: run for run in (*tried, *known_runs(comparison, out))}


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


def unfinished(comparison: Comparison, out: Path) -> list[str]:
    """The methods of which the plan has something left to train."""
    asked = ((cell.method, runs_of(comparison, out, cell)) for cell in comparison.plan)
    left = (name for name, runs in asked if runs is None or not all(is_done(comparison, out, run) for run in runs))
    return list(dict.fromkeys(left))


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
