"""Residual connections: where the norms stand around a branch, and the projection that ends it."""

import abc
from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor, nn


class ResidualProjection(nn.Linear):
    """The last linear layer of a residual branch; it starts narrower than others, see `initialise`."""


class Residual(nn.Module, abc.ABC):
    """A residual connection around a branch, and where its norms stand."""

    @abc.abstractmethod
    def forward(
        self, x: Float[Tensor, "batch token dim"], branch: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "batch token dim"]:
        """`x` with what the branch makes of it."""


class PreNorm(Residual):
    """`x + branch(norm(x))`: GPT-2, Llama, GRT. `norm` makes one norm of the width."""

    def __init__(self, norm: Callable[[], nn.Module]):
        super().__init__()
        self.norm = norm()

    def forward(
        self, x: Float[Tensor, "batch token dim"], branch: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "batch token dim"]:
        """Normed before the branch."""
        return x + branch(self.norm(x))


class PostNorm(Residual):
    """`norm(x + branch(x))`: the first Transformer, the Universal Transformer. `norm` makes one norm of the width."""

    def __init__(self, norm: Callable[[], nn.Module]):
        super().__init__()
        self.norm = norm()

    def forward(
        self, x: Float[Tensor, "batch token dim"], branch: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "batch token dim"]:
        """Normed after the sum."""
        return self.norm(x + branch(x))


class ResidualSandwich(Residual):
    """`after(x + branch(before(x)))`: a second norm on the residual stream itself. `norm` makes one of the two.

    Reference: Geiping et al., 2025, arXiv 2502.05171 (Huginn).
    """

    def __init__(self, norm: Callable[[], nn.Module]):
        super().__init__()
        self.before, self.after = norm(), norm()

    def forward(
        self, x: Float[Tensor, "batch token dim"], branch: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "batch token dim"]:
        """Normed before the branch and after the sum."""
        return self.after(x + branch(self.before(x)))


class BranchSandwich(Residual):
    """`x + after(branch(before(x)))`: both norms inside the branch. `norm` makes one of the two.

    Reference: Zhu et al., 2025, arXiv 2510.25741 (Ouro).
    """

    def __init__(self, norm: Callable[[], nn.Module]):
        super().__init__()
        self.before, self.after = norm(), norm()

    def forward(
        self, x: Float[Tensor, "batch token dim"], branch: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "batch token dim"]:
        """Normed before and after the branch."""
        return x + self.after(branch(self.before(x)))
