"""The tokens that a router picked."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor


class Pick(NamedTuple):
    """The tokens that a router picked: ascending indices, padded to one width at the end of each row.

    Attributes:
        index: which tokens of each row.
        valid: False where a pick is only padding; None where none is.
        rows: the rows that pick anything, where the others are left out altogether; None where all rows are there.
        batch: how many rows there are in all; None where all are there.
    """

    index: Int[Tensor, "row picked"]
    valid: Bool[Tensor, "row picked"] | None = None
    rows: Int[Tensor, " row"] | None = None
    batch: int | None = None

    def gather(self, x: Tensor) -> Tensor:
        """The picked tokens of a tensor that leads with (batch, token)."""
        x = x if self.rows is None else x[self.rows]
        return x.gather(1, self._index_like(x, self.index))

    def scatter(self, x: Tensor, picked: Tensor) -> Tensor:
        """`x` with the picked tokens replaced; padding goes to a row of its own, which is dropped."""
        if self.rows is not None:
            return x.index_copy(0, self.rows, self.within_rows().scatter(x[self.rows], picked))
        num_tokens = x.shape[1]
        index = self.index if self.valid is None else torch.where(self.valid, self.index, num_tokens)
        spare = torch.cat([x, x[:, :1]], dim=1)
        return spare.scatter(1, self._index_like(x, index), picked.to(x.dtype))[:, :num_tokens]

    def narrow(self, inner: "Pick") -> "Pick":
        """The picks of a pick: `inner` counts among the tokens picked here."""
        valid = inner.valid if self.valid is None else inner.gather(self.valid) & inner.valid_like()
        if inner.rows is None:
            return Pick(inner.gather(self.index), valid, self.rows, self.batch)
        rows = inner.rows if self.rows is None else self.rows[inner.rows]
        return Pick(inner.gather(self.index), valid, rows, self.batch or inner.batch)

    def within_rows(self) -> "Pick":
        """The same of a batch that has no other rows."""
        return Pick(self.index, self.valid)

    def valid_like(self) -> Bool[Tensor, "row picked"]:
        """`valid`, written out where it is None."""
        return torch.ones_like(self.index, dtype=torch.bool) if self.valid is None else self.valid

    @staticmethod
    def _index_like(x: Tensor, index: Tensor) -> Tensor:
        return index.reshape(*index.shape, *[1] * (x.ndim - 2)).expand(-1, -1, *x.shape[2:])


def pick_chosen(chosen: Bool[Tensor, "batch token"], width: int) -> Pick:
    """The pick of the tokens where `chosen` is True, of which no row has more than `width`."""
    counts = chosen.sum(1, keepdim=True)
    # False sorts before True: a stable sort puts the chosen first, and keeps their order.
    index = chosen.logical_not().long().argsort(dim=1, stable=True)[:, :width]
    return Pick(index, torch.arange(width, device=chosen.device) < counts)


def pick_fewest(chosen: Bool[Tensor, "batch token"]) -> Pick:
    """The same, as narrow as goes, and without the rows that choose nobody: what is not chosen costs nothing.

    It looks at the values, which on an accelerator waits for them. While a graph is compiled it is as wide as the row.
    """
    if torch.compiler.is_compiling():
        return pick_chosen(chosen, chosen.shape[1])
    counts = chosen.sum(1).tolist()
    rows = [row for row, count in enumerate(counts) if count]
    if not 0 < len(rows) < len(counts):
        return _without_padding(pick_chosen(chosen, max(counts)), counts)
    kept = torch.tensor(rows, device=chosen.device)
    some = _without_padding(pick_chosen(chosen[kept], max(counts)), [counts[row] for row in rows])
    return some._replace(rows=kept, batch=len(counts))


def _without_padding(pick: Pick, counts: list[int]) -> Pick:
    return pick._replace(valid=None) if min(counts) == max(counts) else pick
