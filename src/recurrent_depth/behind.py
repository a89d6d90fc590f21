"""Updates that wrap another one and put a module behind it: behind each step, or behind the last."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from recurrent_depth.blocks import linear_cost
from recurrent_depth.contracts import Call, Tree, UpdateCost
from recurrent_depth.step import StepBlocks
from recurrent_depth.update import DepthState, DepthUpdate


class BehindLoop(DepthUpdate):
    """Another update, of which the coda sees `module(h)`: a norm, or a projection, once behind the last step.

    Args:
        inner: the update.
        module: called as `module(h)`; `Borrowed(norm)` for the model's own final norm.

    Reference: the norm of Geiping et al., 2025, arXiv 2502.05171; the projection of Parcae, 2026, arXiv 2604.12946.
    """

    def __init__(self, inner: DepthUpdate, module: nn.Module):
        super().__init__()
        self.inner, self.module = inner, module

    def begin(self, anchor: Float[Tensor, "batch token dim"], call: Call) -> DepthState:
        """The inner update's."""
        return self.inner.begin(anchor, call)

    def forward(self, state: DepthState, blocks: StepBlocks, step: int) -> DepthState:
        """The inner update's step."""
        return self.inner(state, blocks, step)

    def read(self, state: DepthState) -> Float[Tensor, "batch token dim"]:
        """`module(h)`."""
        return self.module(self.inner.read(state))

    def cost(self, num_steps: int) -> UpdateCost:
        """The inner update's, and the module's linear layers once."""
        cost = self.inner.cost(num_steps)
        return cost._replace(begin=cost.begin + linear_cost(self.module).linear)


class Unnormed(NamedTuple):
    """What is carried beside the normed state.

    Attributes:
        h: the state before its norm.
        inner: what the inner update carries.
    """

    h: Float[Tensor, "batch token dim"]
    inner: Tree


class NormEachStep(DepthUpdate):
    """Another update, whose state is normed after every step: `h <- norm(step(h))`.

    The normed state is what the next step starts from and what an exit rule reads. The coda gets the state before the
    norm, so that with `Borrowed(model.norm)` here the model's final norm gives the same normed state, and not one that
    is normed twice.

    Args:
        inner: the update.
        norm: called as `norm(h)`.

    Reference: Ouro, Zhu et al., 2025, arXiv 2510.25741.
    """

    def __init__(self, inner: DepthUpdate, norm: nn.Module):
        super().__init__()
        self.inner, self.norm = inner, norm

    def begin(self, anchor: Float[Tensor, "batch token dim"], call: Call) -> DepthState:
        """The inner update's, not normed."""
        state = self.inner.begin(anchor, call)
        return state._replace(carry=Unnormed(torch.zeros_like(state.h), state.carry))

    def forward(self, state: DepthState, blocks: StepBlocks, step: int) -> DepthState:
        """The inner update's step, then the norm."""
        after = self.inner(state._replace(carry=state.carry.inner), blocks, step)
        h = self.norm(after.h).to(after.h.dtype)
        return after._replace(h=h, carry=Unnormed(after.h, after.carry))

    def read(self, state: DepthState) -> Float[Tensor, "batch token dim"]:
        """What the inner update reads of the state before its norm."""
        return self.inner.read(state._replace(h=state.carry.h, carry=state.carry.inner))

    def cost(self, num_steps: int) -> UpdateCost:
        """The inner update's: norms are not counted."""
        return self.inner.cost(num_steps)
