"""One forward's business with a cache: where its keys and values stand, and what is put aside for later tokens."""

from typing import NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from recurrent_depth.kv_policy import KeysValues, KVStepPolicy
from recurrent_depth.slots import Key, Rows, Slot, Span


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

    Attributes:
        steps: of the loop, that were begun.
        aside: what copies will hold of the new tokens, where their buffers show something else.
        standing: copies whose buffers show just what they will hold.
        begun: the first step that wrote to a copy.
        visited: the blocks that ran.
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

    def keep(self, key: Key, before: KeysValues | None, merged: KeysValues, rows: Rows, *, changed: bool) -> None:
        """Puts aside what a copy will hold of these rows, unless it is what lies aside already."""
        if changed or key in self.standing:
            self.aside[key] = merged if changed and rows is None else self.with_rows(before, merged, rows)
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
