"""Samplers: how many steps a training step takes."""

import abc
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from recurrent_depth.arguments import optional_steps, require_number, require_whole
from recurrent_depth.depth import Depth


class ExpectedDepth(NamedTuple):
    """What a sampler draws on average, in steps: those taken, and those of them that are differentiated."""

    num_steps: float
    grad_steps: float


class DepthSampler(abc.ABC):
    """Draws the depth of a training step as a pure function of its seed and the draw's number.

    Nothing is remembered and the global RNG is not touched, so every rank draws the same depth, in any order, and a
    resumed run continues the sequence. Draw once per optimizer step, whatever the gradient accumulation.
    """

    @abc.abstractmethod
    def __call__(self, draw: int) -> Depth:
        """The depth of draw number `draw`, counted from 0."""

    @abc.abstractmethod
    def expected(self, draw: int = 0) -> ExpectedDepth:
        """The average over all seeds of what draw number `draw` gives."""

    def expected_at(self, step: int, draw: int = 0) -> ExpectedDepth | None:
        """What falls on one step, counted from 1: how likely it is taken, and differentiated; None if not known.

        The sum over all steps is `expected`. It is asked where steps cost differently, as with routers.
        """
        return None


@dataclass(frozen=True)
class FixedDepth(DepthSampler):
    """Takes `num_steps` steps every time, the last `grad_steps` of them (None: all) differentiated.

    Raises:
        ValueError: if either is below 1.
    """

    num_steps: int
    grad_steps: int | None = None

    def __post_init__(self) -> None:
        require_whole("num_steps", self.num_steps, at_least=1)
        optional_steps("grad_steps", self.grad_steps)

    def __call__(self, draw: int) -> Depth:
        require_whole("draw", draw, at_least=0)
        return _truncated(self.num_steps, self.grad_steps)

    def expected(self, draw: int = 0) -> ExpectedDepth:
        depth = self(draw)
        return ExpectedDepth(float(depth.num_steps), float(depth.grad_steps or depth.num_steps))

    def expected_at(self, step: int, draw: int = 0) -> ExpectedDepth:
        return on_step(step, self.grad_steps, lambda limit: float(min(limit, self.num_steps)))


@dataclass(frozen=True)
class UniformDepth(DepthSampler):
    """Draws the number of steps evenly from 1 to `max_steps`, the same on every rank.

    Every depth gets trained, so any prefix of the loop can serve as an early exit.

    Raises:
        ValueError: if `max_steps` or `grad_steps` is below 1, or `seed` no whole number.

    Reference: Hegazy et al., 2026, arXiv 2608.15062.
    """

    max_steps: int
    seed: int = 0
    grad_steps: int | None = None

    def __post_init__(self) -> None:
        require_whole("max_steps", self.max_steps, at_least=1)
        require_whole("seed", self.seed)
        optional_steps("grad_steps", self.grad_steps)

    def __call__(self, draw: int) -> Depth:
        return _truncated(1 + generator_of(self.seed, draw).randrange(self.max_steps), self.grad_steps)

    def expected(self, draw: int = 0) -> ExpectedDepth:
        require_whole("draw", draw, at_least=0)
        return ExpectedDepth((self.max_steps + 1) / 2, self._up_to(self.grad_steps or self.max_steps))

    def expected_at(self, step: int, draw: int = 0) -> ExpectedDepth:
        return on_step(step, self.grad_steps, self._up_to)

    def _up_to(self, limit: int) -> float:
        beyond = max(self.max_steps - limit, 0)
        return (self.max_steps + 1) / 2 - beyond * (beyond + 1) / (2 * self.max_steps)


@dataclass(frozen=True)
class PoissonLogNormalDepth(DepthSampler):
    """Draws a heavy-tailed number of steps: 1 + Poisson(rate), the rate log-normal with the given `mean`.

    The draws average `mean + 1`, not `mean`; most lie below. The last `grad_steps` steps (None: all) are
    differentiated, which bounds the memory of the deep draws.

    Raises:
        ValueError: if `mean` is not above 0, `grad_steps` below 1, `seed` no whole number, or `sigma` outside of 0 to 2
            (beyond, single draws take thousands of steps).

    Reference: Geiping et al., 2025, arXiv 2502.05171.
    """

    mean: float | int
    grad_steps: int | None
    seed: int = 0
    sigma: float | int = 0.5

    def __post_init__(self) -> None:
        optional_steps("grad_steps", self.grad_steps)
        require_whole("seed", self.seed)
        require_number("mean", self.mean, above=0)
        require_number("sigma", self.sigma, at_least=0, at_most=2)

    def __call__(self, draw: int) -> Depth:
        generator = generator_of(self.seed, draw)
        rate = math.exp(self._log_rate(generator.gauss(0.0, 1.0)))
        return _truncated(1 + draw_poisson(rate, generator), self.grad_steps)

    def expected(self, draw: int = 0) -> ExpectedDepth:
        require_whole("draw", draw, at_least=0)
        num_steps = self.mean + 1.0
        if self.grad_steps is None:
            return ExpectedDepth(num_steps, num_steps)
        return ExpectedDepth(num_steps, self._up_to(self.grad_steps))

    def expected_at(self, step: int, draw: int = 0) -> ExpectedDepth:
        return on_step(step, self.grad_steps, self._up_to)

    def _log_rate(self, deviate: float) -> float:
        return math.log(self.mean) - self.sigma**2 / 2 + self.sigma * deviate

    def _up_to(self, limit: int) -> float:
        # min(limit, 1 + n) averages limit minus what a short draw lacks. The trapezoidal rule over the normal deviate
        # converges faster than any power here, since the integrand is analytic and dies out at both ends.
        step, lacking = 1 / 32, 0.0
        for deviate in (step * i for i in range(-320, 321)):
            density = step * math.exp(-(deviate**2) / 2) / math.sqrt(2 * math.pi)
            lacking += density * expected_lack(limit - 1, self._log_rate(deviate))
        return limit - lacking


def on_step(step: int, grad_steps: int | None, up_to: Callable[[int], float]) -> ExpectedDepth:
    """What falls on a step, of a sampler that takes `up_to(limit)` of the first `limit` steps on average.

    A step is differentiated if it is taken and the one `grad_steps` later is not.
    """

    def taken(step: int) -> float:
        return up_to(step) - up_to(step - 1)

    num_steps = taken(step)
    return ExpectedDepth(num_steps, num_steps - (0.0 if grad_steps is None else taken(step + grad_steps)))


def expected_lack(limit: int, log_rate: float) -> float:
    """How far a Poisson number falls short of `limit`, on average."""
    rate = math.exp(log_rate)
    return math.fsum((limit - n) * math.exp(n * log_rate - rate - math.lgamma(n + 1)) for n in range(limit))


def draw_poisson(rate: float, generator: random.Random) -> int:
    """A Poisson number: how many arrivals there are until `rate`."""
    count, time = 0, generator.expovariate(1.0)
    while time < rate:
        count, time = count + 1, time + generator.expovariate(1.0)
    return count


def generator_of(seed: int, draw: int) -> random.Random:
    """The random numbers of one draw."""
    # Seeding with a string hashes it, so neighbouring draws are unrelated.
    return random.Random(f"{int(seed)}/{require_whole('draw', draw, at_least=0)}")


def _truncated(num_steps: int, grad_steps: int | None) -> Depth:
    return Depth(num_steps, None if grad_steps is None else min(grad_steps, num_steps))
