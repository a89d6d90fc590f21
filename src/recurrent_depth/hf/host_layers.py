"""Where a host keeps its layers, and how wide its hidden state is."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from recurrent_depth.arguments import require_whole

HINT = "Give the list itself or its path, such as layers='model.layers'."


def find_layers(model: nn.Module, given: nn.ModuleList | str | None) -> nn.ModuleList:
    """The list of a host's layers: the given one, or the one that is as long as the configuration says.

    Raises:
        ValueError: if there is none, or more than one; says what was looked for.
    """
    if given is None:
        return model if isinstance(model, nn.ModuleList) else _found(model)
    name = type(model).__name__
    try:
        layers = model.get_submodule(given) if isinstance(given, str) else given
    except AttributeError:
        raise ValueError(f"layers is {given!r}, but {name} has no such part. {_listed(_lists(model))}") from None
    if not isinstance(layers, nn.ModuleList) or all(layers is not part for part in model.modules()):
        raise ValueError(
            f"layers must be an nn.ModuleList of {name}, got {type(layers).__name__}. {_listed(_lists(model))}"
        )
    return layers


def _found(model: nn.Module) -> nn.ModuleList:
    config = text_config(model)
    wanted = getattr(config, "num_hidden_layers", None)
    lists = _lists(model)
    fitting = [layers for layers in lists.values() if wanted is None or len(layers) == wanted]
    if wanted is None:
        longest = max(map(len, fitting), default=0)
        fitting = [layers for layers in fitting if len(layers) == longest]
    if len(fitting) == 1:
        return fitting[0]
    size = "the longest list" if wanted is None else f"a list of num_hidden_layers={wanted}"
    raise ValueError(
        f"{len(fitting) or 'None'} of the lists of layers of {type(model).__name__} fits what was looked for: {size} "
        f"modules of one class. {_listed(lists)} {HINT}"
    )


def _lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Lists of modules of one class by their paths, those within another list left out."""
    found: dict[str, nn.ModuleList] = {}
    for path, part in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if isinstance(part, nn.ModuleList) and len({type(layer) for layer in part}) == 1 and not inside:
            found[path] = part
    return found


def _listed(lists: dict[str, nn.ModuleList]) -> str:
    if not lists:
        return "There is no nn.ModuleList of modules of one class."
    said = [f"{path!r} ({len(layers)} {type(layers[0]).__name__})" for path, layers in lists.items()]
    return f"There are {', '.join(said)}."


def text_config(model: nn.Module) -> Any:
    """The configuration of the language model where there are several; None without one."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if callable(getattr(config, "get_text_config", None)) else config


def state_width(model: nn.Module, layer: nn.Module, given: int | None) -> int:
    """The width of the hidden state: that given, of the configuration, or of the first norm inside of a layer.

    Raises:
        ValueError: if it is not found.
    """
    if given is not None:
        return require_whole("dim", given, at_least=1)
    known = getattr(text_config(model), "hidden_size", None) or _norm_width(layer)
    if known is None:
        raise ValueError(
            f"How wide the hidden state of {type(model).__name__} is stands neither in config.hidden_size nor in a "
            f"norm of {type(layer).__name__}: give dim."
        )
    return known


def _norm_width(layer: nn.Module) -> int | None:
    norms = [part for part in layer.modules() if isinstance(part, nn.LayerNorm | nn.RMSNorm)]
    return norms[0].normalized_shape[-1] if norms else None


def check_core(core: Sequence[int], drop: Sequence[int], num_layers: int) -> tuple[int, int]:
    """The core as its first layer and the one behind its last.

    Raises:
        ValueError: if it is empty, has gaps, runs backwards or out of the model, or overlaps with `drop`.
    """
    layers = [require_whole("core", layer) for layer in sequence("core", core)]
    there = f"the model has {num_layers} layers, 0 to {num_layers - 1}"
    if not layers:
        raise ValueError(f"core is {core!r}, which is empty, but a loop needs at least one layer; {there}.")
    if layers != list(range(layers[0], layers[0] + len(layers))):
        raise ValueError(f"core is {core!r}, but must be layers in a row, such as range(2, 6); {there}.")
    if layers[0] < 0 or layers[-1] >= num_layers:
        raise ValueError(f"core is {core!r}, but {there}.")
    dropped = [require_whole("drop", layer) for layer in sequence("drop", drop)]
    if len(set(dropped)) < len(dropped) or not all(0 <= layer < num_layers for layer in dropped):
        raise ValueError(f"drop is {drop!r}, but must name layers once each; {there}.")
    if set(dropped) & set(layers):
        raise ValueError(f"drop is {drop!r} and overlaps with core, {core!r}.")
    return layers[0], layers[-1] + 1


def sequence(name: str, value: object) -> Sequence[Any]:
    """The value, if it lists layers.

    Raises:
        ValueError: if it does not.
    """
    if isinstance(value, range | list | tuple):
        return value
    raise ValueError(f"{name} is {value!r}, but must be a range or a list of layers, such as range(2, 6).")
