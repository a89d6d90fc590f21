"""Times of several runs, taken side by side: a machine's noise hits all runs of a round alike."""

import time
from collections.abc import Callable
from statistics import median, quantiles

import torch
from tqdm import tqdm


def seconds(run: Callable[[], object], device: str) -> float:
    """How long one call takes."""
    begin = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def side_by_side(runs: dict[str, Callable[[], object]], rounds: int, device: str = "cpu") -> dict[str, list[float]]:
    """Seconds of each run, round by round; the order turns, so that no run always follows the same one.

    A round before the first warms up, and compiles what is to be compiled; it is not counted.
    """
    names, times = list(runs), {name: [] for name in runs}
    for turn in tqdm(range(-1, rounds), leave=False):
        for shift in range(len(names)):
            name = names[(turn + shift) % len(names)]
            times[name].append(seconds(runs[name], device))
    return {name: measured[1:] for name, measured in times.items()}


def ratios(times: dict[str, list[float]], of: str, to: str) -> list[float]:
    """How many times as long one run took as the other, in each round."""
    return [a / b for a, b in zip(times[of], times[to], strict=True)]


def shown(values: list[float]) -> str:
    """The median over the rounds, and the quartiles."""
    low, _, high = quantiles(values, n=4)
    return f"{median(values):.3f} ({low:.3f} to {high:.3f})"


def ratio(times: dict[str, list[float]], of: str, to: str) -> str:
    """The median of the ratio within a round, and its quartiles."""
    return shown(ratios(times, of, to))
