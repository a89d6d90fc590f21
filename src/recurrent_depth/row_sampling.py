"""A sampler that draws a depth for each row of the batch."""

import math
from dataclasses import dataclass

from recurrent_depth.arguments import optional_steps, require_number, require_whole
from recurrent_depth.depth import Depth
from recurrent_depth.sampling import DepthSampler, ExpectedDepth, draw_poisson, expected_lack, generator_of, on_step


@dataclass(frozen=True)
class PoissonDepthPerRow(DepthSampler):
    """Draws `max(1, Poisson(mean))` steps for each row on its own; rows that are done leave and cost nothing more.

    The draws average `mean + exp(-mean)`. The last `grad_steps` steps of each row (None: all) are differentiated.

    Raises:
        ValueError: if `mean` is not above 0 and at most 500, `num_rows` or `grad_steps` below 1, or `seed` no whole
            number.

    Reference: Parcae, 2026, arXiv 2604.12946.
    """

    mean: float | int
    num_rows: int
    grad_steps: int | None
    seed: int = 0

    def __post_init__(self) -> None:
        require_whole("num_rows", self.num_rows, at_least=1)
        optional_steps("grad_steps", self.grad_steps)
        require_whole("seed", self.seed)
        require_number("mean", self.mean, above=0, at_most=500)

    def __call__(self, draw: int) -> Depth:
        generator = generator_of(self.seed, draw)
        rows = tuple(max(1, draw_poisson(float(self.mean), generator)) for _ in range(self.num_rows))
        num_steps = max(rows)
        return Depth(num_steps, None if self.grad_steps is None else min(self.grad_steps, num_steps), rows)

    def expected(self, draw: int = 0) -> ExpectedDepth:
        require_whole("draw", draw, at_least=0)
        num_steps = self.mean + math.exp(-self.mean)
        if self.grad_steps is None:
            return ExpectedDepth(num_steps, num_steps)
        return ExpectedDepth(num_steps, self._up_to(self.grad_steps))

    def expected_at(self, step: int, draw: int = 0) -> ExpectedDepth:
        return on_step(step, self.grad_steps, self._up_to)

    def _up_to(self, limit: int) -> float:
        # A row that draws 0 takes a step all the same: it lacks one less.
        return limit - expected_lack(limit, math.log(self.mean)) + math.exp(-self.mean) * (limit > 0)
