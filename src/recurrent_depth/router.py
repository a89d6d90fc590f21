"""What a router is asked, and what it answers."""

import abc
from typing import NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor, nn

from recurrent_depth.contracts import Call, Tree, UpdateCost
from recurrent_depth.pick import Pick


class RouterState(NamedTuple):
    """What a router keeps; leaves lead with (batch, token).

    Attributes:
        context: made once, the same at every step.
        carry: what changes from step to step.
        losses: auxiliary losses of `begin`.
    """

    context: Tree = ()
    carry: Tree = ()
    losses: dict[str, Float[Tensor, ""]] = {}


class Routing(NamedTuple):
    """A router's decision about one step. Its tensors are of all tokens, picked or not.

    Attributes:
        carry: what the router carries on.
        pick: who takes the step; None where all do.
        weight: of the result; None where the result is the new state, as without routing.
        base: what the result is combined with; the state by default.
        losses: auxiliary losses of this step.
    """

    carry: Tree
    pick: Pick | None = None
    weight: Float[Tensor, "batch token"] | None = None
    base: Float[Tensor, "batch token dim"] | None = None
    losses: dict[str, Float[Tensor, ""]] = {}


class Router(nn.Module, abc.ABC):
    """Decides which tokens take a step, and with which weight.

    In training it may look at the whole of a text. Everywhere else its rule is causal: a token's decision depends on
    this token's state alone, so it is the same whether the token comes alone, in a chunk, or in a batch.

    Attributes:
        skips: a class says True where a token that is left out of a step may take a later one. It does not move then,
            and yet has not converged.
    """

    skips: bool = False

    @abc.abstractmethod
    def begin(self, h: Float[Tensor, "batch token dim"], call: Call) -> RouterState:
        """What the router knows before the first step, whose state is `h`."""

    @abc.abstractmethod
    def forward(
        self,
        h: Float[Tensor, "batch token dim"],
        state: RouterState,
        real: Bool[Tensor, "batch token"],
        step: int,
        *,
        causal: bool,
    ) -> Routing:
        """The decision about a step.

        Args:
            h: the state.
            state: what the router keeps.
            real: which tokens are no padding: padding is never picked, and never counts.
            step: which step, from 0.
            causal: whether a decision may depend on its own token alone.
        """

    @abc.abstractmethod
    def cost(self, num_steps: int) -> UpdateCost:
        """Its own matrix FLOPs per token, and the expected share of the tokens that takes each step."""
