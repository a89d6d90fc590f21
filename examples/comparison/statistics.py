"""What may be concluded from results on text: means over seeds, differences with their errors, shares of the headroom.

Two things make a difference uncertain: the seeds, whose spread is pooled over all methods, since two or three runs of
one say little; and the choice of text, for which methods are paired part by part. Their squares add up. With one seed
all methods see the same batches, so methods are compared over the seeds that they share, and what a seed does to all of
them is no part of the spread. A spread of few runs is itself uncertain: how many standard errors a claim takes is
Student's t with the spread's degrees of freedom, and never less than two.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

Result = dict[str, Any]
LEAST = 2.0  # a difference is claimed above so many standard errors, however many degrees of freedom they have
LEVEL = 0.05  # of a claim, both sides together


class Spread(NamedTuple):
    """A standard deviation over seeds, and the degrees of freedom that it was found with."""

    value: float
    freedom: int


class Estimate(NamedTuple):
    """A number and its standard error; None where there are no two seeds of anything to judge it by.

    Attributes:
        value: over the seeds that have a loss.
        error: of the value.
        freedom: degrees of freedom of the error.
        diverged: how many seeds have no loss, and are left out.
    """

    value: float
    error: float | None
    freedom: float = math.inf
    diverged: int = 0

    @property
    def claimed(self) -> bool:
        """Whether it is told from 0."""
        return self.error is not None and abs(self.value) > errors_needed(self.freedom) * self.error


def errors_needed(freedom: float) -> float:
    """How many standard errors a claim takes."""
    return max(LEAST, float(stats.t.ppf(1 - LEVEL / 2, freedom)))


def loss(result: Result) -> float:
    """Bits per byte at full depth."""
    return result["measured"]["exits"][-1]


def gain(result: Result) -> float:
    """The depth gain: the loss after one step less that at full depth."""
    return result["measured"]["exits"][0] - loss(result)


def spent(result: Result) -> float:
    """Training FLOPs."""
    return result["training"]["flops"]


def pooled_spread(groups: Sequence[Sequence[Result]], of: Callable[[Result], float] = loss) -> Spread | None:
    """Over seeds, pooled over the methods (`groups`) that have several."""
    several = [[of(result) for result in group] for group in groups if len(group) > 1]
    freedom = sum(len(values) - 1 for values in several)
    if freedom == 0:
        return None
    return Spread(math.sqrt(sum(np.var(values) * len(values) for values in several) / freedom), freedom)


def own_spread(groups: Sequence[Sequence[Result]]) -> Spread | None:
    """That of a loss beyond what its method and its seed explain; None where they explain everything."""
    several = [(number, group) for number, group in enumerate(groups) if len(group) > 1]
    runs = [(number, result["seed"], loss(result)) for number, group in several for result in group]
    seeds = sorted({seed for _, seed, _ in runs})
    if not runs:
        return None
    explained = np.array(
        [[at == n for n, _ in several] + [seed == s for s in seeds[1:]] for at, seed, _ in runs], float
    )
    losses = np.array([value for _, _, value in runs])
    freedom = len(losses) - int(np.linalg.matrix_rank(explained))
    rest = losses - explained @ np.linalg.lstsq(explained, losses, rcond=None)[0]
    return Spread(math.sqrt(float(rest @ rest) / freedom), freedom) if freedom else None


def shared(*groups: Sequence[Result]) -> list[list[Result]]:
    """The results of the seeds that all groups have; of all seeds where there are none such."""
    seeds = set.intersection(*({result["seed"] for result in group} for group in groups))
    return [[result for result in group if not seeds or result["seed"] in seeds] for group in groups]


def mean(group: Sequence[Result], of: Callable[[Result], float] = loss) -> float:
    """Over seeds."""
    return sum(map(of, group)) / len(group)


def difference(some: Sequence[Result], others: Sequence[Result], spread: Spread | None) -> Estimate:
    """The loss of some less that of others, both the means over the seeds that they share."""
    some, others = shared(some, others)
    if not {result["seed"] for result in some} & {result["seed"] for result in others}:
        spread = None
    parts = _mean_parts(some, "last_parts") - _mean_parts(others, "last_parts")
    return Estimate(mean(some) - mean(others), *_error(parts, some, spread, 1 / len(some) + 1 / len(others)))


def depth_gain(group: Sequence[Result], spread: Spread | None) -> Estimate:
    """The depth gain, and its error by the spread over seeds of depth gains."""
    parts = _mean_parts(group, "first_parts") - _mean_parts(group, "last_parts")
    return Estimate(mean(group, gain), *_error(parts, group, spread, 1 / len(group)))


def at_equal_flops(budgets: Sequence[Sequence[Result]], flops: float) -> list[Result]:
    """What each seed of a method comes to with so many training FLOPs, between its budgets.

    Straight in the logarithms of both. Seeds that end short of them, or begin beyond, are left out.
    """
    seeds = dict.fromkeys(result["seed"] for group in budgets for result in group)
    runs = [[result for group in budgets for result in group if result["seed"] == seed] for seed in seeds]
    return [_between(run, flops) for run in runs if spent(run[0]) <= flops <= spent(run[-1])]


def _between(run: Sequence[Result], flops: float) -> Result:
    def straight(name: str) -> list[float]:
        values = np.log([result["measured"][name] for result in run])
        return [math.exp(np.interp(math.log(flops), at, value)) for value in values.T]

    at = [math.log(spent(result)) for result in run]
    measured = {name: straight(name) for name in ("exits", "last_parts")}
    return {"seed": run[0]["seed"], "measured": {**run[0]["measured"], **measured}}


def _mean_parts(group: Sequence[Result], name: str) -> np.ndarray:
    return np.mean([result["measured"][name] for result in group], axis=0)


def _error(
    parts: np.ndarray, group: Sequence[Result], spread: Spread | None, shares: float
) -> tuple[float | None, float]:
    """The error by text and seeds, and its degrees of freedom (Welch and Satterthwaite)."""
    if spread is None:
        return None, math.inf
    weights = np.array(group[0]["measured"]["part_bytes"], dtype=float)
    weights /= weights.sum()
    off = parts - weights @ parts
    freedoms = np.array([max(1, len(parts) - 1), spread.freedom])
    of_text = (weights**2 * off**2).sum() * len(parts) / freedoms[0]
    squares = np.array([of_text, spread.value**2 * shares])
    total = float(squares.sum())
    return math.sqrt(total), total**2 / float((squares**2 / freedoms).sum()) if total else math.inf
