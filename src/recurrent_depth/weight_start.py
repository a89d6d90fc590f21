"""From which distribution a model's weights start."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn


def normal(weight: Tensor, std: float) -> None:
    """Draws a weight from N(0, std²), in place."""
    nn.init.normal_(weight, std=std)


def truncated_normal(weight: Tensor, std: float) -> None:
    """Draws a weight from N(0, std²), anew beyond three deviations, in place."""
    nn.init.trunc_normal_(weight, std=std, a=-3 * std, b=3 * std)


class WeightStart(NamedTuple):
    """How a model's linear layers and embeddings start.

    Attributes:
        std: their standard deviation.
        draw: called as `draw(weight, std)`.
    """

    std: float = 0.02
    draw: Callable[[Tensor, float], None] = normal
