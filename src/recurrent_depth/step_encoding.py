"""Where a token stands and which step it is at, told to the blocks by sinusoids: the Universal Transformer's input."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from recurrent_depth.contracts import Call, PartCost
from recurrent_depth.injection import Injection
from recurrent_depth.numerics import at_least_float32


def sinusoids(
    places: Int[Tensor, "#batch token"] | Int[Tensor, ""], dim: int, *, like: Tensor
) -> Float[Tensor, "... dim"]:
    """Feature 2j is `sin(place / 10000^(2j/dim))`, feature 2j + 1 its cosine; in float32, or finer where `like` is."""
    places = at_least_float32(places.to(like))
    pairs = torch.arange(0, dim, 2, device=like.device, dtype=places.dtype) / dim
    angles = places[..., None] * 10000.0**-pairs
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)[..., :dim]


class StepEncoding(Injection):
    """The blocks see `h + P^t`, where `P^t` sums a sinusoid of the token's position and one of the step.

    It has no weights. Positions and steps are counted from 0, as in Tensor2Tensor; sines and cosines alternate, as in
    the paper's equation, where that code puts all cosines behind all sines.

    Reference: Dehghani et al., 2018, arXiv 1807.03819.
    """

    def begin(self, anchor: Float[Tensor, "batch token dim"], call: Call) -> Float[Tensor, "batch token dim"]:
        """The positions' half."""
        positions = call.positions
        if positions is None:
            positions = torch.arange(anchor.shape[1], device=anchor.device)[None]
        return sinusoids(positions, anchor.shape[2], like=anchor).to(anchor.dtype).expand_as(anchor)

    def forward(
        self, h: Float[Tensor, "batch token dim"], context: Float[Tensor, "batch token dim"], step: int
    ) -> Float[Tensor, "batch token dim"]:
        """The sum of all three."""
        now = sinusoids(torch.full((), step, device=h.device), h.shape[2], like=h)
        return h + context + now.to(h.dtype)

    def cost(self) -> PartCost:
        """None: additions are not counted."""
        return PartCost()
