"""The norm of the Llama form."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from recurrent_depth.arguments import require_sizes


class RMSNorm(nn.Module):
    """Divides by the root mean square of the features, then scales each; gives the dtype of its input.

    Torch's own norm warns under autocast, where state and weight differ in dtype, and leaves its fused kernel.

    Raises:
        ValueError: if `dim` is below 1.

    Reference: Zhang and Sennrich, 2019, arXiv 1910.07467.
    """

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        require_sizes(dim=dim)
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def reset_parameters(self) -> None:
        """Sets the scales to 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Float[Tensor, "*axes dim"]) -> Float[Tensor, "*axes dim"]:
        """The normed state."""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)
