"""Grafts from folders: `load_graft`."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from recurrent_depth.builders import UpdateFactory
from recurrent_depth.hf.description import factory_of
from recurrent_depth.hf.grafting import graft
from recurrent_depth.hf.host_layers import find_layers
from recurrent_depth.hf.recursive import tie
from recurrent_depth.hf.saving import CONFIG, unsealed
from recurrent_depth.hf.tied_layers import TiedStack
from recurrent_depth.hf.weight_files import read_tensors
from recurrent_depth.kv_policy import KVStepPolicy

OURS = "recurrence."


def load_graft(
    folder: str | Path,
    *,
    update: UpdateFactory | None = None,
    kv: KVStepPolicy | None = None,
    model_class: type[nn.Module] | None = None,
    **arguments: Any,
) -> Any:
    """The graft that `save_pretrained`, or a Trainer, wrote to a folder: host, loop, weights, and how they were set.

    It is bit for bit the one that was saved, unless another `dtype` is asked for; "auto" is the saved one. Also for
    grafts by `retrofit` and `recurse`.

    Args:
        folder: a local one.
        update: the function that made the update, where it is not one of this library.
        kv: a policy for the cache, where it is not one of this library.
        model_class: the host's class, where transformers does not have it under the name that it was saved by.
        arguments: for the host's `from_pretrained`, such as `dtype` and `device_map`.

    Raises:
        ValueError: if the folder holds no graft, or weights are missing, or the graft was made with functions that are
            not of this library and were not given.
    """
    path = Path(folder)
    said = _configuration(path)
    settings = said["recurrence"]
    cls: Any = model_class or _host_class(said)
    config = cls.config_class.from_dict(unsealed(said))
    model = _host(cls, path, config, settings, arguments)
    with torch.random.fork_rng(devices=[]):  # weights are drawn, and replaced by those of the folder
        _plant(model, settings, update, kv)
    _fill(model, read_tensors(path, lambda name: name.startswith(OURS)), keep_dtype=not _other_dtype(arguments))
    return model


def _other_dtype(arguments: dict[str, Any]) -> bool:
    """Whether `from_pretrained` is asked for a dtype that need not be the saved one, also under its older name."""
    asked = next((arguments[name] for name in ("dtype", "torch_dtype") if arguments.get(name) is not None), "auto")
    return asked != "auto"


def _configuration(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG).exists():
        raise ValueError(f"{folder} is no folder of a saved model: there is no {CONFIG} in it.")
    said = json.loads((folder / CONFIG).read_text())
    if "recurrence" not in said:
        raise ValueError(f"{folder} holds a model without a grafted loop: load it by from_pretrained.")
    return said


def _host_class(said: dict[str, Any]) -> Any:
    (name,) = said["architectures"]
    if not hasattr(transformers, name):
        raise ValueError(f"transformers has no {name}: give model_class, the class of the host.")
    return getattr(transformers, name)


def _host(cls: Any, folder: Path, config: Any, settings: dict[str, Any], arguments: dict[str, Any]) -> Any:
    """The host with its weights; of one whose layers share them, each gets a copy until they are tied."""
    ignored = [*(cls._keys_to_ignore_on_load_unexpected or []), rf"^{OURS}"]
    quiet = type(cls.__name__, (cls,), {"__module__": cls.__module__, "_keys_to_ignore_on_load_unexpected": ignored})
    if "tied" in settings:
        weights = _untied(read_tensors(folder, lambda name: not name.startswith(OURS)), settings)
        model, info = quiet.from_pretrained(
            None, config=config, state_dict=weights, output_loading_info=True, **arguments
        )
        if model.can_generate():
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    else:
        model, info = quiet.from_pretrained(folder, config=config, output_loading_info=True, **arguments)
    model.__class__ = cls
    if info["missing_keys"]:
        raise ValueError(f"{folder} lacks weights of the host: {', '.join(sorted(info['missing_keys']))}.")
    return model


def _untied(weights: dict[str, Tensor], settings: dict[str, Any]) -> dict[str, Tensor]:
    first, end = settings["core"]
    for layer in range(first + settings["tied"], end):
        kept = f"{settings['layers']}.{first + (layer - first) % settings['tied']}."
        here = f"{settings['layers']}.{layer}."
        weights |= {here + name.removeprefix(kept): x for name, x in weights.items() if name.startswith(kept)}
    return weights


def _plant(model: Any, settings: dict[str, Any], update: UpdateFactory | None, kv: KVStepPolicy | None) -> None:
    layers, (first, end) = find_layers(model, settings["layers"]), settings["core"]
    if "tied" in settings:
        max_steps = (end - first) // settings["tied"]
        how = {name: settings[name] for name in ("rank", "skip_first", "vectors")}
        stack = TiedStack(list(layers[first : first + settings["tied"]]), max_steps, **how)
        tie(model, layers, first, end, stack, how)
        model.recurrence.num_steps = settings["num_steps"]
        model.config.recurrence |= {"num_steps": settings["num_steps"]}
        return
    graft(
        model,
        range(first, end),
        settings["num_steps"],
        update=factory_of("update", settings["update"]) if update is None else update,
        kv=factory_of("kv", settings["kv"])() if kv is None else kv,
        drop=settings["drop"],
        layers=layers,
        host_first=settings["host_first"],
        dim=settings["dim"],
    )


def _fill(model: Any, weights: dict[str, Tensor], *, keep_dtype: bool) -> None:
    wanted = model.recurrence.state_dict()
    given = {name.removeprefix(OURS): weight for name, weight in weights.items()}
    if wanted.keys() != given.keys():
        lacking, more = sorted(wanted.keys() - given.keys()), sorted(given.keys() - wanted.keys())
        raise ValueError(f"The folder's weights are not those of this loop: {lacking} are missing, {more} are unknown.")
    placed = {name: weight.to(wanted[name].device) for name, weight in given.items()}
    if not keep_dtype:
        placed = {name: weight.to(wanted[name].dtype) for name, weight in placed.items()}
    model.recurrence.load_state_dict(placed, assign=True)
