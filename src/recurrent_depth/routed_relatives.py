"""Builders of the routed designs, Mixture-of-Recursions and Mixture-of-Depths, and their routers. Assembly only."""

from collections.abc import Callable, Sequence

from recurrent_depth.arguments import check_types
from recurrent_depth.balance import BalanceLoss
from recurrent_depth.builders import UpdateFactory, assemble, plain
from recurrent_depth.capacity import falling_capacities
from recurrent_depth.depth import Layout
from recurrent_depth.factories import made
from recurrent_depth.forms import Form, GPT2Form
from recurrent_depth.model import RecurrentTransformer
from recurrent_depth.router import Router
from recurrent_depth.router_scores import LinearScores
from recurrent_depth.router_weights import RawWeight, SigmoidWeight, SoftmaxWeight
from recurrent_depth.routers import ExpertChoice, MixtureOfDepths
from recurrent_depth.routing import AddWeighted, Combination, Interpolate, RoutedUpdate
from recurrent_depth.token_choice import TokenChoice
from recurrent_depth.top_tokens import TopTokens
from recurrent_depth.update import DepthUpdate, innermost

RouterFactory = Callable[[int, int], Router]
"""Makes a router for a width and a number of steps: `expert_choice`, `token_choice`, `every_other`."""


@check_types
def expert_choice(
    dim: int,
    num_steps: int,
    *,
    capacities: Sequence[float | int] | None = None,
    alpha: float | int = 0.1,
    temperature: float | int = 1.0,
    loss: float | int = 0.001,
    z_loss: float | int = 0.0,
) -> ExpertChoice:
    """The released recipe of Mixture-of-Recursions: a linear router at each step, sigmoid weights, causal by its loss.

    Args:
        dim: the width.
        num_steps: full depth.
        capacities: the share of the tokens that takes each step; by default `1, (n - 1) / n, ..., 1 / n`.
        alpha: the largest weight.
        temperature: divides the state that is scored.
        loss: coefficient of the loss by which the router learns to tell who is taken.
        z_loss: coefficient of the mean squared score.

    Raises:
        ValueError: for capacities that rise, leave (0, 1], or are not one for each step.

    Reference: Bae et al., 2025, arXiv 2507.10524.
    """
    scores = LinearScores(dim, num_routers=num_steps, temperature=temperature)
    choose = TopTokens(scores, SigmoidWeight(alpha), loss=loss, z_loss=z_loss)
    return ExpertChoice(choose, falling_capacities(num_steps) if capacities is None else capacities)


@check_types
def token_choice(
    dim: int,
    num_steps: int,
    *,
    alpha: float | int = 1.0,
    temperature: float | int = 1.0,
    balance: float | int = 0.1,
    z_loss: float | int = 1e-5,
) -> TokenChoice:
    """The released recipe of token choice: one linear router, softmax weights, a balance loss.

    Args:
        dim: the width.
        num_steps: full depth, and how many depths there are to choose from.
        alpha: scales the weights.
        temperature: divides the state that is scored.
        balance: coefficient of the balance loss.
        z_loss: coefficient of the mean squared logsumexp of the scores.

    Reference: Bae et al., 2025, arXiv 2507.10524.
    """
    scores = LinearScores(dim, num_outputs=num_steps, temperature=temperature)
    return TokenChoice(scores, SoftmaxWeight(alpha), BalanceLoss(balance), z_loss=z_loss)


@check_types
def every_other(
    dim: int, num_steps: int, *, capacity: float | int = 0.125, every: int = 2, loss: float | int = 0.001
) -> MixtureOfDepths:
    """The router of Mixture-of-Depths: every other step takes an eighth of the tokens, weighted by their raw score.

    Args:
        dim: the width.
        num_steps: full depth.
        capacity: the share of the tokens that takes a routed step.
        every: which steps are routed; 1 for all.
        loss: coefficient of the loss by which the router learns to tell who is taken.

    Raises:
        ValueError: if `capacity` leaves (0, 1], or `every` is below 1.

    Warns:
        UserWarning: if none of `num_steps` is routed, as of one step with every other routed.

    Reference: Raposo et al., 2024, arXiv 2404.02258.
    """
    scores = LinearScores(dim, num_routers=max(1, num_steps // max(every, 1)))
    choose = TopTokens(scores, RawWeight(), loss=loss)
    return MixtureOfDepths(choose, capacity=capacity, every=every, num_steps=num_steps)


@check_types
def mor(
    layout: Layout,
    *,
    dim: int,
    num_heads: int,
    vocab_size: int,
    context_length: int,
    form: Callable[..., Form] = GPT2Form,
    router: RouterFactory = expert_choice,
    update: UpdateFactory = plain,
    combine: Callable[[], Combination] | None = None,
) -> RecurrentTransformer:
    """Mixture-of-Recursions: each token takes as many of the loop's steps as a router gives it.

    The source's preferred sharing (`middle_cycle`) is a layout such as `1+10×3+1`, the other (`cycle`) `0+12×3+0`.

    Args:
        layout: blocks before, in and behind the loop, and full depth.
        dim: the width.
        num_heads: attention heads.
        vocab_size: how many tokens there are.
        context_length: how many positions are learned (GPT-2 form).
        form: the family of blocks.
        router: makes the router for width and steps: `expert_choice`, `token_choice`, or a `functools.partial` of them.
        update: makes the update that is routed.
        combine: makes the combination of a token's result with what was there; by default the source's `AddWeighted`
            where the update's steps replace the state, and `Interpolate` where they blend it, as those of `gated` do.

    Raises:
        ValueError: for what `grt` refuses, and for capacities that rise or leave (0, 1].

    Reference: Bae et al., 2025, arXiv 2507.10524.
    """
    inner, chosen = _routed_parts(update, router, dim, layout)
    fitting = AddWeighted if innermost(inner).replaces_state else Interpolate
    chosen_combination = made("combine", Combination, fitting if combine is None else combine, example="rd.Interpolate")
    routed = RoutedUpdate(inner, chosen, chosen_combination)
    return assemble(layout, form(dim, num_heads), routed, vocab_size=vocab_size, context_length=context_length)


@check_types
def mod(
    layout: Layout,
    *,
    dim: int,
    num_heads: int,
    vocab_size: int,
    context_length: int,
    form: Callable[..., Form] = GPT2Form,
    router: RouterFactory = every_other,
    update: UpdateFactory = plain,
) -> RecurrentTransformer:
    """Mixture-of-Depths on a loop: every other step is taken by an eighth of the tokens, chosen anew each time.

    In the source blocks are not shared: there every other block is routed, here every other step of the loop.
    Arguments and errors are those of `mor`; `partial(every_other, capacity=0.25)` is another router.

    Reference: Raposo et al., 2024, arXiv 2404.02258.
    """
    routed = RoutedUpdate(*_routed_parts(update, router, dim, layout), Interpolate())
    return assemble(layout, form(dim, num_heads), routed, vocab_size=vocab_size, context_length=context_length)


def _routed_parts(update: UpdateFactory, router: RouterFactory, dim: int, layout: Layout) -> tuple[DepthUpdate, Router]:
    example = "rd.expert_choice or partial(rd.expert_choice, alpha=0.5)"
    inner = made("update", DepthUpdate, update, dim)
    return inner, made("router", Router, router, dim, layout.num_steps, example=example)
