"""What a router says of each token."""

import abc

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from recurrent_depth.arguments import require_number, require_whole
from recurrent_depth.numerics import at_least_float32, without_autocast


class RouterScores(nn.Module, abc.ABC):
    """Scores of each token. One module holds several routers, one for each step for example, in shared tensors.

    They are float32 or finer whatever the dtype of the model, under autocast too: decisions hang on their signs.

    Attributes:
        num_routers: how many routers there are.
        num_outputs: how many scores each gives.
    """

    num_routers: int
    num_outputs: int

    @abc.abstractmethod
    def forward(self, h: Float[Tensor, "batch token dim"], router: int) -> Float[Tensor, "batch token out"]:
        """What a router says."""

    @abc.abstractmethod
    def cost(self) -> int:
        """Matrix FLOPs per token of one router."""


class LinearScores(RouterScores):
    """`W h / temperature`, without bias; weights start from N(0, 0.02²).

    Args:
        dim: the width.
        num_routers: how many routers.
        num_outputs: scores that each gives.
        temperature: divides the state.

    Raises:
        ValueError: if a number is below 1, or the temperature not finite or not above 0; in a forward, for a state of
            another width.

    Reference: Bae et al., 2025, arXiv 2507.10524.
    """

    def __init__(self, dim: int, *, num_routers: int = 1, num_outputs: int = 1, temperature: float | int = 1.0):
        super().__init__()
        _check(temperature, dim=dim, num_routers=num_routers, num_outputs=num_outputs)
        self.num_routers, self.num_outputs, self.temperature = num_routers, num_outputs, temperature
        self.weight = nn.Parameter(torch.empty(num_routers, num_outputs, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, h: Float[Tensor, "batch token dim"], router: int) -> Float[Tensor, "batch token out"]:
        """What a router says."""
        with without_autocast(h.device):
            return _linear(_scaled(h, self.weight, self.temperature), self.weight[router])

    def cost(self) -> int:
        """One product."""
        return 2 * self.weight[0].numel()


class MLPScores(RouterScores):
    """`W_2 gelu(W_1 h / temperature)`, without biases; weights start from N(0, 0.02²).

    In the released code both `mlp` and `wide_mlp` are this, twice as wide inside as outside.

    Args:
        dim: the width.
        num_routers: how many routers.
        num_outputs: scores that each gives.
        hidden: the width inside; twice `dim` by default.
        temperature: divides the state.

    Raises:
        ValueError: if a number is below 1, or the temperature not finite or not above 0; in a forward, for a state of
            another width.

    Reference: Bae et al., 2025, arXiv 2507.10524.
    """

    def __init__(
        self,
        dim: int,
        *,
        num_routers: int = 1,
        num_outputs: int = 1,
        hidden: int | None = None,
        temperature: float | int = 1.0,
    ):
        super().__init__()
        hidden = 2 * dim if hidden is None else hidden
        _check(temperature, dim=dim, num_routers=num_routers, num_outputs=num_outputs, hidden=hidden)
        self.num_routers, self.num_outputs, self.temperature = num_routers, num_outputs, temperature
        self.up = nn.Parameter(torch.empty(num_routers, hidden, dim))
        self.out = nn.Parameter(torch.empty(num_routers, num_outputs, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights."""
        nn.init.normal_(self.up, std=0.02)
        nn.init.normal_(self.out, std=0.02)

    def forward(self, h: Float[Tensor, "batch token dim"], router: int) -> Float[Tensor, "batch token out"]:
        """What a router says."""
        with without_autocast(h.device):
            hidden = F.gelu(_linear(_scaled(h, self.up, self.temperature), self.up[router]))
            return _linear(hidden, self.out[router])

    def cost(self) -> int:
        """Two products."""
        return 2 * (self.up[0].numel() + self.out[0].numel())


def _scaled(h: Tensor, weight: Tensor, temperature: float) -> Tensor:
    if h.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"The state is {h.shape[-1]} wide, but the router was built for {weight.shape[-1]}: build it with "
            f"dim={h.shape[-1]}, the width of the model."
        )
    return at_least_float32(h) / temperature


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))


def _check(temperature: float | int, **sizes: int) -> None:
    require_number("temperature of the router", temperature, above=0)
    for name, size in sizes.items():
        require_whole(name, size, at_least=1)
