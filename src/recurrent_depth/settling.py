"""What a cache stores of a forward that is done."""

from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor

from recurrent_depth.kv_policy import KeysValues
from recurrent_depth.slots import Key, Rows, Slot, rows_of
from recurrent_depth.turn import Turn


def settle(turn: Turn) -> None:
    """Writes what was put aside, and fills the copies that a row's steps did not reach with its last step's."""
    _check_blocks(turn)
    core = [key for key in turn.slots if key.part == "core"]
    depths = list(_depths(turn))
    valid = _valid(turn, core, always=all(depth > 0 for _, depth in depths))
    for rows, depth in depths:
        written = {turn.policy.writes(step) for step in range(depth)}
        missing = [key for key in core if key.copy not in written]
        if depth == 0:
            for key in missing:
                _put(turn, key, _blank(turn, key, rows), rows)
            continue
        last = turn.policy.writes(depth - 1)
        for key in missing:
            source = key._replace(copy=last)
            _put(turn, key, rows_of(turn.entry(source) or turn.standing_in(source), rows), rows)
        for copy in valid.keys() - written:
            valid[copy][_all(rows)] = valid[last][_all(rows)]
    for key, entry in turn.aside.items():
        slot = turn.slots[key]
        keys, values = map(turn.span.stored, slot.both, entry)
        if not turn.span.in_place:
            turn.slots[key] = Slot(keys, values)  # the cache's own stays as it is until it advances
    for copy, mask in valid.items():
        turn.valid[copy] = turn.span.stored(turn.valid_of(copy, mask.device), mask[:, None, :, None])


def _check_blocks(turn: Turn) -> None:
    for part, _, layer in turn.slots:
        if (part, layer) not in turn.visited and (part != "core" or turn.steps):
            raise ValueError(
                f"The cache holds something for block {layer} of the {part}, but the model ran no such block: it "
                "belongs to another model."
            )


def _depths(turn: Turn) -> Iterator[tuple[Rows, int]]:
    """The rows and how many steps they took, up to the last one that ran blocks, in runs of equal depth."""
    if all(step.rows is None for step in turn.steps):
        yield None, turn.steps[-1].step + 1 if turn.steps else 0
        return
    depths = [0] * turn.shape[0]
    for step, rows, _ in turn.steps:
        for row in _indices(rows, turn.shape[0]):
            depths[row] = step + 1
    for depth, run in groupby(range(len(depths)), key=depths.__getitem__):
        rows = list(run)
        yield slice(rows[0], rows[-1] + 1), depth


def _indices(rows: Rows, batch: int) -> list[int]:
    if isinstance(rows, Tensor):
        return rows.tolist()
    return list(range(batch) if rows is None else range(batch)[rows])


def _all(rows: Rows) -> slice | Tensor:
    return slice(None) if rows is None else rows


def _put(turn: Turn, key: Key, part: KeysValues, rows: Rows) -> None:
    if turn.span.in_place and key not in turn.aside:
        for buffer, x in zip(turn.slots[key].both, part, strict=True):
            turn.span.put(buffer, rows, x)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        turn.aside[key] = turn.with_rows(turn.aside.get(key), part, rows)


def _blank(turn: Turn, key: Key, rows: Rows) -> KeysValues:
    """What rows leave in a copy if no step ran the blocks: nobody sees it, but it must be numbers."""
    some = (buffer[_all(rows)] for buffer in turn.slots[key].both)
    return KeysValues(*(x.new_zeros(*x.shape[:2], turn.shape[1], x.shape[3]) for x in some))


def _valid(turn: Turn, core: list[Key], *, always: bool) -> dict[int, Tensor]:
    """By copy, which of the new tokens left something there; nothing where all tokens always do."""
    masks = [step.picked for step in turn.steps if step.picked is not None]
    if not core or (always and not masks and not turn.valid):
        return {}
    device = turn.slots[core[0]].keys.device
    valid = {key.copy: torch.zeros(turn.shape, dtype=torch.bool, device=device) for key in core}
    for step, rows, picked in turn.steps:
        valid[turn.policy.writes(step)][_all(rows)] |= True if picked is None else picked
    return valid
