"""Adaptive computation time: each token halts when its halting probabilities have summed to 1."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from recurrent_depth.arguments import require_callable, require_instance, require_number
from recurrent_depth.contracts import Call, Tree, UpdateCost
from recurrent_depth.exits import ExitRule, Hazard, Readout
from recurrent_depth.halting_unit import Mix, sum_states
from recurrent_depth.injection import Injection
from recurrent_depth.numerics import at_least_float32
from recurrent_depth.step import StepBlocks
from recurrent_depth.trees import map_tensors
from recurrent_depth.update import DepthState, DepthUpdate, add_losses, initial_state
from recurrent_depth.update_answers import begun_by, cost_of


class HaltingContext(NamedTuple):
    """What halting keeps of the anchor, beside the context of the update within.

    Attributes:
        inner: the context of the update within.
        sees: that of what the halting unit sees.
        share: each token's share of the mean over all real ones.
    """

    inner: Tree
    sees: Tree
    share: Float[Tensor, "batch token"]


class Halting(NamedTuple):
    """How far each token has come to halting.

    Attributes:
        inner: the carry of the update within.
        mixture: of the states before the last; the last joins when it is known not to be, or is read.
        weight: that of the last state, 0 where the token halted before.
        mass: the sum of the halting probabilities; 1 once the token has halted.
        num_updates: steps that the token took, `N`.
    """

    inner: Tree
    mixture: Float[Tensor, "batch token dim"]
    weight: Float[Tensor, "batch token"]
    mass: Float[Tensor, "batch token"]
    num_updates: Float[Tensor, "batch token"]

    def next(self, p: Float[Tensor, "batch token"], epsilon: float) -> tuple["Halting", Bool[Tensor, "batch token"]]:
        """One step further with these halting probabilities, and which tokens take the step."""
        running = self.mass < 1
        halts = running & (self.mass + p > 1 - epsilon)
        weight = torch.where(halts, 1 - self.mass, p * running)
        mass = torch.where(halts, 1.0, self.mass + weight)
        return self._replace(weight=weight, mass=mass, num_updates=self.num_updates + running), running


class HaltingUpdate(DepthUpdate):
    """Adaptive computation time around any update: a token takes steps until it halts, and then stays as it is.

    At step n a token has the probability `p_n` to halt, made of the state before the step. It halts when their sum
    exceeds `1 - epsilon`. What is read is its states weighted by `p_n`, the last one by the remainder: the weights sum
    to 1, and nothing is divided by the number of steps. A token that was never let go gives what is left to the last
    step that it took, so every depth can be read. Others go on to see a halted token's frozen state.

    The loss `ponder` is `ponder * mean(N + R)` over the real tokens, and is added by `last_step_loss`.

    Every token is computed at every step, and halted ones are put back: FLOPs and time do not fall with early halting,
    and `cost` says so. `carry.num_updates` tells how many steps each token needed; `TokenHalted` lets rows leave in
    decoding.

    Args:
        inner: the update that tokens take steps of.
        unit: gives the halting probabilities (batch, token) of what it sees.
        sees: what the unit sees of the state.
        ponder: the weight of the ponder cost; 0.01 as in Tensor2Tensor.
        epsilon: how much of the mass may lack at halting, so that a single step can suffice.
        mix: how the states are weighed together: `sum_states` or `blend_states`.

    Raises:
        ValueError: if a part is something else, such as a width or a class, `ponder` is below 0, or `epsilon` not
            between 0 and 1; in a forward, if `unit` gives no chance for each token.

    Reference: Graves, 2016, arXiv 1603.08983; per token Dehghani et al., 2018, arXiv 1807.03819.
    """

    def __init__(
        self,
        inner: DepthUpdate,
        unit: nn.Module,
        sees: Injection,
        *,
        ponder: float | int = 0.01,
        epsilon: float | int = 0.01,
        mix: Mix = sum_states,
    ):
        super().__init__()
        require_instance("inner", inner, DepthUpdate, "rd.plain(dim)")
        require_instance("unit", unit, nn.Module, "rd.HaltingUnit(dim)")
        require_instance("sees", sees, Injection, "rd.KeepState()")
        self.inner, self.unit, self.sees = inner, unit, sees
        self.ponder = require_number("ponder", ponder, at_least=0)
        self.epsilon = require_number("epsilon", epsilon, above=0, below=1)
        self.mix = require_callable("mix", mix, "rd.sum_states")

    def begin(self, anchor: Float[Tensor, "batch token dim"], call: Call) -> DepthState:
        """That of the update within, with nothing mixed and all of the mass to come."""
        inner = begun_by(self.inner, anchor, call)
        context = HaltingContext(inner.context, self.sees.begin(anchor, call), _share(inner.write, call))
        mixture = torch.zeros_like(at_least_float32(inner.h))
        # The first weight is zero, but made of the state: its gradient is zero too, and a compiled step finds at once
        # what asks for gradients later.
        weight = at_least_float32(inner.h[..., 0]).masked_fill(torch.ones_like(context.share, dtype=torch.bool), 0.0)
        mass, num_updates = (torch.zeros_like(inner.write) for _ in range(2))
        carry = Halting(inner.carry, mixture, weight, mass, num_updates)
        losses = add_losses(inner.losses, {"ponder": torch.zeros_like(inner.write[:1, :1]).sum()})
        return initial_state(inner.h, context, carry)._replace(write=inner.write, losses=losses)

    def forward(self, state: DepthState, blocks: StepBlocks, step: int) -> DepthState:
        """A step of the update within for the tokens that have not halted."""
        before, context = state.carry, state.context
        carry, running = before.next(self._chances(state.h, context.sees, step), self.epsilon)
        after = self.inner(state._replace(context=context.inner, carry=before.inner), blocks, step)
        old, new = ((one.h, one.write, inner) for one, inner in ((state, before.inner), (after, after.carry)))
        h, write, inner = map_tensors(lambda was, now: torch.where(_as_wide(running, now), now, was), old, new)
        carry = carry._replace(inner=inner, mixture=self._mixed(before, state.h, before.weight))
        # Picked tokens may be padded with others' double.
        share = context.share if blocks.valid is None else context.share * blocks.valid
        # A step adds 1 to N, and takes from R what the step before weighed; a token's first one brings all of the mass.
        grown = (running * (1 - before.weight + (before.num_updates == 0)) * share).sum()
        losses = add_losses(after.losses, {"ponder": self.ponder * grown})
        return after._replace(h=h, write=write, context=context, carry=carry, losses=losses)

    def _chances(self, h: Tensor, sees: Tree, step: int) -> Tensor:
        p = self.unit(self.sees(h, sees, step))
        if not isinstance(p, Tensor) or p.shape != h.shape[:2]:
            got = tuple(p.shape) if isinstance(p, Tensor) else type(p).__name__
            raise ValueError(
                f"unit is a {type(self.unit).__name__}, which must give one chance for each token, "
                f"{tuple(h.shape[:2])}; got {got}. rd.HaltingUnit(dim) does."
            )
        return p

    def read(self, state: DepthState) -> Float[Tensor, "batch token dim"]:
        """What the update within reads of the weighted states; what is left of the mass goes to the last."""
        carry = state.carry
        h = self._mixed(carry, state.h, carry.weight + (1 - carry.mass)).to(state.h.dtype)
        return self.inner.read(state._replace(h=h, context=state.context.inner, carry=carry.inner))

    def _mixed(self, carry: Halting, h: Tensor, weight: Tensor) -> Tensor:
        return self.mix(carry.mixture, at_least_float32(h), weight[..., None])

    def cost(self, num_steps: int) -> UpdateCost:
        """That of the update within, and of what the unit sees: every token is computed at every step."""
        cost, sees = cost_of(self.inner, num_steps), self.sees.cost()
        return cost._replace(begin=cost.begin + sees.begin, step=cost.step + sees.step)


class TokenHalted(ExitRule):
    """A row leaves when its token has halted; the model's update must be a `HaltingUpdate`, or wrap one.

    Later tokens then see the last keys and values that it made, where without leaving they see those that its frozen
    state makes at every later step: texts can differ.

    What it costs: nothing.

    Raises:
        ValueError: when it is asked, if the model's tokens don't halt.
    """

    def hazard(self, carry: Tree, state: DepthState, readout: Readout, step: int) -> tuple[Tree, Hazard]:
        mass = _halting(state.carry).mass
        return carry, (mass >= 1).to(mass)


def _halting(carry: Tree) -> Halting:
    """What a `HaltingUpdate` carries: all of this, or one part of what a wrapper carries beside it."""
    parts = carry if isinstance(carry, tuple) and not isinstance(carry, Halting) else (carry,)
    found = [part for part in parts if isinstance(part, Halting)]
    if len(found) != 1:
        held = type(carry).__name__ if parts else "nothing"
        raise ValueError(
            f"TokenHalted reads the Halting that a HaltingUpdate carries, but this update carries {held}: build the "
            "model with update=rd.halted."
        )
    return found[0]


def _share(like: Tensor, call: Call) -> Tensor:
    real = torch.ones_like(like) if call.mask is None else call.mask[:, -like.shape[1] :].to(like)
    return real / real.sum().clamp(min=1)


def _as_wide(chosen: Tensor, leaf: Tensor) -> Tensor:
    return chosen.reshape(*chosen.shape, *[1] * (leaf.ndim - 2))
