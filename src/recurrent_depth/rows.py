"""A depth for each row: rows are sorted once, deepest first, so that the rows still at work are a prefix."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from recurrent_depth.contracts import At
from recurrent_depth.depth import Depth
from recurrent_depth.step import map_rows_of_at
from recurrent_depth.trees import map_tensors
from recurrent_depth.update import DepthState, add_losses


class SomeRows(NamedTuple):
    """Some rows of the batch.

    Attributes:
        sorted: where they stand once sorted by depth.
        given: where they stand as the caller gave them.
    """

    sorted: slice
    given: slice | Int[Tensor, " row"]


class RowOrder:
    """The order of the rows by depth, and what it does to states. Rows that come sorted are not copied."""

    def __init__(self, depth: Depth, device: torch.device):
        rows = depth.rows or ()
        order = sorted(range(len(rows)), key=lambda row: -rows[row])
        self.depths = [rows[row] for row in order]
        self.grad_steps = depth.grad_steps or depth.num_steps
        self.order = None if order == list(range(len(rows))) else torch.tensor(order, device=device)

    def active(self, step: int) -> int:
        """How many rows take this step; they are the first."""
        return sum(depth > step for depth in self.depths)

    def frozen(self, step: int) -> int:
        """How many of those take it without gradients: the deepest ones, whose end is still far."""
        return sum(depth > step + self.grad_steps for depth in self.depths)

    def rows(self, places: range) -> SomeRows:
        """The rows at these places of the order."""
        where = slice(places.start, places.stop)
        return SomeRows(where, where if self.order is None else self.order[where])

    def sort(self, state: DepthState) -> DepthState:
        """The state with its rows in this order."""
        return state if self.order is None else map_rows(lambda leaf: leaf[self.order], state)

    def unsort(self, state: DepthState) -> DepthState:
        """What changes from step to step, with its rows as the caller gave them."""
        if self.order is None:
            return state
        back = self.order.argsort()
        return map_changing(lambda leaf: leaf[back], state)

    def sort_at(self, at: At) -> At:
        """`at` with its rows in this order."""
        return at if self.order is None else map_rows_of_at(lambda leaf: leaf[self.order], at)


def merge(parts: Sequence[DepthState], before: DepthState) -> DepthState:
    """The rows that took the step, part by part, and behind them those that had left; losses add up."""
    num_rows, active = before.h.shape[0], sum(part.h.shape[0] for part in parts)
    # A block may remember for the first time when rows have left: they get a blank, which nobody reads.
    new = {layer: memory for layer, memory in parts[0].memory.items() if layer not in before.memory}
    blank = map_tensors(lambda leaf: leaf.new_zeros(num_rows, *leaf.shape[1:]), new)
    before = before._replace(memory={**before.memory, **blank})
    merged = map_changing(lambda old, *new: torch.cat([*new, old[active:]]), before, *parts)
    return merged._replace(losses=reduce(add_losses, [part.losses for part in parts], before.losses))


def map_changing(change: Callable[..., Tensor], state: DepthState, *others: DepthState) -> DepthState:
    """Applies `change` to all leaves that change from step to step: those of `h`, `write`, `carry` and `memory`."""
    parts = [(one.h, one.write, one.carry, one.memory) for one in (state, *others)]
    h, write, carry, memory = map_tensors(change, *parts)
    return state._replace(h=h, write=write, carry=carry, memory=memory)


def map_rows(change: Callable[[Tensor], Tensor], state: DepthState) -> DepthState:
    """Applies a change of rows to every leaf that has rows: all but the losses."""
    return DepthState(*map_tensors(change, tuple(state[:-1])), losses=state.losses)
