"""The shared blocks as one step sees them."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from recurrent_depth.attention import causal_mask
from recurrent_depth.contracts import At, KeyValues, Notes, Tree
from recurrent_depth.pick import Pick
from recurrent_depth.trees import map_tensors


class StepBlocks:
    """The shared blocks at one step: called with what they are to see, they give the candidate.

    What blocks say beside their output, losses and memory, is collected in `notes`; the loop folds it into the state,
    so that a step stays a pure function.

    Args:
        stack: called as `stack(x, at, step, kv)`.
        at: where the blocks are called, the same at every step.
        step: which step this is, from 0.
        kv: gives the cache as this step sees it, a view per block, as `kv()` or `kv(pick=pick)`; None without a cache.
        notes: what the blocks remembered at the step before.
        pick: the tokens that every call is about; None for all.
        condition: what step-conditioned blocks read where a call gives nothing else.
    """

    def __init__(
        self,
        stack: nn.Module,
        at: At,
        step: int,
        kv: Callable[..., Sequence[KeyValues]] | None,
        notes: Notes,
        pick: Pick | None = None,
        condition: Tree = None,
    ):
        self.stack, self.at, self.step, self.kv, self.notes, self.pick = stack, at, step, kv, notes, pick
        self.condition = condition

    def __call__(
        self, x: Float[Tensor, "batch token dim"], pick: Pick | None = None, condition: Tree = None
    ) -> Float[Tensor, "batch token dim"]:
        """The blocks' output.

        Args:
            x: what the blocks see; with `pick`, the picked tokens alone.
            pick: which tokens these are, so that their positions, mask and memory are picked alike.
            condition: what step-conditioned blocks read; that of `conditioned` by default.
        """
        condition = self.condition if condition is None else condition
        if pick is not None:
            return self.picked(pick)(x, condition=condition)
        if self.pick is None:
            views = None if self.kv is None else self.kv()
            at = self.at if views is None else hide_holes(self.at, views[0].valid)
            return self.stack(x, at._replace(condition=condition, notes=self.notes), self.step, views)
        notes = _pick_notes(self.notes, self.pick)
        views = None if self.kv is None else self.kv(pick=self.pick)
        at, pick = _at_rows(self.at, self.pick), self.pick.within_rows()
        at = pick_at(at, pick) if views is None else pick_cached(at, pick, views[0].valid)
        out = self.stack(x, at._replace(condition=condition, notes=notes), self.step, views)
        _return_notes(notes, self.notes, self.pick, self.at)
        return out

    @property
    def valid(self) -> Bool[Tensor, "row picked"] | None:
        """Which of the tokens that calls are about are real; None where all are."""
        if self.pick is None or self.at.valid is None:
            return self.at.valid if self.pick is None else self.pick.valid
        return self.pick.gather(self.at.valid) & self.pick.valid_like()

    def picked(self, pick: Pick) -> "StepBlocks":
        """The same blocks for the picked tokens alone: what a router hands to the update that it wraps."""
        whole = pick if self.pick is None else self.pick.narrow(pick)
        return StepBlocks(self.stack, self.at, self.step, self.kv, self.notes, whole, self.condition)

    def conditioned(self, condition: Tree) -> "StepBlocks":
        """The same blocks, which read this condition: what a wrapper hands to the update within. It is not picked."""
        return StepBlocks(self.stack, self.at, self.step, self.kv, self.notes, self.pick, condition)


def map_rows_of_at(change: Callable[[Tensor], Tensor], at: At) -> At:
    """Applies a change of rows to what a block may read; positions shared by all rows stay."""
    shared = at.positions is not None and at.positions.shape[0] == 1
    positions = at.positions if shared else map_tensors(change, at.positions)
    return at._replace(positions=positions, mask=map_tensors(change, at.mask), valid=map_tensors(change, at.valid))


def _at_rows(at: At, pick: Pick) -> At:
    """`at` for the rows that a pick has, each with a mask of its own."""
    if at.mask is not None and at.mask.shape[0] == 1:
        at = at._replace(mask=at.mask.expand(pick.batch or len(pick.index), *at.mask.shape[1:]))
    return at if pick.rows is None else map_rows_of_at(lambda leaf: leaf[pick.rows], at)


def pick_at(at: At, pick: Pick) -> At:
    """`at` for the picked tokens: their positions, and a mask that also hides the padding among them."""
    batch, num_picked = pick.index.shape
    positions = None if at.positions is None else pick.gather(at.positions.expand(batch, -1))
    valid = pick.valid if at.valid is None else pick.gather(at.valid) & pick.valid_like()
    mask = valid
    if at.mask is not None:
        mask = pick.gather(at.mask)
        if mask.ndim == 3:
            mask = mask.gather(2, pick.index[:, None].expand(-1, num_picked, -1))
        mask = mask if pick.valid is None else mask & (pick.valid if mask.ndim == 2 else pick.valid[:, None])
        if mask.ndim == 3:  # a softmax over nothing is not a number: padding sees itself
            mask = mask | torch.eye(num_picked, dtype=torch.bool, device=mask.device)
    return at._replace(positions=positions, mask=mask, valid=valid)


def hide_holes(at: At, held: Bool[Tensor, "batch key"] | None) -> At:
    """`at` with a complete mask that hides keys at which a cache holds nothing."""
    if held is None:
        return at
    assert at.positions is not None  # a forward with a cache has them
    mask = held if at.mask is None or at.mask.ndim == 3 else held & at.mask
    mask = causal_mask(mask, at.positions.shape[1])
    return at._replace(mask=mask if at.mask is None or at.mask.ndim == 2 else mask & at.mask)


def pick_cached(at: At, pick: Pick, held: Bool[Tensor, "batch key"] | None) -> At:
    """`at` for the picked tokens, which look at all keys that a cache holds: earlier tokens', and their own."""
    at = hide_holes(at, held)
    assert at.positions is not None  # a forward with a cache has them
    assert at.mask is not None  # there are holes where tokens are picked
    positions = pick.gather(at.positions.expand(len(pick.index), -1))
    valid = pick.valid if at.valid is None else pick.gather(at.valid) & pick.valid_like()
    return at._replace(positions=positions, mask=pick.gather(at.mask), valid=valid)


def _pick_notes(notes: Notes, pick: Pick) -> Notes:
    return Notes({layer: map_tensors(pick.gather, memory) for layer, memory in notes.before.items()})


def _return_notes(picked: Notes, notes: Notes, pick: Pick, at: At) -> None:
    for name, loss in picked.losses.items():
        notes.add_loss(name, loss)
    for layer, memory in picked.after.items():
        notes.after[layer] = _scatter_memory(notes, layer, memory, pick, at)


def _scatter_memory(notes: Notes, layer: int, memory: Tree, pick: Pick, at: At) -> Tree:
    if at.positions is None:
        raise ValueError("at.positions is None, but a block that remembers needs them where tokens are picked.")
    num_tokens = at.positions.shape[1]
    blank = map_tensors(lambda leaf: leaf.new_zeros(pick.batch or leaf.shape[0], num_tokens, *leaf.shape[2:]), memory)
    whole = notes.after.get(layer, notes.before.get(layer, blank))
    return map_tensors(pick.scatter, whole, memory)
