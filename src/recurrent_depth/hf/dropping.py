"""Layers taken out of a host for good: out of its list, its configuration and its numbers."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from recurrent_depth.hf.alike import difference, settings
from recurrent_depth.hf.grafting import host_layers
from recurrent_depth.hf.host_layers import check_core, find_layers, sequence, text_config


def drop_layers(model: Any, drop: Sequence[int], *, layers: nn.ModuleList | str | None = None) -> Any:
    """Takes layers out of a model, in place, and returns the same object.

    The model is then an ordinary one with fewer layers: the others count anew, the configuration says how many there
    are and, where it tells layers apart, of which kind each is, and a cache has as many. So it saves and loads as
    such. What the dropped layers weighed is free again.

    Args:
        model: a model of transformers, or a module with a list of layers.
        drop: the layers, counted from 0.
        layers: where the layers are, or the path to there, if they are not found.

    Raises:
        ValueError: if the layers are not found, `drop` does not fit them or leaves none, or the configuration cannot
            say what is left.
    """
    found = host_layers(model, layers)
    kept = [place for place in range(len(found)) if place not in sequence("drop", drop)]
    if not kept:
        raise ValueError(f"drop is {drop!r}, all layers that there are, but one at least must stay.")
    check_core(kept[:1], drop, len(found))
    if len(kept) == len(found):
        return model
    if hasattr(model, "config"):
        changes = _changes(text_config(model), len(found), kept)
        _renumber(found, kept, like=_planned(model, changes, len(kept)))
        for name, value in changes.items():
            setattr(text_config(model), name, value)
    left = [found[place] for place in kept]
    found._modules.clear()
    found.extend(left)
    return model


def _changes(config: Any, num_layers: int, kept: Sequence[int]) -> dict[str, Any]:
    """What the configuration says otherwise: lists with an entry for each layer, and how many there are."""
    lists = {name: value for name, value in vars(config).items() if isinstance(value, list | tuple)}
    changes = {name: [value[place] for place in kept] for name, value in lists.items() if len(value) == num_layers}
    return changes | {"num_hidden_layers": len(kept)}


def _planned(model: Any, changes: dict[str, Any], num_layers: int) -> nn.ModuleList:
    """The layers of the model that the changed configuration describes, on the meta device."""
    try:
        config = copy.deepcopy(model.config)
        for name, value in changes.items():
            setattr(config.get_text_config(), name, value)
        with torch.device("meta"):
            return find_layers(type(model)(type(config).from_dict(config.to_dict())), None)
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        raise ValueError(
            f"The configuration of {type(model).__name__} cannot say what {num_layers} layers are left: {error}."
        ) from error


def _renumber(layers: nn.ModuleList, kept: Sequence[int], like: nn.ModuleList) -> None:
    """Gives the layers that stay the numbers that they have in a model without the others."""
    for place, old in enumerate(kept):
        differs = difference(layers[old], like[place], old, place)
        if differs is not None:
            raise ValueError(
                f"Without the dropped layers, layer {old} would be layer {place}, but the configuration gives that one "
                f"another {differs}: drop others."
            )
    for place, old in enumerate(kept):
        planned = dict(like[place].named_modules())
        for path, part in layers[old].named_modules():
            vars(part).update({name: its for name, its in settings(planned[path]).items() if its != vars(part)[name]})
