"""Routing: some tokens take a step, and what comes out of it is combined with what was there."""

import abc
from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor, nn

from recurrent_depth.arguments import require_instance
from recurrent_depth.contracts import Call, Tree, UpdateCost
from recurrent_depth.numerics import at_least_float32
from recurrent_depth.pick import Pick
from recurrent_depth.router import Router, RouterState, Routing
from recurrent_depth.step import StepBlocks
from recurrent_depth.trees import map_tensors
from recurrent_depth.update import DepthState, DepthUpdate, add_losses
from recurrent_depth.update_answers import begun_by, cost_of


class Combination(nn.Module, abc.ABC):
    """How a token's result is combined with what was there before."""

    @abc.abstractmethod
    def forward(
        self,
        base: Float[Tensor, "row token dim"],
        result: Float[Tensor, "row token dim"],
        weight: Float[Tensor, "row token"],
    ) -> Float[Tensor, "row token dim"]:
        """The new state, in float32 or finer."""


class AddWeighted(Combination):
    """`base + weight * result`: Mixture-of-Recursions.

    The result holds the blocks' own residual stream, so this is not the plain loop, whatever the weight.

    Reference: Bae et al., 2025, arXiv 2507.10524.
    """

    def forward(
        self,
        base: Float[Tensor, "row token dim"],
        result: Float[Tensor, "row token dim"],
        weight: Float[Tensor, "row token"],
    ) -> Float[Tensor, "row token dim"]:
        """The weighted sum."""
        return at_least_float32(base) + weight[..., None] * at_least_float32(result)


class Interpolate(Combination):
    """`base + weight * (result - base)`: Mixture-of-Depths, whose blocks give no outer residual; and any gated update.

    With weight 1 it is the update that is routed, with 0 nothing happens.

    Reference: Raposo et al., 2024, arXiv 2404.02258.
    """

    def forward(
        self,
        base: Float[Tensor, "row token dim"],
        result: Float[Tensor, "row token dim"],
        weight: Float[Tensor, "row token"],
    ) -> Float[Tensor, "row token dim"]:
        """The blend."""
        base = at_least_float32(base)
        return base + weight[..., None] * (at_least_float32(result) - base)


class Routed(NamedTuple):
    """The same part of the state, of the update that is wrapped and of the router."""

    inner: Tree
    router: Tree


class RoutedUpdate(DepthUpdate):
    """The tokens that a router picks take a step of the update that is wrapped; the others stay as they are.

    In training the router may choose the best of a whole text. In evaluation, and wherever there is a cache, it decides
    for each token by itself. `write` is the wrapped update's.

    Args:
        inner: the update of a step, such as `ReplaceState(KeepState())` or a `GatedDepthUpdate`.
        router: who takes it.
        combine: what becomes of its result; `AddWeighted()` or `Interpolate()`.

    Raises:
        ValueError: if one of them is something else, such as the class in place of its instance, or another of them.
    """

    def __init__(self, inner: DepthUpdate, router: Router, combine: Combination):
        super().__init__()
        check_parts(inner, router, combine)
        self.inner, self.router, self.combine = inner, router, combine

    def begin(self, anchor: Float[Tensor, "batch token dim"], call: Call) -> DepthState:
        """The start of the wrapped update, and what the router makes of it."""
        state = begun_by(self.inner, anchor, call)
        router = self.router.begin(state.h if call.start is None else call.start, call)
        losses = add_losses(state.losses, router.losses)
        context, carry = Routed(state.context, router.context), Routed(state.carry, router.carry)
        return state._replace(context=context, carry=carry, losses=losses)

    def forward(self, state: DepthState, blocks: StepBlocks, step: int) -> DepthState:
        """The picked tokens' step."""
        known = RouterState(state.context.router, state.carry.router)
        causal = not self.training or blocks.kv is not None
        routing = self.router(state.h, known, _real(state, blocks), step, causal=causal)
        part = _picked(routing.pick, state._replace(context=state.context.inner, carry=state.carry.inner))
        after = self.inner(part, blocks if routing.pick is None else blocks.picked(routing.pick), step)
        after = after._replace(h=self._combined(state, after, routing))
        return _returned(routing, state, after)

    def _combined(self, state: DepthState, after: DepthState, routing: Routing) -> Tensor:
        if routing.weight is None:
            return after.h
        base, weight = state.h if routing.base is None else routing.base, routing.weight
        if routing.pick is not None:
            base, weight = routing.pick.gather(base), routing.pick.gather(weight)
        return self.combine(base, after.h, weight).to(state.h.dtype)

    def read(self, state: DepthState) -> Float[Tensor, "batch token dim"]:
        """What the wrapped update reads."""
        return self.inner.read(state._replace(context=state.context.inner, carry=state.carry.inner))

    def cost(self, num_steps: int) -> UpdateCost:
        """The router's for all tokens, the wrapped update's for those that are expected to take its steps.

        Of a router within this one, those are the tokens that it picks itself.
        """
        inner, router = cost_of(self.inner, num_steps), self.router.cost(num_steps)
        all_tokens = (1.0,) * num_steps
        shares = tuple(a * b for a, b in zip(inner.shares or all_tokens, router.shares or all_tokens, strict=True))
        counts = tuple(map(_one_after_the_other, router.takers(num_steps), inner.takers(num_steps)))
        picked = inner.step + inner.picked + router.picked
        return UpdateCost(inner.begin + router.begin, router.step, shares, selects=True, picked=picked, counts=counts)


def _one_after_the_other(first: Callable[[int], int], second: Callable[[int], int]) -> Callable[[int], int]:
    return lambda num_tokens: second(first(num_tokens))


def check_parts(inner: object, router: object, combine: object) -> None:
    """Raises a ValueError for parts of a routed update that are none, or stand in the wrong place."""
    require_instance("inner", inner, DepthUpdate, "rd.ReplaceState(rd.KeepState())")
    require_instance("router", router, Router, "rd.expert_choice(dim, num_steps)")
    require_instance("combine", combine, Combination, "rd.AddWeighted()")


def _real(state: DepthState, blocks: StepBlocks) -> Tensor:
    return state.h.new_ones(state.h.shape[:2]).bool() if blocks.valid is None else blocks.valid


def _picked(pick: Pick | None, state: DepthState) -> DepthState:
    """The state of the picked tokens, for the wrapped update."""
    if pick is None:
        return state
    h, write, context, carry = map_tensors(pick.gather, (state.h, state.write, state.context, state.carry))
    return state._replace(h=h, write=write, context=context, carry=carry)


def _returned(routing: Routing, state: DepthState, after: DepthState) -> DepthState:
    """The state of all tokens, once the picked ones have stepped."""
    new = after.h, after.write, after.carry
    if routing.pick is not None:
        new = map_tensors(routing.pick.scatter, (state.h, state.write, state.carry.inner), new)
    h, write, carry = new
    losses = add_losses(after.losses, routing.losses)
    return state._replace(h=h, write=write, carry=Routed(carry, routing.carry), losses=losses)
