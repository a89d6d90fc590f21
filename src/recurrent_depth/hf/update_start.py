"""How the update of a graft is made, and how it starts."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from recurrent_depth.arguments import require_instance
from recurrent_depth.builders import gated
from recurrent_depth.factories import called
from recurrent_depth.initialisation import start_weights
from recurrent_depth.injection import Injection
from recurrent_depth.update import DepthUpdate
from recurrent_depth.update_answers import cost_of


def half_open(factory: Any) -> Any:
    """The factory, where each `rd.gated` in it that is given no bias gets that of a graft, 0 in place of the paper's 4.

    Found is `rd.gated` itself, a `functools.partial` of it, and what a `functools.partial` gives to another factory.
    """
    if not isinstance(factory, partial):
        return partial(gated, bias=0.0) if factory is gated else factory
    given = {name: half_open(value) for name, value in factory.keywords.items()}
    start = {"bias": 0.0} if factory.func is gated else {}
    return partial(factory.func, *factory.args, **start | given)


def make_update(factory: Callable[[int], DepthUpdate], dim: int, *, like: nn.Module) -> DepthUpdate:
    """The update for a width, on a layer's device and in its dtype, started for a graft.

    Raises:
        ValueError: if the factory gives none, or one that picks tokens.
    """
    if isinstance(factory, nn.Module) or not callable(factory):
        said = type(factory).__name__
        raise ValueError(f"update must make an update for a width, such as rd.gated; got {said}, which is no function.")
    update = called("update", factory, dim, example="rd.gated or partial(rd.gated, bias=0.0)")
    require_instance("What update makes", update, DepthUpdate)
    if cost_of(update, 1).selects:
        raise ValueError(
            f"{type(update).__name__} picks tokens, but a host's layers cannot run on some tokens alone: their masks, "
            "positions and caches are made for all. Choose an update in which every token takes every step."
        )
    start_weights(update)
    start_as_host(update)
    weights = [x for x in like.parameters() if x.is_floating_point()]
    return update.to(weights[0].device, weights[0].dtype) if weights else update


def start_as_host(update: nn.Module) -> None:
    """Starts all injections of an update where the blocks see the anchor alone, as far as they can."""
    for part in update.modules():
        if isinstance(part, Injection):
            part.start_at_anchor()
