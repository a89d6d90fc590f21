"""Grafts from folders: `load_graft`."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from recurrent_depth.builders import UpdateFactory
from recurrent_depth.depth import Depth
from recurrent_depth.hf.grafting import graft
from recurrent_depth.hf.host_layers import check_core, find_layers
from recurrent_depth.hf.recursive import tie
from recurrent_depth.hf.saved_parts import checked_depth, saved_policy, saved_update
from recurrent_depth.hf.saved_settings import CONFIG, Check, read_configuration, require
from recurrent_depth.hf.saving import unsealed
from recurrent_depth.hf.slots import refuse_mistaken
from recurrent_depth.hf.tied_layers import TiedStack
from recurrent_depth.hf.weight_files import read_tensors
from recurrent_depth.kv_policy import KVStepPolicy

OURS = "recurrence."
CLASS = Check(
    lambda value: isinstance(value, list) and len(value) == 1 and isinstance(value[0], str),
    'the name of one class, such as ["LlamaForCausalLM"]; or give model_class, the class of the host',
)


def load_graft(
    folder: str | Path,
    *,
    num_steps: int | Depth | None = None,
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
        num_steps: the depth of a forward that is told none, where it is not to be the saved one.
        update: the function that made the update, where it is not one of this library. One of this library is
            restored by itself, and what is given must be that one: another would read the same weights as something
            else.
        kv: a policy for the cache, where it is not one of this library.
        model_class: the host's class, where transformers does not have it under the name that it was saved by.
        arguments: for the host's `from_pretrained`, such as `dtype`, `device_map` and `variant`.

    Raises:
        ValueError: if the folder holds no graft, or its files are damaged or edited to what they cannot hold, or
            weights are missing, or the graft was made with functions that are not of this library and were not given,
            or with another `update` than is given, or `num_steps` is no depth of it.
    """
    path = Path(folder)
    refuse_mistaken(arguments, ())
    said = read_configuration(path)
    settings = said["recurrence"]
    depth = checked_depth(settings, num_steps)
    weights = read_tensors(path, lambda name: name.startswith(OURS), arguments.get("variant"))
    update, kv = saved_update(settings, update), saved_policy(settings, kv)
    cls: Any = model_class or _host_class(path / CONFIG, said)
    config = cls.config_class.from_dict(unsealed(said))
    model = _host(cls, path, config, settings, arguments)
    with torch.random.fork_rng(devices=[]):  # weights are drawn, and replaced by those of the folder
        _plant(model, settings, update, kv)
    _fill(path, model, weights, keep_dtype=not _other_dtype(arguments))
    model.recurrence.num_steps = depth
    return model


def _other_dtype(arguments: dict[str, Any]) -> bool:
    """Whether `from_pretrained` is asked for a dtype that need not be the saved one, also under its older name."""
    asked = next((arguments[name] for name in ("dtype", "torch_dtype") if arguments.get(name) is not None), "auto")
    return asked != "auto"


def _host_class(path: Path, said: dict[str, Any]) -> Any:
    (name,) = require(path, said.get("architectures"), CLASS, "architectures")
    found = getattr(transformers, name, None)
    if not isinstance(found, type) or not issubclass(found, transformers.PreTrainedModel):
        raise ValueError(f"transformers has no {name}: give model_class, the class of the host.")
    return found


def _host(cls: Any, folder: Path, config: Any, settings: dict[str, Any], arguments: dict[str, Any]) -> Any:
    """The host with its weights; of one whose layers share them, each gets a copy until they are tied."""
    ignored = [*(cls._keys_to_ignore_on_load_unexpected or []), rf"^{OURS}"]
    quiet = type(cls.__name__, (cls,), {"__module__": cls.__module__, "_keys_to_ignore_on_load_unexpected": ignored})
    if "tied" in settings:
        found = read_tensors(folder, lambda name: not name.startswith(OURS), arguments.get("variant"))
        weights = _untied(found, settings)
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


def _plant(model: Any, settings: dict[str, Any], update: Any, kv: KVStepPolicy | None) -> None:
    layers = find_layers(model, settings["layers"])
    first, end = check_core(range(*settings["core"]), (), len(layers))
    if "tied" in settings:
        max_steps = (end - first) // settings["tied"]
        how = {name: settings[name] for name in ("rank", "skip_first", "vectors")}
        stack = TiedStack(list(layers[first : first + settings["tied"]]), max_steps, **how)
        tie(model, layers, first, end, stack, how)
        model.config.recurrence |= {"num_steps": settings["num_steps"]}
        return
    graft(
        model,
        range(first, end),
        settings["num_steps"],
        update=update,
        kv=kv,
        drop=settings["drop"],
        layers=layers,
        host_first=settings["host_first"],
        dim=settings["dim"],
    )


def _fill(folder: Path, model: Any, weights: dict[str, Tensor], *, keep_dtype: bool) -> None:
    wanted = model.recurrence.state_dict()
    given = {name.removeprefix(OURS): weight for name, weight in weights.items()}
    if wanted and not given:
        raise ValueError(
            f"All weights of the loop are missing in {folder}: the host's own class saved it, loaded by plain "
            "from_pretrained, which leaves the loop out. Load the graft from the folder that it was saved to itself."
        )
    if wanted.keys() != given.keys():
        lacking, more = sorted(wanted.keys() - given.keys()), sorted(given.keys() - wanted.keys())
        raise ValueError(
            f"The weights in {folder} are not those of this loop: {lacking} are missing, {more} are unknown."
        )
    for name, weight in given.items():
        if weight.shape != wanted[name].shape:
            sizes = f"{tuple(weight.shape)} in {folder}, but {tuple(wanted[name].shape)} in the loop of its {CONFIG}"
            raise ValueError(f"{OURS}{name} is {sizes}.")
    placed = {name: weight.to(wanted[name].device) for name, weight in given.items()}
    if not keep_dtype:
        placed = {name: weight.to(wanted[name].dtype) for name, weight in placed.items()}
    model.recurrence.load_state_dict(placed, assign=True)
