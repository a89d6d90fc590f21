"""A pretrained model made recursive: its layers share weights, and low-rank corrections make up for the rest."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from recurrent_depth.arguments import check_types, require_whole
from recurrent_depth.builders import plain
from recurrent_depth.core import RecurrentCore
from recurrent_depth.dense_start import TiedStart, average_start
from recurrent_depth.hf.alike import check_alike
from recurrent_depth.hf.grafting import host_layers, plant
from recurrent_depth.hf.host_layers import check_core
from recurrent_depth.hf.recurrence import Place, Recurrence
from recurrent_depth.hf.tied_layers import TiedLayers, TiedStack
from recurrent_depth.kv_policy import KeepAll


@check_types
def recurse(
    model: nn.Module,
    core: Sequence[int] | None = None,
    num_steps: int = 2,
    *,
    rank: int,
    start: TiedStart = average_start,
    skip_first: bool = False,
    vectors: bool = True,
    layers: nn.ModuleList | str | None = None,
) -> Any:
    """Turns n layers into n / `num_steps` tied ones that run `num_steps` times, in place; returns the same object.

    Layer k of step r stands for layer `first + r n / num_steps + k` of the host: it is called with what the host calls
    that one with, and has its place in a cache. Its corrections are the truncated singular value decomposition of what
    the tied weights lack, at scale 1: at full rank the model computes what it did, up to rounding. All of its weights
    are then trained further, not the corrections alone.

    The tied layers keep the names of the first ones, the others' parameters are gone, the corrections are
    `recurrence.*`. `num_steps` in `forward` and `generate` takes fewer steps.

    Args:
        model: a decoder or encoder of transformers.
        core: the layers, in a row; all by default. A first and a last one that are to share nothing are left out.
        num_steps: how many steps they are divided into.
        rank: of the corrections, cut to that of each matrix; 0 for none.
        start: makes the tied layers, such as `rd.average_start`, `rd.stepwise_start` or `rd.lower_start`.
        skip_first: the first step runs the bare tied weights.
        vectors: norms and biases get an offset per step, without which a model is not met at any rank. The source
            shares them: False.
        layers: where the layers are, or the path to there, if they are not found.

    Raises:
        ValueError: if the layers are not found or grafted already, `core` does not fit them or is no multiple of
            `num_steps`, the layers that would share weights are not alike (other sizes, other kinds of attention), or
            have weights that a low-rank correction cannot reach, such as fused experts.

    Reference: Bae et al., 2024, arXiv 2410.20672.
    """
    found = host_layers(model, layers)
    first, end = check_core(range(len(found)) if core is None else core, (), len(found))
    chosen = list(found[first:end])
    num_tied = _num_tied(len(chosen), num_steps)
    check_alike(chosen, num_tied, first, rank=require_whole("rank", rank, at_least=0))
    before = copy.deepcopy(chosen[:num_tied])
    groups = [TiedLayers(before), *_groups(chosen, num_tied)[1:]]
    _copy_weights(start(chosen, num_tied), chosen[:num_tied])
    stack = TiedStack(chosen[:num_tied], num_steps, rank, skip_first=skip_first, vectors=vectors)
    stack.corrections.fit(stack.tied, groups)
    return tie(model, found, first, end, stack, settings={"rank": rank, "skip_first": skip_first, "vectors": vectors})


def tie(
    model: nn.Module, layers: nn.ModuleList, first: int, end: int, stack: TiedStack, settings: dict[str, Any]
) -> Any:
    """Makes the layers' host run a stack of its first ones instead of them all; the others' weights are let go."""
    num_steps = stack.corrections.num_steps
    place = Place(first, end - first, len(layers))
    recurrence = Recurrence(RecurrentCore(stack, plain(1)), KeepAll(), place, num_steps, tied=stack.num_tied)
    settings = {"core": [first, end], "num_steps": num_steps, "tied": stack.num_tied} | settings
    plant(model, layers, recurrence, drop=(), settings=settings)
    for layer in layers[first + stack.num_tied : end]:
        for held in (layer._parameters, layer._buffers, layer._modules):
            held.clear()
    return model


def _num_tied(num_layers: int, num_steps: int) -> int:
    num_tied, rest = divmod(num_layers, require_whole("num_steps", num_steps, at_least=1))
    if rest or num_tied == 0:
        raise ValueError(f"num_steps is {num_steps}, but must divide the number of layers in core, {num_layers}.")
    return num_tied


def _groups(layers: Sequence[nn.Module], num_tied: int) -> list[TiedLayers]:
    return [TiedLayers(layers[at : at + num_tied]) for at in range(0, len(layers), num_tied)]


@torch.no_grad()
def _copy_weights(tied: Sequence[nn.Module], layers: Sequence[nn.Module]) -> None:
    for source, layer in zip(tied, layers, strict=True):
        weights = dict(source.named_parameters())
        for name, weight in layer.named_parameters():
            weight.copy_(weights[name])
