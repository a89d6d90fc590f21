"""What a forward went through: the states, and what is made of them."""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from recurrent_depth.arguments import require_whole
from recurrent_depth.contracts import Notes
from recurrent_depth.update import DepthState, add_losses


class Trajectory(NamedTuple):
    """What a forward went through.

    Attributes:
        states: the state after each step if every step was asked for, else after the last one alone.
        num_steps: how many steps were taken before the last of the states.
        readout: makes the logits of a state.
        notes: what the blocks before the loop say, and those behind it once an output is read.
        tokens: what the model read.
        rows: how many steps each row took; None where all took `num_steps`.
    """

    states: tuple[DepthState, ...]
    num_steps: int
    readout: Callable[[DepthState], Tensor]
    notes: Notes
    tokens: Int[Tensor, "batch token"]
    rows: tuple[int, ...] | None = None

    @property
    def output(self) -> Float[Tensor, "batch token out"]:
        """The logits after the last step, computed anew at each access."""
        return self.readout(self.states[-1])

    def after(self, num_steps: int) -> Float[Tensor, "batch token out"]:
        """The logits as if the loop had been left after so many steps, computed anew at each call.

        Raises:
            ValueError: if the state after so many steps was not kept.
        """
        require_whole("num_steps", num_steps)
        first = self.num_steps - len(self.states) + 1
        if not first <= num_steps <= self.num_steps:
            kept = f"{first} to {self.num_steps}" if first < self.num_steps else f"{first} alone"
            raise ValueError(
                f"num_steps is {num_steps}, but the states kept are those after {kept}; every_step=True keeps all."
            )
        return self.readout(self.states[num_steps - first])

    @property
    def losses(self) -> dict[str, Float[Tensor, ""]]:
        """Auxiliary losses by name, of the loop and of the blocks outside of it; read it after the output.

        Those behind the loop are of the output that was read last, and count once however often one is read.
        """
        return add_losses(self.states[-1].losses, self.notes.losses)


def check_trajectory(trajectory: object) -> None:
    """Raises a ValueError for what is no trajectory, such as the logits of a forward."""
    if isinstance(trajectory, Trajectory):
        return
    got, hint = type(trajectory).__name__, ""
    if isinstance(trajectory, Tensor):
        got, hint = f"a tensor of shape {tuple(trajectory.shape)}", "; of logits take next_token_loss(logits, tokens)"
    raise ValueError(
        f"trajectory is {got}, but must be a Trajectory: give model.trajectory(tokens, num_steps), or leave that to "
        f"WithObjective(model, objective){hint}."
    )
