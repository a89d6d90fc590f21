"""Two runs of one model that are to agree: a deep one, and a shallow one that learns to end where it does."""

from collections import deque
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from recurrent_depth.arguments import require_instance, require_number, require_whole
from recurrent_depth.contracts import Notes
from recurrent_depth.depth import Depth, as_depth
from recurrent_depth.model import RecurrentTransformer
from recurrent_depth.numerics import at_least_float32
from recurrent_depth.objective import mean_of_real, next_token_loss
from recurrent_depth.update import add_losses


def consistency_loss(
    long: Float[Tensor, "batch token dim"],
    short: Float[Tensor, "batch token dim"],
    mask: Bool[Tensor, "batch token"] | Int[Tensor, "batch token"] | None = None,
) -> Float[Tensor, ""]:
    """The mean square of `short - long` over the features of all real tokens; `long` is a target, without gradient.

    Raises:
        ValueError: if the two, or the mask, are of different shapes.
    """
    if short.shape != long.shape:
        raise ValueError(f"short must be {tuple(long.shape)} like long, got {tuple(short.shape)}.")
    return mean_of_real((at_least_float32(short) - at_least_float32(long).detach()).square().mean(-1), mask)


class WithConsistency(nn.Module):
    """A model and LoopFormer's loss behind one `forward`: a run at full depth and a shallower one.

    `loss(long) + short * loss(short) + consistency * mse(x_long, x_short)`, where `x` is what the final norm gives and
    the long run's has no gradient. Auxiliary losses of each run count as its next-token loss does. It costs both runs,
    but holds the logits of one at a time: they are recomputed in the backward pass.

    Args:
        model: the model.
        short: the weight of the shallower run's loss.
        consistency: the weight of the distance.

    Raises:
        ValueError: if `model` is no `RecurrentTransformer` of at least 2 steps, or a weight is negative or not
            finite; in a forward, if the shallower run is not said, or is no shallower than full depth.

    Reference: Jeddi et al., 2026, arXiv 2602.11451.
    """

    def __init__(self, model: RecurrentTransformer, *, short: float | int = 0.1, consistency: float | int = 0.1):
        super().__init__()
        require_instance("model", model, RecurrentTransformer)
        require_whole("num_steps of the model", model.num_steps, at_least=2)
        self.model = model
        self.short = require_number("short", short, at_least=0)
        self.consistency = require_number("consistency", consistency, at_least=0)

    def forward(
        self,
        tokens: Integer[Tensor, "batch token"],
        num_steps: int | Depth | Sequence[int] | None = None,
        *,
        mask: Bool[Tensor, "batch token"] | Int[Tensor, "batch token"] | None = None,
        labels: Integer[Tensor, "batch token"] | None = None,
    ) -> Float[Tensor, ""]:
        """The loss where the shallower run takes `num_steps`; the source draws them from 1 to full depth - 1.

        `labels` are the tokens, with -100 where nothing is to be predicted; the distance is of all real tokens.
        """
        full = self.model.num_steps
        if num_steps is None or as_depth(num_steps).num_steps >= full:
            wanted = f"from 1 to {full - 1}, below full depth: draw it, as by UniformDepth({full - 1}, seed=0)"
            raise ValueError(f"num_steps is {num_steps}, but the shallower run must take {wanted}.")
        targets = tokens if labels is None else labels
        long_loss, long = self._run(tokens, None, mask, targets)
        short_loss, short = self._run(tokens, num_steps, mask, targets)
        return long_loss + self.short * short_loss + self.consistency * consistency_loss(long, short, mask)

    def _run(
        self, tokens: Tensor, num_steps: int | Depth | Sequence[int] | None, mask: Tensor | None, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The loss at this depth, and what the final norm gives."""
        model, said = self.model, Notes()
        begun = model.begin(tokens, num_steps, mask=mask)
        (last,) = deque(model.core.steps(begun.state, begun.depth, begun.at, begun.views), maxlen=1)
        x = model.finish(model.core.read(last), begun.at._replace(notes=said))

        def loss_of(x: Tensor) -> Tensor:
            return next_token_loss(model.head(x, model.embed.token.weight), labels, mask)

        loss = checkpoint(loss_of, x, use_reentrant=False) if torch.is_grad_enabled() else loss_of(x)
        losses = add_losses(add_losses(last.losses, begun.notes.losses), said.losses)
        return torch.stack([loss, *losses.values()]).sum(), x
