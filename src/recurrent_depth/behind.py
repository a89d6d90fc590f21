"""Updates that wrap another one and put a module behind it: behind each step, or behind the last."""

from jaxtyping import Float
from torch import Tensor, nn

from recurrent_depth.arguments import require_instance
from recurrent_depth.blocks import linear_cost
from recurrent_depth.contracts import Call, UpdateCost
from recurrent_depth.halting import HaltingUpdate
from recurrent_depth.routing import RoutedUpdate
from recurrent_depth.step import StepBlocks
from recurrent_depth.update import DepthState, DepthUpdate
from recurrent_depth.update_answers import begun_by, cost_of


class BehindLoop(DepthUpdate):
    """Another update, of which the coda sees `module(h)`: a norm, or a projection, once behind the last step.

    Args:
        inner: the update.
        module: called as `module(h)`; `Borrowed(norm)` for the model's own final norm.

    Raises:
        ValueError: if `inner` is no update, or `module` no module.

    Reference: the norm of Geiping et al., 2025, arXiv 2502.05171; the projection of Parcae, 2026, arXiv 2604.12946.
    """

    def __init__(self, inner: DepthUpdate, module: nn.Module):
        super().__init__()
        require_instance("inner", inner, DepthUpdate, "rd.plain(dim)")
        require_instance("module", module, nn.Module)
        self.inner, self.module = inner, module

    def begin(self, anchor: Float[Tensor, "batch token dim"], call: Call) -> DepthState:
        """The inner update's."""
        return begun_by(self.inner, anchor, call)

    def forward(self, state: DepthState, blocks: StepBlocks, step: int) -> DepthState:
        """The inner update's step."""
        return self.inner(state, blocks, step)

    def read(self, state: DepthState) -> Float[Tensor, "batch token dim"]:
        """`module(h)`."""
        return self.module(self.inner.read(state))

    def cost(self, num_steps: int) -> UpdateCost:
        """The inner update's, and the module's linear layers once."""
        cost = cost_of(self.inner, num_steps)
        return cost._replace(begin=cost.begin + linear_cost(self.module).linear)


class NormEachStep(DepthUpdate):
    """Another update, whose state is normed after every step: `h <- norm(step(h))`.

    The normed state is what the next step starts from, what an exit rule reads, and what is read behind the loop. A
    model without coda then needs no final norm: give it `nn.Identity()`, as `ouro` does, so that nothing is normed
    twice. To halt or route tokens put the norm inside, `RoutedUpdate(NormEachStep(update, norm), ...)`: around them it
    would norm those that take no step again and again.

    Args:
        inner: the update.
        norm: called as `norm(h)`.

    Raises:
        ValueError: if `inner` is no update, `norm` no module, or a part of `inner` halts or routes tokens.

    Reference: Ouro, Zhu et al., 2025, arXiv 2510.25741.
    """

    def __init__(self, inner: DepthUpdate, norm: nn.Module):
        super().__init__()
        require_instance("inner", inner, DepthUpdate, "rd.plain(dim)")
        require_instance("norm", norm, nn.Module, "torch.nn.RMSNorm(dim)")
        require_all_step(inner, "normed again", "NormEachStep(update, norm)")
        self.inner, self.norm = inner, norm

    def begin(self, anchor: Float[Tensor, "batch token dim"], call: Call) -> DepthState:
        """The inner update's, not normed."""
        return begun_by(self.inner, anchor, call)

    def forward(self, state: DepthState, blocks: StepBlocks, step: int) -> DepthState:
        """The inner update's step, then the norm."""
        after = self.inner(state, blocks, step)
        return after._replace(h=self.norm(after.h).to(after.h.dtype))

    def read(self, state: DepthState) -> Float[Tensor, "batch token dim"]:
        """What the inner update reads of the normed state."""
        return self.inner.read(state)

    def cost(self, num_steps: int) -> UpdateCost:
        """The inner update's: norms are not counted."""
        return cost_of(self.inner, num_steps)


def require_all_step(inner: DepthUpdate, done: str, inside: str) -> None:
    """Refuses updates in which some tokens take no step: which ones, a wrapper that changes every token cannot see.

    Args:
        inner: the update that is wrapped.
        done: what the wrapper would do to idle tokens.
        inside: how the wrapper is written where it goes.
    """
    for part in inner.modules():
        if isinstance(part, HaltingUpdate | RoutedUpdate):
            name = type(part).__name__
            raise ValueError(
                f"inner holds a {name}, whose idle tokens would be {done} at every step: put this inside, "
                f"{name}({inside}, ...)."
            )
