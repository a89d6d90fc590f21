"""Runs the plan: several runs side by side, each in a process of one thread, with the time that is left."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from journal import read_journal

from comparison.parts import Comparison, Run
from comparison.planning import known_runs, missing_runs, runs_of

POLL_SECONDS = 1.0


class Worker:
    """A process that trains one run; what it says goes to `output.txt` in the run's folder."""

    def __init__(self, run: Run, out: Path, command: list[str]):
        self.run, folder = run, out / run.name
        folder.mkdir(parents=True, exist_ok=True)
        self._output = (folder / "output.txt").open("a")
        arguments = ["--only", run.name, "--budgets", str(run.num_budgets)]
        self._process = subprocess.Popen(
            [sys.executable, *command, *arguments], stdout=self._output, stderr=subprocess.STDOUT
        )

    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()


def work(comparison: Comparison, out: Path, command: list[str], *, jobs: int, say: Callable[[str], None]) -> list[Run]:
    """Runs all that is missing; returns the runs that failed.

    A run whose learning rate is not known waits for its trials; others go before it meanwhile.
    """
    workers: list[Worker] = []
    failed: list[Run] = []
    said = 0.0
    while True:
        for worker in [worker for worker in workers if worker.code() is not None]:
            workers.remove(worker)
            if worker.code():
                failed.append(worker.run)
            say(f"{worker.run.name}: {'failed, see its output.txt' if worker.code() else 'done'}")
        busy = {worker.run.name for worker in workers} | {run.name for run in failed}
        waiting = [run for run in missing_runs(comparison, out) if run.name not in busy]
        for run in waiting[: jobs - len(workers)]:
            say(f"{run.name}: begins")
            workers.append(Worker(run, out, command))
        if not workers:
            return failed
        if time.monotonic() - said > 60:
            said = time.monotonic()
            say(progress(comparison, out, jobs))
        time.sleep(POLL_SECONDS)


def progress(comparison: Comparison, out: Path, jobs: int) -> str:
    """Steps done and to do, and the time left: each method at its own speed so far, new ones at the mean of all."""
    taken = {name: [0, 0.0] for name in comparison.methods}
    planned = dict.fromkeys(comparison.methods, 0)
    for run in _longest(list(known_runs(comparison, out))):
        records = [record for path in (out / run.name).glob("*/log.jsonl") for record in read_journal(path)]
        taken[run.method][0] += len(records)
        taken[run.method][1] += sum(record["seconds"] for record in records)
        planned[run.method] += comparison.protocol.steps(run.num_budgets)
    unknown = {cell[:2] for cell in comparison.plan if runs_of(comparison, out, cell) is None}
    for method, _ in unknown:
        planned[method] += comparison.protocol.steps(len(comparison.protocol.budgets))
    done, seconds = (sum(column) for column in zip(*taken.values(), strict=True))
    said = f"{done:,} of {sum(planned.values()):,} steps done"
    if not done:
        return said
    hours = sum(
        (planned[name] - steps) * (spent / steps if steps else seconds / done) / 3600
        for name, (steps, spent) in taken.items()
    )
    return f"{said}, {hours:.1f} core-hours left: {hours / jobs:.1f} hours with {jobs} at a time on cores of their own"


def _longest(runs: list[Run]) -> list[Run]:
    longest: dict[str, Run] = {}
    for run in runs:
        longest[run.name] = max(run, longest.get(run.name, run), key=lambda each: each.num_budgets)
    return list(longest.values())
