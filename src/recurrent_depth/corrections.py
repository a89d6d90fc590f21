"""The corrections that a step adds to shared weights: low-rank ones to matrices, offsets to vectors."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from recurrent_depth.numerics import at_least_float32


class Matrix(NamedTuple):
    """The matrix of a layer that gives `W x`.

    Attributes:
        stored: the parameter, maybe packed by a quantiser.
        num_out: features that the layer gives.
        num_in: features that it takes.
        transposed: whether it is stored as (in, out).
    """

    stored: Tensor
    num_out: int
    num_in: int
    transposed: bool = False


MatrixOf = Callable[[nn.Module], Matrix | None]
"""Says what a layer's matrix is; None for modules that have none, or contain such layers."""


def linear_matrix(layer: nn.Module) -> Matrix | None:
    """The matrix of an `nn.Linear`."""
    return Matrix(layer.weight, layer.out_features, layer.in_features) if isinstance(layer, nn.Linear) else None


class LowRank(nn.Module):
    """The correction `B A x` of one linear layer, with factors of its own for each step, and no scale beside them.

    The factors of all steps lie in one tensor each. A run that takes one step alone thus has a gradient for the whole
    tensor, zero at the other steps, and data-parallel training needs no flag for unused parameters. `A` starts uniform
    within `1 / sqrt(in)`, `B` at zero, so that the correction starts as none.

    Args:
        matrix: the layer's, whose sizes, device and (where it is a floating one) dtype the factors get.
        num_steps: how many steps are corrected.
        rank: of each correction; cut to the rank that the layer can have.

    Reference: Hu et al., 2021, arXiv 2106.09685.
    """

    def __init__(self, matrix: Matrix, num_steps: int, rank: int):
        super().__init__()
        stored = matrix.stored
        like = stored if stored.is_floating_point() else torch.empty(0, device=stored.device)
        rank = min(rank, matrix.num_in, matrix.num_out)
        self.A = nn.Parameter(like.new_empty(num_steps, rank, matrix.num_in))
        self.B = nn.Parameter(like.new_empty(num_steps, matrix.num_out, rank))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts as no correction."""
        bound = self.A.shape[-1] ** -0.5
        nn.init.uniform_(self.A, -bound, bound)
        nn.init.zeros_(self.B)

    def at(self, step: int) -> dict[str, Tensor]:
        """A step's factors, by the names under which the layer looks for them."""
        return {"step_A": self.A[step], "step_B": self.B[step]}

    @torch.no_grad()
    def fit(self, residuals: Float[Tensor, "step out in"]) -> None:
        """Sets `B A` to the nearest matrices of its rank: the truncated singular value decomposition."""
        rank = self.A.shape[1]
        u, s, vh = torch.linalg.svd(at_least_float32(residuals), full_matrices=False)
        self.B.copy_(u[..., :rank] * s[:, None, :rank])
        self.A.copy_(vh[:, :rank])


class Offset(nn.Module):
    """What is added to a vector, the scales of a norm or a bias, at each step; starts at zero."""

    def __init__(self, vector: Tensor, num_steps: int):
        super().__init__()
        self.offset = nn.Parameter(vector.new_zeros(num_steps, *vector.shape))

    def reset_parameters(self) -> None:
        """Starts as no correction."""
        nn.init.zeros_(self.offset)

    @torch.no_grad()
    def fit(self, residuals: Float[Tensor, "step dim"]) -> None:
        """Sets the offsets."""
        self.offset.copy_(residuals)


def make_correctable(name: str, layer: nn.Module) -> None:
    """Lets a layer add `step_B step_A x` to what it gives, once something puts these two factors into it.

    Raises:
        ValueError: if it does so already.
    """
    if hasattr(layer, "step_A"):
        raise ValueError(f"Layer {name!r} has a correction per step already.")
    layer.register_buffer("step_A", None, persistent=False)
    layer.register_buffer("step_B", None, persistent=False)
    layer.register_forward_hook(_add_correction)


def _add_correction(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    if layer.step_A is None:
        return output
    correction = F.linear(F.linear(inputs[0].to(layer.step_A.dtype), layer.step_A), layer.step_B)
    return output + correction.to(output.dtype)
