"""What the blocks of a model see of a cache at each step, and how their keys and values are folded into it."""

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from recurrent_depth.contracts import KeyValues, ModelKeyValues
from recurrent_depth.kv_policy import KeepLast, KeysValues, KVStepPolicy
from recurrent_depth.pick import Pick
from recurrent_depth.slots import Key, Rows, rows_of
from recurrent_depth.turn import Step, Turn

OUTSIDE = KeepLast()
"""The policy of blocks outside of the loop: where the coda is run again, to look at an exit, the last time stays."""


def views_of(turn: Turn) -> ModelKeyValues:
    """What a model's forward is given of a cache."""
    return ModelKeyValues(
        prelude=partial(StepViews, turn, "prelude", OUTSIDE, 0),
        core=partial(_core, turn),
        coda=partial(StepViews, turn, "coda", OUTSIDE, 0),
    )


def _core(turn: Turn, step: int, rows: Rows = None, pick: Pick | None = None) -> "StepViews":
    if pick is None or pick.rows is None:
        views = StepViews(turn, "core", turn.policy, step, rows, pick)
        turn.steps.append(Step(step, rows, views.picked))
        return views
    return _core_rows(turn, step, rows, pick, pick.rows)


def _core_rows(turn: Turn, step: int, rows: Rows, pick: Pick, some: Int[Tensor, " row"]) -> "StepViews":
    """The views of the rows that pick anything. The others take the step too: they leave holes, and have not left."""
    everyone = torch.arange(turn.shape[0], device=some.device)
    given = everyone if rows is None else everyone[rows]
    blank = torch.zeros(len(given), turn.shape[1], dtype=torch.bool, device=some.device)
    picked = pick.scatter(blank, torch.ones_like(pick.index, dtype=torch.bool))
    turn.span.show(turn.valid_of(turn.policy.reads(step), some.device), rows, picked[:, None, :, None])
    views = StepViews(turn, "core", turn.policy, step, given[some], pick.within_rows())
    turn.steps.append(Step(step, rows, picked))
    return views


class StepViews(Sequence):
    """The cache as one step of one part of the model sees it: a view for each block.

    Args:
        turn: the forward's.
        part: which part of the model.
        policy: which copies are read and written.
        step: which step.
        rows: the rows that take it.
        pick: their tokens that do.
    """

    def __init__(
        self, turn: Turn, part: str, policy: KVStepPolicy, step: int, rows: Rows = None, pick: Pick | None = None
    ):
        self.turn, self.part, self.policy, self.step, self.rows, self.pick = turn, part, policy, step, rows, pick
        self.picked = None if pick is None else self._spread(torch.ones_like(pick.index, dtype=torch.bool))
        self.taken = turn.taken(step, rows, self.picked)
        self.valid = self._valid()

    def read(self, layer: int) -> Key:
        """The slot that a block reads."""
        return Key(self.part, self.policy.reads(self.step), layer)

    def update(self, layer: int, new: KeysValues) -> tuple[Tensor, Tensor]:
        """Takes a block's keys and values; gives those that its queries look at."""
        if self.pick is not None:
            new = KeysValues(*(self._spread(x.transpose(1, 2)).transpose(1, 2) for x in new))
        self.turn.visited.add((self.part, layer))
        read, write = self.read(layer), Key(self.part, self.policy.writes(self.step), layer)
        slot = self.turn.slot(read, new)
        if write != read:
            self.turn.slot(write, new)
            self.turn.save(read)
        self._store(write, new)
        show = self.turn.span.show
        return show(slot.keys, self.rows, new.keys), show(slot.values, self.rows, new.values)

    def _store(self, key: Key, new: KeysValues) -> None:
        """Folds this step's keys and values into a copy."""
        turn, before = self.turn, self.turn.entry(key)
        # Rows that take the copy's first step apart from others have nothing there yet, though the others have.
        apart = turn.begun.setdefault(key, self.step) == self.step and self.rows is not None
        old = None if before is None or apart else rows_of(before, self.rows)
        if isinstance(self.taken, Tensor):
            merged = self._merged_by_token(old, new, self.taken, key.layer)
        else:
            merged = self._checked(self.policy.merge(old, new, self.taken, key.layer), new)
            if merged is new and key == self.read(key.layer) and turn.span.in_place and key not in turn.aside:
                turn.standing.add(key)  # the buffer is about to show just that
                return
        turn.keep(key, before, merged, self.rows, changed=merged is not old)

    def _checked(self, merged: object, new: KeysValues) -> KeysValues:
        if isinstance(merged, KeysValues) and [x.shape for x in merged] == [x.shape for x in new]:
            return merged
        got = [tuple(x.shape) for x in merged] if isinstance(merged, KeysValues) else type(merged).__name__
        name, wanted = type(self.policy).__name__, [tuple(x.shape) for x in new]
        raise ValueError(f"merge of {name} must return KeysValues of the shapes {wanted}, like those given; got {got}.")

    def _merged_by_token(self, old: KeysValues | None, new: KeysValues, taken: Tensor, layer: int) -> KeysValues:
        """Of tokens that were never picked before, the new; of those that are not picked now, the old."""
        # Counts as fine as what is merged by them: 1 over a tensor of integers would be float32 in a double model.
        counts = taken.to(torch.promote_types(new.keys.dtype, torch.float32))
        merged = self._checked(self.policy.merge(old, new, counts, layer), new)
        if old is not None:
            merged = KeysValues(*(torch.where(taken == 0, x, y) for x, y in zip(new, merged, strict=True)))
        if self.picked is None:
            return merged
        picked = self.picked[:, None, :, None]
        blank = old or KeysValues(torch.zeros_like(new.keys), torch.zeros_like(new.values))
        return KeysValues(*(torch.where(picked, x, y.to(x.dtype)) for x, y in zip(merged, blank, strict=True)))

    def _valid(self) -> Bool[Tensor, "batch key"] | None:
        copy, turn = self.policy.reads(self.step), self.turn
        if self.part != "core" or (self.picked is None and not turn.valid):
            return None
        now = self.picked
        if now is None:
            device = next(iter(turn.valid.values())).device
            now = torch.ones(turn.shape, dtype=torch.bool, device=device)[
                slice(None) if self.rows is None else self.rows
            ]
        return turn.span.show(turn.valid_of(copy, now.device), self.rows, now[:, None, :, None])[:, 0, :, 0]

    def _spread(self, x: Tensor) -> Tensor:
        """What is given of the picked tokens alone, at their places among all new ones."""
        assert self.pick is not None
        return self.pick.scatter(x.new_zeros(len(x), self.turn.shape[1], *x.shape[2:]), x)

    def __getitem__(self, layer: int) -> "BlockView":
        return BlockView(self, layer)

    def __len__(self) -> int:
        return sum(key.part == self.part and key.copy == 0 for key in self.turn.slots)


class BlockView(KeyValues):
    """What one block sees of the cache at one step."""

    def __init__(self, views: StepViews, layer: int):
        self.views, self.layer = views, layer

    @property
    def valid(self) -> Bool[Tensor, "batch key"] | None:
        """Which keys hold something; None where all do."""
        return self.views.valid

    def update(
        self, keys: Float[Tensor, "batch head token size"], values: Float[Tensor, "batch head token size"]
    ) -> tuple[Float[Tensor, "batch head key size"], Float[Tensor, "batch head key size"]]:
        """The keys and values of the tokens seen, and behind them the new ones."""
        return self.views.update(self.layer, KeysValues(keys, values))
