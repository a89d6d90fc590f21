"""The damped loop: a trained model's own blocks, looped without training and without new weights."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from recurrent_depth.arguments import check_types, require_number, require_whole
from recurrent_depth.contracts import Call, UpdateCost
from recurrent_depth.numerics import at_least_float32
from recurrent_depth.step import StepBlocks
from recurrent_depth.update import DepthState, DepthUpdate, initial_state


class FirstPass(NamedTuple):
    """The first step's candidate, and which tokens have none yet."""

    candidate: Float[Tensor, "batch token dim"]
    missing: Bool[Tensor, "batch token 1"]


class DampedUpdate(DepthUpdate):
    """`h <- (1 - 1/K) h + 1/K blocks(h)` for K steps; what is read is `s blocks(anchor) + (1 - s) h`.

    K steps of Euler's method through the field `blocks(h) - h`, of length 1/K each, blended with what one plain pass
    gives. That pass is the first step's candidate, so it costs nothing. One step is the plain pass, whatever `share`.

    A run of k steps takes longer steps than a deeper run, so it is no prefix of it. With a depth for each row, all rows
    take steps of the deepest row's length, and shallower ones leave on the way.

    Args:
        share: `s`, of the plain pass in what is read; 1 is the model without a loop, 0 the loop alone.

    Raises:
        ValueError: if `share` is not from 0 to 1.

    Reference: arXiv 2605.23872.
    """

    def __init__(self, share: float = 0.5):
        super().__init__()
        self.share = require_number("share", share, at_least=0, at_most=1)

    def begin(self, anchor: Float[Tensor, "batch token dim"], call: Call) -> DepthState:
        """The anchor, and the length of a step."""
        length = torch.full_like(at_least_float32(anchor[..., :1]), 1 / call.num_steps)
        return initial_state(anchor, length, carry=FirstPass(anchor, torch.ones_like(length, dtype=torch.bool)))

    def forward(self, state: DepthState, blocks: StepBlocks, step: int) -> DepthState:
        """A step of Euler's method; the first one's candidate is carried to the end."""
        candidate, length = blocks(state.h).to(state.h.dtype), state.context
        h = torch.lerp(at_least_float32(state.h), at_least_float32(candidate), length).to(state.h.dtype)
        # Selected rather than branched on the step, so that one compiled step serves all.
        first = torch.where(state.carry.missing, candidate, state.carry.candidate)
        carry = FirstPass(first, torch.zeros_like(state.carry.missing))
        return state._replace(h=h, carry=carry, write=length[..., 0])

    def read(self, state: DepthState) -> Float[Tensor, "batch token dim"]:
        """The blend of the plain pass and the loop's last state."""
        h, first = at_least_float32(state.h), at_least_float32(state.carry.candidate)
        return torch.lerp(h, first, self.share).to(state.h.dtype)

    @property
    def starts_plain(self) -> bool:
        """True."""
        return True

    def cost(self, num_steps: int) -> UpdateCost:
        """None: blends are not counted."""
        return UpdateCost()

    def extra_repr(self) -> str:
        """Its setting, for `print(model)`."""
        return f"share={self.share}"


@check_types
def damped(dim: int, *, share: float | int = 0.5) -> DampedUpdate:
    """The update of a training-free loop: short steps, blended with a plain pass; no weights, whatever the width.

    Args:
        dim: the width.
        share: of the plain pass in what is read.

    Raises:
        ValueError: if `dim` is below 1, or `share` not from 0 to 1.

    Reference: arXiv 2605.23872.
    """
    require_whole("dim", dim, at_least=1)
    return DampedUpdate(float(share))
