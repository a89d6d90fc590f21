"""One forward's business with a cache: what the blocks see at each step, and what becomes of their keys and values."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from recurrent_depth.contracts import KeyValues, ModelKeyValues, Pick
from recurrent_depth.kv_policy import KeepLast, KeysValues, KVStepPolicy
from recurrent_depth.slots import Key, Rows, Slot, Span, rows_of

OUTSIDE = KeepLast()
"""The policy of blocks outside of the loop: where the coda is run again, to look at an exit, the last time stays."""


class Step(NamedTuple):
    """A step that was begun: for which rows, and which of their new tokens (None: all)."""

    step: int
    rows: Rows
    picked: Bool[Tensor, "batch token"] | None


class Turn:
    """One forward's business with a cache.

    While blocks run, the new tokens' keys and values of the step at hand stand behind those of the tokens seen, in the
    copy that the step reads. What the policy makes of them is put aside where it is something else. None of this
    counts as seen before it is settled and the cache advances: a forward that fails leaves the cache as it was.

    Args:
        slots: the cache's; slots of blocks and copies that are new are added.
        valid: by copy, which tokens left something there, as a buffer (batch, 1, capacity, 1); absent where all did.
        policy: what is stored.
        span: where the new tokens go.
        shape: rows, and new tokens.
        length: tokens seen.
        capacity: of slots that are made.
    """

    def __init__(
        self,
        slots: dict[Key, Slot],
        valid: dict[int, Tensor],
        policy: KVStepPolicy,
        span: Span,
        *,
        shape: tuple[int, int],
        length: int,
        capacity: int,
    ):
        self.slots, self.valid, self.policy, self.span = slots, valid, policy, span
        self.shape, self.length, self.capacity = shape, length, capacity
        self.steps: list[Step] = []
        self.aside: dict[Key, KeysValues] = {}
        self.standing: set[Key] = set()
        self.begun: dict[Key, int] = {}
        self.visited: set[tuple[str, int]] = set()

    def kv(self) -> ModelKeyValues:
        """What the model's forward is given."""
        return ModelKeyValues(
            prelude=lambda rows=None: StepViews(self, "prelude", OUTSIDE, 0, rows),
            core=self._core,
            coda=lambda rows=None: StepViews(self, "coda", OUTSIDE, 0, rows),
        )

    def _core(self, step: int, rows: Rows = None, pick: Pick | None = None) -> "StepViews":
        views = StepViews(self, "core", self.policy, step, rows, pick)
        self.steps.append(Step(step, rows, views.picked))
        return views

    def slot(self, key: Key, like: KeysValues) -> Slot:
        """The slot of that name; a copy deeper than all before starts as what the deepest one holds."""
        slot = self.slots.get(key)
        if slot is None or (self.length == 0 and not slot.fits(like)):
            slot = self.slots[key] = self._new_slot(key, like)
        if not slot.fits(like):
            raise ValueError(
                f"The cache holds {slot} for block {key.layer} of the {key.part}, but the model makes "
                f"{Slot(*like)}: it belongs to another model, or to this one in another dtype."
            )
        return slot

    def _new_slot(self, key: Key, like: KeysValues) -> Slot:
        if self.length == 0:
            return Slot.empty(like, self.shape[0], self.capacity)
        copies = [k.copy for k in self.slots if (k.part, k.layer) == (key.part, key.layer)]
        if not copies:
            raise ValueError(
                f"The cache holds {self.length} tokens, but nothing for block {key.layer} of the {key.part}: it "
                "belongs to another model."
            )
        deepest = self.slots[key._replace(copy=max(copies))]
        return Slot(deepest.keys.clone(), deepest.values.clone())

    def store(self, key: Key, new: KeysValues, views: "StepViews") -> None:
        """Folds a step's keys and values into a copy."""
        before = self.entry(key)
        # Rows that take the copy's first step apart from others have nothing there yet, though the others have.
        apart = self.begun.setdefault(key, views.step) == views.step and views.rows is not None
        old = None if before is None or apart else rows_of(before, views.rows)
        # Counts as fine as what is merged by them: 1 over a tensor of integers would be float32 in a double model.
        taken = (
            views.taken.to(torch.promote_types(new.keys.dtype, torch.float32))
            if isinstance(views.taken, Tensor)
            else views.taken
        )
        merged = views.policy.merge(old, new, taken, key.layer)
        if isinstance(views.taken, Tensor):
            merged = _picked_only(views, old, new, merged)
        elif merged is new and key == views.read(key.layer) and self.span.in_place and key not in self.aside:
            self.standing.add(key)  # the buffer is about to show just that
            return
        if merged is old and key not in self.standing:
            return
        alone = views.rows is None and merged is not old
        self.aside[key] = merged if alone else self.with_rows(before, merged, views.rows)
        self.standing.discard(key)

    def save(self, key: Key) -> None:
        """Puts aside what stands in a buffer that a step of another copy is about to overwrite."""
        if key in self.standing:
            self.aside[key] = KeysValues(*(x.clone() for x in self.standing_in(key)))
            self.standing.discard(key)

    def valid_of(self, copy: int, device: torch.device) -> Tensor:
        """Which tokens left something in a copy, as a buffer."""
        if copy not in self.valid:
            everything = torch.ones(self.shape[0], 1, self.capacity, 1, dtype=torch.bool, device=device)
            # A copy deeper than all before starts with the holes of the deepest one, as it does with its keys.
            self.valid[copy] = self.valid[max(self.valid)].clone() if self.valid else everything
        return self.valid[copy]

    def entry(self, key: Key) -> KeysValues | None:
        """What a copy holds of the new tokens so far, for all rows; None where nothing."""
        return self.standing_in(key) if key in self.standing else self.aside.get(key)

    def standing_in(self, key: Key) -> KeysValues:
        """What the buffers of a slot show of the new tokens; there are none where tensors are joined."""
        keys, values = map(self.span.entry, self.slots[key].both)  # pyright: ignore[reportAttributeAccessIssue]
        return KeysValues(keys, values)

    def with_rows(self, before: KeysValues | None, part: KeysValues, rows: Rows) -> KeysValues:
        """Keys and values of all rows: those of `part` where it has them, else those before, or zeros."""
        whole = []
        for x, old in zip(part, before or (None, None), strict=True):
            base = x.new_zeros(self.shape[0], *x.shape[1:]) if old is None else old.to(x.dtype, copy=True)
            base[slice(None) if rows is None else rows] = x
            whole.append(base)
        return KeysValues(*whole)

    def taken(self, step: int, rows: Rows, picked: Tensor | None) -> int | Tensor:
        """How many steps the new tokens of these rows took before; (batch, 1, token, 1) where tokens are picked."""
        masks = [mask for mask in (picked, *(before.picked for before in self.steps)) if mask is not None]
        if not masks:
            return len({before.step for before in self.steps} - {step})
        count = torch.zeros(self.shape, dtype=torch.long, device=masks[0].device)
        for _, of, mask in self.steps:
            count[slice(None) if of is None else of] += 1 if mask is None else mask.long()
        return (count if rows is None else count[rows])[:, None, :, None]


def _picked_only(views: "StepViews", old: KeysValues | None, new: KeysValues, merged: KeysValues) -> KeysValues:
    """Of tokens that were never picked before, the new; of those that are not picked now, the old."""
    first = torch.as_tensor(views.taken == 0)
    if old is not None:
        merged = KeysValues(*(torch.where(first, x, y) for x, y in zip(new, merged, strict=True)))
    if views.picked is None:
        return merged
    picked = views.picked[:, None, :, None]
    blank = old or KeysValues(torch.zeros_like(new.keys), torch.zeros_like(new.values))
    return KeysValues(*(torch.where(picked, x, y.to(x.dtype)) for x, y in zip(merged, blank, strict=True)))


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
        self.turn.store(write, new, self)
        show = self.turn.span.show
        return show(slot.keys, self.rows, new.keys), show(slot.values, self.rows, new.values)

    def _valid(self) -> Bool[Tensor, "batch key"] | None:
        copy, turn = self.policy.reads(self.step), self.turn
        if self.part != "core" or (self.picked is None and not turn.valid):
            return None
        num_rows = turn.shape[0] if self.rows is None else torch.arange(turn.shape[0])[self.rows].numel()
        now = torch.ones(num_rows, turn.shape[1], dtype=torch.bool) if self.picked is None else self.picked
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
