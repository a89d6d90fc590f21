"""The update of a graft: the first step is the host's own pass, another update takes the later ones."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from recurrent_depth.contracts import Call, UpdateCost
from recurrent_depth.step import StepBlocks
from recurrent_depth.update import DepthState, DepthUpdate, initial_state
from recurrent_depth.update_answers import begun_by, cost_of


class HostFirst(DepthUpdate):
    """Step 0 is `h = blocks(anchor)`, without projection, noise or gate; the later steps are another update's.

    A forward of one step is thus the host itself, whatever the update within has learned.

    Args:
        inner: takes the steps from 1 on.
    """

    def __init__(self, inner: DepthUpdate):
        super().__init__()
        self.inner = inner

    def begin(self, anchor: Float[Tensor, "batch token dim"], call: Call) -> DepthState:
        """What the inner update makes of the anchor; with a single step nothing, since it takes none."""
        if call.num_steps > 1:
            return begun_by(self.inner, anchor, call)._replace(h=anchor)
        learning = torch.is_grad_enabled()
        h = _Touch.apply(anchor, *self.inner.parameters()) if learning else anchor
        return initial_state(h, carry=_Alone())

    def forward(self, state: DepthState, blocks: StepBlocks, step: int) -> DepthState:
        """The host's pass, then the inner update's steps."""
        if step > 0:
            return self.inner(state, blocks, step)
        return state._replace(h=blocks(state.h).to(state.h.dtype), write=torch.ones_like(state.write))

    def read(self, state: DepthState) -> Float[Tensor, "batch token dim"]:
        """What the inner update reads; of a single step, which it has no part in, the state."""
        return state.h if isinstance(state.carry, _Alone) else self.inner.read(state)

    @property
    def starts_plain(self) -> bool:
        """True."""
        return True

    def cost(self, num_steps: int) -> UpdateCost:
        """The inner update's, at all steps but the first."""
        cost = cost_of(self.inner, num_steps)
        return cost._replace(begin=cost.begin * (num_steps > 1), step=cost.step * (num_steps - 1) // num_steps)


class _Alone(NamedTuple):
    """Stands for what an update carries, where the host's pass is the only step."""


class _Touch(torch.autograd.Function):
    """Gives its first input unchanged, and zero gradients to the others.

    At one step the inner update is not used; data-parallel training would miss its gradients.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, *(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)
