"""The loop: a stack of blocks, run again and again under a depth update."""

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from recurrent_depth.arguments import check_types
from recurrent_depth.blocks import Stack, check_call
from recurrent_depth.checks import check_anchor, check_like, check_positions, check_step, checked_padding
from recurrent_depth.contracts import At, Call, KeyValues, Notes
from recurrent_depth.depth import Depth, as_depth
from recurrent_depth.rows import RowOrder, SomeRows, map_changing, map_rows, map_rows_of_at, merge
from recurrent_depth.step import StepBlocks
from recurrent_depth.update import DepthState, DepthUpdate, add_losses
from recurrent_depth.update_answers import begun_by, read_by

CoreViews = Callable[..., Sequence[KeyValues]]
"""Gives each step its view of a cache, one per block; see `ModelKeyValues.core`."""


class RecurrentCore(nn.Module):
    """Runs shared blocks for a number of steps; the update decides what they see and what becomes of their output.

    Args:
        blocks: the shared blocks, in order, each called as `block(x, at)`; or a stack, called as
            `stack(x, at, step, kv)`.
        update: the depth update.

    Raises:
        ValueError: if there is no block, or one cannot be called as `block(x, at)`, or `update` is none.

    Attributes:
        checkpointing: recompute each step in the backward pass, and keep one state per step instead of all
            activations. Off by default.
    """

    @check_types
    def __init__(self, blocks: Iterable[nn.Module] | nn.Module, update: DepthUpdate):
        super().__init__()
        self.stack: Stack = _stack_of(blocks)  # or a module that wraps one, and offers what it does
        self.update = update
        self.checkpointing = False
        self._take_step = take_step

    def forward(
        self,
        x: Float[Tensor, "batch token dim"],
        num_steps: int | Depth | Sequence[int],
        *,
        mask: Bool[Tensor, "batch key"] | Bool[Tensor, "batch query key"] | None = None,
        positions: Int[Tensor, "#batch token"] | None = None,
        start: Float[Tensor, "batch token dim"] | None = None,
        kv: CoreViews | None = None,
        extra: Mapping[str, Any] | None = None,
        watch: Callable[[DepthState], object] | None = None,
    ) -> Float[Tensor, "batch token dim"]:
        """What the update reads from the state after the last step.

        Args:
            x: the anchor, from which the loop starts.
            num_steps: how many steps, for all rows or one number for each; or a `Depth`.
            mask: handed to the blocks; (batch, key) is a padding mask, True at real tokens.
            positions: handed to the blocks; 0, 1, 2, ... by default.
            start: an initial state in place of the update's own.
            kv: gives each step its view of a cache.
            extra: further arguments for your blocks, which read them from `at.extra`.
            watch: is shown the state after each step.

        Raises:
            ValueError: if `x` is not (batch, token, dim) of floats or not of the update's width, `start` is not like
                `x`, `mask` or `positions` have another shape, there is a cache but no positions, or the depth is not a
                whole number of at least 1, or not one for each row.
        """
        check_anchor(x)
        check_positions(positions, *x.shape[:2])
        if mask is not None and mask.ndim != 3:
            mask = checked_padding(mask, *x.shape[:2], cached=kv is not None)
        if kv is not None and positions is None:
            raise ValueError("A forward with a cache needs positions: how many came before?")
        depth = as_depth(num_steps, batch=x.shape[0])
        padding = mask if mask is not None and mask.ndim == 2 else None
        positions = torch.arange(x.shape[1], device=x.device)[None] if positions is None else positions
        call = Call(depth.num_steps, positions=positions, mask=padding, start=start)
        valid = None if padding is None else padding[:, -x.shape[1] :]
        at = At(positions, mask, valid, extra=extra or {})
        states = self.states(x, depth, call, at, kv)
        (last,) = deque(states if watch is None else _watched(states, watch), maxlen=1)
        return self.read(last)

    def states(
        self,
        anchor: Float[Tensor, "batch token dim"],
        depth: Depth,
        call: Call,
        at: At,
        kv: CoreViews | None = None,
    ) -> Iterator[DepthState]:
        """The loop itself: yields the state after each step. Whoever stops reading leaves early.

        With `depth.grad_steps` the steps before the last so many run without gradients; what `begin` makes of the
        anchor learns through those that have them. With `depth.rows` a row that has taken its steps stays as it is,
        and costs nothing more.
        """
        yield from self.steps(self.begin(anchor, call), depth, at, kv)

    def begin(self, anchor: Float[Tensor, "batch token dim"], call: Call) -> DepthState:
        """The state before the first step."""
        state = begun_by(self.update, anchor, call)
        if call.start is not None:
            check_like("start", call.start, anchor)
            state = state._replace(h=call.start)
        # A first state that is the anchor itself, which the context may hold too, would cost the compiler a graph more.
        return state._replace(h=state.h.clone())

    def read(self, state: DepthState) -> Float[Tensor, "batch token dim"]:
        """What the update reads of the state after the last step: the input of what stands behind the loop."""
        return read_by(self.update, state)

    def steps(
        self, state: DepthState, depth: Depth, at: At, kv: CoreViews | None = None, *, first: int = 0
    ) -> Iterator[DepthState]:
        """Yields the state after each step from `first` on, which earlier steps have led to `state`."""
        if depth.rows is not None:
            yield from self._steps_by_row(state, depth, at, kv)
            return
        frozen_steps = depth.num_steps - min(depth.grad_steps or depth.num_steps, depth.num_steps)
        for step in range(first, depth.num_steps):
            frozen = step < frozen_steps
            with torch.no_grad() if frozen else nullcontext():
                before = map_changing(Tensor.detach, state) if frozen else state
                state = self.step(before, at, step, kv)
            yield state

    def _steps_by_row(self, begun: DepthState, depth: Depth, at: At, kv: CoreViews | None) -> Iterator[DepthState]:
        if at.extra:
            raise ValueError("A depth for each row does not go with extra arguments, whose rows nobody knows.")
        order = RowOrder(depth, device=begun.h.device)
        state, at = order.sort(begun), order.sort_at(at)
        for step in range(depth.num_steps):
            # Frozen and learning rows take the step apart: what the frozen ones do keeps no activations and no losses.
            frozen, active = order.frozen(step), order.active(step)
            groups = ((range(frozen), False), (range(frozen, active), True))
            parts = [
                self._step_of(order.rows(rows), state, at, step, kv, learns=learns) for rows, learns in groups if rows
            ]
            state = merge(parts, state)
            yield order.unsort(state)._replace(context=begun.context)

    def _step_of(
        self, rows: SomeRows, state: DepthState, at: At, step: int, kv: CoreViews | None, *, learns: bool
    ) -> DepthState:
        part = map_rows(lambda leaf: leaf[rows.sorted], state)._replace(losses={})
        views = None if kv is None else partial(kv, rows=rows.given)
        with nullcontext() if learns else torch.no_grad():
            before = part if learns else map_changing(Tensor.detach, part)
            return self.step(before, map_rows_of_at(lambda leaf: leaf[rows.sorted], at), step, views)

    def step(self, state: DepthState, at: At, step: int, kv: CoreViews | None = None) -> DepthState:
        """One step, recomputed in the backward pass where `checkpointing` asks for it."""
        take = partial(self._take, at, step, kv)
        if not (self.checkpointing and torch.is_grad_enabled()):
            return take(state)
        if kv is not None:
            warnings.warn("A forward with a cache is not checkpointed: recomputing would write twice.", stacklevel=2)
            return take(state)
        return checkpoint(take, state, use_reentrant=False)

    def _take(self, at: At, step: int, kv: CoreViews | None, state: DepthState) -> DepthState:
        views = None if kv is None else partial(kv, step)
        blocks = StepBlocks(self.stack, at, step, views, Notes(state.memory))
        return self._take_step(self.update, state, blocks)

    def compile_step(self, **arguments: Any) -> None:
        """Compiles one step with `torch.compile(**arguments)`; it then serves every depth.

        The loop stays Python, so a new depth compiles nothing.
        """
        self._take_step = torch.compile(take_step, **arguments)


def _watched(states: Iterator[DepthState], watch: Callable[[DepthState], object]) -> Iterator[DepthState]:
    for state in states:
        watch(state)
        yield state


def _stack_of(blocks: Iterable[nn.Module] | nn.Module) -> Any:
    if not isinstance(blocks, Iterable):
        check_call(blocks, "a stack must be callable as stack(x, at, step, kv). Blocks are given as a list", 4)
        return blocks
    stack = Stack(blocks)
    if len(stack.blocks) == 0:
        raise ValueError("blocks is empty, but a loop needs at least one block.")
    return stack


def take_step(update: DepthUpdate, state: DepthState, blocks: StepBlocks) -> DepthState:
    """One step of the loop: the update's, with what the blocks said folded into the state."""
    after = update(state, blocks, blocks.step)
    check_step(update, after, state)
    losses = add_losses(after.losses, blocks.notes.losses)
    return after._replace(memory={**after.memory, **blocks.notes.after}, losses=losses)
