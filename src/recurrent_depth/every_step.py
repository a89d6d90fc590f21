"""What objectives read of every step: states, losses, what a rule says; never more than one step's logits at a time."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from recurrent_depth.arguments import require_instance
from recurrent_depth.checks import checked_ids
from recurrent_depth.exits import ExitRule, ask, exit_law
from recurrent_depth.objective import next_token_targets, token_losses
from recurrent_depth.trajectory import Trajectory, check_trajectory
from recurrent_depth.update import DepthState

Mask = Bool[Tensor, "batch token"] | Int[Tensor, "batch token"] | None
"""True at real tokens."""


def every_state(trajectory: Trajectory) -> tuple[DepthState, ...]:
    """The states of a trajectory that kept all of them.

    Raises:
        ValueError: if it did not, or is none.
    """
    check_trajectory(trajectory)
    if len(trajectory.states) != trajectory.num_steps:
        raise ValueError(
            f"The objective reads the state after each of {trajectory.num_steps} steps, but the trajectory kept "
            f"{len(trajectory.states)}: give every_step=True, to WithObjective too."
        )
    return trajectory.states


def targets_of(trajectory: Trajectory, tokens: Tensor, mask: Mask) -> Int[Tensor, "batch token"]:
    """What each token is to predict.

    Raises:
        ValueError: if `trajectory` is none, or tokens or mask are not of its shape.
    """
    check_trajectory(trajectory)
    wanted = tuple(trajectory.states[-1].h.shape[:2])
    if checked_ids(tokens).shape != wanted:
        raise ValueError(f"tokens must be {wanted} like those of the trajectory, got {tuple(tokens.shape)}.")
    return next_token_targets(tokens, mask)


def losses_by_step(
    trajectory: Trajectory, targets: Int[Tensor, "batch token"]
) -> Iterator[Float[Tensor, "batch token"]]:
    """The loss of each target after each step. Of the logits nothing is kept; the backward makes them anew.

    Raises:
        ValueError: if the trajectory kept not every step.
    """

    def losses(state: DepthState) -> Tensor:
        return token_losses(trajectory.readout(state), targets)

    for state in every_state(trajectory):
        yield recomputed(losses, state)


def steps_taken(trajectory: Trajectory) -> Bool[Tensor, "step batch 1"]:
    """Whether a row took each step: with a depth for each row, those that have left stay as they are."""
    h = trajectory.states[-1].h
    if trajectory.rows is None:
        return torch.ones(trajectory.num_steps, len(h), 1, dtype=torch.bool, device=h.device)
    rows = torch.tensor(trajectory.rows, device=h.device)
    return (torch.arange(trajectory.num_steps, device=h.device)[:, None] < rows)[..., None]


def exit_chances(rule: ExitRule, trajectory: Trajectory) -> Float[Tensor, "step batch token"]:
    """The chance of each token to leave after each step; who has not left by its row's last step leaves there.

    Raises:
        ValueError: as `exit_hazards` does.
    """
    hazards, goes_on = exit_hazards(rule, trajectory), steps_taken(trajectory).roll(-1, 0)
    goes_on[-1] = False
    hazards = hazards.masked_fill(~goes_on, 1.0)
    # At one step the law says nothing of the rule, whose gradient is then zero rather than none.
    return exit_law(hazards) + 0.0 * hazards


def exit_hazards(rule: ExitRule, trajectory: Trajectory) -> Float[Tensor, "step batch token"]:
    """What a rule says after each step if nobody leaves; `exit_law` makes the chances to leave of it.

    Raises:
        ValueError: if the trajectory kept not every step, `rule` is no exit rule or says no chance for each token.
    """
    require_instance("rule", rule, ExitRule, "LearnedExit(dim)")
    carry, hazards = None, []
    for step, state in enumerate(every_state(trajectory)):
        carry, hazard = recomputed(ask, rule, carry, state, trajectory.readout, step)
        hazards.append(hazard)
    return torch.stack(hazards)


def recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function gives; of what it computes on the way nothing is kept, and the backward computes it anew."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False)


def entropy_of(law: Float[Tensor, "step batch token"]) -> Float[Tensor, "batch token"]:
    """The entropy over the steps, in nats; chances of 0 add nothing, and a finite gradient."""
    return -(law * log_of(law)).sum(0)


def log_of(chance: Tensor) -> Tensor:
    """Its logarithm, finite for a chance of 0 too."""
    return chance.clamp(min=torch.finfo(chance.dtype).tiny).log()
