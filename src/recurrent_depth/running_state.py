"""What a run carries besides its weights, as named tensors: the optimizer's state and the random numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state, each tensor under `<parameter>/<what it is>`, such as `norm.weight/exp_avg`.

    Raises:
        ValueError: if the optimizer holds a parameter that is not the model's, or keeps anything but tensors.
    """
    names = _parameter_names(model, optimizer)
    tensors = {}
    for parameter, name in zip(_parameters(optimizer), names, strict=True):
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"{type(optimizer).__name__} keeps {key} of {name} as {value!r}, but must keep tensors."
                )
            tensors[f"{name}/{key}"] = value
    return tensors


def optimizer_outline(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's class, and of each group the names of its parameters and all else that it says.

    Raises:
        ValueError: if the optimizer holds a parameter that is not the model's.
    """
    names = iter(_parameter_names(model, optimizer))
    groups = [
        {
            "parameters": [next(names) for _ in group["params"]],
            "settings": {key: value for key, value in group.items() if key != "params"},
        }
        for group in optimizer.param_groups
    ]
    return {"class": type(optimizer).__name__, "groups": groups}


def optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, outline: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """What `optimizer.load_state_dict` takes, from what the two functions above gave of an optimizer of this outline.

    Learning rate, weight decay and all else that the groups say are those that were saved.
    """
    numbers = {name: number for number, name in enumerate(_parameter_names(model, optimizer))}
    state: dict[int, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        name, key = full_name.rsplit("/", 1)
        # A copy into torch's own memory: what safetensors gives lies within the file's bytes.
        state.setdefault(numbers[name], {})[key] = tensor.clone()
    pairs = zip(optimizer.state_dict()["param_groups"], outline["groups"], strict=True)
    return {"state": state, "param_groups": [{**group, **saved["settings"]} for group, saved in pairs]}


def random_state() -> dict[str, Tensor]:
    """The state of torch's global random number generators in this process, on the CPU and on its GPU."""
    state = {"cpu": torch.get_rng_state()}
    return {**state, "cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else state


def set_random_state(state: Mapping[str, Tensor]) -> None:
    """Puts back what `random_state` gave."""
    torch.set_rng_state(state["cpu"].clone())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].clone())


def by_rank(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The random states of all ranks under one set of names, such as `0.cpu`."""
    return {f"{rank}.{name}": value for rank, state in enumerate(states) for name, value in state.items()}


def of_rank(states: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """One rank's random state, from what `by_rank` gave.

    Raises:
        ValueError: if there is none of that rank.
    """
    found = {name.partition(".")[2]: value for name, value in states.items() if name.startswith(f"{rank}.")}
    if not found:
        ranks = sorted({int(name.partition(".")[0]) for name in states})
        raise ValueError(f"rank is {rank}, but the checkpoint holds the random numbers of ranks {ranks} only.")
    return found


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    if any(parameter not in names for parameter in _parameters(optimizer)):
        raise ValueError(
            "The optimizer holds a parameter that the model does not: give the bare model it was built for."
        )
    return [names[parameter] for parameter in _parameters(optimizer)]
