"""When a token halts, and how its states are weighed together."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from recurrent_depth.arguments import require_number, require_whole
from recurrent_depth.numerics import at_least_float32

Mix = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Adds the next state (batch, token, dim) with its weight (batch, token, 1) to the mixture of those before it."""


def sum_states(mixture: Tensor, h: Tensor, weight: Tensor) -> Tensor:
    """`mixture + weight * h`: the weights of all steps sum to 1. Reference: Graves, 2016, arXiv 1603.08983."""
    return mixture + weight * h


def blend_states(mixture: Tensor, h: Tensor, weight: Tensor) -> Tensor:
    """`(1 - weight) * mixture + weight * h`: later steps fade earlier ones.

    The mixture starts at zero and the first weight is below 1, so the shares sum to less than 1. Tensor2Tensor's code
    subtracts the weight from the mixture's features, for want of parentheses; this is what was meant.

    Reference: Dehghani et al., 2018, arXiv 1807.03819, its appendix.
    """
    return (1 - weight) * mixture + weight * h


class HaltingUnit(nn.Module):
    """The chance of a token to halt at a step: `p = sigmoid(w . x + b)`, in float32 whatever the model's dtype.

    From +1, the source's, a token halts at its second step, in training and afterwards: most of the loop is never
    trained. A bias of -3 starts deep, with about 20 steps.

    Args:
        dim: the width.
        bias: where `b` starts; a parameter of this module, so that a host's rule for linear layers cannot reset it.

    Raises:
        ValueError: if `dim` is below 1, or `bias` no finite number.
    """

    def __init__(self, dim: int, *, bias: float | int = 1.0):
        super().__init__()
        self.initial_bias = require_number("bias", bias)
        self.linear = nn.Linear(require_whole("dim", dim, at_least=1), 1, bias=False)
        self.bias = nn.Parameter(torch.full((1,), self.initial_bias))

    def reset_parameters(self) -> None:
        """Sets the bias to where it starts."""
        nn.init.constant_(self.bias, self.initial_bias)

    def forward(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch token"]:
        """The probabilities.

        Raises:
            ValueError: if `x` has another width.
        """
        if x.shape[-1] != self.linear.in_features:
            raise ValueError(f"x is {x.shape[-1]} wide, but the unit was built for {self.linear.in_features}.")
        # A sum of products, since autocast would make a matrix product of them, in bfloat16.
        products = at_least_float32(x) * at_least_float32(self.linear.weight)
        return torch.sigmoid(products.sum(-1) + at_least_float32(self.bias))
