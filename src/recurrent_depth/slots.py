"""Where a cache keeps keys and values: buffers for the tokens seen, and behind them room for those of a forward."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from recurrent_depth.kv_policy import KeysValues

Rows = slice | Tensor | None
"""Which rows of the batch: a range, indices, or all."""


def rows_of(both: KeysValues, rows: Rows) -> KeysValues:
    """Keys and values of these rows."""
    return both if rows is None else KeysValues(both.keys[rows], both.values[rows])


class Key(NamedTuple):
    """Names a slot: which part of the model, which copy, which block of the part."""

    part: str
    copy: int
    layer: int


class Slot:
    """The keys and values of one block in one copy: two buffers (batch, head, capacity, size)."""

    def __init__(self, keys: Tensor, values: Tensor):
        self.keys, self.values = keys, values

    @classmethod
    def empty(cls, like: KeysValues, batch: int, capacity: int) -> "Slot":
        """Zeros, of the heads, dtype and device of `like`."""
        keys, values = (x.new_zeros(batch, x.shape[1], capacity, x.shape[3]) for x in like)
        return cls(keys, values)

    @property
    def both(self) -> tuple[Tensor, Tensor]:
        """Keys and values."""
        return self.keys, self.values

    def fits(self, new: KeysValues) -> bool:
        """Whether keys and values have these heads, this dtype and this device."""
        pairs = ((self.keys, new.keys), (self.values, new.values))
        return all(a.shape[1::2] == b.shape[1::2] and a.dtype == b.dtype and a.device == b.device for a, b in pairs)

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replaces both buffers by what `change` makes of them."""
        self.keys, self.values = change(self.keys), change(self.values)

    def __str__(self) -> str:
        return f"{self.keys.shape[1]} heads of {self.keys.shape[3]} in {self.keys.dtype} on {self.keys.device}"


class Range(NamedTuple):
    """New tokens go to the places from `begin` to `end`, in place; keys up to `end` are looked at."""

    begin: int
    end: int
    in_place = True

    def show(self, buffer: Tensor, rows: Rows, new: Tensor) -> Tensor:
        """Writes the new tokens behind those seen, and returns all of them."""
        self.put(buffer, rows, new)
        seen = buffer[:, :, : self.end]
        return seen if rows is None else seen[rows]

    def put(self, buffer: Tensor, rows: Rows, new: Tensor) -> None:
        """Writes to the new tokens' places."""
        if isinstance(rows, Tensor):
            buffer[rows, :, self.begin : self.end] = new.to(buffer.dtype)
        else:
            (buffer if rows is None else buffer[rows])[:, :, self.begin : self.end].copy_(new)

    def entry(self, buffer: Tensor) -> Tensor:
        """What stands at the new tokens' places."""
        return buffer[:, :, self.begin : self.end]

    def stored(self, buffer: Tensor, entry: Tensor) -> Tensor:
        """The buffer with the new tokens' entries."""
        self.put(buffer, None, entry)
        return buffer


class Places(NamedTuple):
    """New tokens go to the places `index`, in place; the whole buffer is looked at, under a mask.

    Only values of tensors change with the length, so that one compiled step serves every length.
    """

    index: Tensor
    in_place = True

    def show(self, buffer: Tensor, rows: Rows, new: Tensor) -> Tensor:
        """Writes the new tokens, and returns the whole buffer."""
        self.put(buffer, rows, new)
        return buffer if rows is None else buffer[rows]

    def put(self, buffer: Tensor, rows: Rows, new: Tensor) -> None:
        """Writes to the new tokens' places."""
        if isinstance(rows, Tensor):
            buffer[rows[:, None], :, self.index] = new.to(buffer.dtype).transpose(1, 2)
        else:
            (buffer if rows is None else buffer[rows]).index_copy_(2, self.index, new.to(buffer.dtype))

    def entry(self, buffer: Tensor) -> Tensor:
        """What stands at the new tokens' places."""
        return buffer.index_select(2, self.index)

    def stored(self, buffer: Tensor, entry: Tensor) -> Tensor:
        """The buffer with the new tokens' entries."""
        self.put(buffer, None, entry)
        return buffer


class Joined(NamedTuple):
    """New tokens are joined to the `begin` tokens seen, in tensors of their own, so that gradients flow."""

    begin: int
    in_place = False

    def show(self, buffer: Tensor, rows: Rows, new: Tensor) -> Tensor:
        """The tokens seen and the new ones."""
        seen = buffer[:, :, : self.begin]
        return torch.cat([seen if rows is None else seen[rows], new], dim=2)

    def stored(self, buffer: Tensor, entry: Tensor) -> Tensor:
        """A buffer of just the tokens seen and the new ones."""
        return self.show(buffer, None, entry.to(buffer.dtype))


Span = Range | Places | Joined
"""Where the new tokens of a forward go."""
