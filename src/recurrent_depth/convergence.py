"""Exit rules that stop a token which has stopped changing: by the gate, the state, or what the model says."""

import warnings
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from recurrent_depth.arguments import require_number, require_whole
from recurrent_depth.contracts import Tree
from recurrent_depth.exits import ExitRule, Hazard, Readout
from recurrent_depth.numerics import at_least_float32
from recurrent_depth.router import Router
from recurrent_depth.update import DepthState, DepthUpdate, innermost


class GateClosed(ExitRule):
    """A token leaves once the gate has written next to nothing: `state.write`, the mean of `1 - g`, is below `below`.

    Where an update replaces the state it writes all of it, so there no token ever leaves early. A gate that is as it
    starts, with its bias of 4, writes 0.018 at each step: an untrained model leaves after its first.

    What it costs: nothing. The gate has said it already.

    Args:
        below: the share of a step's result that is next to nothing. The default keeps steps that write more than a
            gate does as it starts; it is this library's own, and one to tune.

    Raises:
        ValueError: if `below` is not above 0 and at most 1.
    """

    def __init__(self, below: float | int = 0.02):
        super().__init__()
        self.below = require_number("below", below, above=0, at_most=1)

    def hazard(self, carry: Tree, state: DepthState, readout: Readout, step: int) -> tuple[Tree, Hazard]:
        return carry, _certain(at_least_float32(state.write) < self.below)


class LatentConverged(ExitRule):
    """A token leaves once a step moves its state by a small part: `||h_t - h_{t-1}|| / ||h_t||` is below `below`.

    No token leaves after the first step, which has nothing to be compared with: the rule never sees the initial state,
    which is what the source compares with there.

    What it costs: two norms per token and step, and one more state in memory. Nothing that the accountant counts: no
    coda and no head.

    Args:
        below: the part, as a share of the state's norm; the default is the source's ("latent-diff").

    Raises:
        ValueError: if `below` is not above 0.

    Reference: Geiping et al., 2025, arXiv 2502.05171.
    """

    def __init__(self, below: float | int = 0.03):
        super().__init__()
        self.below = require_number("below", below, above=0)

    def hazard(self, carry: Tree, state: DepthState, readout: Readout, step: int) -> tuple[Tree, Hazard]:
        if carry is None:
            return state.h, _never(state)
        h, before = at_least_float32(state.h), at_least_float32(carry)
        return state.h, _certain((h - before).norm(dim=-1) < self.below * h.norm(dim=-1))


class KLConverged(ExitRule):
    """A token leaves once what it predicts hardly changes: `KL(previous || current)`, in nats, is below `below`.

    Both are next-token distributions, in float32. No token leaves after the first step, which has nothing to be
    compared with. The source compares it with the uniform distribution, which a trained model is never near; a model
    that is would leave for having thought nothing yet.

    What it costs: coda and head for every token that is still there, at every step: `coda + head` of
    `accounting.flops_breakdown` for each step, where a forward without the rule pays them once. And a distribution over
    the vocabulary for each token in memory.

    Args:
        below: nats; the default is that of the source's headline, whose code also has 1e-3.

    Raises:
        ValueError: if `below` is not above 0.

    Reference: Geiping et al., 2025, arXiv 2502.05171.
    """

    def __init__(self, below: float | int = 5e-4):
        super().__init__()
        self.below = require_number("below", below, above=0)

    def hazard(self, carry: Tree, state: DepthState, readout: Readout, step: int) -> tuple[Tree, Hazard]:
        current = F.log_softmax(at_least_float32(readout(state)), dim=-1)
        if carry is None:
            return current, _never(state)
        return current, _certain(divergence(carry, current) < self.below)


class Stability(NamedTuple):
    """What `ArgmaxStable` carries: the likeliest token, and how often in a row it was that of the step before."""

    argmax: Int[Tensor, "batch token"]
    times: Int[Tensor, "batch token"]


class ArgmaxStable(ExitRule):
    """A token leaves once its likeliest next token has stayed the same over `times` steps in a row.

    The first step has nothing to be compared with, so no token leaves before `times + 1` steps.

    What it costs: coda and head for every token that is still there, at every step: `coda + head` of
    `accounting.flops_breakdown` for each step, where a forward without the rule pays them once.

    Args:
        times: how often in a row it must equal that of the step before; the default is the source's.

    Raises:
        ValueError: if `times` is below 1.

    Reference: Geiping et al., 2025, arXiv 2502.05171 ("argmax-stability").
    """

    def __init__(self, times: int = 5):
        super().__init__()
        self.times = require_whole("times", times, at_least=1)

    def hazard(self, carry: Stability | None, state: DepthState, readout: Readout, step: int) -> tuple[Tree, Hazard]:
        argmax = readout(state).argmax(-1)
        times = torch.zeros_like(argmax)
        if carry is not None:
            times = torch.where(argmax == carry.argmax, carry.times + 1, times)
        return Stability(argmax, times), _certain(times >= self.times)


CONVERGED = (LatentConverged, KLConverged, ArgmaxStable)
"""Rules that compare a token with what it was a step before."""


def warn_if_misread(rule: ExitRule, update: DepthUpdate, *, stacklevel: int) -> None:
    """Warns of a rule that reads what the update does not say.

    The gate, where the innermost update has none; convergence, where tokens rest in one step and go on in the next.
    """
    if innermost(update).replaces_state and any(isinstance(part, GateClosed) for part in rule.modules()):
        warnings.warn(
            "exit is GateClosed, but this model has no gate: each step replaces the state, so that no token ever "
            "leaves early. Take LatentConverged(), KLConverged() or a LearnedExit, or a model of update=rd.gated.",
            stacklevel=stacklevel + 1,
        )
    converged = [type(part).__name__ for part in rule.modules() if isinstance(part, CONVERGED)]
    if converged and any(isinstance(part, Router) and part.skips for part in update.modules()):
        warnings.warn(
            f"exit is {converged[0]}, but this model's router leaves tokens out of a step that later ones move again: "
            "at rest they look converged, and leave. Take ExitAfter(num_steps) or a LearnedExit, or another router.",
            stacklevel=stacklevel + 1,
        )


def divergence(
    of: Float[Tensor, "batch token vocab"], against: Float[Tensor, "batch token vocab"]
) -> Float[Tensor, "batch token"]:
    """`KL(of || against)` of two distributions given by their logarithms, in nats."""
    chance = of.exp()
    # Tokens that both rule out say nothing, though their logarithms differ by infinity minus infinity.
    return torch.where(chance == 0, 0.0, chance * (of - against)).sum(-1)


def _never(state: DepthState) -> Hazard:
    return torch.zeros_like(state.write, dtype=torch.float32)


def _certain(leaves: Bool[Tensor, "batch token"]) -> Hazard:
    return leaves.float()
