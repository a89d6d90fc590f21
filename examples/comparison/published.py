"""What is published of a run: all its results as one file, from which others can check it or go on."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from comparison.parts import Comparison, Run
from comparison.planning import read_result, runs_by_name

ABOUT = ("tokens", "layout", "parameters", "non_embedding", "flops_per_token")


class PublishedRun(NamedTuple):
    """A run, its result at each budget that is done, and the losses of its first steps."""

    run: Run
    results: list[dict[str, Any]]
    first_losses: list[float]

    def as_json(self) -> str:
        """The file."""
        told = {"run": self.run._asdict(), "budgets": self.results, "first_losses": self.first_losses}
        return json.dumps(told) + "\n"


def run_files(comparison: Comparison, out: Path) -> dict[str, str]:
    """Each run that has a result as one file, by its name."""
    runs = {name: _published(comparison, out, run) for name, run in runs_by_name(comparison, out).items()}
    return {f"cells/{name}.json": published.as_json() for name, published in runs.items() if published.results}


def _published(comparison: Comparison, out: Path, run: Run) -> PublishedRun:
    found = [read_result(comparison, out, run, budget) for budget in comparison.protocol.budgets]
    done = [result for result in found if result is not None]
    first = done[0].get("first_losses", []) if done else []
    results = [{key: value for key, value in result.items() if key != "first_losses"} for result in done]
    return PublishedRun(run, results, [round(loss, 5) for loss in first])


def read_run(said: str, path: Path) -> PublishedRun:
    """A published run, of whatever method.

    Args:
        said: how the path was asked for, which begins the message of an error.
        path: the file.

    Raises:
        ValueError: if no published run can be read there, or it is damaged.
    """
    try:
        told = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{said}, but no published cell can be read there: {error}") from None
    run, results, losses = (
        told.get(key) if isinstance(told, dict) else None for key in ("run", "budgets", "first_losses")
    )
    fitting = {
        f"run is {run}": _is_run(run),
        "budgets are no list of results of that run": _are_results(results, run),
        "first_losses are no list of numbers": _are_numbers(losses),
    }
    wrong = [reason for reason, fits in fitting.items() if not fits]
    if wrong:
        raise ValueError(f"{said}, but that is no published cell: {wrong[0]}.")
    return PublishedRun(Run(**run), results, losses)


def num_results(text: str) -> int:
    """How many results a file of a run has; 0 where it is damaged."""
    try:
        return len(json.loads(text)["budgets"])
    except (ValueError, TypeError, KeyError):
        return 0


def _is_run(run: object) -> bool:
    if not isinstance(run, dict) or run.keys() != set(Run._fields) or not isinstance(run["method"], str):
        return False
    counts = (run["seed"], run["num_budgets"])
    return _are_numbers([run["rate"]]) and run["rate"] > 0 and all(type(n) is int and n >= 0 for n in counts)


def _are_results(results: object, run: object) -> bool:
    return isinstance(results, list) and bool(results) and all(_is_result(result, run) for result in results)


def _is_result(result: object, run: Any) -> bool:
    if not isinstance(result, dict) or type(result.get("budget")) is not int:
        return False
    same = isinstance(run, dict) and all(result.get(key) == run.get(key) for key in ("method", "rate", "seed"))
    trained = isinstance(result.get("measured"), dict) and _has_sums(result.get("training"))
    complete = all(key in result for key in ABOUT) and isinstance(result.get("config"), dict)
    return same and complete and (trained or isinstance(result.get("diverged"), str))


def _has_sums(training: object) -> bool:
    return isinstance(training, dict) and _are_numbers([training.get(key) for key in ("flops", "seconds")])


def _are_numbers(values: object) -> bool:
    return isinstance(values, list) and all(type(n) in (int, float) and math.isfinite(n) for n in values)
