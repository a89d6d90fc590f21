"""Trains the first steps of a published cell again, and compares."""

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from comparison.describing import differences
from comparison.parts import Comparison
from comparison.published import read_run
from comparison.running import FIRST_STEPS, DivergedError, Running, Stage


def verify(comparison: Comparison, published: Path, out: Path, *, tolerance: float, say: Callable[[str], None]) -> int:
    """The exit code: 0 if every loss is within `tolerance` nats of the published one.

    A method that is described in other words than here is told, and trained all the same: with another version of the
    library its parts may be called otherwise, and on another processor its weights differ in their last bits.

    Raises:
        ValueError: if the cell cannot be read, is of other settings, of no method of these cells or of other text than
            here, or training diverges here.
    """
    run, results, expected = read_run(f"verify is {published}", published)
    if run.method not in comparison.methods:
        known = ", ".join(comparison.methods)
        raise ValueError(f"verify is {published}, but its method is {run.method}, which is none of {known}.")
    most = min(FIRST_STEPS, comparison.protocol.fork(comparison.protocol.budgets[0]))
    if not 1 <= len(expected) <= most:
        raise ValueError(f"verify is {published}, but it holds {len(expected)} first_losses, not 1 to {most}.")
    found: list[float] = []
    with TemporaryDirectory(prefix="verify-") as folder:
        (Path(folder) / "text").symlink_to((out / "text").resolve())
        comparison.data.open(out / "text")
        running = Running(comparison, run, Path(folder))
        config = results[0]["config"]
        _require_same(config, running.config)
        other = differences(config, running.config, "method")
        if other:
            say(f"{run.name}: the published cell is of another method than the cells describe: {other}.")
        trunk, _ = running.stages(comparison.protocol.budgets[0])
        try:
            running.advance(Stage(trunk.folder, 0, len(expected), trunk.factor), watch=found.append)
        except DivergedError as error:
            raise ValueError(f"verify is {published}, but here its training diverges: {error}.") from None
    off = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    fits = off <= tolerance
    say(
        f"{run.name}: {len(found)} steps, losses at most {off:.2g} nats from the published ones, "
        f"{'within' if fits else 'more than'} {tolerance:g}."
    )
    return 0 if fits else 1


def _require_same(found: dict, expected: dict) -> None:
    # How its modules print may change with the library; whether they compute the same, the losses tell.
    names = [name for name in expected if name not in ("built", "method")]
    different = [name for name in names if found.get(name) != json.loads(json.dumps(expected[name]))]
    if different:
        told = "; ".join(f"{name} is {found.get(name)} there, {expected[name]} here" for name in different)
        raise ValueError(f"The published cell is of another run: {told}.")
