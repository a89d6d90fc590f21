"""Initial states that are not the anchor."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from recurrent_depth.arguments import require_number


class RandomState(nn.Module):
    """A random initial state: N(0, std²) cut at three deviations in training, zeros in evaluation.

    Drawn anew at every call from the global RNG, in float32. It knows nothing of the anchor but its shape, so an
    update that starts here needs an injection that brings the anchor in.

    Args:
        std: the standard deviation; 0 starts from zeros in training too, and draws nothing.
        in_evaluation: random in evaluation mode too.

    Raises:
        ValueError: if `std` is negative or not finite.

    Reference: Geiping et al., 2025, arXiv 2502.05171; that evaluation starts from zeros is our choice.
    """

    def __init__(self, std: float | int, *, in_evaluation: bool = False):
        super().__init__()
        self.std = require_number("std of the initial state", std, at_least=0)
        self.in_evaluation = in_evaluation

    def forward(self, anchor: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch token dim"]:
        """A state of the anchor's shape and dtype."""
        if self.std == 0 or not (self.training or self.in_evaluation):
            return torch.zeros_like(anchor)
        state = torch.empty_like(anchor, dtype=torch.float32)
        return nn.init.trunc_normal_(state, std=self.std, a=-3 * self.std, b=3 * self.std).to(anchor.dtype)

    def extra_repr(self) -> str:
        """Its settings, for `print(model)`."""
        return f"std={self.std}, in_evaluation={self.in_evaluation}"
