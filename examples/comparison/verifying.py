"""Trains the first steps of a published cell again, and compares."""

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from comparison.parts import Comparison, Run
from comparison.running import Running, Stage


def verify(comparison: Comparison, published: Path, out: Path, *, tolerance: float, say: Callable[[str], None]) -> int:
    """The exit code: 0 if every loss is within `tolerance` nats of the published one.

    Raises:
        ValueError: if the cell cannot be read, is of other settings, another method or other text than here.
    """
    cell = _read(published)
    run, expected = Run(**cell["run"]), cell["first_losses"]
    found: list[float] = []
    with TemporaryDirectory(prefix="verify-") as folder:
        (Path(folder) / "text").symlink_to((out / "text").resolve())
        comparison.data.open(out / "text")
        running = Running(comparison, run, Path(folder))
        _require_same(cell["budgets"][0]["config"], running.config)
        trunk, _ = running.stages(comparison.protocol.budgets[0])
        running.advance(Stage(trunk.folder, 0, len(expected), trunk.factor), watch=found.append)
    off = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    fits = off <= tolerance
    say(
        f"{run.name}: {len(found)} steps, losses at most {off:.2g} nats from the published ones, "
        f"{'within' if fits else 'more than'} {tolerance:g}."
    )
    return 0 if fits else 1


def _read(path: Path) -> dict:
    try:
        cell = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"verify is {path}, but no published cell can be read there: {error}") from None
    if not cell.get("first_losses"):
        raise ValueError(f"verify is {path}, but it holds no first_losses.")
    return cell


def _require_same(found: dict, expected: dict) -> None:
    # How its modules print, "built", may change with the library; whether they compute the same, the losses tell.
    names = [name for name in expected if name != "built"]
    different = [name for name in names if found.get(name) != json.loads(json.dumps(expected[name]))]
    if different:
        told = "; ".join(f"{name} is {found.get(name)} there, {expected[name]} here" for name in different)
        raise ValueError(f"The published cell is of another run: {told}.")
