"""What a training script needs beside its loop: parameter groups, a schedule, checkpoints. Needs the extra `train`."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from recurrent_depth.arguments import require_number, require_whole
from recurrent_depth.checkpoint import (
    Checkpoint,
    latest_checkpoint,
    load_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from recurrent_depth.running_state import random_state

__all__ = [
    "Checkpoint",
    "latest_checkpoint",
    "load_checkpoint",
    "parameter_groups",
    "random_state",
    "read_checkpoint",
    "save_checkpoint",
    "warmup_cosine",
]


def parameter_groups(
    model: nn.Module,
    weight_decay: float = 0.1,
    scales: Mapping[str, float] | None = None,
    *,
    lr: float | None = None,
    undecayed: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Parameter groups for AdamW: matrices decay, vectors do not, and each trained parameter is there exactly once.

    Args:
        model: its parameters; tied ones count once, those that need no gradient are left out.
        weight_decay: of everything with two or more axes, as in GPT-2's recipe.
        scales: multiples of the learning rate by the beginning of a parameter's name, such as
            `{"core.update.gate": 10.0}`; the longest that fits counts. A gate of bias +4 opens slowly otherwise.
        lr: the learning rate that `scales` multiplies.
        undecayed: beginnings of the names of parameters that don't decay whatever their axes, such as
            `["core.update"]` for the recurrence of `parcae`.

    Raises:
        ValueError: if a name in `scales` or `undecayed` begins no parameter, a scale is not above 0, or `lr` is missing
            beside `scales`.
    """
    scales = dict(scales or {})
    require_number("weight_decay", weight_decay, at_least=0)
    if scales and lr is None:
        raise ValueError(f"scales is {scales}, but without lr there is nothing to scale: give lr too.")
    parameters = {name: x for name, x in model.named_parameters() if x.requires_grad}
    _check_scales(scales, parameters)
    for prefix in undecayed:
        _check_prefix("undecayed", prefix, parameters)
    groups: dict[tuple[float, bool], dict[str, Any]] = {}
    for name, parameter in parameters.items():
        scale, decays = _scale_of(name, scales), parameter.ndim >= 2
        decays = decays and not any(_begins(prefix, name) for prefix in undecayed)
        group = groups.setdefault((scale, decays), {"params": [], "weight_decay": weight_decay if decays else 0.0})
        group["params"].append(parameter)
        if lr is not None:
            group["lr"] = lr * scale
    return list(groups.values())


def warmup_cosine(num_steps: int, warmup_steps: int, floor: float = 0.1) -> Callable[[int], float]:
    """A factor of the learning rate by optimizer step, for torch's `LambdaLR`.

    It rises linearly to 1 over `warmup_steps` (the first step already moves), then falls along half a cosine to `floor`
    at `num_steps`, where it stays. GPT-2's recipe: 20,000 steps, 2,000 of warm-up, from 6e-4 to a floor of a tenth.

    Raises:
        ValueError: if `num_steps` is below 1, `warmup_steps` not from 0 to `num_steps`, or `floor` not from 0 to 1.
    """
    num_steps = require_whole("num_steps", num_steps, at_least=1)
    warmup_steps = require_whole("warmup_steps", warmup_steps, at_least=0)
    if warmup_steps > num_steps:
        raise ValueError(f"warmup_steps is {warmup_steps}, but must be at most num_steps, {num_steps}.")
    require_number("floor", floor, at_least=0, at_most=1)

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
        return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2

    return factor


def _begins(prefix: str, name: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def _scale_of(name: str, scales: Mapping[str, float]) -> float:
    fitting = [prefix for prefix in scales if _begins(prefix, name)]
    return float(scales[max(fitting, key=len)]) if fitting else 1.0


def _check_prefix(argument: str, prefix: str, parameters: Mapping[str, nn.Parameter]) -> None:
    if not any(_begins(prefix, name) for name in parameters):
        known = sorted({name.rpartition(".")[0] or name for name in parameters})
        raise ValueError(f"{argument} names {prefix!r}, but no parameter begins so. Modules with parameters: {known}.")


def _check_scales(scales: Mapping[str, float], parameters: Mapping[str, nn.Parameter]) -> None:
    for prefix, scale in scales.items():
        _check_prefix("scales", prefix, parameters)
        require_number(f"scales[{prefix!r}]", scale, above=0)
