"""What weighs the result of a token that was routed, made of the router's scores."""

import abc

import torch
from jaxtyping import Float
from torch import Tensor, nn

from recurrent_depth.arguments import require_number


class RouterWeight(nn.Module, abc.ABC):
    """What weighs a token's result: a function of its scores that keeps their order, elementwise or over the last.

    Attributes:
        compares: whether a router's outputs are weighed against each other, so that a single one says nothing.
    """

    compares: bool = False

    @abc.abstractmethod
    def forward(self, scores: Float[Tensor, "batch token out"]) -> Float[Tensor, "batch token out"]:
        """The weights."""


class SigmoidWeight(RouterWeight):
    """`alpha * sigmoid(score)`; 0.1 is the released default of Mixture-of-Recursions.

    Raises:
        ValueError: if `alpha` is not finite or not above 0, as with all weights that have one.
    """

    def __init__(self, alpha: float | int = 0.1):
        super().__init__()
        self.alpha = require_number("alpha", alpha, above=0)

    def forward(self, scores: Float[Tensor, "batch token out"]) -> Float[Tensor, "batch token out"]:
        """The weights."""
        return self.alpha * scores.sigmoid()


class TanhWeight(RouterWeight):
    """`alpha * tanh(score)`."""

    def __init__(self, alpha: float | int = 0.1):
        super().__init__()
        self.alpha = require_number("alpha", alpha, above=0)

    def forward(self, scores: Float[Tensor, "batch token out"]) -> Float[Tensor, "batch token out"]:
        """The weights."""
        return self.alpha * scores.tanh()


class RawWeight(RouterWeight):
    """The score itself, unbounded: Mixture-of-Depths."""

    def forward(self, scores: Float[Tensor, "batch token out"]) -> Float[Tensor, "batch token out"]:
        """The scores."""
        return scores


class SoftmaxWeight(RouterWeight):
    """`alpha * softmax(scores)` over a router's outputs: token choice."""

    compares = True

    def __init__(self, alpha: float | int = 1.0):
        super().__init__()
        self.alpha = require_number("alpha", alpha, above=0)

    def forward(self, scores: Float[Tensor, "batch token out"]) -> Float[Tensor, "batch token out"]:
        """The weights."""
        return self.alpha * scores.softmax(-1)


class ConstantWeight(RouterWeight):
    """The same weight for all, so that only the choice is routed; 1 is the published variant without weights."""

    def __init__(self, value: float | int = 1.0):
        super().__init__()
        self.value = require_number("value", value)

    def forward(self, scores: Float[Tensor, "batch token out"]) -> Float[Tensor, "batch token out"]:
        """The constant."""
        return torch.full_like(scores, self.value)
