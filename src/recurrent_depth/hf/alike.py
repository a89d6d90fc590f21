"""Whether layers of a host can share weights: of one form, told apart by nothing but weights and their place."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from recurrent_depth.hf.tied_layers import host_matrix

PLAIN = (bool, int, float, str, tuple, type(None))


def check_alike(layers: Sequence[nn.Module], num_tied: int, first: int, *, rank: int) -> None:
    """Refuses layers that differ from those whose weights they would share in more than their weights.

    Args:
        layers: those of the core.
        num_tied: how many of them are kept; layer i shares with layer `i % num_tied`.
        first: where they start in the host.
        rank: of the corrections.

    Raises:
        ValueError: names the two layers and what is not the same in them.
    """
    for index, layer in enumerate(layers):
        kept = index % num_tied
        differs = difference(layers[kept], layer, first + kept, first + index)
        if differs is not None:
            raise ValueError(
                f"Layers {first + kept} and {first + index} would share weights, but they differ in {differs}. "
                "Choose core and num_steps so that layers of one kind meet."
            )
        if rank > 0:
            _check_reached(layer, first + index)
        if _scales_by_place(layer):
            raise ValueError(
                "The host scales attention by the number of each layer (scale_attn_by_inverse_layer_idx), so its "
                "layers cannot stand for one another."
            )


def difference(one: nn.Module, other: nn.Module, place: int, other_place: int) -> str | None:
    """The first thing beside weights in which layers differ; numbers that say their places may."""
    ours, theirs = dict(one.named_modules()), dict(other.named_modules())
    if [type(part) for part in ours.values()] != [type(part) for part in theirs.values()] or [*ours] != [*theirs]:
        return f"the modules that they consist of ({type(one).__name__}, {type(other).__name__})"
    for path, part in ours.items():
        mine, its = settings(part), settings(theirs[path])
        for name in mine.keys() | its.keys():
            told = mine.get(name), its.get(name)
            if told[0] != told[1] and told != (place, other_place):
                return f"{f'{path}.{name}'.lstrip('.')} ({told[0]!r}, {told[1]!r})"
    return _tensor_difference(one, other)


def settings(part: nn.Module) -> dict[str, Any]:
    """The plain values that a module keeps, but for its mode and what is private."""
    public = {name: value for name, value in vars(part).items() if not name.startswith("_") and name != "training"}
    return {name: value for name, value in public.items() if isinstance(value, PLAIN)}


def _tensor_difference(one: nn.Module, other: nn.Module) -> str | None:
    theirs = dict(other.named_parameters())
    for name, weight in one.named_parameters():
        if name not in theirs or theirs[name].shape != weight.shape:
            return f"the shape of {name}"
    held = dict(other.named_buffers())
    for name, buffer in one.named_buffers():
        if name not in held or not (held[name].is_meta or torch.equal(held[name], buffer)):
            return name
    return None


def _check_reached(layer: nn.Module, place: int) -> None:
    reached = {f"{path}.weight" for path, part in layer.named_modules() if host_matrix(part) is not None}
    lost = [name for name, weight in layer.named_parameters() if weight.ndim != 1 and name not in reached]
    if lost:
        raise ValueError(
            f"Layer {place} has weights that no correction per step can reach: {', '.join(lost)}. Only linear layers "
            "and vectors are corrected. With rank=0 the layers are tied without corrections."
        )


def _scales_by_place(layer: nn.Module) -> bool:
    return any(vars(part).get("scale_attn_by_inverse_layer_idx") for part in layer.modules())
