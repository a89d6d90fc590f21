"""One forward of the native model, and what is kept of it on the way."""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

import recurrent_depth as rd
from recurrent_depth.update import DepthState, add_losses


class Passed(NamedTuple):
    """What a forward went through.

    Attributes:
        hidden: what the head reads.
        states: the state after each step if every step was asked for, else after the last one alone.
        losses: auxiliary losses by name.
    """

    hidden: Float[Tensor, "batch token dim"]
    states: tuple[DepthState, ...]
    losses: dict[str, Tensor]


def run(
    native: rd.RecurrentTransformer,
    tokens: Tensor,
    depth: rd.Depth,
    given: Mapping[str, Tensor | None],
    kv: rd.ModelKeyValues | None,
    *,
    every_step: bool,
) -> Passed:
    """The native model up to its head; `given` are mask and positions."""
    begun = native.begin(tokens, depth, **given, kv=kv)
    steps = native.core.steps(begun.state, begun.depth, begun.at, begun.views)
    states = tuple(steps) if every_step else tuple(deque(steps, maxlen=1))
    said = rd.Notes()
    hidden = native.finish(native.core.read(states[-1]), begun.at._replace(notes=said), kv)
    return Passed(hidden, states, add_losses(add_losses(states[-1].losses, begun.notes.losses), said.losses))


@contextmanager
def recorded(native: rd.RecurrentTransformer, wanted: bool) -> Iterator[list[Tensor]]:
    """What the embedding and the blocks outside of the loop give while this is open, each of which runs once."""
    parts = [native.embed, *native.prelude.blocks, *native.coda.blocks] if wanted else []
    given: list[Tensor] = []

    def keep(_module: Any, _inputs: Any, output: Tensor) -> None:
        given.append(output)

    handles = [part.register_forward_hook(keep) for part in parts]
    try:
        yield given
    finally:
        for handle in handles:
            handle.remove()


def hidden_states(native: rd.RecurrentTransformer, between: list[Tensor], passed: Passed) -> tuple[Tensor, ...]:
    """The embedding, the prelude's blocks, the steps, the coda's blocks, and what the head reads, in this order."""
    before = 1 + native.layout.prelude
    steps = (state.h for state in passed.states)
    return (*between[:before], *steps, *between[before:], passed.hidden)
