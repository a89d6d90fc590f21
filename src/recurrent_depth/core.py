"""The loop: a stack of blocks, run again and again under a depth update."""

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from recurrent_depth.blocks import Stack
from recurrent_depth.contracts import At, Call, KeyValues, Notes
from recurrent_depth.depth import Depth, as_depth
from recurrent_depth.rows import RowOrder, detach_first, map_changing, map_rows, map_rows_of_at, merge
from recurrent_depth.step import StepBlocks
from recurrent_depth.update import DepthState, DepthUpdate

StepViews = Callable[[int], Sequence[KeyValues]]
"""Gives each step its view of a cache: one per block."""


class Trajectory(NamedTuple):
    """What a forward went through.

    Attributes:
        states: the state after each step if every step was asked for, else after the last one alone.
        readout: makes an output of a state: logits for a model.
        notes: what the blocks outside of the loop say.
    """

    states: tuple[DepthState, ...]
    readout: Callable[[DepthState], Tensor]
    notes: Notes

    @property
    def output(self) -> Float[Tensor, "batch token out"]:
        """The output after the last step, computed anew at each access."""
        return self.readout(self.states[-1])

    def at(self, step: int) -> Float[Tensor, "batch token out"]:
        """The output as if the loop had been left after step `step`, counted from 0; computed at each call.

        Raises:
            ValueError: if that step's state was not kept.
        """
        if not 0 <= step < len(self.states):
            raise ValueError(
                f"step must be in 0 to {len(self.states) - 1}, the states kept (see every_step); got {step}."
            )
        return self.readout(self.states[step])

    @property
    def losses(self) -> dict[str, Float[Tensor, ""]]:
        """Auxiliary losses by name, of the loop and of the blocks outside of it; read it after the output.

        Those behind the loop are of the output that was read last, and count once however often one is read.
        """
        return add_losses(self.states[-1].losses, self.notes.losses)


class RecurrentCore(nn.Module):
    """Runs shared blocks for a number of steps; the update decides what they see and what becomes of their output.

    Args:
        blocks: the shared blocks, in order, each called as `block(x, at)`; or a stack, called as
            `stack(x, at, step, kv)`.
        update: the depth update.

    Raises:
        ValueError: if there is no block, or one cannot be called as `block(x, at)`.

    Attributes:
        checkpointing: recompute each step in the backward pass, and keep one state per step instead of all
            activations. Off by default.
    """

    def __init__(self, blocks: Iterable[nn.Module] | nn.Module, update: DepthUpdate):
        super().__init__()
        self.stack = _stack_of(blocks) if isinstance(blocks, Iterable) else blocks
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
        kv: StepViews | None = None,
        extra: Mapping[str, Any] | None = None,
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

        Raises:
            ValueError: if `x` is not (batch, token, dim) or not of the update's width, `start` is not like `x`, there
                is a cache but no positions, or the depth is not a whole number of at least 1, or not one for each row.
        """
        if x.ndim != 3:
            raise ValueError(f"x must be (batch, token, dim), got shape {tuple(x.shape)}.")
        if kv is not None and positions is None:
            raise ValueError("A forward with a cache needs positions: how many came before?")
        depth = as_depth(num_steps, batch=x.shape[0])
        padding = mask if mask is not None and mask.ndim == 2 else None
        positions = torch.arange(x.shape[1], device=x.device)[None] if positions is None else positions
        call = Call(depth.num_steps, positions=positions, mask=padding, start=start)
        valid = None if padding is None else padding[:, -x.shape[1] :]
        at = At(positions, mask, valid, extra=extra or {})
        (last,) = deque(self.states(x, depth, call, at, kv), maxlen=1)
        return self.update.read(last)

    def states(
        self,
        anchor: Float[Tensor, "batch token dim"],
        depth: Depth,
        call: Call,
        at: At,
        kv: StepViews | None = None,
    ) -> Iterator[DepthState]:
        """The loop itself: yields the state after each step. Whoever stops reading leaves early.

        With `depth.grad_steps` the steps before the last so many run without gradients; what `begin` makes of the
        anchor learns through those that have them. With `depth.rows` a row that has taken its steps stays as it is,
        and costs nothing more.
        """
        if call.start is not None and call.start.shape != anchor.shape:
            raise ValueError(f"start must be {tuple(anchor.shape)} like the anchor, got {tuple(call.start.shape)}.")
        state = self.update.begin(anchor, call)
        # A first state that is the anchor itself, which the context may hold too, would cost the compiler one more graph.
        state = state._replace(h=state.h.clone())
        if depth.rows is not None:
            yield from self._states_by_row(state, depth, at, kv)
            return
        frozen_steps = depth.num_steps - min(depth.grad_steps or depth.num_steps, depth.num_steps)
        for step in range(depth.num_steps):
            frozen = step < frozen_steps
            with torch.no_grad() if frozen else nullcontext():
                before = map_changing(Tensor.detach, state) if frozen else state
                state = self._step(before, at, step, kv)
            yield state

    def _states_by_row(self, state: DepthState, depth: Depth, at: At, kv: StepViews | None) -> Iterator[DepthState]:
        if kv is not None or at.extra:
            raise ValueError("A depth for each row goes neither with a cache nor with extra arguments.")
        order = RowOrder(depth, device=state.h.device)
        state, at = order.sort(state), order.sort_at(at)
        for step in range(depth.num_steps):
            active, frozen = order.active(step), order.frozen(step)
            with torch.no_grad() if frozen == active else nullcontext():
                before = map_rows(lambda leaf, n=active: leaf[:n], state)
                after = self._step(before, map_rows_of_at(lambda leaf, n=active: leaf[:n], at), step, kv)
            # Cut behind the step, not before it: the step after the last frozen one must not learn through that one.
            state = merge(detach_first(after, frozen), state, active)
            yield order.unsort(state)

    def _step(self, state: DepthState, at: At, step: int, kv: StepViews | None) -> DepthState:
        take = partial(self._take, at, step, kv)
        if not (self.checkpointing and torch.is_grad_enabled()):
            return take(state)
        if kv is not None:
            warnings.warn("A forward with a cache is not checkpointed: recomputing would write twice.", stacklevel=2)
            return take(state)
        return checkpoint(take, state, use_reentrant=False)

    def _take(self, at: At, step: int, kv: StepViews | None, state: DepthState) -> DepthState:
        views = None if kv is None else kv(step)
        return self._take_step(self.update, state, StepBlocks(self.stack, at, step, views, Notes(state.memory)))

    def compile_step(self, **arguments: Any) -> None:
        """Compiles one step with `torch.compile(**arguments)`; it then serves every depth.

        The loop stays Python, so a new depth compiles nothing.
        """
        self._take_step = torch.compile(take_step, **arguments)


def _stack_of(blocks: Iterable[nn.Module]) -> Stack:
    stack = Stack(blocks)
    if len(stack.blocks) == 0:
        raise ValueError("blocks is empty, but a loop needs at least one block.")
    return stack


def take_step(update: DepthUpdate, state: DepthState, blocks: StepBlocks) -> DepthState:
    """One step of the loop: the update's, with what the blocks said folded into the state."""
    state = update(state, blocks, blocks.step)
    losses = add_losses(state.losses, blocks.notes.losses)
    return state._replace(memory={**state.memory, **blocks.notes.after}, losses=losses)


def add_losses(some: Mapping[str, Tensor], more: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sum by name; a name that stands in one alone is kept."""
    return {**some, **{name: some[name] + loss if name in some else loss for name, loss in more.items()}}
