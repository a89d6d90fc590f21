"""Leaving the loop early: the interface, the law of leaving, and the rules that look at no convergence."""

import abc
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from recurrent_depth.arguments import require_instance, require_number, require_whole
from recurrent_depth.contracts import Tree
from recurrent_depth.numerics import at_least_float32
from recurrent_depth.optional import module_or_identity
from recurrent_depth.update import DepthState

Hazard = Float[Tensor, "batch token"]
"""The chance of each token to leave after a step, given that it is still there; float32 or finer."""

Readout = Callable[[DepthState], Float[Tensor, "batch token vocab"]]
"""Makes the next-token logits of a state; runs coda, final norm and head for every token that it is given."""


class ExitRule(nn.Module, abc.ABC):
    """Decides after each step whether a token has been thought about enough."""

    _quantile: float = 0.5

    @property
    def quantile(self) -> float:
        """A token leaves after the first step at which its chance to have left reaches this; it may be set at any time.

        For rules whose hazards are 0 or 1 every value in (0, 1] says the same; others are refused with a ValueError.
        """
        return self._quantile

    @quantile.setter
    def quantile(self, quantile: float | int) -> None:
        self._quantile = require_number("quantile", quantile, above=0, at_most=1)

    @abc.abstractmethod
    def hazard(self, carry: Tree, state: DepthState, readout: Readout, step: int) -> tuple[Tree, Hazard]:
        """What the rule carries to the next step, and the chance to leave after this one, given not having left.

        Args:
            carry: what the rule carried here; None at the first step. Its leaves lead with (batch, token), so that the
                caller can gather the rows that stay.
            state: the state after this step.
            readout: makes the logits of a state, at the price of coda and head for every token.
            step: the number of this step, from 0.
        """


def ask(rule: ExitRule, carry: Tree, state: DepthState, readout: Readout, step: int) -> tuple[Tree, Hazard]:
    """What a rule carries to the next step, and its hazard; one of another shape would let tokens decide for others.

    Raises:
        ValueError: if it gives something else, or, where values are looked at (on CPU), chances outside of 0 to 1.
    """
    answer, wanted = rule.hazard(carry, state, readout, step), tuple(state.h.shape[:2])
    if not (isinstance(answer, tuple) and len(answer) == 2):
        got = f"{type(answer).__name__} in place of (carry, hazard)"
    elif not isinstance(hazard := answer[1], Tensor):
        got = type(hazard).__name__
    elif hazard.shape != wanted or not hazard.is_floating_point():
        got = f"{tuple(hazard.shape)} of {hazard.dtype}"
    elif (bounds := _outside(hazard)) is not None:
        got = f"chances from {bounds[0]:.3g} to {bounds[1]:.3g}, which must lie in 0 to 1"
    else:
        return answer
    raise ValueError(
        f"hazard of {type(rule).__name__} must return what it carries and a floating tensor {wanted}, one chance per "
        f"token; got {got}."
    )


def _outside(hazard: Tensor) -> tuple[float, float] | None:
    """The lowest and the highest chance, where they are looked at and one of them is none."""
    if hazard.numel() == 0 or hazard.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    low, high = (float(bound) for bound in hazard.detach().aminmax())
    return (low, high) if low < 0 or high > 1 else None


def leaving(survival: Hazard, hazard: Hazard, quantile: float) -> tuple[Hazard, Bool[Tensor, "batch token"]]:
    """The chance not to have left after this step, and whether the chance to have left reaches `quantile`.

    Args:
        survival: the chance not to have left before this step; ones before the first.
        hazard: the chance to leave after this step, given not having left.
        quantile: above 0 and at most 1; `ExitRule.quantile`.

    Reference: "Q-exit" of Ouro, Zhu et al., 2025, arXiv 2510.25741.
    """
    survival = survival * (1 - hazard)
    # The second half is for quantiles that round to 0 in float32: a hazard of 0 never lets a token go.
    return survival, (1 - survival >= quantile) & (survival < 1)


def exit_law(hazards: Float[Tensor, "step batch token"]) -> Float[Tensor, "step batch token"]:
    """The chance of each token to leave after each step: `p_t = lambda_t * prod_{j<t} (1 - lambda_j)`, in float32.

    The last hazard is taken as 1, whatever it is: who has not left by then leaves there. So the chances of hazards
    between 0 and 1 sum to 1 by construction, and none is negative. Differentiable in all hazards but the last.

    Raises:
        ValueError: if there is no step.

    Reference: Ouro, Zhu et al., 2025, arXiv 2510.25741.
    """
    if hazards.shape[0] == 0:
        raise ValueError(f"hazards must hold at least one step, got shape {tuple(hazards.shape)}.")
    hazards = at_least_float32(hazards)
    survival, law = torch.ones_like(hazards[0]), []
    for hazard in hazards[:-1]:
        law.append(hazard * survival)
        survival = survival * (1 - hazard)
    return torch.stack([*law, survival])


class ExitAfter(ExitRule):
    """Every token leaves after `num_steps` steps.

    What it costs: nothing.

    Raises:
        ValueError: if `num_steps` is below 1.
    """

    def __init__(self, num_steps: int):
        super().__init__()
        self.num_steps = require_whole("num_steps", num_steps, at_least=1)

    def hazard(self, carry: Tree, state: DepthState, readout: Readout, step: int) -> tuple[Tree, Hazard]:
        return carry, at_least_float32(torch.full_like(state.write, float(step + 1 >= self.num_steps)))


class AtLeast(ExitRule):
    """Another rule, of which no token leaves before it has taken `num_steps` steps.

    The rule sees the earlier steps too, so that it knows what to compare with, or how long a token has been stable.

    What it costs: what the rule costs, at the early steps too.

    Raises:
        ValueError: if `num_steps` is below 1.
    """

    def __init__(self, num_steps: int, rule: ExitRule):
        super().__init__()
        self.num_steps = require_whole("num_steps", num_steps, at_least=1)
        require_instance("rule", rule, ExitRule)
        self.rule = rule

    @property
    def quantile(self) -> float:
        """The rule's."""
        return self.rule.quantile

    @quantile.setter
    def quantile(self, quantile: float | int) -> None:
        self.rule.quantile = quantile

    def hazard(self, carry: Tree, state: DepthState, readout: Readout, step: int) -> tuple[Tree, Hazard]:
        carry, hazard = ask(self.rule, carry, state, readout, step)
        return carry, hazard if step + 1 >= self.num_steps else torch.zeros_like(hazard)


class LearnedExit(ExitRule):
    """A linear unit on the state says how likely a token is to leave: `lambda_t = sigmoid(w . h_t + b)`.

    Product and sigmoid are float32 whatever the dtype of the model. A token leaves after the first step at which
    `1 - prod_{j<=t} (1 - lambda_j)` reaches `quantile`: the lower, the earlier.

    As it starts it is about as likely as not to leave after each step, so that a token takes one step or two, and a
    training that follows its choices may never see more. A bias of -3 starts deep: by the default quantile a token
    leaves after 15 steps.

    What it costs: `2 * dim` FLOPs per token and step, which the accountant leaves out. No coda and no head.

    Args:
        dim: the width.
        quantile: the chance to have left at which a token leaves.
        bias: where `b` starts; a parameter of this module rather than of the linear layer, so that a host's rule for
            linear layers cannot reset it to zero.
        norm: what is applied to the state before; nothing by default. The source reads the state behind the final norm:
            `rd.Borrowed(model.norm)`, which stays the model's.

    Raises:
        ValueError: if `dim` is below 1, `quantile` not above 0 and at most 1, or `bias` no finite number; at a step, if
            the state has another width.

    Reference: Ouro, Zhu et al., 2025, arXiv 2510.25741.
    """

    def __init__(
        self, dim: int, *, quantile: float | int = 0.5, bias: float | int = 0.0, norm: nn.Module | None = None
    ):
        super().__init__()
        self.quantile = quantile
        self.initial_bias = require_number("bias", bias)
        self.linear = nn.Linear(require_whole("dim", dim, at_least=1), 1, bias=False)
        self.bias = nn.Parameter(torch.full((1,), self.initial_bias))
        self.norm = module_or_identity("norm", norm, "rd.Borrowed(model.norm)")

    def reset_parameters(self) -> None:
        """Sets the bias to where it starts."""
        nn.init.constant_(self.bias, self.initial_bias)

    def hazard(self, carry: Tree, state: DepthState, readout: Readout, step: int) -> tuple[Tree, Hazard]:
        x = self.norm(state.h)
        if x.shape[-1] != self.linear.in_features:
            raise ValueError(f"The state is {x.shape[-1]} wide, but the exit was built for {self.linear.in_features}.")
        # A sum of products, since autocast would make a matrix product of them, in bfloat16.
        products = at_least_float32(x) * at_least_float32(self.linear.weight)
        return carry, torch.sigmoid(products.sum(-1) + at_least_float32(self.bias))
