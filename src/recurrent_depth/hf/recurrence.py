"""What a graft adds to its host: the loop."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from recurrent_depth.arguments import require_whole
from recurrent_depth.core import RecurrentCore
from recurrent_depth.depth import Depth, as_depth
from recurrent_depth.hf.cache import StepSlots
from recurrent_depth.hf.forward_notes import ForwardNotes
from recurrent_depth.hf.host_calls import HostCall
from recurrent_depth.hf.own_layers import OwnLayers
from recurrent_depth.hf.update_start import start_as_host
from recurrent_depth.initialisation import start_weights
from recurrent_depth.kv_policy import KVStepPolicy
from recurrent_depth.update import DepthState


class Place(NamedTuple):
    """Where the core stands in its host: its first layer, how many layers it has, and how many the host has."""

    first: int
    num_core: int
    num_layers: int


class Recurrence(nn.Module):
    """The loop over a host's layers; `model.recurrence` of a graft.

    Args:
        core: the loop, over a stack that reads the calls from `at.extra["calls"]`.
        kv: what a cache stores of the steps.
        place: where the core stands.
        num_steps: the depth of a forward that is told none; may be set later.
        tied: how many of the layers run at each step, where steps keep to layers of their own; None where all do.

    Attributes:
        gradient_checkpointing: recompute each step in the backward pass. What transformers sets.
    """

    def __init__(
        self, core: RecurrentCore, kv: KVStepPolicy, place: Place, num_steps: int | Depth, *, tied: int | None = None
    ):
        super().__init__()
        self.core, self.kv, self.place, self.tied = core, kv, place, tied
        self.num_steps = num_steps
        self._forward = ForwardNotes()

    def reset_parameters(self) -> None:
        """Gives every weight its start, that of `graft`: the model is its host. Corrections per step start as none."""
        start_weights(self.core)
        start_weights(self.kv)
        start_as_host(self.core.update)

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether each step is recomputed."""
        return self.core.checkpointing

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, value: bool) -> None:
        self.core.checkpointing = value

    @contextmanager
    def at_depth(self, num_steps: int | Depth | None) -> Iterator[None]:
        """Forwards inside take so many steps, those of this thread; None leaves it as it is.

        Raises:
            ValueError: if it is no depth, or one for each row; or, at the end, if the host called some layers of the
                core and not the last one, which runs the loop.
        """
        now = self._forward
        before, now.asked = now.asked, now.asked if num_steps is None else whole_depth(num_steps)
        now.forget()
        now.losses = {}
        try:
            yield
            self._check_looped()
        finally:
            now.asked, now.losses = before, None
            now.forget()

    @property
    def losses(self) -> dict[str, Tensor]:
        """The auxiliary losses of the forward that is running in this thread, by name; none outside of one."""
        return self._forward.losses or {}

    def _check_looped(self) -> None:
        first, num_core, _ = self.place
        if 0 < len(self._forward.noted) < num_core:
            raise ValueError(
                f"The host did not call layer {first + num_core - 1}, the last one of the core, so that the loop did "
                f"not run: it stopped behind layer {first + len(self._forward.noted) - 1}. Either its list of layers "
                "was cut or num_hidden_layers changed, which is to be done before grafting, or layers are left out at "
                "random (layerdrop), which cannot loop."
            )

    @contextmanager
    def recording(self) -> Iterator[list[DepthState]]:
        """Gives a list to which forwards inside, those of this thread, add the state after each of their steps.

        `state.h` is the state, `state.write` the share that the step wrote, (batch, token), the mean over the features:
        `1 - g` of a gate. The first step is the host's own and writes all, if nothing else was asked of `graft`. States
        of forwards with gradients hold on to their graph; those of `generate` follow one another, token by token.
        """
        now = self._forward
        states: list[DepthState] = []
        before, now.records = now.records, (*now.records, states)
        try:
            yield states
        finally:
            now.records = before

    def _replicate_for_data_parallel(self) -> Any:
        # Replicas of the layers would find this module, on another device, and not their own.
        raise RuntimeError(
            "nn.DataParallel cannot run a graft: train it with one process for each device, by torchrun and "
            "DistributedDataParallel, or on one device alone (CUDA_VISIBLE_DEVICES=0)."
        )

    def note(self, index: int, anchor: Float[Tensor, "batch token dim"], call: HostCall) -> tuple[HostCall, ...]:
        """Keeps what a layer was called with until the last one was; gives all those noted so far.

        Raises:
            ValueError: if the host did something between its layers that a loop cannot repeat: it left one out, or
                changed the hidden state.
        """
        now = self._forward
        before = now.noted if index > 0 else ()
        if len(before) != index or (before and anchor is not now.anchor):
            now.forget()
            raise ValueError(
                f"The host did not run layer {self.place.first + index} right behind the one before it: layers are "
                "left out at random (layerdrop), or the hidden state changes between them. Such layers cannot loop."
            )
        now.noted, now.anchor = (*before, call), anchor
        return now.noted

    def forward(
        self, anchor: Float[Tensor, "batch token dim"], calls: tuple[HostCall, ...]
    ) -> Float[Tensor, "batch token dim"]:
        """The loop over the layers of `calls`."""
        now = self._forward
        now.forget()
        depth = whole_depth(self.num_steps) if now.asked is None else now.asked
        slots = self._slots(calls, depth.num_steps)
        if slots is None:
            calls = tuple(call.with_cache(None) for call in calls)
        h = self.core(anchor, depth, extra={"calls": calls, "slots": slots}, watch=now.watch)
        now.sum_losses()
        if slots is not None:
            slots.close()
        return h

    def _slots(self, calls: tuple[HostCall, ...], num_steps: int) -> StepSlots | OwnLayers | None:
        cache = calls[-1].cache
        recomputed = self.core.checkpointing and self.training and torch.is_grad_enabled()
        if cache is None or recomputed:  # what is recomputed would be written twice
            return None
        where = self.place._asdict() | {"num_steps": num_steps}
        if self.tied is not None:
            return OwnLayers(cache, **where, num_tied=self.tied)
        return StepSlots(cache, **where, policy=self.kv)


def whole_depth(num_steps: object) -> Depth:
    """A depth that all rows share.

    Raises:
        ValueError: if it is none.
    """
    if not isinstance(num_steps, Depth | list | tuple | range):
        return Depth(require_whole("num_steps", num_steps, at_least=1))
    depth = as_depth(num_steps)
    if depth.rows is not None:
        raise ValueError(
            f"num_steps is {num_steps!r}, but a graft takes one depth for all rows: which rows the host's own masks "
            "and positions belong to is not known."
        )
    return depth
