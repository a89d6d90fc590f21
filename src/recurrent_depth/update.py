"""Depth updates: how a step's result is written back into the state."""

import abc
from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from recurrent_depth.arguments import require_instance
from recurrent_depth.contracts import Call, Tree, UpdateCost
from recurrent_depth.gate import DepthGate
from recurrent_depth.injection import Injection, KeepState
from recurrent_depth.numerics import at_least_float32
from recurrent_depth.optional import module_or_identity
from recurrent_depth.step import StepBlocks


class DepthState(NamedTuple):
    """What goes from step to step. Every leaf of `context`, `carry` and `memory` leads with (batch, token).

    Attributes:
        h: the state.
        write: the share that the last step wrote, the mean of `1 - g` over the features: the gate's own exit signal.
            1 where a step replaces the state, and before the first.
        context: made once by `begin`, the same at every step.
        carry: what else an update changes from step to step: memory slots, streams, halting mass.
        memory: what each block remembers for its next step, by its place in the stack. Kept by the loop.
        losses: auxiliary losses by name, summed over the steps; they leave padding out.
    """

    h: Float[Tensor, "batch token dim"]
    write: Float[Tensor, "batch token"]
    context: Tree = ()
    carry: Tree = ()
    memory: dict[int, Tree] = {}
    losses: dict[str, Float[Tensor, ""]] = {}


def initial_state(h: Float[Tensor, "batch token dim"], context: Tree = (), carry: Tree = ()) -> DepthState:
    """The state before the first step, with the defaults of all that an update does not use."""
    return DepthState(h, at_least_float32(h.new_ones(h.shape[:2])), context, carry)


def add_losses(some: Mapping[str, Tensor], more: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sum by name; a name that stands in one alone is kept."""
    return {**some, **{name: some[name] + loss if name in some else loss for name, loss in more.items()}}


class DepthUpdate(nn.Module, abc.ABC):
    """A rule for one step of depth. It receives the blocks, and decides what they see and what is written back.

    To an update the shared blocks are what its vector field is to an ODE solver. A new method is one such class: the
    loop is never edited. The state keeps the anchor's dtype.

    Attributes:
        replaces_state: a class says True where each of its steps writes all of the state: there is no gate to read.
    """

    replaces_state: bool = False

    @abc.abstractmethod
    def begin(self, anchor: Float[Tensor, "batch token dim"], call: Call) -> DepthState:
        """The state before the first step, and everything that no step changes. Always differentiated.

        A caller's own initial state then takes the place of `h`.
        """

    @abc.abstractmethod
    def forward(self, state: DepthState, blocks: StepBlocks, step: int) -> DepthState:
        """The state after this step; a pure function of its arguments, its parameters and the global RNG.

        A cache sees the calls of `blocks`. An update that picks tokens calls them with the pick, even where it is empty
        or all padding; one that calls them twice in a step leaves what the second call made.
        """

    @abc.abstractmethod
    def read(self, state: DepthState) -> Float[Tensor, "batch token dim"]:
        """What is made of the state after the last step: the input of the coda."""

    @property
    def starts_plain(self) -> bool:
        """Whether a run of one step is the blocks alone, whatever was learned; False where that is not known."""
        return False

    @abc.abstractmethod
    def cost(self, num_steps: int) -> UpdateCost:
        """What the update spends beside the blocks in a forward of so many steps."""


class ReplaceState(DepthUpdate):
    """`h <- blocks(inject(h))`: each step's result replaces the state.

    Args:
        inject: what the blocks see; `KeepState()` is the plain loop.
        start: makes the initial state from the anchor; the anchor itself by default.

    Raises:
        ValueError: if one of them is something else, such as a width or a class.
    """

    replaces_state = True

    def __init__(self, inject: Injection, start: nn.Module | None = None):
        super().__init__()
        require_instance("inject", inject, Injection, "rd.KeepState()")
        self.inject, self.start = inject, module_or_identity("start", start, "rd.GaussianNoise(0.1)")

    def begin(self, anchor: Float[Tensor, "batch token dim"], call: Call) -> DepthState:
        """The start that is made of the anchor."""
        return initial_state(self.start(anchor), context=self.inject.begin(anchor, call))

    def forward(self, state: DepthState, blocks: StepBlocks, step: int) -> DepthState:
        """The blocks' output."""
        candidate = blocks(self.inject(state.h, state.context, step))
        return state._replace(h=candidate.to(state.h.dtype), write=torch.ones_like(state.write))

    def read(self, state: DepthState) -> Float[Tensor, "batch token dim"]:
        """The state."""
        return state.h

    def cost(self, num_steps: int) -> UpdateCost:
        """The injection's."""
        return UpdateCost(*self.inject.cost())


def innermost(update: DepthUpdate) -> DepthUpdate:
    """The update that no other is within."""
    *_, last = (part for part in update.modules() if isinstance(part, DepthUpdate))
    return last


def is_plain(update: DepthUpdate) -> bool:
    """Whether an update is that of the plain loop, `h <- blocks(h)`, and nothing else."""
    parts = (update.inject, update.start) if isinstance(update, ReplaceState) else ()
    return [type(part) for part in parts] == [KeepState, nn.Identity]


class GateContext(NamedTuple):
    """What the injection and the gate keep of the anchor."""

    inject: Tree
    gate: Tree


class GatedDepthUpdate(DepthUpdate):
    """`h <- g * h + (1 - g) * blocks(inject(h))`: an elementwise gate decides how much each step may write.

    With g at 1 a step is the identity, with g at 0 it is the plain loop. The blend is float32, as the gate is.

    Args:
        inject: what the blocks see.
        gate: gives the share `1 - g`.
        start: makes the initial state from the anchor; the anchor itself by default. `GaussianNoise(0.1)` is the other
            reading of the source, a start from `h_pre + eps`.

    Raises:
        ValueError: if one of them is something else, such as a width or a class.

    Reference: Hegazy et al., 2026, arXiv 2608.15062.
    """

    def __init__(self, inject: Injection, gate: DepthGate, start: nn.Module | None = None):
        super().__init__()
        require_instance("inject", inject, Injection, "rd.ConcatProjection(dim)")
        require_instance("gate", gate, DepthGate, "rd.AnchoredGate(dim)")
        self.inject, self.gate = inject, gate
        self.start = module_or_identity("start", start, "rd.GaussianNoise(0.1)")

    def begin(self, anchor: Float[Tensor, "batch token dim"], call: Call) -> DepthState:
        """The start that is made of the anchor, and the anchor's halves of the injection and the gate."""
        context = GateContext(self.inject.begin(anchor, call), self.gate.begin(anchor))
        return initial_state(self.start(anchor), context)

    def forward(self, state: DepthState, blocks: StepBlocks, step: int) -> DepthState:
        """The gated blend of state and candidate."""
        candidate = blocks(self.inject(state.h, state.context.inject, step))
        write = self.gate(state.h, state.context.gate)
        h = torch.lerp(at_least_float32(state.h), at_least_float32(candidate), write)
        return state._replace(h=h.to(state.h.dtype), write=write.mean(-1))

    def read(self, state: DepthState) -> Float[Tensor, "batch token dim"]:
        """The state."""
        return state.h

    def cost(self, num_steps: int) -> UpdateCost:
        """The injection's and the gate's."""
        return UpdateCost(*self.inject.cost().plus(self.gate.cost()))
