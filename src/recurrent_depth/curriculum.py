"""Curricula: the depth grows over training."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from recurrent_depth.arguments import require_whole
from recurrent_depth.depth import Depth
from recurrent_depth.factories import called
from recurrent_depth.sampling import DepthSampler, ExpectedDepth, PoissonLogNormalDepth


def linear_ramp(progress: float) -> float:
    """Grows evenly with training."""
    return progress


def sqrt_ramp(progress: float) -> float:
    """Grows slowly at first and steeply at the end: `1 - sqrt(1 - progress)`."""
    return 1.0 - math.sqrt(1.0 - progress)


@dataclass(frozen=True)
class RampedDepth(DepthSampler):
    """Ramps the depth up over the first `num_draws` draws, then stays there.

    Draw number t is that of `make(max(1, ceil(max_depth * ramp(t / num_draws))))`, a sampler for that whole number:

        RampedDepth(partial(UniformDepth, seed=0), max_depth=10, num_draws=2000)
        RampedDepth(partial(PoissonLogNormalDepth, grad_steps=8), max_depth=32, num_draws=5000, ramp=sqrt_ramp)

    Raises:
        ValueError: if `max_depth` or `num_draws` is below 1, `make` gives no sampler (hand over `UniformDepth`, not
            `UniformDepth(10)`), or `ramp` a share outside of 0 to 1.

    Reference: McLeish et al., 2025, arXiv 2511.07384.
    """

    make: Callable[[int], DepthSampler]
    max_depth: int
    num_draws: int
    ramp: Callable[[float], float] = linear_ramp

    def __post_init__(self) -> None:
        require_whole("max_depth", self.max_depth, at_least=1)
        require_whole("num_draws", self.num_draws, at_least=1)
        for draw in (0, self.num_draws):
            self.at(draw)

    def __call__(self, draw: int) -> Depth:
        return self.at(draw)(draw)

    def expected(self, draw: int = 0) -> ExpectedDepth:
        return self.at(draw).expected(draw)

    def expected_at(self, step: int, draw: int = 0) -> ExpectedDepth | None:
        return self.at(draw).expected_at(step, draw)

    def at(self, draw: int) -> DepthSampler:
        """The sampler that draw number `draw` comes from."""
        progress = min(1.0, require_whole("draw", draw, at_least=0) / self.num_draws)
        # Rounded first, since 100 * 0.55 comes out a little above 55.
        depth = max(1, math.ceil(round(self.max_depth * self._share(progress), 9)))
        sampler = called("make", self.make, depth, example="UniformDepth or partial(UniformDepth, seed=0)")
        if not isinstance(sampler, DepthSampler):
            raise ValueError(
                f"make is {self.make!r} and gave {sampler!r}, but must make a sampler of a whole number, as "
                "UniformDepth or partial(UniformDepth, seed=0) do."
            )
        return sampler

    def _share(self, progress: float) -> float:
        share = self.ramp(progress)
        if not 0 <= round(share, 9) <= 1:
            raise ValueError(f"ramp({progress:g}) is {share!r}, but must be from 0 to 1, the share of max_depth.")
        return min(share, 1.0)


def retrofit_curriculum(
    max_mean: int,
    num_draws: int,
    *,
    grad_steps: int = 8,
    ramp: Callable[[float], float] = linear_ramp,
    seed: int = 0,
) -> RampedDepth:
    """The curriculum by which a dense model is retrofitted with a loop: a heavy tail whose mean grows.

    While the mean is below `grad_steps`, only so many steps are differentiated.

    Args:
        max_mean: the mean at the end of the ramp, 4 to 32 in the source; draws average one more, as always.
        num_draws: the ramp's length: in the source an eighth, a quarter or three quarters of training.
        grad_steps: how many steps are differentiated at most.
        ramp: `linear_ramp` or `sqrt_ramp`.
        seed: of the draws.

    Raises:
        ValueError: if a number is below 1, or `seed` no whole number.

    Reference: McLeish et al., 2025, arXiv 2511.07384.
    """
    make = partial(_heavy_tail, require_whole("grad_steps", grad_steps, at_least=1), seed)
    return RampedDepth(make, require_whole("max_mean", max_mean, at_least=1), num_draws, ramp)


def _heavy_tail(grad_steps: int, seed: int, mean: int) -> PoissonLogNormalDepth:
    return PoissonLogNormalDepth(mean, grad_steps=min(grad_steps, mean), seed=seed)
