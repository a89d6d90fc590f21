"""Trains methods side by side on one protocol, and tabulates what came out.

    python examples/compare.py --out runs/compare                          # all cells of comparison/language.py
    python examples/compare.py --out runs/compare --text my_texts/ --jobs 4
    python examples/compare.py --out runs/compare --publish docs/results/comparison
    python examples/compare.py --out runs/compare --verify docs/results/comparison/cells/grt-lr0.003-seed0.json

Kill it whenever you like: the same command goes on, cell by cell and inside each cell, and nothing is lost. What is
compared and on which text must be the same in every call.
"""

import os
import sys
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch
import tyro
from comparison.parts import Comparison
from comparison.planning import find_run
from comparison.running import Running
from comparison.verifying import verify
from comparison.working import progress, work


class Arguments(NamedTuple):
    """Trains the cells of a comparison that have no result yet, in their order."""

    out: Path
    """Where the runs lie; outside of the repository, since checkpoints are large."""
    cells: str = "comparison.language"
    """The Python module of the cells."""
    text: Path | None = None
    """A folder of text files. By default the Python standard library's own sources."""
    jobs: int = 1
    """Runs side by side, each on one core."""
    nice: int = 19
    """Added to the niceness of the processes; 19 yields to everything else that runs on the machine."""
    publish: Path | None = None
    """Trains nothing; writes table, JSON and plots of what there is to this folder."""
    verify: Path | None = None
    """Trains the first steps of a published cell again and compares the losses."""
    tolerance: float = 0.005
    """How far losses may be apart there, in nats: other processors round differently."""
    status: bool = False
    """Trains nothing; says how far the runs are."""
    only: str | None = None
    """Trains this run alone, in this process."""
    budgets: int | None = None
    """With --only: up to so many of its budgets."""


def load(arguments: Arguments) -> Comparison:
    """The comparison that the module of cells makes.

    Raises:
        ValueError: if the module has none, or its data reads no text but a folder of text is given.
    """
    comparison = getattr(import_module(arguments.cells), "COMPARISON", None)
    if not isinstance(comparison, Comparison):
        raise ValueError(f"cells is {arguments.cells}, but that module has no COMPARISON.")
    if arguments.text is None:
        return comparison
    return comparison._replace(data=comparison.data.reading(arguments.text))


def main(arguments: Arguments) -> int:
    """Does what the arguments ask for; returns the exit code."""
    os.nice(arguments.nice)
    torch.set_num_threads(1)
    comparison = load(arguments)
    if arguments.verify is not None:
        return verify(comparison, arguments.verify, arguments.out, tolerance=arguments.tolerance, say=_say)
    if arguments.publish is not None:
        print(comparison.publish(comparison, arguments.out, arguments.publish))
        return 0
    if arguments.status:
        print(progress(comparison, arguments.out, arguments.jobs))
        return 0
    if arguments.only is not None:
        run = find_run(comparison, arguments.out, arguments.only)
        asked = run if arguments.budgets is None else run._replace(num_budgets=arguments.budgets)
        Running(comparison, asked, arguments.out).finish()
        return 0
    comparison.data.open(arguments.out / "text")
    failed = work(comparison, arguments.out, sys.argv, jobs=arguments.jobs, say=_say)
    if failed:
        _say(f"{len(failed)} runs failed: {', '.join(run.name for run in failed)}. The same command tries them again.")
    return 1 if failed else 0


def _say(message: str) -> None:
    print(f"{datetime.now():%m-%d %H:%M} {message}", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Arguments)))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("Stopped; nothing is lost. The same command goes on.")
