"""Trains methods side by side on one protocol, and tabulates what came out.

    python examples/compare.py --out runs/compare                          # all cells of comparison/language.py
    python examples/compare.py --out runs/compare --text my_texts/ --jobs 4
    python examples/compare.py --out runs/mine --cells mine.py                             # docs/comparison.md has one
    python examples/compare.py --out runs/compare --publish docs/results/comparison
    python examples/compare.py --out runs/compare --text text/ --restore docs/results/comparison
    python examples/compare.py --out runs/compare --verify docs/results/comparison/cells/grt-lr0.003-seed0.json

Kill it whenever you like: the same command goes on, cell by cell and inside each cell, and nothing is lost. What is
compared and on which text must be the same in every call.
"""

import math
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import torch
import tyro
from comparison.checking import check, check_methods, check_steps
from comparison.loading import load_cells
from comparison.locking import BusyError
from comparison.parts import Comparison, Trials
from comparison.planning import find_run, possible_trials, results, runs_of, unfinished
from comparison.restoring import published_files, restore
from comparison.running import Running
from comparison.stopping import StoppedError, stop_request
from comparison.verifying import verify
from comparison.working import BUSY, progress, work


class Arguments(NamedTuple):
    """Trains the cells of a comparison that have no result yet, in their order."""

    out: Path
    """Where the runs lie; outside of the repository, since checkpoints are large."""
    cells: str = "comparison.language"
    """A file of cells, or a Python module."""
    text: Path | None = None
    """A folder of text files. By default the Python standard library's own sources."""
    jobs: int = os.cpu_count() or 1
    """Runs side by side, each on one core; by default as many as there are cores."""
    nice: int = 19
    """Added to the niceness of the processes; 19 yields to everything else that runs on the machine."""
    publish: Path | None = None
    """Trains nothing; writes table, JSON and plots of what there is to this folder."""
    restore: Path | None = None
    """Takes the results published in this folder, on the same text, as done: only what they lack is trained."""
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
    parent: int | None = None
    """With --only: saves and ends once the process of this id is no longer the one that began it."""


def require_sensible(arguments: Arguments) -> None:
    """Refuses what cannot be meant.

    Raises:
        ValueError: naming the option, what it is and what it may be.
    """
    if arguments.jobs < 1:
        raise ValueError(f"jobs is {arguments.jobs}, but must be at least 1.")
    if arguments.only is None and arguments.budgets is not None:
        raise ValueError(f"budgets is {arguments.budgets}, but goes with --only alone.")
    if arguments.budgets is not None and arguments.budgets < 1:
        raise ValueError(f"budgets is {arguments.budgets}, but must be at least 1.")
    if not 0 <= arguments.tolerance < math.inf:
        raise ValueError(f"tolerance is {arguments.tolerance}, but must be a number of nats of at least 0.")
    if arguments.text is not None and not arguments.text.exists():
        raise ValueError(f"text is {arguments.text}, but there is no such file or folder.")
    if arguments.restore is not None and arguments.verify is not None:
        raise ValueError(f"restore is {arguments.restore}, but goes without --verify.")
    if arguments.restore is not None:
        published_files(arguments.restore)
    _require_folder("out", arguments.out)
    if arguments.publish is not None:
        _require_folder("publish", arguments.publish)


def _require_folder(name: str, path: Path) -> None:
    place = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not place.is_dir():
        where = "that" if place == path else f"{place}"
        raise ValueError(f"{name} is {path}, but {where} is a file; it must be a folder, or where one can be made.")


def load(arguments: Arguments) -> Comparison:
    """The comparison that the cells make.

    Raises:
        ValueError: if there are no such cells, they are impossible or one of their methods cannot be built, or their
            data reads no text but a folder of text is given.
    """
    comparison = load_cells(arguments.cells)
    check(comparison)
    check_methods(comparison)
    if arguments.text is None:
        return comparison
    return comparison._replace(data=comparison.data.reading(arguments.text))


def main(arguments: Arguments) -> int:
    """Does what the arguments ask for; returns the exit code."""
    require_sensible(arguments)
    os.nice(arguments.nice)
    torch.set_num_threads(1)
    comparison = load(arguments)
    if arguments.restore is not None or (arguments.publish is None and not arguments.status):
        make_out(arguments.out)
    if arguments.verify is not None:
        return verify(comparison, arguments.verify, arguments.out, tolerance=arguments.tolerance, say=_say)
    if arguments.restore is not None and arguments.parent is None:
        _say(restore(comparison, arguments.restore, arguments.out))
    if arguments.only is not None:
        return train_only(comparison, arguments, arguments.only)
    done = results(comparison, arguments.out)
    if arguments.publish is not None:
        if not done:
            raise ValueError(f"out is {arguments.out}, but no run has a result there: there is nothing to publish.")
        print(comparison.publish(comparison, arguments.out, arguments.publish))
        return 0
    if arguments.status:
        print(progress(comparison, arguments.out, arguments.jobs))
        return 0
    return train_missing(comparison, arguments)


def make_out(out: Path) -> None:
    """Makes the folder of the runs.

    Raises:
        ValueError: if none can be made there.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"out is {out}, but no folder can be made there ({error}).") from None


def train_only(comparison: Comparison, arguments: Arguments, name: str) -> int:
    """Trains one run in this process; returns the exit code."""
    run, most = find_run(comparison, arguments.out, name), len(comparison.protocol.budgets)
    if arguments.budgets is not None and arguments.budgets > most:
        raise ValueError(f"budgets is {arguments.budgets}, but there are {most}.")
    asked = run if arguments.budgets is None else run._replace(num_budgets=arguments.budgets)
    with stop_request(arguments.parent) as stop:
        Running(comparison, asked, arguments.out, stop).finish()
    return 0


def train_missing(comparison: Comparison, arguments: Arguments) -> int:
    """Trains all that is missing, each run in a process of its own; returns the exit code."""
    comparison.data.open(arguments.out / "text")
    require_trials(comparison, arguments.out)
    check_steps(comparison, unfinished(comparison, arguments.out))
    with stop_request() as stop:
        failed = work(comparison, arguments.out, sys.argv, jobs=arguments.jobs, say=_say, stop=stop)
    if failed:
        names = ", ".join(run.name for run in failed)
        _say(f"{len(failed)} runs failed: {names}. Once the cause is mended, the same command tries them again.")
    return 1 if failed else 0


def require_trials(comparison: Comparison, out: Path) -> None:
    """Refuses a plan that would wait for ever.

    Raises:
        ValueError: if a learning rate is not known, and no cell would find it.
    """
    tried = {cell.method for cell in comparison.plan if isinstance(cell, Trials)}
    for cell in comparison.plan:
        owner = comparison.methods[cell.method].rate_of or cell.method
        if owner not in tried and runs_of(comparison, out, cell) is None:
            seed = possible_trials(comparison, owner)[0].seed
            raise ValueError(
                f"plan names {cell.method!r}, but has no Trials({owner!r}) to choose its learning rate, and not all of "
                f"those, with seed {seed}, have a result."
            )


def told_plainly(arguments: Arguments) -> int:
    """The exit code; where arguments, files or a signal end the program and not the code, a message is enough."""
    try:
        return main(arguments)
    except BusyError as error:
        print(f"error: {error}", file=sys.stderr)
        return BUSY
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
    except (StoppedError, KeyboardInterrupt):
        print(f"{StoppedError()}", file=sys.stderr)
    return 1


def _say(message: str) -> None:
    print(f"{datetime.now():%m-%d %H:%M} {message}", flush=True)


if __name__ == "__main__":
    sys.exit(told_plainly(tyro.cli(Arguments)))
