"""What is alive at once while a model runs, in numbers per token."""

from typing import NamedTuple

import torch


class Moment(NamedTuple):
    """What is alive at one moment of a forward without gradients, in numbers per token.

    Attributes:
        states: tensors as wide as the state.
        numbers: other numbers in the model's dtype.
        wide: numbers in float32, or in the model's dtype where that is finer.
        cast: more numbers in float32, where the model's dtype is narrower.
        folded: more numbers as in `wide`, if a cache's policy computes with keys and values, as a mean does.
        unmade: numbers per token of a cache that will be stored, but have no room yet.
    """

    states: int = 0
    numbers: int = 0
    wide: int = 0
    cast: int = 0
    folded: int = 0
    unmade: int = 0

    def plus(self, other: "Moment") -> "Moment":
        """Both alive at once."""
        return Moment(*(some + more for some, more in zip(self, other, strict=True)))

    def under(self, *, folds: bool, grows: bool) -> "Moment":
        """The moment as it is where a policy computes with keys and values or not, in a copy of its own or not."""
        return self._replace(wide=self.wide + self.folded * folds, folded=0, unmade=self.unmade * grows)

    def num_bytes(self, dim: int, dtype: torch.dtype) -> int:
        """Bytes per token of a model of this width and dtype."""
        wide = torch.promote_types(dtype, torch.float32)
        cast = 0 if wide == dtype else self.cast * wide.itemsize
        return (self.states * dim + self.numbers) * dtype.itemsize + self.wide * wide.itemsize + cast
