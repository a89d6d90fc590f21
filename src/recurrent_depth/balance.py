"""What keeps a router from sending all tokens to the same depth."""

import abc

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from recurrent_depth.arguments import require_number, require_whole
from recurrent_depth.numerics import at_least_float32
from recurrent_depth.top_tokens import row_mean


class Balance(nn.Module, abc.ABC):
    """Keeps tokens from all choosing the same depth.

    Attributes:
        num_depths: for how many depths; None for any number.
    """

    num_depths: int | None = None

    @abc.abstractmethod
    def preference(self, weights: Float[Tensor, "batch token depth"]) -> Float[Tensor, "batch token depth"]:
        """What a token takes the largest of."""

    @abc.abstractmethod
    def losses(
        self,
        weights: Float[Tensor, "batch token depth"],
        last: Int[Tensor, "batch token"],
        real: Bool[Tensor, "batch token"],
    ) -> dict[str, Float[Tensor, ""]]:
        """Losses by name, given the weights of all depths and each token's last step."""


class BalanceLoss(Balance):
    """`coefficient * sum_i P_i f_i`: `P_i` the mean weight of depth i, `f_i` the number of depths times its share.

    Of each text by itself, then the mean over texts: so it does not depend on how a batch is split. The released code
    pools the batch. It is the coefficient where all depths are taken evenly, and the number of depths times that where
    all tokens agree with certainty.

    Raises:
        ValueError: if `coefficient` is negative or not finite.

    Reference: Bae et al., 2025, arXiv 2507.10524.
    """

    def __init__(self, coefficient: float | int = 0.1):
        super().__init__()
        self.coefficient = require_number("coefficient", coefficient, at_least=0)

    def preference(self, weights: Float[Tensor, "batch token depth"]) -> Float[Tensor, "batch token depth"]:
        """The weights."""
        return weights

    def losses(
        self,
        weights: Float[Tensor, "batch token depth"],
        last: Int[Tensor, "batch token"],
        real: Bool[Tensor, "batch token"],
    ) -> dict[str, Float[Tensor, ""]]:
        """The loss."""
        num_depths = weights.shape[-1]
        share = row_mean(F.one_hot(last, num_depths).to(weights.dtype), real)
        balance = (row_mean(weights, real) * num_depths * share).sum(-1).mean()
        return {"balance": self.coefficient * balance}


class BalanceBias(Balance):
    """A bias per depth, added to the weights where depths are compared and nowhere else; no loss.

    Call `update` after each step of training, with the depths that its tokens took: a trajectory's
    `states[-1].context.router.last`.

    Args:
        num_depths: how many depths.
        rate: how far a bias moves at each update.

    Attributes:
        moves: how often each bias went up, less how often it went down. Whole numbers, since a model that is cast to
            bfloat16 casts its floats, where an update of 0.001 is lost beside a bias of 0.5.

    Raises:
        ValueError: if `num_depths` is below 1, or `rate` negative or not finite.

    Reference: Wang et al., 2024, arXiv 2408.15664; Bae et al., 2025, arXiv 2507.10524.
    """

    def __init__(self, num_depths: int, rate: float | int = 0.001):
        super().__init__()
        self.num_depths = require_whole("num_depths", num_depths, at_least=1)
        self.rate = require_number("rate", rate, at_least=0)
        self.register_buffer("moves", torch.zeros(num_depths, dtype=torch.long))

    @property
    def bias(self) -> Float[Tensor, " depth"]:
        """`rate * moves`, in float32."""
        return self.rate * self.get_buffer("moves").float()

    def reset_parameters(self) -> None:
        """Forgets all updates."""
        nn.init.zeros_(self.get_buffer("moves"))

    def preference(self, weights: Float[Tensor, "batch token depth"]) -> Float[Tensor, "batch token depth"]:
        """Weights and bias."""
        return at_least_float32(weights) + self.bias

    def losses(
        self,
        weights: Float[Tensor, "batch token depth"],
        last: Int[Tensor, "batch token"],
        real: Bool[Tensor, "batch token"],
    ) -> dict[str, Float[Tensor, ""]]:
        """None."""
        return {}

    @torch.no_grad()
    def update(
        self,
        last: Int[Tensor, "batch token"],
        mask: Bool[Tensor, "batch token"] | Int[Tensor, "batch token"] | None = None,
    ) -> None:
        """`bias_i += rate * sign(mean share - share_i)`, with the shares of depths among the real tokens.

        With several processes give the tokens of all, or the biases drift apart.

        Raises:
            ValueError: if `last` holds no depths from 0 to `num_depths - 1` (looked at on CPU), or the mask is not of
                its shape.
        """
        _check_depths(last, len(self.get_buffer("moves")))
        if mask is not None and mask.shape != last.shape:
            raise ValueError(f"mask must be {tuple(last.shape)} like last, got {tuple(mask.shape)}.")
        moves = self.get_buffer("moves")
        taken = last.flatten() if mask is None else last[mask.bool()]
        # In whole numbers, where depths in even use are exactly even.
        counts = F.one_hot(taken, len(moves)).sum(0)
        moves += (counts.sum() - len(moves) * counts).sign()


def _check_depths(last: Tensor, num_depths: int) -> None:
    if last.is_floating_point() or last.dtype == torch.bool:
        raise ValueError(f"last must hold the number of each token's last step, an integer; got {last.dtype}.")
    if last.numel() == 0 or last.device.type != "cpu":  # elsewhere looking would cost a synchronisation
        return
    low, high = (int(bound) for bound in last.aminmax())
    if low < 0 or high >= num_depths:
        raise ValueError(f"last must lie in 0 to {num_depths - 1}, got {low} to {high}.")
