"""Expert choice: of the tokens of a text those with the highest scores are taken, up to a capacity."""

import warnings
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from recurrent_depth.arguments import require_instance, require_number
from recurrent_depth.router_scores import RouterScores
from recurrent_depth.router_weights import RouterWeight


class Limit(NamedTuple):
    """How many tokens are taken.

    Attributes:
        rows: of each row.
        widest: of a row without padding.
    """

    rows: Int[Tensor, " batch"]
    widest: int


class Choice(NamedTuple):
    """Who is taken, with which weight, and the losses of the router.

    Attributes:
        chosen: who is taken.
        weight: of each token's result, taken or not.
        losses: of those that teach the router.
    """

    chosen: Bool[Tensor, "batch token"]
    weight: Float[Tensor, "batch token"]
    losses: dict[str, Float[Tensor, ""]]


class TopTokens(nn.Module):
    """Takes the tokens with the highest scores in training, and those that are expected to be among them otherwise.

    Who is among the highest depends on later tokens. So the router also learns to tell by the token alone: the binary
    cross-entropy of a score against "was taken". Where decisions must be causal, a token is taken if
    `sigmoid(score) > 0.5`. Losses are of scores of the *detached* state: no gradient of theirs reaches the model.

    Args:
        scores: one router for each routed step, with one output.
        weight: what weighs the results.
        predictor: a second set of routers, that predicts who is taken; by default the scores do.
        loss: coefficient of the cross-entropy.
        z_loss: coefficient of the mean squared score, 0 in the published recipe.

    Raises:
        ValueError: for scores or a predictor with more than one output, a predictor with another number of routers, a
            weight that compares outputs, and a coefficient that is negative or not finite.

    Warns:
        UserWarning: if `loss` is 0, since nothing then teaches who is taken where decisions are causal.

    Reference: Bae et al., 2025, arXiv 2507.10524; Raposo et al., 2024, arXiv 2404.02258.
    """

    def __init__(
        self,
        scores: RouterScores,
        weight: RouterWeight,
        *,
        predictor: RouterScores | None = None,
        loss: float | int = 0.001,
        z_loss: float | int = 0.0,
    ):
        super().__init__()
        _check_parts(scores, weight, predictor)
        self.scores, self.weight, self.predictor = scores, weight, predictor
        self.loss, self.z_loss = require_number("loss", loss, at_least=0), require_number("z_loss", z_loss, at_least=0)
        if not self.loss:
            warnings.warn(
                "loss is 0, so nothing teaches the router who is taken outside of training, where a token decides "
                "alone: keep it above 0 (0.001 is published), or don't evaluate or decode with this model.",
                stacklevel=2,
            )

    def forward(
        self,
        h: Float[Tensor, "batch token dim"],
        active: Bool[Tensor, "batch token"],
        router: int,
        limit: Limit | None,
        *,
        share: Float[Tensor, "batch token"],
        causal: bool,
    ) -> Choice:
        """Who is taken of the active tokens; without a limit all of them. `share` is that of `row_share`."""
        scores = self.scores(h, router)
        weight = self.weight(scores)[..., 0]
        if causal:
            if limit is None:
                return Choice(active, weight, {})
            told = scores if self.predictor is None else self.predictor(h, router)
            return Choice(active & (told[..., 0] > 0), weight, {})
        chosen = active if limit is None else highest(scores[..., 0], active, limit)
        return Choice(chosen, weight, self._losses(h.detach(), active, chosen, router, share))

    def _losses(self, h: Tensor, active: Tensor, chosen: Tensor, router: int, share: Tensor) -> dict[str, Tensor]:
        losses = {}
        if self.loss:
            told = (self.scores if self.predictor is None else self.predictor)(h, router)[..., 0]
            losses["router"] = self.loss * choice_loss(told, chosen, active, share)
        if self.z_loss:
            losses["router_z"] = self.z_loss * z_loss(self.scores(h, router), active, share)
        return losses

    def cost(self) -> int:
        """Matrix FLOPs per token of one router's decision, in training; its losses are left out."""
        return self.scores.cost()


def _check_parts(scores: RouterScores, weight: RouterWeight, predictor: RouterScores | None) -> None:
    require_instance("scores", scores, RouterScores, "rd.LinearScores(dim, num_routers=num_steps)")
    require_instance("weight", weight, RouterWeight, "rd.SigmoidWeight(0.1)")
    require_instance("predictor", predictor or scores, RouterScores, "rd.MLPScores(dim)")
    for name, part in (("scores", scores), ("predictor", predictor or scores)):
        if part.num_outputs != 1:
            raise ValueError(
                f"{name} gives {part.num_outputs} outputs, but must give one, by which tokens are ranked: build it "
                "with num_outputs=1, or let tokens choose among depths with TokenChoice."
            )
    if predictor is not None and predictor.num_routers != scores.num_routers:
        raise ValueError(
            f"predictor has {predictor.num_routers} routers, but must have as many as scores, {scores.num_routers}: "
            f"build it with num_routers={scores.num_routers}."
        )
    if weight.compares:
        raise ValueError(
            f"weight is {type(weight).__name__}, which compares a router's outputs, but there is only one, so that its "
            "weight would never change: use SigmoidWeight() or RawWeight()."
        )


def highest(
    scores: Float[Tensor, "batch token"], active: Bool[Tensor, "batch token"], limit: Limit
) -> Bool[Tensor, "batch token"]:
    """The active tokens with the highest scores, up to each row's limit."""
    # Scores may be infinite; what is not active stands behind all that is.
    ranked = torch.where(active, scores, scores.new_tensor(-torch.inf))
    best = ranked.topk(limit.widest, dim=1).indices
    within = torch.arange(limit.widest, device=scores.device) < limit.rows[:, None]
    return torch.zeros_like(active).scatter(1, best, within) & active


def choice_loss(
    logits: Float[Tensor, "batch token"],
    chosen: Bool[Tensor, "batch token"],
    active: Bool[Tensor, "batch token"],
    share: Float[Tensor, "batch token"],
) -> Float[Tensor, ""]:
    """Binary cross-entropy against "was taken": the mean over each row's active tokens, then over rows."""
    loss = F.binary_cross_entropy_with_logits(logits, chosen.to(logits.dtype), reduction="none")
    return row_mean(share * loss, active).sum()


def z_loss(
    scores: Float[Tensor, "batch token out"],
    active: Bool[Tensor, "batch token"],
    share: Float[Tensor, "batch token"],
) -> Float[Tensor, ""]:
    """`logsumexp(scores)²`: the mean over each row's active tokens, then over rows."""
    return row_mean(share * scores.logsumexp(-1).square(), active).sum()


def row_share(h: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch token"]:
    """Each row's share of a mean over the rows, written at all of its tokens.

    A router makes it once, of all rows, and keeps it as context: a step may be taken by some rows alone.
    """
    return torch.full_like(h[..., 0], 1 / len(h), dtype=torch.promote_types(h.dtype, torch.float32))


def row_mean(
    x: Float[Tensor, "batch token *more"], counted: Bool[Tensor, "batch token"]
) -> Float[Tensor, "batch *more"]:
    """The mean over the tokens of each row that count; 0 where none does.

    Means over rows of these do not depend on how a batch is split, whatever the padding.
    """
    counted = counted.reshape(*counted.shape, *[1] * (x.ndim - 2))
    return torch.where(counted, x, 0).sum(1) / counted.sum(1).clamp(min=1)
