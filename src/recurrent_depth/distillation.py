"""Training objectives with a teacher: its logits, and its hidden states where they are aligned with steps."""

import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Integer
from torch import Tensor, nn

from recurrent_depth.arguments import require_instance, require_number, require_whole
from recurrent_depth.borrowed import Borrowed
from recurrent_depth.checks import warn_in_training_mode
from recurrent_depth.every_step import Mask, every_state
from recurrent_depth.model import RecurrentTransformer
from recurrent_depth.numerics import at_least_float32
from recurrent_depth.objective import IGNORED, mean_of_real, next_token_loss, with_auxiliary
from recurrent_depth.trajectory import Trajectory, check_trajectory


def distillation_loss(
    logits: Float[Tensor, "batch token vocab"],
    teacher: Float[Tensor, "batch token other"],
    mask: Mask = None,
    *,
    temperature: float | int = 1.0,
) -> Float[Tensor, ""]:
    """`KL(teacher || student)` of the next-token distributions: the mean over real tokens, in nats per token.

    Both are flattened by the temperature, and the loss multiplied by its square, so that gradients keep their size.

    Raises:
        ValueError: if the temperature is not above 0, the two are of different shapes, or the mask of another.

    Reference: Hinton et al., 2015, arXiv 1503.02531.
    """
    require_instance("logits", logits, Tensor)
    require_instance("teacher", teacher, Tensor)
    if logits.shape != teacher.shape:
        raise ValueError(f"teacher must be {tuple(logits.shape)} like logits, got {tuple(teacher.shape)}.")
    temperature = require_number("temperature", temperature, above=0)
    student, wanted = (at_least_float32(x / temperature).log_softmax(-1) for x in (logits, teacher))
    divergence = F.kl_div(student, wanted, reduction="none", log_target=True).sum(-1)
    return temperature**2 * mean_of_real(divergence, mask)


def aligned_state_loss(
    states: Sequence[Float[Tensor, "batch token dim"]],
    teacher: Sequence[Float[Tensor, "batch token dim"]],
    mask: Mask = None,
) -> Float[Tensor, ""]:
    """The mean squared difference of states and the teacher's, pair by pair, over real tokens and features.

    Raises:
        ValueError: if there are not as many of each, or none; if two that are paired, or the mask, differ in shape.
    """
    if not states or len(states) != len(teacher):
        raise ValueError(f"teacher holds {len(teacher)} states, but must hold one for each of {len(states)} >= 1.")
    for i, (h, other) in enumerate(zip(states, teacher, strict=True)):
        if h.shape != other.shape:
            raise ValueError(f"teacher's state {i} must be {tuple(h.shape)} like ours, got {tuple(other.shape)}.")
    differences = [(at_least_float32(h) - other).square().mean(-1) for h, other in zip(states, teacher, strict=True)]
    return mean_of_real(torch.stack(differences).mean(0), mask)


class Taught(NamedTuple):
    """What a teacher says of some tokens.

    Attributes:
        logits: its logits.
        states: its state after each block that it ran, in order.
    """

    logits: Float[Tensor, "batch token vocab"]
    states: tuple[Float[Tensor, "batch token dim"], ...]


def taught(teacher: RecurrentTransformer, tokens: Integer[Tensor, "batch token"], mask: Mask = None) -> Taught:
    """Runs a model without gradients, and keeps its state after each block.

    Raises:
        ValueError: if `teacher` is no `RecurrentTransformer`, which a dense one is as well.

    Warns:
        UserWarning: if it is in training mode.
    """
    _check_teacher(teacher)
    warn_in_training_mode("teacher", teacher)
    seen: list[Tensor] = []

    def keep(module: nn.Module, inputs: tuple, out: Tensor) -> None:
        seen.append(out)

    stacks = (teacher.prelude, teacher.core.stack, teacher.coda)
    blocks = [block for stack in stacks for block in stack.blocks]
    hooks = [block.register_forward_hook(keep) for block in blocks]
    try:
        with torch.no_grad():
            logits = teacher(tokens, mask=mask)
    finally:
        for hook in hooks:
            hook.remove()
    return Taught(logits, tuple(seen))


class DistilledLoss(nn.Module):
    """The next-token loss after the last step, and how far the model is from a dense teacher; auxiliary losses too.

    `CE + logits * KL(teacher || student) + states * MSE(h_t, teacher's state behind its aligned block)`. The teacher is
    run as it is, at its full depth and without gradients; put it into evaluation mode. It stays the caller's: none of
    its parameters are the objective's. It reads the text whole, and teaches no token whose next one is -100.

    Args:
        teacher: the model to learn from, with the same vocabulary.
        logits: the weight of the divergence.
        states: the weight of the states' distance.
        align: for the number of steps taken, the number of the teacher's blocks whose output the state then should
            equal, such as `{1: 4, 2: 8, 3: 12}`; steps that a forward does not take are left out, with a warning
            where it takes none of them.
        temperature: flattens both distributions.

    Raises:
        ValueError: if the teacher is no `RecurrentTransformer`, a weight is negative or not finite, the temperature not
            above 0, `states` is given without `align` or the other way round, or `align` is no mapping of steps from 1
            to blocks that the teacher has; in a forward, if states are aligned and the trajectory kept not every step
            or has a depth for each row, or the teacher's states have another width.

    Reference: the logits of Bae et al., 2024, arXiv 2410.20672 (RRT).
    """

    def __init__(
        self,
        teacher: RecurrentTransformer,
        *,
        logits: float | int = 1.0,
        states: float | int = 0.0,
        align: Mapping[int, int] | None = None,
        temperature: float | int = 1.0,
    ):
        super().__init__()
        _check_teacher(teacher)
        self.teacher = Borrowed(teacher)
        self.weights = require_number("logits", logits, at_least=0), require_number("states", states, at_least=0)
        self.temperature, self.align = require_number("temperature", temperature, above=0), _checked_align(align)
        if bool(states) != bool(self.align):
            raise ValueError(
                f"states is {states} and align {align}: states are aligned where they weigh, or not at all."
            )
        for num_steps, num_blocks in self.align.items():
            if num_steps < 1 or not 1 <= num_blocks <= teacher.layout.executed:
                raise ValueError(
                    f"align has {num_steps}: {num_blocks}, but must name a step from 1 and one of the teacher's "
                    f"{teacher.layout.executed} blocks."
                )

    def forward(
        self, trajectory: Trajectory, tokens: Integer[Tensor, "batch token"], mask: Mask = None
    ) -> Float[Tensor, ""]:
        """The loss, in nats per token where the states weigh nothing."""
        check_trajectory(trajectory)
        said, output = taught(self.teacher.module, trajectory.tokens, mask), trajectory.output
        loss = next_token_loss(output, tokens, mask)
        wanted = _before_targets(tokens, mask)
        loss = loss + self.weights[0] * distillation_loss(output, said.logits, wanted, temperature=self.temperature)
        pairs = [(step, block) for step, block in self.align.items() if step <= trajectory.num_steps]
        if self.align and not pairs:
            named = f"align names the steps {sorted(self.align)}"
            warnings.warn(f"{named}, but this forward takes none of them: its states weigh nothing.", stacklevel=2)
        if pairs and trajectory.rows is not None:
            raise ValueError("States are aligned with steps that all rows take: give one depth for all, not one a row.")
        if pairs:
            ours = [every_state(trajectory)[step - 1].h for step, _ in pairs]
            loss = loss + self.weights[1] * aligned_state_loss(ours, [said.states[b - 1] for _, b in pairs], wanted)
        return with_auxiliary(loss, trajectory)


def _before_targets(tokens: Tensor, mask: Mask) -> Mask:
    """The real tokens but those whose next one is no target; the last one where it is a target itself."""
    wanted = torch.cat([tokens[:, 1:], tokens[:, -1:]], dim=1) != IGNORED
    return wanted if mask is None else wanted & mask.bool()


def _check_teacher(teacher: object) -> None:
    require_instance("teacher", teacher, RecurrentTransformer, "rd.dense(...)")


def _checked_align(align: object) -> dict[int, int]:
    if align is None:
        return {}
    if not isinstance(align, Mapping):
        raise ValueError(f"align is {align!r}, but must map steps to the teacher's blocks, such as {{1: 4, 2: 8}}.")
    return {
        require_whole("a step in align", step): require_whole("a block in align", block)
        for step, block in align.items()
    }
