"""The diagonal injection: the state decays feature by feature, and the anchor refills it."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from recurrent_depth.arguments import require_sizes
from recurrent_depth.contracts import Call, PartCost
from recurrent_depth.injection import Injection, check_width
from recurrent_depth.numerics import at_least_float32
from recurrent_depth.optional import module_or_identity

DECAY = math.sqrt(1 / 5)
"""The share of the state that a step keeps as it starts."""


class SquareMap(nn.Module):
    """A linear map of the width to itself, without bias, that starts as the identity.

    Raises:
        ValueError: if `dim` is below 1.
    """

    def __init__(self, dim: int):
        super().__init__()
        require_sizes(dim=dim)
        self.linear = nn.Linear(dim, dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the map to the identity."""
        nn.init.eye_(self.linear.weight)

    def forward(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch token dim"]:
        """The mapped state."""
        return self.linear(x)


class DiagonalInjection(Injection):
    """The blocks see `exp(-dt * A) * h + dt * B norm(anchor)`, with `dt = softplus(dt_bias)` and `A = exp(A_log)`.

    Decay and step size are one number per feature, in float32. The decay lies between 0 and 1 whatever the weights
    are, so that without the blocks the state is a contraction: it cannot blow up, at any number of steps.
    The source trains `A_log`, `dt_bias` and `B` without weight decay.

    Args:
        dim: the width.
        norm: what the anchor goes through first; nothing by default.

    Raises:
        ValueError: if `dim` is below 1.

    Reference: Parcae, 2026, arXiv 2604.12946.
    """

    def __init__(self, dim: int, norm: nn.Module | None = None):
        super().__init__()
        require_sizes(dim=dim)
        self.log_rate = nn.Parameter(torch.empty(dim))
        self.dt_bias = nn.Parameter(torch.empty(dim))
        self.input = SquareMap(dim)
        self.norm = module_or_identity("norm", norm, "torch.nn.RMSNorm(dim)")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets `A` to 1, and `dt` so that a step keeps the share `DECAY` of the state."""
        nn.init.zeros_(self.log_rate)
        nn.init.constant_(self.dt_bias, math.log(math.expm1(-math.log(DECAY))))

    def step_size(self) -> Float[Tensor, " dim"]:
        """`dt`, in float32."""
        return F.softplus(at_least_float32(self.dt_bias))

    def decay(self) -> Float[Tensor, " dim"]:
        """The share of each feature that a step keeps, in float32."""
        return torch.exp(-self.step_size() * at_least_float32(self.log_rate).exp())

    def begin(self, anchor: Float[Tensor, "batch token dim"], call: Call) -> Float[Tensor, "batch token dim"]:
        """`dt * B norm(anchor)`, in the dtype of the anchor.

        Raises:
            ValueError: if the anchor has another width.
        """
        check_width(anchor, self.input.linear.in_features)
        return (self.step_size() * self.input(self.norm(anchor))).to(anchor.dtype)

    def forward(
        self, h: Float[Tensor, "batch token dim"], context: Float[Tensor, "batch token dim"], step: int
    ) -> Float[Tensor, "batch token dim"]:
        """The decayed state and what the anchor adds."""
        return (self.decay() * h + context).to(h.dtype)

    def cost(self) -> PartCost:
        """The map of the anchor, once."""
        return PartCost(begin=2 * self.input.linear.weight.numel())
