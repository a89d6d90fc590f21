"""Training objectives: functions of a trajectory, and the wrapper that gives a trainer one `forward`."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor, nn

from recurrent_depth.checks import check_flags, check_tokens_in, checked_ids
from recurrent_depth.depth import Depth
from recurrent_depth.model import RecurrentTransformer
from recurrent_depth.numerics import at_least_float32
from recurrent_depth.trajectory import Trajectory, check_trajectory

Objective = Callable[[Trajectory, Tensor, Tensor | None], Tensor]
"""Makes a loss of a trajectory, the tokens and the padding mask."""

IGNORED = -100


def next_token_loss(
    logits: Float[Tensor, "batch token vocab"],
    tokens: Integer[Tensor, "batch token"],
    mask: Bool[Tensor, "batch token"] | Int[Tensor, "batch token"] | None = None,
) -> Float[Tensor, ""]:
    """Cross-entropy of each token given those before it: the mean over all real targets, in nats per token.

    Logits know no auxiliary losses: routed and halted models (`mor`, `mod`, `universal`) and blocks with losses of
    their own are trained by `WithObjective(model)(tokens)`, or `last_step_loss(model.trajectory(tokens), tokens)`.

    Args:
        logits: what the model says at each token.
        tokens: the same tokens; the target at token `t` is token `t + 1`. One of -100 is no target, as in labels of
            transformers: the loss of completions alone is that of their tokens, with -100 in place of the prompts.
        mask: True at real tokens; padding is no target, and no token is predicted from it.

    Raises:
        ValueError: if there is no next token to predict, tokens are no integers or, where they are looked at (on CPU),
            beyond the logits, logits are none (but a trajectory), or logits or mask are not of the tokens' shape.
    """
    _check_logits(logits, checked_ids(tokens))
    targets = next_token_targets(tokens, mask)
    return token_losses(logits, targets).sum() / num_targets(targets)


def _check_logits(logits: object, tokens: Tensor) -> None:
    if isinstance(logits, Trajectory):
        raise ValueError(
            "logits is a Trajectory, but must be a tensor (batch, token, vocab): the same loss of a trajectory is "
            "last_step_loss(trajectory, tokens, mask), which WithObjective(model) takes by default."
        )
    if not isinstance(logits, Tensor):
        raise ValueError(f"logits must be a tensor (batch, token, vocab), got {type(logits).__name__}.")
    if logits.ndim != 3 or logits.shape[:2] != tokens.shape:
        wanted = f"for tokens of shape {tuple(tokens.shape)}, (batch, token, vocab)"
        raise ValueError(f"logits must be {wanted}; got {tuple(logits.shape)}.")


def next_token_targets(tokens: Tensor, mask: Tensor | None) -> Int[Tensor, "batch token"]:
    """The token that stands behind each token; `IGNORED` where there is none, or where one of the two is padding.

    A token that is `IGNORED` stays so.

    Raises:
        ValueError: if there is no next token to predict, tokens are no integers, or the mask is not of their shape.
    """
    tokens = checked_ids(tokens)
    if mask is not None and mask.shape != tokens.shape:
        raise ValueError(f"mask must be {tuple(tokens.shape)} like tokens, got {tuple(mask.shape)}.")
    if mask is not None:
        check_flags(mask)
    if tokens.shape[1] < 2:
        raise ValueError(f"tokens must be at least 2 long to have a next token, got shape {tuple(tokens.shape)}.")
    targets = tokens[:, 1:].long()
    if mask is not None:
        targets = targets.masked_fill(~(mask[:, :-1].bool() & mask[:, 1:].bool()), IGNORED)
    return F.pad(targets, (0, 1), value=IGNORED)


def num_targets(targets: Int[Tensor, "batch token"]) -> Int[Tensor, ""]:
    """How many targets count; at least 1, so that a batch without any costs nothing."""
    return (targets != IGNORED).sum().clamp(min=1)


def token_losses(
    logits: Float[Tensor, "batch token vocab"], targets: Int[Tensor, "batch token"]
) -> Float[Tensor, "batch token"]:
    """The cross-entropy of each target, in nats; 0 where it is ignored.

    Raises:
        ValueError: if the logits know no such target.
    """
    check_tokens_in(logits.shape[-1], targets, ignored=IGNORED)
    losses = F.cross_entropy(
        at_least_float32(logits.flatten(0, 1)), targets.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return losses.view(targets.shape)


def mean_of_real(
    losses: Float[Tensor, "batch token"], mask: Bool[Tensor, "batch token"] | Int[Tensor, "batch token"] | None
) -> Float[Tensor, ""]:
    """The mean over all real tokens; 0 where there are none.

    Raises:
        ValueError: if the mask is not of the tokens' shape.
    """
    if mask is None:
        return losses.mean()
    if mask.shape != losses.shape:
        raise ValueError(f"mask must be {tuple(losses.shape)} like the tokens, got {tuple(mask.shape)}.")
    check_flags(mask)
    real = mask.bool()
    return losses.masked_fill(~real, 0.0).sum() / real.sum().clamp(min=1)


def with_auxiliary(loss: Float[Tensor, ""], trajectory: Trajectory) -> Float[Tensor, ""]:
    """The loss and the auxiliary ones of the loop and the blocks, added up; to be called after the outputs are read."""
    return torch.stack([loss, *trajectory.losses.values()]).sum()


def last_step_loss(
    trajectory: Trajectory,
    tokens: Integer[Tensor, "batch token"],
    mask: Bool[Tensor, "batch token"] | Int[Tensor, "batch token"] | None = None,
) -> Float[Tensor, ""]:
    """The next-token loss after the last step, plus the auxiliary losses: how the GRT is trained, at sampled depth.

    Raises:
        ValueError: for what is no trajectory, and for what `next_token_loss` refuses.
    """
    check_trajectory(trajectory)
    loss = next_token_loss(trajectory.output, tokens, mask)
    return with_auxiliary(loss, trajectory)


class WithObjective(nn.Module):
    """A model and its loss behind one `forward`, which is all that data-parallel wrappers see.

    Args:
        model: the model.
        objective: makes a loss of the trajectory, the tokens and the mask.
        every_step: whether the objective reads the state after each step.

    Raises:
        ValueError: if the model has no trajectory, the objective is a class or nothing that can be called, or holds
            parameters of the model as its own; in a forward, if it reads every step without `every_step`, or reads
            logits in place of a trajectory, as `next_token_loss` does.
    """

    def __init__(self, model: RecurrentTransformer, objective: Objective = last_step_loss, *, every_step: bool = False):
        super().__init__()
        _check_looped(model)
        _check_objective(objective)
        _check_apart(model, objective)
        self.model, self.objective, self.every_step = model, objective, every_step

    def forward(
        self,
        tokens: Integer[Tensor, "batch token"],
        num_steps: int | Depth | Sequence[int] | None = None,
        *,
        mask: Bool[Tensor, "batch token"] | Int[Tensor, "batch token"] | None = None,
        labels: Integer[Tensor, "batch token"] | None = None,
    ) -> Float[Tensor, ""]:
        """The loss at this depth. `labels` are the tokens, with -100 where nothing is to be predicted."""
        trajectory = self.model.trajectory(tokens, num_steps, mask=mask, every_step=self.every_step)
        return self.objective(trajectory, tokens if labels is None else labels, mask)


def _check_looped(model: object) -> None:
    if callable(getattr(model, "trajectory", None)):  # or what wraps such a model and offers what it does
        return
    raise ValueError(
        f"model is of {type(model).__name__}, which has no trajectory: give a RecurrentTransformer, such as "
        "rd.grt(...), or the native model within one of transformers, model.native. A graft is trained by the loss of "
        "its own forward, model(input_ids, labels=...)."
    )


def _check_apart(model: nn.Module, objective: object) -> None:
    own = {id(weight) for weight in objective.parameters()} if isinstance(objective, nn.Module) else set()
    shared = [name for name, weight in model.named_parameters() if id(weight) in own]
    if shared:
        raise ValueError(
            f"objective holds {shared[0]} of the model as its own, so that it would be trained and saved twice: lend "
            "it, as in LearnedExit(dim, norm=rd.Borrowed(model.norm))."
        )


def _check_objective(objective: object) -> None:
    if callable(objective) and not isinstance(objective, type):
        return
    said, hint = repr(objective), "last_step_loss, every_step_loss or an ExpectedExitLoss(...)"
    if isinstance(objective, type):
        said, hint = f"the class {objective.__name__}", f"an instance of it, {objective.__name__}(...)"
    raise ValueError(f"objective is {said}, but must be callable as objective(trajectory, tokens, mask): give {hint}.")
