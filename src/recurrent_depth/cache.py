"""The cache of a looped model's keys and values."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from recurrent_depth.arguments import require_instance, require_whole
from recurrent_depth.kv_policy import KeepAll, KVStepPolicy
from recurrent_depth.slots import Joined, Key, Range, Slot
from recurrent_depth.turn import Turn

SMALLEST = 64
"""Tokens that a growing cache has room for at first."""


class DepthCache:
    """Keys and values of the tokens that a model has seen, for every block and every copy that the policy stores.

    It knows no layout: a slot appears when a block first writes, of the heads, dtype and device that it writes. All
    rows have the same length, padding included. Use it through `extend`, `generate` or `stream`; between calls it may
    be cropped, reordered, repeated or moved.

    Args:
        policy: what is stored of the loop's many steps; `KeepAll()` by default.
        max_tokens: room for so many tokens per row, allocated at the first write, and no more; by default the room is
            doubled whenever it is used up.

    Raises:
        ValueError: if `policy` is none, or `max_tokens` below 1.

    Attributes:
        capacity: tokens per row that there is room for.
        length: tokens seen per row; never the number of entries that a policy made of them.
        batch: rows; None before the first tokens.
        mask: which of the tokens seen are real; None where all are.
    """

    def __init__(self, policy: KVStepPolicy | None = None, *, max_tokens: int | None = None):
        self.policy = KeepAll() if policy is None else policy
        require_instance("policy", self.policy, KVStepPolicy, "rd.KeepMean()")
        self.max_tokens = None if max_tokens is None else require_whole("max_tokens", max_tokens, at_least=1)
        self.reset()

    def reset(self) -> None:
        """Forgets everything, and frees the room."""
        self.length, self.capacity = 0, self.max_tokens or 0
        self.batch: int | None = None
        self.mask: Bool[Tensor, "batch key"] | None = None
        self.slots: dict[Key, Slot] = {}
        self.valid: dict[int, Tensor] = {}
        self._open: Turn | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys and values, the room that is not used yet included."""
        return sum(buffer.nbytes for slot in self.slots.values() for buffer in slot.both)

    @property
    def num_copies(self) -> int:
        """How many copies there are of each core block's keys and values."""
        return 1 + max((key.copy for key in self.slots if key.part == "core"), default=-1)

    def begin(self, batch: int, num_new: int, *, differentiable: bool = False) -> Turn:
        """Opens a forward of so many new tokens.

        Args:
            batch: rows.
            num_new: new tokens per row.
            differentiable: join tensors instead of writing in place, so that gradients flow through what is stored.

        Raises:
            ValueError: if the cache has another number of rows, or no room.
        """
        self._check(batch, num_new)
        self._clean()
        end = self.length + num_new
        if not differentiable:
            self._grow(end)
        span = Joined(self.length) if differentiable else Range(self.length, end)
        capacity = self.length if differentiable else self.capacity
        # The turn adds slots to dictionaries of its own: those of a forward that fails are forgotten with it.
        slots, valid, shape = dict(self.slots), dict(self.valid), (batch, num_new)
        self._open = Turn(slots, valid, self.policy, span, shape=shape, length=self.length, capacity=capacity)
        return self._open

    def advance(self, batch: int, num_new: int, mask: Bool[Tensor, "batch key"] | None) -> None:
        """Counts so many new tokens as seen; `mask` says which of all tokens are real."""
        if self._open is not None:
            self.slots, self.valid = self._open.slots, self._open.valid
        self.length, self.batch, self._open = self.length + num_new, batch, None
        self.mask = None if mask is None else mask.clone()  # the caller may go on to write to theirs
        self.capacity = max(self.capacity, self.length)

    def crop(self, length: int) -> None:
        """Forgets all tokens behind the first `length`.

        Raises:
            ValueError: if `length` is negative or above the tokens seen.
        """
        if require_whole("length", length, at_least=0) > self.length:
            raise ValueError(f"length is {length}, but the cache holds {self.length} tokens.")
        self.length = length
        for slot in self.slots.values():
            # What gradients flow through is never written to again: it has no room.
            slot.map(lambda buffer: buffer[:, :, :length] if buffer.requires_grad else buffer)
        self.mask = None if self.mask is None else self.mask[:, :length]

    def select(self, rows: Int[Tensor, " row"] | Bool[Tensor, " batch"]) -> None:
        """Keeps these rows, in this order; a row may be named more than once, as beams are.

        Raises:
            ValueError: if a row is not there, or rows are neither indices nor one boolean for each.
        """
        rows = self._rows(rows)
        self._map(lambda buffer: buffer.index_select(0, rows.to(buffer.device)))
        self.batch = rows.numel() if self.batch is not None else None

    def repeat(self, times: int) -> None:
        """Puts `times` copies of each row one behind the other.

        Raises:
            ValueError: if `times` is below 1.
        """
        times = require_whole("times", times, at_least=1)
        if self.batch is not None:
            self.select(torch.arange(self.batch).repeat_interleave(times))

    def to(self, device: torch.device | str) -> "DepthCache":
        """Moves everything to a device, the policy too; returns the cache."""
        where = torch.device(device)
        self._map(lambda buffer: buffer.to(where))
        self.policy.to(where)
        return self

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        # All is made before anything is replaced: without memory for it the cache stays whole.
        slots = {key: Slot(*map(change, slot.both)) for key, slot in self.slots.items()}
        valid = {copy: change(buffer) for copy, buffer in self.valid.items()}
        self.mask = None if self.mask is None else change(self.mask)
        self.slots, self.valid = slots, valid

    def _rows(self, rows: object) -> Tensor:
        if not isinstance(rows, Tensor) or rows.is_complex():
            raise ValueError(f"rows is {rows!r}, but must be a tensor of indices, or of one boolean for each row.")
        if not self.batch:
            raise ValueError("rows were to be chosen, but the cache is empty and has none.")
        if rows.ndim != 1 or rows.is_floating_point() or (rows.dtype == torch.bool and len(rows) != self.batch):
            raise ValueError(
                f"rows must be indices, or one boolean for each of the {self.batch} rows; got {tuple(rows.shape)} of "
                f"{rows.dtype}."
            )
        if rows.dtype == torch.bool:
            rows = rows.nonzero()[:, 0]
        rows = rows.long()
        if rows.numel() == 0 or int(rows.min()) < 0 or int(rows.max()) >= (self.batch or 0):
            raise ValueError(f"rows is {rows.tolist()}, but the cache holds rows 0 to {(self.batch or 0) - 1}.")
        return rows

    def _check(self, batch: int, num_new: int) -> None:
        if self.batch is not None and batch != self.batch:
            raise ValueError(f"tokens has {batch} rows, but the cache holds {self.batch}.")
        if self.max_tokens is not None and self.length + num_new > self.max_tokens:
            raise ValueError(
                f"The cache is full: it holds {self.length} of max_tokens={self.max_tokens} tokens, and {num_new} more "
                "were to come. Make it larger, or crop() it."
            )

    def _grow(self, needed: int) -> None:
        """Makes room, by doubling; one slot at a time, so that no more than one exists twice."""
        if needed <= min((slot.keys.shape[2] for slot in self.slots.values()), default=self.capacity):
            return
        self.capacity = max(self.capacity, SMALLEST)
        while self.capacity < needed:
            self.capacity *= 2
        room = self.capacity

        def grown(buffer: Tensor) -> Tensor:
            larger = buffer.new_zeros(*buffer.shape[:2], room, *buffer.shape[3:])
            larger[:, :, : self.length] = buffer[:, :, : self.length]
            return larger

        for slot in self.slots.values():
            slot.map(grown)
        self.valid = {copy: grown(buffer) for copy, buffer in self.valid.items()}

    def _clean(self) -> None:
        """Blanks what a forward left that never ended: NaNs behind a mask would still reach real tokens, as 0 * NaN."""
        if self._open is not None and self._open.span.in_place:
            end = self._open.length + self._open.shape[1]
            for slot in self.slots.values():
                for buffer in slot.both:
                    buffer[:, :, self.length : end] = 0
        self._open = None
