"""The plain loop with a connection around each step: controls that others compare with."""

import torch
from jaxtyping import Float
from torch import Tensor

from recurrent_depth.arguments import require_instance
from recurrent_depth.contracts import Call, PartCost, UpdateCost
from recurrent_depth.injection import Injection
from recurrent_depth.step import StepBlocks
from recurrent_depth.update import DepthState, DepthUpdate, initial_state


class KeepAnchor(Injection):
    """The anchor alone, whatever the state. For what goes around the blocks: if they see nothing else, none loops."""

    def begin(self, anchor: Float[Tensor, "batch token dim"], call: Call) -> Float[Tensor, "batch token dim"]:
        """The anchor itself."""
        return anchor

    def forward(
        self, h: Float[Tensor, "batch token dim"], context: Float[Tensor, "batch token dim"], step: int
    ) -> Float[Tensor, "batch token dim"]:
        """The anchor."""
        return context

    def cost(self) -> PartCost:
        """None."""
        return PartCost()


class SkipUpdate(DepthUpdate):
    """`h <- blocks(h) + skip(h)`: each step's result replaces the state, and something is added to it.

    Args:
        skip: what is added. `KeepState()` is a residual connection around the step, beside those of its blocks;
            `KeepAnchor()` adds the input again after each step, where `ReplaceState(AddAnchor())` does so before it.

    Raises:
        ValueError: if `skip` is something else, such as a class.

    Reference: the looped baselines of arXiv 2510.07739 (MeSH), equation 1.
    """

    replaces_state = True

    def __init__(self, skip: Injection):
        super().__init__()
        require_instance("skip", skip, Injection, "rd.KeepAnchor()")
        self.skip = skip

    def begin(self, anchor: Float[Tensor, "batch token dim"], call: Call) -> DepthState:
        """The anchor, and what of it is added."""
        return initial_state(anchor, self.skip.begin(anchor, call))

    def forward(self, state: DepthState, blocks: StepBlocks, step: int) -> DepthState:
        """The blocks' output and what goes around them."""
        h = blocks(state.h) + self.skip(state.h, state.context, step)
        return state._replace(h=h.to(state.h.dtype), write=torch.ones_like(state.write))

    def read(self, state: DepthState) -> Float[Tensor, "batch token dim"]:
        """The state."""
        return state.h

    def cost(self, num_steps: int) -> UpdateCost:
        """That of what is added."""
        return UpdateCost(*self.skip.cost())
