"""What must fit before a run goes on from a checkpoint, with messages that name what does not."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor


def require_same_config(path: Path, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compares configurations as JSON writes them, nested as they are: NaN equals NaN, and 1 is not 1.0.

    Raises:
        ValueError: naming each field that differs, with what it is in the checkpoint and here.
    """
    names = _different(_as_json(found), _as_json(expected))
    if names:
        raise ValueError(
            f"{path} was made with another configuration: {_told(names, _flat(found), _flat(expected))}. "
            "Give the same settings to go on with it, or another folder to start anew."
        )


def require_same_tensors(path: Path, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Compares names, shapes and data types.

    Raises:
        ValueError: naming the first tensors that differ, with what they are in the checkpoint and here.
    """
    names = _different(_described(found), _described(expected))
    if names:
        raise ValueError(
            f"{path} is of another model: {_told(names, _described(found), _described(expected))}. "
            "Build the model as the checkpoint's configuration says."
        )


def require_same_optimizer(path: Path, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Compares the class, the number of groups, and which group each parameter is in; not learning rates and the like.

    Raises:
        ValueError: naming what differs first, with what it is in the checkpoint and here.
    """
    names = _different(_outlined(found), _outlined(expected))
    if names:
        raise ValueError(
            f"{path} is of another optimizer: {_told(names, _outlined(found), _outlined(expected))}. "
            "Build the optimizer as it was when it was saved, with the same groups in the same order."
        )


def _outlined(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    groups = optimizer["groups"]
    places = {name: f"in group {number}" for number, group in enumerate(groups) for name in group["parameters"]}
    return {"its class": optimizer["class"], "its number of groups": len(groups), **places}


def _different(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    names = dict.fromkeys([*found, *expected])
    return [name for name in names if found.get(name, ...) != expected.get(name, ...)]


def _told(names: list[str], found: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    told = [
        f"{name} is {found.get(name, 'absent')} there and {expected.get(name, 'absent')} here" for name in names[:8]
    ]
    return ", ".join(told) + (f", and {len(names) - 8} more" if len(names) > 8 else "")


def _flat(config: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(config, dict):
        return {prefix: config}
    inner = [_flat(value, f"{prefix}.{key}" if prefix else key) for key, value in config.items()]
    return {name: value for part in inner for name, value in part.items()}


def _as_json(config: Any) -> dict[str, str]:
    return {name: json.dumps(value, sort_keys=True) for name, value in _flat(config).items()}


def _described(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: f"{tensor.dtype} {tuple(tensor.shape)}" for name, tensor in tensors.items()}
