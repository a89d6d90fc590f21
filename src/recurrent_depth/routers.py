"""The routers of Mixture-of-Recursions (expert choice) and of Mixture-of-Depths."""

import math
import warnings
from collections.abc import Sequence
from functools import partial

from jaxtyping import Bool, Float
from torch import Tensor

from recurrent_depth.arguments import require_instance, require_number, require_whole
from recurrent_depth.capacity import checked_capacities
from recurrent_depth.contracts import Call, UpdateCost
from recurrent_depth.pick import Pick, pick_chosen, pick_fewest
from recurrent_depth.router import Router, RouterState, Routing
from recurrent_depth.top_tokens import Choice, Limit, TopTokens, row_share

ROUNDING = 1e-6
"""A capacity of 0.7 of 10 tokens is 7, though 0.7 * 10 may fall short of it."""


class ExpertChoice(Router):
    """Mixture-of-Recursions: at step `r` the best `max(1, int(c_r * tokens))` of the tokens that the step before kept.

    Each step has a router of its own. A step at capacity 1 takes all that are left, without a choice; so the first
    step is taken by everyone by default, in decoding too.

    Args:
        choose: takes the best; with a router for each step.
        capacities: the share of all tokens that takes each step; see `falling_capacities` and `CosineCapacities`.

    Raises:
        ValueError: if `choose` is no `TopTokens`; for capacities that rise or leave (0, 1], or are not one for each
            router; in a forward, if it takes more steps than there are routers.

    Reference: Bae et al., 2025, arXiv 2507.10524.
    """

    def __init__(self, choose: TopTokens, capacities: Sequence[float | int]):
        super().__init__()
        _check_choose(choose)
        self.choose = choose
        self.capacities = capacities

    @property
    def capacities(self) -> tuple[float, ...]:
        """The share of all tokens that takes each step, in training; a schedule may set it at any time."""
        return self._capacities

    @capacities.setter
    def capacities(self, capacities: Sequence[float | int]) -> None:
        found = checked_capacities(capacities)
        if len(found) != self.choose.scores.num_routers:
            raise ValueError(
                f"capacities has {len(found)} shares, but must have one for each of the "
                f"{self.choose.scores.num_routers} routers."
            )
        self._capacities = found

    def begin(self, h: Float[Tensor, "batch token dim"], call: Call) -> RouterState:
        """All tokens are there."""
        check_routed_steps(call.num_steps, len(self.capacities))
        return RouterState(row_share(h), carry=h.new_ones(h.shape[:2]).bool())

    def forward(
        self,
        h: Float[Tensor, "batch token dim"],
        state: RouterState,
        real: Bool[Tensor, "batch token"],
        step: int,
        *,
        causal: bool,
    ) -> Routing:
        """The best of those that the step before kept."""
        limit = None if self.capacities[step] == 1 else at_most(real, self.capacities[step])
        choice = self.choose(h, state.carry & real, step, limit, share=state.context, causal=causal)
        return Routing(choice.chosen, picked(choice, limit, causal=causal), choice.weight, losses=choice.losses)

    def cost(self, num_steps: int) -> UpdateCost:
        """A router at each step; the capacities.

        Raises:
            ValueError: for more steps than there are routers.
        """
        check_routed_steps(num_steps, len(self.capacities))
        shares = self.capacities[:num_steps]
        counts = tuple(partial(num_at_most, capacity) for capacity in shares)
        return UpdateCost(step=self.choose.cost(), shares=shares, selects=True, counts=counts)


class MixtureOfDepths(Router):
    """Every other step takes the best `ceil(capacity * tokens)` of all tokens alone; the steps between take everyone.

    A token left out of one step may be taken by the next. Steps between are those of the wrapped update, unweighted.

    Args:
        choose: takes the best; with a router for each routed step.
        capacity: the share of the tokens that takes a routed step.
        every: a routed step stands behind so many less one of the others; 1 routes each step.
        num_steps: full depth. Without it a forward may go on behind the last routed step, up to the next one.

    Raises:
        ValueError: if `choose` is no `TopTokens`, `capacity` leaves (0, 1], `every` or `num_steps` is below 1, or
            `num_steps` has more or fewer routed steps than there are routers, of which there is always one; in a
            forward, if it takes more steps.

    Warns:
        UserWarning: if none of `num_steps` is routed.

    Reference: Raposo et al., 2024, arXiv 2404.02258.
    """

    skips = True

    def __init__(
        self, choose: TopTokens, *, capacity: float | int = 0.125, every: int = 2, num_steps: int | None = None
    ):
        super().__init__()
        _check_choose(choose)
        self.capacity = require_number("capacity", capacity, above=0, at_most=1)
        self.choose, self.every = choose, require_whole("every", every, at_least=1)
        self.most = (choose.scores.num_routers + 1) * self.every - 1 if num_steps is None else self._full(num_steps)

    def _full(self, num_steps: int) -> int:
        routers = self.choose.scores.num_routers
        routed = require_whole("num_steps", num_steps, at_least=1) // self.every
        if max(1, routed) != routers:
            raise ValueError(
                f"num_steps is {num_steps}, of which {routed} are routed with every={self.every}, but there are "
                f"{routers} routers: build the scores with num_routers={max(1, routed)}."
            )
        if not routed:
            warnings.warn(
                f"Of {num_steps} steps none is routed with every={self.every}, so all tokens take them and the router "
                f"is never asked: take {self.every} steps or more, or every=1.",
                stacklevel=3,
            )
        return num_steps

    def routes(self, step: int) -> bool:
        """Whether a step is routed."""
        return (step + 1) % self.every == 0

    def begin(self, h: Float[Tensor, "batch token dim"], call: Call) -> RouterState:
        """The rows' shares of the losses."""
        check_routed_steps(call.num_steps, self.most)
        return RouterState(row_share(h))

    def forward(
        self,
        h: Float[Tensor, "batch token dim"],
        state: RouterState,
        real: Bool[Tensor, "batch token"],
        step: int,
        *,
        causal: bool,
    ) -> Routing:
        """The best of all, or everyone."""
        if not self.routes(step):
            return Routing(())
        limit = None if self.capacity == 1 else at_least(real, self.capacity)
        choice = self.choose(h, real, step // self.every, limit, share=state.context, causal=causal)
        return Routing((), picked(choice, limit, causal=causal), choice.weight, losses=choice.losses)

    def cost(self, num_steps: int) -> UpdateCost:
        """A router at each routed step, on average over all; the capacity there.

        Raises:
            ValueError: for more steps than there are routers.
        """
        check_routed_steps(num_steps, self.most)
        routed = [self.routes(step) for step in range(num_steps)]
        shares = tuple(self.capacity if r else 1.0 for r in routed)
        counts = tuple(partial(num_at_least, share) for share in shares)
        step = self.choose.cost() * sum(routed) / max(num_steps, 1)
        return UpdateCost(step=step, shares=shares, selects=True, counts=counts)


def _check_choose(choose: object) -> None:
    require_instance("choose", choose, TopTokens, "rd.TopTokens(rd.LinearScores(dim), rd.RawWeight())")


def at_most(real: Bool[Tensor, "batch token"], capacity: float | int) -> Limit:
    """`int(capacity * tokens)` of the real tokens of each row, but at least one."""
    rows = (real.sum(1).double() * capacity + ROUNDING).floor().long().clamp(min=1)
    return Limit(rows, num_at_most(capacity, real.shape[1]))


def num_at_most(capacity: float | int, num_tokens: int) -> int:
    """How many of so many tokens `at_most` takes; none of none."""
    return max(min(1, num_tokens), math.floor(num_tokens * capacity + ROUNDING))


def at_least(real: Bool[Tensor, "batch token"], capacity: float | int) -> Limit:
    """`ceil(capacity * tokens)` of the real tokens of each row."""
    rows = (real.sum(1).double() * capacity - ROUNDING).ceil().long()
    return Limit(rows, num_at_least(capacity, real.shape[1]))


def num_at_least(capacity: float | int, num_tokens: int) -> int:
    """How many of so many tokens `at_least` takes."""
    return math.ceil(num_tokens * capacity - ROUNDING)


def picked(choice: Choice, limit: Limit | None, *, causal: bool) -> Pick | None:
    """The pick of a choice; None where all take the step."""
    if limit is None:
        return None
    return pick_fewest(choice.chosen) if causal else pick_chosen(choice.chosen, limit.widest)


def check_routed_steps(num_steps: int, most: int) -> None:
    """Raises a ValueError for more steps than a router knows."""
    if num_steps > most:
        raise ValueError(
            f"{num_steps} steps asked for, but the router was built for {most} at most, and has no weights for others: "
            f"ask for {most} steps or fewer, or build and train the model for {num_steps}."
        )
