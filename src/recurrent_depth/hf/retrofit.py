"""Retrofitted recurrence: a dense model becomes prelude, core and coda, with an adapter in front of the core."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from recurrent_depth.arguments import check_types, require_whole
from recurrent_depth.hf.dropping import drop_layers
from recurrent_depth.hf.grafting import graft, host_layers
from recurrent_depth.hf.host_layers import check_core, state_width
from recurrent_depth.injection import ConcatProjection
from recurrent_depth.kv_policy import KVStepPolicy
from recurrent_depth.start import RandomState
from recurrent_depth.update import ReplaceState

StateStart = Callable[[int], nn.Module]
"""Makes, for a width, what makes the initial state of the anchor: `random_start` and its siblings."""


def random_start(dim: int) -> nn.Module:
    """A random state in training, of variance `2 / (5 dim)`; zeros in evaluation. The source's."""
    return RandomState(math.sqrt(2 / (5 * dim)))


def zero_start(dim: int) -> nn.Module:
    """Zeros, in training too."""
    return RandomState(0.0)


def anchor_start(dim: int) -> nn.Module:
    """The prelude's output."""
    return nn.Identity()


def pass_anchor(adapter: ConcatProjection) -> None:
    """Starts an adapter as zero on the state and the identity on the anchor: every step begins as the host's pass."""
    adapter.start_at_anchor()


def draw_adapter(adapter: ConcatProjection) -> None:
    """Starts an adapter as torch starts a linear layer from 2 `dim` to `dim`, as the source's file does."""
    bound = (2 * adapter.state.in_features) ** -0.5
    for weight in adapter.parameters():
        nn.init.uniform_(weight, -bound, bound)


def adapted(dim: int, *, start: StateStart = random_start, bias: bool = False) -> ReplaceState:
    """The update of retrofitted recurrence: `h <- blocks(W [h; anchor])`, from a state that `start` makes.

    Args:
        dim: the width.
        start: `random_start`, `zero_start` or `anchor_start`, or another function of the width.
        bias: whether the adapter has a bias.

    Raises:
        ValueError: if `dim` is below 1.
    """
    return ReplaceState(ConcatProjection(require_whole("dim", dim, at_least=1), bias=bias), start=start(dim))


@check_types
def retrofit(
    model: nn.Module,
    core: Sequence[int],
    num_steps: int,
    *,
    drop: Sequence[int] = (),
    start: StateStart = random_start,
    adapter_start: Callable[[ConcatProjection], None] = pass_anchor,
    bias: bool = False,
    host_first: bool = False,
    kv: KVStepPolicy | None = None,
    layers: nn.ModuleList | str | None = None,
    dim: int | None = None,
) -> Any:
    """Turns a dense model into a recurrent one by the recipe of retrofitting, in place; returns the same object.

    The layers before the core are the prelude, those behind it the coda; dropped ones are gone, see `drop_layers`. At
    every step an adapter joins state and prelude's output into what the core sees, and the core's output is the new
    state. While the adapter passes the prelude's output, which is how it starts, every depth is the host without the
    dropped layers. Train it by `rd.retrofit_curriculum`.

    Args:
        model: a decoder of transformers.
        core: the layers of the core, in a row, counted in the host as it is.
        num_steps: how often the core runs where a call says nothing else.
        drop: layers that are taken out, counted in the host as it is.
        start: makes the initial state.
        adapter_start: how the adapter starts: `pass_anchor`, or `draw_adapter` as in the source's file.
        bias: whether the adapter has a bias.
        host_first: the first step has no adapter, so that one step always is the host without the dropped layers.
        kv: what a cache stores of the steps; `rd.KeepAll()` by default.
        layers: where the layers are, or the path to there, if they are not found.
        dim: the width of the hidden state, if it is not found.

    Raises:
        ValueError: as `graft` and `drop_layers`.

    Reference: McLeish et al., 2025, arXiv 2511.07384.
    """
    found = host_layers(model, layers)
    first, end = check_core(core, drop, len(found))
    require_whole("num_steps", num_steps, at_least=1)
    width = state_width(model, found[first], dim)
    drop_layers(model, drop, layers=found)
    before = sum(place < first for place in drop)
    update = partial(adapted, start=start, bias=bias)
    shifted = range(first - before, end - before)
    made = graft(model, shifted, num_steps, update=update, kv=kv, layers=found, host_first=host_first, dim=width)
    adapter_start(next(part for part in made.recurrence.modules() if isinstance(part, ConcatProjection)))
    return made
