"""The results of a comparison on text, method by method and budget by budget, as the tables and plots need them."""

import math
from pathlib import Path
from typing import NamedTuple

from comparison import planning, statistics
from comparison.parts import Comparison, Full, Run
from comparison.planning import best_rate, possible_trials, read_result, trial_score, trials
from comparison.statistics import Estimate, Result, Spread


class Row(NamedTuple):
    """One method.

    Attributes:
        name: of the method.
        label: its name in tables.
        num_seeds: how many the plan asks for.
        rate: the learning rate that the trials chose; None while that is open.
        budgets: for each budget, the results of the seeds that are done and did not diverge.
        diverged: for each budget, how many seeds did.
        trials: the loss of each rate's trial, of those that are asked for; None while open, infinite where it diverged.
    """

    name: str
    label: str
    num_seeds: int
    rate: float | None
    budgets: list[list[Result]]
    diverged: list[int]
    trials: dict[float, float | None]

    @property
    def longest(self) -> list[Result]:
        """Those of the longest budget that has any."""
        return next((group for group in reversed(self.budgets) if group), [])

    @property
    def lost(self) -> int:
        """How many seeds diverged at that budget."""
        return next((lost for group, lost in zip(self.budgets[::-1], self.diverged[::-1], strict=True) if group), 0)


class Table(NamedTuple):
    """All methods, and what is needed to judge them at the last budget.

    Attributes:
        rows: in the order of the plan.
        spreads: the standard deviation of a loss, at each budget, beyond what its method and its seed explain.
        gain_spreads: at each budget, that of a depth gain over seeds, by method. It is pooled over methods that draw
            their depths alike: where nothing leaves after one step in training, the loss there can be anything.
    """

    rows: dict[str, Row]
    spreads: list[Spread | None]
    gain_spreads: list[dict[str, Spread | None]]

    def difference(self, some: str, others: str, budget: int) -> Estimate | None:
        """Between two methods at the budget of this number; None while one is open."""
        groups = [self.rows[name].budgets[budget] for name in (some, others)]
        if not all(groups):
            return None
        found = statistics.difference(*groups, self.spreads[budget])
        return found._replace(diverged=self.diverged(budget, some, others))

    def at_equal_flops(self, name: str, baseline: str) -> Estimate | None:
        """Of the method's longest budget less the baseline at as many training FLOPs.

        None where that lies outside of the baseline's budgets. The two have seen different numbers of tokens, so what
        a seed does to all methods stays in the spread.
        """
        row, base = self.rows[name], self.rows[baseline]
        others = statistics.at_equal_flops(base.budgets, statistics.mean(row.longest, statistics.spent))
        if not others:
            return None
        number = row.budgets.index(row.longest)
        spread = statistics.pooled_spread([each.budgets[number] for each in self.rows.values()])
        found = statistics.difference(row.longest, others, spread)
        return found._replace(diverged=row.lost + sum(base.diverged))

    def depth_gain(self, name: str, budget: int) -> Estimate | None:
        """Of a loop; None while it is open."""
        group = self.rows[name].budgets[budget]
        if not _loops(group):
            return None
        found = statistics.depth_gain(group, self.gain_spreads[budget][name])
        return found._replace(diverged=self.diverged(budget, name))

    def diverged(self, budget: int, *names: str) -> int:
        """How many seeds of these methods diverged at the budget of this number."""
        return sum(self.rows[name].diverged[budget] for name in dict.fromkeys(names))


def collect(comparison: Comparison, out: Path) -> Table:
    """Everything there is by now."""
    names = dict.fromkeys(cell.method for cell in comparison.plan)
    rows = {name: _row(comparison, out, name) for name in names}
    numbers = range(len(comparison.protocol.budgets))
    groups = [[row.budgets[number] for row in rows.values()] for number in numbers]
    return Table(
        rows,
        [statistics.own_spread(group) for group in groups],
        [_gain_spreads(comparison, {name: row.budgets[number] for name, row in rows.items()}) for number in numbers],
    )


def _gain_spreads(comparison: Comparison, groups: dict[str, list[Result]]) -> dict[str, Spread | None]:
    alike: dict[object, list[list[Result]]] = {}
    for name, group in groups.items():
        if _loops(group):
            alike.setdefault(comparison.methods[name].sampler, []).append(group)
    pooled = {sampler: statistics.pooled_spread(of_sampler, statistics.gain) for sampler, of_sampler in alike.items()}
    return {name: pooled[comparison.methods[name].sampler] for name, group in groups.items() if _loops(group)}


def _loops(group: list[Result]) -> bool:
    return bool(group) and len(group[0]["measured"]["exits"]) > 1


def _row(comparison: Comparison, out: Path, name: str) -> Row:
    rate = best_rate(comparison, out, name)
    seeds = dict.fromkeys(cell.seed for cell in comparison.plan if isinstance(cell, Full) and cell.method == name)
    runs = [] if rate is None else [Run(name, rate, seed, len(comparison.protocol.budgets)) for seed in seeds]
    done = [_done(comparison, out, runs, budget) for budget in comparison.protocol.budgets]
    budgets = [[one for one in group if planning.score(comparison, one) < math.inf] for group in done]
    diverged = [len(group) - len(finite) for group, finite in zip(done, budgets, strict=True)]
    tried = {} if comparison.methods[name].rate_of else _tried(comparison, out, name)
    return Row(name, comparison.methods[name].label, len(seeds), rate, budgets, diverged, tried)


def _done(comparison: Comparison, out: Path, runs: list[Run], budget: int) -> list[Result]:
    results = [read_result(comparison, out, run, budget) for run in runs]
    return [result for result in results if result is not None]


def _tried(comparison: Comparison, out: Path, name: str) -> dict[float, float | None]:
    """The trials that the choice asks for, and any others that there are."""
    asked = trials(comparison, out, name)
    losses = {run: trial_score(comparison, out, run) for run in possible_trials(comparison, name)}
    return {run.rate: loss for run, loss in losses.items() if run in asked or loss is not None}
