"""Runs the plan: several runs side by side, each in a process of one thread, with the time that is left."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from journal import read_journal

from comparison.locking import is_held
from comparison.parts import Comparison, Full, Run
from comparison.planning import known_runs, missing_budgets, missing_runs, runs_of
from comparison.running import TRUNK, cooldown_name
from comparison.stopping import StoppedError

POLL_SECONDS = 1.0
PATIENCE = 30.0  # seconds that a run is given to save
BUSY = 75  # the exit code of a run that another process trains


class Worker:
    """A process that trains one run; what it says goes to `output.txt` in the run's folder."""

    def __init__(self, run: Run, out: Path, command: list[str]):
        self.run, folder = run, out / run.name
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "output.txt"
        self._output = self._path.open("a")
        self._from = self._path.stat().st_size
        arguments = ["--only", run.name, "--budgets", str(run.num_budgets), "--parent", str(os.getpid())]
        self._process = subprocess.Popen(
            [sys.executable, *command, *arguments], stdout=self._output, stderr=subprocess.STDOUT
        )

    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    def last_words(self) -> str:
        """What a process that has ended said last, and where all that it said stands."""
        said = self._path.read_bytes()[self._from :].decode(errors="replace").split("\n")
        last = next((line for line in reversed(said) if line.strip()), f"nothing, and its exit code is {self.code()}")
        return f"{self._path} ends with: {last}"

    def ask_to_stop(self) -> None:
        """It saves after the running step, and ends."""
        self._process.terminate()

    def end(self) -> None:
        """Waits until it has ended, and no longer than that takes."""
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()


def work(
    comparison: Comparison,
    out: Path,
    command: list[str],
    *,
    jobs: int,
    say: Callable[[str], None],
    stop: Callable[[], bool] = lambda: False,
) -> list[Run]:
    """Runs all that is missing; returns the runs that failed.

    A run whose learning rate is not known waits for its trials, and one that another process trains for that process;
    others go before it meanwhile. However this ends, the processes it began end first.

    Raises:
        StoppedError: if it was asked to stop.
    """
    crew = Crew(comparison, out, command, say)
    said = 0.0
    try:
        while not stop():
            crew.dismiss()
            if not crew.hire(jobs):
                return crew.failed
            if time.monotonic() - said > 60:
                said = time.monotonic()
                say(progress(comparison, out, jobs))
            time.sleep(POLL_SECONDS)
        raise StoppedError
    finally:
        crew.end()


class Crew:
    """The workers of a comparison."""

    def __init__(self, comparison: Comparison, out: Path, command: list[str], say: Callable[[str], None]):
        self.comparison, self.out, self.command, self.say = comparison, out, command, say
        self.failed: list[Run] = []
        self._workers: list[Worker] = []
        self._held: set[str] = set()

    def dismiss(self) -> None:
        """Takes leave of those that have ended."""
        for worker in [worker for worker in self._workers if worker.code() is not None]:
            self._workers.remove(worker)
            worker.end()
            if worker.code() == BUSY:
                continue  # another process was faster: it comes again, and waits
            if worker.code():
                self.failed.append(worker.run)
            self.say(f"{worker.run.name}: {f'failed, {worker.last_words()}' if worker.code() else 'done'}")

    def hire(self, jobs: int) -> bool:
        """Begins what can be begun, up to so many at a time; returns whether anything is left to wait for."""
        taken = {worker.run.name for worker in self._workers} | {run.name for run in self.failed}
        waiting = [run for run in missing_runs(self.comparison, self.out) if run.name not in taken]
        held = {run.name for run in waiting if is_held(self.out / run.name)}
        for name in sorted(held - self._held):
            self.say(f"{name}: another process trains it; waits")
        self._held = held
        for run in [run for run in waiting if run.name not in held][: jobs - len(self._workers)]:
            self.say(f"{run.name}: {_beginning(self.out / run.name)}")
            self._workers.append(Worker(run, self.out, self.command))
        return bool(self._workers or waiting)

    def end(self) -> None:
        """Ends all that still run."""
        for worker in self._workers:
            worker.ask_to_stop()
        for worker in self._workers:
            worker.end()


def progress(comparison: Comparison, out: Path, jobs: int) -> str:
    """Steps done and to do, and the time left: each method at its own speed so far, new ones at the mean of all.

    Steps of restored results, which others took, are neither done nor to do.
    """
    taken = {name: [0, 0.0] for name in comparison.methods}
    left = dict.fromkeys(comparison.methods, 0)
    for run in _longest(list(known_runs(comparison, out))):
        records = {path.parent.name: read_journal(path) for path in (out / run.name).glob("*/log.jsonl")}
        taken[run.method][0] += sum(map(len, records.values()))
        taken[run.method][1] += sum(record["seconds"] for stage in records.values() for record in stage)
        left[run.method] += steps_left(comparison, out, run, {name: len(stage) for name, stage in records.items()})
    unknown = [cell for cell in comparison.plan if isinstance(cell, Full) and runs_of(comparison, out, cell) is None]
    for method, _ in dict.fromkeys((cell.method, cell.seed) for cell in unknown):
        left[method] += comparison.protocol.steps(len(comparison.protocol.budgets))
    done, seconds = (sum(column) for column in zip(*taken.values(), strict=True))
    said = f"{done:,} of {done + sum(left.values()):,} steps done"
    if not any(left.values()):
        return f"{said}, nothing is left"
    if not done:
        return said
    hours = sum(
        left[name] * (spent / steps if steps else seconds / done) / 3600 for name, (steps, spent) in taken.items()
    )
    return f"{said}, {hours:.1f} core-hours left: {hours / jobs:.1f} hours with {jobs} at a time on cores of their own"


def steps_left(comparison: Comparison, out: Path, run: Run, taken: dict[str, int]) -> int:
    """What is missing of the trunk, up to the last budget without a result, and of the cooldowns of all without."""
    protocol = comparison.protocol
    missing = missing_budgets(comparison, out, run)
    trunk = max((protocol.fork(budget) for budget in missing), default=0)
    stages = {TRUNK: trunk, **{cooldown_name(budget): budget - protocol.fork(budget) for budget in missing}}
    return sum(max(0, length - taken.get(name, 0)) for name, length in stages.items())


def _beginning(folder: Path) -> str:
    if any(folder.glob("*/checkpoint-*")):
        return "goes on"
    return "begins again, since nothing was saved" if any(folder.glob("*/log.jsonl")) else "begins"


def _longest(runs: list[Run]) -> list[Run]:
    longest: dict[str, Run] = {}
    for run in runs:
        longest[run.name] = max(run, longest.get(run.name, run), key=lambda each: each.num_budgets)
    return list(longest.values())
