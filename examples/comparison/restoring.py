"""Takes what was published as done, so that a comparison goes on where no run of it lies."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from comparison.describing import differences, settings
from comparison.files import write_json
from comparison.parts import Comparison
from comparison.published import PublishedRun, read_run
from comparison.running import result_path

NEEDED = ("run", "protocol", "sizes", "data")  # of a result's configuration; a method was not always described


def restore(comparison: Comparison, folder: Path, out: Path) -> str:
    """Puts published results where their runs would have put them; says what was taken and what was not.

    Taken are those of methods that the plan needs, at budgets of the protocol. A result that is there already stays.
    Checkpoints are not published: a run of which more is asked begins anew, and adds what it lacks.

    Raises:
        ValueError: if there are none, or one is damaged, or of another method, protocol, size or text than here; then
            none is taken.
    """
    paths = published_files(folder)
    wanted = {name for cell in comparison.plan for name in (cell.method, comparison.methods[cell.method].rate_of)}
    found = [read_run(f"restore is {folder}, in it cells/{path.name}", path) for path in paths]
    for path, published in zip(paths, found, strict=True):
        if path.stem != published.run.name:
            raise ValueError(f"restore is {folder}, but cells/{path.name} there holds the run {published.run.name}.")
    ours = [published for published in found if published.run.method in wanted]
    _require_ours(comparison, folder, ours, comparison.data.open(out / "text"))
    placed = [each for published in ours for each in _places(comparison, published, out)]
    missing = [(path, result) for path, result in placed if not path.exists()]
    for path, result in missing:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, result)
    stay, others = len(placed) - len(missing), sum(len(each.results) for each in found) - len(placed)
    said = {f"{stay} stay as they are here": stay, f"{others} are of methods or budgets that the plan lacks": others}
    taken = f"{len(missing)} results taken from {folder}"
    return "; ".join([taken, *(words for words, number in said.items() if number)])


def published_files(folder: Path) -> list[Path]:
    """The files of all published runs.

    Raises:
        ValueError: if there are none.
    """
    paths = sorted((folder / "cells").glob("*.json"))
    if not paths:
        raise ValueError(
            f"restore is {folder}, but there is no published cell in {folder / 'cells'}: give a folder that --publish "
            "wrote."
        )
    return paths


def _require_ours(comparison: Comparison, folder: Path, runs: list[PublishedRun], data: dict[str, Any]) -> None:
    told = {published.run.name: _differences(comparison, published, data) for published in runs}
    different = {name: difference for name, difference in told.items() if difference}
    if different:
        name, difference = next(iter(different.items()))
        raise ValueError(
            f"restore is {folder}, but of {len(told)} cells there {len(different)} are of other runs than here. "
            f"Of {name} {difference}. Text, sizes and protocol must be the published ones; a method that is built "
            "otherwise needs a name of its own."
        )


def _differences(comparison: Comparison, published: PublishedRun, data: dict[str, Any]) -> str:
    """In words, how a run differs from that of this name here; empty if it doesn't."""
    expected = json.loads(json.dumps({"data": data, **settings(comparison, published.run)}))
    for result in published.results:
        config = result["config"]
        lacking = [name for name in NEEDED if type(config.get(name)) is not type(expected[name]) or not config[name]]
        told = f"{', '.join(lacking)} is not told" if lacking else differences(config, expected, *expected)
        if told:
            return told
        if "diverged" not in result and (wrong := comparison.data.misfit(result["measured"])):
            return f"the measurement at budget {result['budget']} does not fit: {wrong}"
    return ""


def _places(comparison: Comparison, published: PublishedRun, out: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for result in published.results:
        if result["budget"] in comparison.protocol.budgets:
            path = result_path(out / published.run.name, result["budget"])
            yield path, {**result, "first_losses": published.first_losses}
