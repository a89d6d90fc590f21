"""Blocks that are told when they run: the time reached so far, and the length of the step at hand."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from recurrent_depth.arguments import require_instance, require_whole
from recurrent_depth.contracts import Call, UpdateCost
from recurrent_depth.numerics import at_least_float32
from recurrent_depth.step import StepBlocks
from recurrent_depth.update import DepthState, DepthUpdate
from recurrent_depth.update_answers import begun_by, cost_of


class TimeEmbedding(nn.Module):
    """A number as a vector: `W_2 silu(W_1 [cos(t f); sin(t f)] + b_1) + b_2`, frequencies falling from 1 to 1/10000.

    Args:
        dim: the width.
        num_frequencies: cosines, and as many sines.

    Raises:
        ValueError: if a number is below 1.
    """

    def __init__(self, dim: int, *, num_frequencies: int = 128):
        super().__init__()
        self.num_frequencies = require_whole("num_frequencies", num_frequencies, at_least=1)
        self.first = nn.Linear(2 * num_frequencies, require_whole("dim", dim, at_least=1))
        self.second = nn.Linear(dim, dim)

    def forward(self, time: Float[Tensor, "row token"]) -> Float[Tensor, "row token dim"]:
        """The embedding of each number."""
        exponents = torch.arange(self.num_frequencies, device=time.device, dtype=time.dtype) / self.num_frequencies
        angles = time[..., None] * 10000.0**-exponents
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1)
        return self.second(F.silu(self.first(waves.to(self.first.weight.dtype))))


class CoarseTimes(nn.Module):
    """The times from 0 to 1 at which steps begin and end.

    Steps are equally long, but for those of a run in training that is shallower than `finest`: these last a random
    whole number of `1 / finest` each. Each but the last is drawn evenly from the lengths that leave room for the
    others, so that early ones tend to be longer. Drawn once per forward, from torch's global generator.

    Args:
        finest: how many steps the longest run has.

    Raises:
        ValueError: if `finest` is below 1.
    """

    def __init__(self, finest: int):
        super().__init__()
        self.finest = require_whole("finest", finest, at_least=1)

    def forward(self, num_steps: int) -> tuple[float, ...]:
        """`num_steps + 1` times, from 0 to 1."""
        if not self.training or num_steps >= self.finest:
            return tuple(step / num_steps for step in range(num_steps + 1))
        ends = [0]
        for left in range(num_steps - 1, 0, -1):
            ends.append(ends[-1] + int(torch.randint(1, self.finest - ends[-1] - left + 1, ())))
        return tuple(end / self.finest for end in (*ends, self.finest))


class TimeConditionedUpdate(DepthUpdate):
    """Any update over blocks that read `at.condition`: the embedded time plus the embedded length of the step.

    A run of k steps goes from time 0 to 1 in k steps, so a shallower run is no prefix of a deeper one: it takes longer
    steps. With a depth for each row, all rows follow the times of the deepest, and shallower ones leave on the way.

    What depends on time alone is computed once per step, whatever the batch, and left out of `cost`, which counts per
    token.

    Args:
        inner: the update.
        dim: the width of the condition.
        times: gives the times at which steps begin and end, `num_steps + 1` of them.

    Raises:
        ValueError: if `dim` is below 1, `inner` is no update, or `times` no `CoarseTimes`.

    Reference: Jeddi et al., 2026, arXiv 2602.11451.
    """

    def __init__(self, inner: DepthUpdate, dim: int, times: CoarseTimes):
        super().__init__()
        require_instance("inner", inner, DepthUpdate, "rd.plain(dim)")
        require_instance("times", times, CoarseTimes, "rd.CoarseTimes(num_steps)")
        self.inner, self.times = inner, times
        self.time, self.length = TimeEmbedding(dim), TimeEmbedding(dim)

    def begin(self, anchor: Float[Tensor, "batch token dim"], call: Call) -> DepthState:
        """That of the update within, and the times."""
        state = begun_by(self.inner, anchor, call)
        times = self.times(call.num_steps)
        # As long for every depth, so that one compiled step serves all.
        times += (1.0,) * (self.times.finest + 1 - len(times))
        clock = at_least_float32(anchor[:1, :1, 0]).new_tensor(times)
        return state._replace(context=(state.context, clock.expand(*anchor.shape[:2], -1)))

    def forward(self, state: DepthState, blocks: StepBlocks, step: int) -> DepthState:
        """A step of the update within, whose blocks know the time."""
        context, clock = state.context
        now, then = (clock[:1, :1].select(2, at) for at in (step, step + 1))
        condition = self.time(now) + self.length(then - now)
        after = self.inner(state._replace(context=context), blocks.conditioned(condition), step)
        return after._replace(context=state.context)

    def read(self, state: DepthState) -> Float[Tensor, "batch token dim"]:
        """What the update within reads."""
        return self.inner.read(state._replace(context=state.context[0]))

    def cost(self, num_steps: int) -> UpdateCost:
        """That of the update within."""
        return cost_of(self.inner, num_steps)
