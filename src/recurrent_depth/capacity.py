"""Capacities: which share of the tokens may take each step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from recurrent_depth.arguments import require_number, require_whole


def falling_capacities(num_steps: int) -> tuple[float, ...]:
    """`1, (n - 1) / n, ..., 1 / n`: the default of Mixture-of-Recursions.

    Raises:
        ValueError: if `num_steps` is below 1.
    """
    require_whole("num_steps", num_steps, at_least=1)
    return tuple((num_steps - step) / num_steps for step in range(num_steps))


def checked_capacities(capacities: Sequence[float | int]) -> tuple[float, ...]:
    """The capacities of the steps.

    Raises:
        ValueError: if they are no list, there is none, one leaves (0, 1], or one is above that of the step before: who
            was left out of a step does not come back.
    """
    if not isinstance(capacities, Sequence) or isinstance(capacities, str):
        raise ValueError(f"capacities is {capacities!r}, but must be a list with a share for each step.")
    named = ((f"capacities[{step}]", capacity) for step, capacity in enumerate(capacities))
    found = tuple(require_number(name, capacity, above=0, at_most=1) for name, capacity in named)
    if not found:
        raise ValueError("capacities is empty, but needs a share for each step.")
    for step, capacity in enumerate(found):
        if capacity > found[max(step - 1, 0)]:
            raise ValueError(
                f"capacities[{step}] is {capacity}, above the {found[step - 1]} of the step before, but capacities "
                "must not rise: a token that was left out does not come back."
            )
    return found


@dataclass(frozen=True)
class CosineCapacities:
    """Capacities that fall from 1 to their ends along a cosine, over the first `warmup` draws.

    A pure function of the draw, as samplers are: `router.capacities = schedule(draw)` before each step of training.

    Args:
        capacities: where they end.
        warmup: draws until then.

    Raises:
        ValueError: for capacities that rise or leave (0, 1], for a `warmup` below 1, and for a draw below 0.

    Reference: Bae et al., 2025, arXiv 2507.10524.
    """

    capacities: Sequence[float | int]
    warmup: int

    def __post_init__(self):
        object.__setattr__(self, "capacities", checked_capacities(self.capacities))
        require_whole("warmup", self.warmup, at_least=1)

    def __call__(self, draw: int) -> tuple[float, ...]:
        """The capacities of a draw, a whole number counted from 0."""
        progress = min(require_whole("draw", draw, at_least=0) / self.warmup, 1.0)
        rest = 0.5 * (1 + math.cos(math.pi * progress))
        return tuple(end + (1 - end) * rest for end in self.capacities)
