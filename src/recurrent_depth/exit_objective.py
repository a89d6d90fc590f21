"""Training objectives that read every step: all exits alike, those of a learned exit, and the exit itself.

None holds more than one step's logits at a time: each step's are recomputed in the backward pass, those that an exit
rule reads too.
"""

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor, nn

from recurrent_depth.arguments import require_instance, require_number
from recurrent_depth.every_step import (
    Mask,
    entropy_of,
    exit_chances,
    exit_hazards,
    log_of,
    losses_by_step,
    steps_taken,
    targets_of,
)
from recurrent_depth.exits import ExitRule
from recurrent_depth.objective import IGNORED, next_token_loss, num_targets, with_auxiliary
from recurrent_depth.rows import map_changing
from recurrent_depth.trajectory import Trajectory
from recurrent_depth.update import DepthState


def every_step_loss(
    trajectory: Trajectory, tokens: Integer[Tensor, "batch token"], mask: Mask = None
) -> Float[Tensor, ""]:
    """The mean over all steps of the next-token loss after each, plus the auxiliary losses: every exit counts alike.

    With a depth for each row, each row's mean is over the steps that it took.

    Raises:
        ValueError: if the trajectory kept not every step, or tokens or mask are not of its shape.
    """
    targets = targets_of(trajectory, tokens, mask)
    taken = steps_taken(trajectory)
    by_step = zip(taken, losses_by_step(trajectory, targets), strict=True)
    total = torch.stack([(took * losses / taken.sum(0)).sum() for took, losses in by_step]).sum()
    return with_auxiliary(total / num_targets(targets), trajectory)


class ExpectedExitLoss(nn.Module):
    """Ouro's first stage: `sum_t p_t CE_t - entropy * H(p)`, where `p` is the law of a learned exit for each token.

    The mean over all targets, plus the auxiliary losses. Exit and model learn together; the entropy keeps the law from
    falling onto one step before the others are any good. Up to a constant this is the ELBO under an even prior.

    Args:
        rule: the exit; its parameters are this objective's, so that `WithObjective(...).parameters()` has them. One
            without parameters weighs the steps as it says, and only the model learns.
        entropy: the weight of the entropy, in nats; 0.1, then 0.05 in the source.

    Raises:
        ValueError: if `rule` is no exit rule, or `entropy` is negative or no finite number; in a forward, if the
            trajectory kept not every step, tokens or mask are not of its shape, or the rule gives no chance per token.

    Reference: Zhu et al., 2025, arXiv 2510.25741.
    """

    def __init__(self, rule: ExitRule, *, entropy: float | int = 0.05):
        super().__init__()
        require_instance("rule", rule, ExitRule, "LearnedExit(dim)")
        self.rule, self.entropy = rule, require_number("entropy", entropy, at_least=0)

    def forward(
        self, trajectory: Trajectory, tokens: Integer[Tensor, "batch token"], mask: Mask = None
    ) -> Float[Tensor, ""]:
        """The loss, in nats per predicted token."""
        targets = targets_of(trajectory, tokens, mask)
        law = exit_chances(self.rule, trajectory)
        losses = losses_by_step(trajectory, targets)
        expected = sum(chance * loss for chance, loss in zip(law, losses, strict=True))
        objective = (expected - self.entropy * entropy_of(law)).masked_fill(targets == IGNORED, 0.0)
        return with_auxiliary(objective.sum() / num_targets(targets), trajectory)


class ExitGainLoss(nn.Module):
    """Ouro's second stage: the exit alone learns to go on where the next step still helps; the model learns nothing.

    From step 2 on, the chance to go on is drawn to `sigmoid(sharpness * (gain - threshold))` by a binary cross-entropy,
    where the gain is by how much the step lowered the token's loss, at least 0. The sum over those steps is divided by
    the number of all steps, as in the source; steps that a row did not take say nothing. Freeze the model, so that no
    graph of it is built.

    Args:
        rule: the exit.
        sharpness: how steeply the target rises with the gain.
        threshold: the gain, in nats, at which going on is as good as leaving.

    Raises:
        ValueError: if `rule` is no exit rule or has no parameters, `sharpness` is not above 0, or a number not finite;
            in a forward, if the trajectory kept not every step.

    Reference: Zhu et al., 2025, arXiv 2510.25741.
    """

    def __init__(self, rule: ExitRule, *, sharpness: float | int = 50.0, threshold: float | int = 0.005):
        super().__init__()
        _check_learns(rule)
        self.rule = rule
        self.sharpness, self.threshold = (
            require_number("sharpness", sharpness, above=0),
            require_number("threshold", threshold),
        )

    def forward(
        self, trajectory: Trajectory, tokens: Integer[Tensor, "batch token"], mask: Mask = None
    ) -> Float[Tensor, ""]:
        """The loss of the exit, in nats per predicted token; 0 where a trajectory has one step."""
        targets = targets_of(trajectory, tokens, mask)
        frozen = trajectory._replace(
            states=tuple(map_changing(Tensor.detach, state) for state in trajectory.states),
            readout=torch.no_grad()(trajectory.readout),
        )
        with torch.no_grad():
            losses = torch.stack(list(losses_by_step(frozen, targets)))
            gains = (losses[:-1] - losses[1:]).clamp(min=0)
            goes_on = torch.sigmoid(self.sharpness * (gains - self.threshold))
        leaves, taken = exit_hazards(self.rule, frozen)[1:], steps_taken(trajectory)
        surprise = -(goes_on * log_of(1 - leaves) + (1 - goes_on) * log_of(leaves))
        counted = surprise.masked_fill((targets == IGNORED) | ~taken[1:], 0.0) / taken.sum(0)
        return counted.sum() / num_targets(targets)


class SampledExitLoss(nn.Module):
    """The next-token loss where each token leaves at a step drawn from the law of an exit, plus the auxiliary losses.

    One readout, however many steps: without a coda it is `sum_t p_t CE_t` on average. With one, the coda sees tokens
    that left at different steps, as it does in decoding. The exit itself does not learn from it; it may be fixed, or
    learn by `ExitGainLoss`. The draw is from the global RNG.

    Raises:
        ValueError: if `rule` is no exit rule; in a forward, if the trajectory kept not every step.
    """

    def __init__(self, rule: ExitRule):
        super().__init__()
        require_instance("rule", rule, ExitRule)
        self.rule = rule

    def forward(
        self, trajectory: Trajectory, tokens: Integer[Tensor, "batch token"], mask: Mask = None
    ) -> Float[Tensor, ""]:
        """The loss, in nats per predicted token."""
        with torch.no_grad():
            law = exit_chances(self.rule, trajectory)
            stays = law.cumsum(0)[:-1] <= torch.rand_like(law[0])
        state = trajectory.states[0]
        for still, later in zip(stays, trajectory.states[1:], strict=True):
            state = _where(still, later, state)
        return with_auxiliary(next_token_loss(trajectory.readout(state), tokens, mask), trajectory)


def _check_learns(rule: ExitRule) -> None:
    require_instance("rule", rule, ExitRule, "LearnedExit(dim)")
    if next(rule.parameters(), None) is None:
        raise ValueError(
            f"rule is of {type(rule).__name__}, which has no parameters, so that no exit would learn: take "
            "LearnedExit(dim), or SampledExitLoss to train a model for a fixed exit."
        )


def _where(chosen: Bool[Tensor, "batch token"], some: DepthState, others: DepthState) -> DepthState:
    def pick(one: Tensor, other: Tensor) -> Tensor:
        return torch.where(chosen.reshape(*chosen.shape, *[1] * (one.ndim - 2)), one, other)

    return map_changing(pick, some, others)._replace(losses=some.losses)
