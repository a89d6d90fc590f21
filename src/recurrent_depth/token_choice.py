"""Token choice: one router tells each token, before the loop, how many steps it takes."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from recurrent_depth.arguments import require_instance, require_number
from recurrent_depth.balance import Balance
from recurrent_depth.contracts import Call, UpdateCost
from recurrent_depth.pick import pick_fewest
from recurrent_depth.router import Router, RouterState, Routing
from recurrent_depth.router_scores import RouterScores
from recurrent_depth.router_weights import RouterWeight
from recurrent_depth.routers import check_routed_steps
from recurrent_depth.top_tokens import row_share, z_loss


class TokenDepths(NamedTuple):
    """What token choice decided before the loop.

    Attributes:
        last: the last step that each token takes, from 0.
        weight: of its result there.
        start: the state before the loop.
    """

    last: Int[Tensor, "batch token"]
    weight: Float[Tensor, "batch token"]
    start: Float[Tensor, "batch token dim"]


class TokenChoice(Router):
    """Mixture-of-Recursions by token choice: the depth of a token is the largest of its `softmax(W h)` before the loop.

    Until its last step the result replaces the state, as in the plain loop; at its last step the result is weighted and
    combined with the state *before the loop*, `h_0 + p_m B^m(h_0)` with `AddWeighted`. A choice depends on its own
    token alone, so training and decoding follow the same rule. Losses leave the model without gradient, as with
    `TopTokens`.

    Args:
        scores: one router, with an output for each depth.
        weight: of the depths; `SoftmaxWeight()` is published, `SigmoidWeight()` too.
        balance: keeps the depths in use.
        z_loss: coefficient of the mean squared logsumexp of the scores.

    Raises:
        ValueError: for scores of more than one router, a balance of another number of depths, and a `z_loss` that is
            negative or not finite; in a forward of more steps than there are depths.

    Reference: Bae et al., 2025, arXiv 2507.10524.
    """

    def __init__(self, scores: RouterScores, weight: RouterWeight, balance: Balance, *, z_loss: float | int = 1e-5):
        super().__init__()
        require_instance("weight", weight, RouterWeight, "rd.SoftmaxWeight()")
        _check_parts(scores, balance)
        self.scores, self.weight, self.balance = scores, weight, balance
        self.z_loss = require_number("z_loss", z_loss, at_least=0)
        self._full_depth = False

    @property
    def full_depth(self) -> bool:
        """While True every token takes all steps, in training: a warm-up, which may be set at any time."""
        return self._full_depth

    @full_depth.setter
    def full_depth(self, full_depth: bool) -> None:
        require_instance("full_depth", full_depth, bool)
        self._full_depth = full_depth

    def begin(self, h: Float[Tensor, "batch token dim"], call: Call) -> RouterState:
        """Each token's depth and weight."""
        weights = self.weight(self.scores(h, 0))
        check_routed_steps(call.num_steps, self.scores.num_outputs)
        last = self.balance.preference(weights).argmax(-1)
        if self.training and self.full_depth:
            last = torch.full_like(last, weights.shape[-1] - 1)
        context = TokenDepths(last, weights.gather(-1, last[..., None])[..., 0], h)
        return RouterState(context, losses=self._losses(h, last, call) if self.training else {})

    def _losses(self, h: Tensor, last: Tensor, call: Call) -> dict[str, Tensor]:
        real = torch.ones_like(last, dtype=torch.bool) if call.mask is None else call.mask[:, -h.shape[1] :]
        scores = self.scores(h.detach(), 0)
        losses = self.balance.losses(self.weight(scores), last, real)
        return {**losses, "router_z": self.z_loss * z_loss(scores, real, row_share(h))} if self.z_loss else losses

    def forward(
        self,
        h: Float[Tensor, "batch token dim"],
        state: RouterState,
        real: Bool[Tensor, "batch token"],
        step: int,
        *,
        causal: bool,
    ) -> Routing:
        """Those whose last step is this one or a later one; the first is everyone's."""
        last, weight, start = state.context
        chosen, ends = real & (last >= step), last == step
        pick = pick_fewest(chosen) if step else None
        # Weight 1 on nothing: before its end a token's result is its new state, whatever the combination.
        base = torch.where(ends[..., None], start, torch.zeros_like(start))
        return Routing((), pick, torch.where(ends, weight, torch.ones_like(weight)), base)

    def cost(self, num_steps: int) -> UpdateCost:
        """One router before the loop; the shares of depths in even use.

        Raises:
            ValueError: for more steps than there are depths.
        """
        depths = self.scores.num_outputs
        check_routed_steps(num_steps, depths)
        shares = tuple((depths - step) / depths for step in range(num_steps))
        return UpdateCost(begin=self.scores.cost(), shares=shares, selects=True)


def _check_parts(scores: RouterScores, balance: Balance) -> None:
    require_instance("scores", scores, RouterScores, "rd.LinearScores(dim, num_outputs=num_steps)")
    require_instance("balance", balance, Balance, "rd.BalanceLoss(0.1)")
    if scores.num_routers != 1:
        raise ValueError(
            f"scores has {scores.num_routers} routers, but token choice asks one, before the loop: build it with "
            "num_routers=1 and num_outputs= the number of depths."
        )
    if balance.num_depths not in (None, scores.num_outputs):
        raise ValueError(
            f"balance was built for {balance.num_depths} depths, but scores has {scores.num_outputs} outputs, one for "
            f"each depth: build the balance for {scores.num_outputs}."
        )
