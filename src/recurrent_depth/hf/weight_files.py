"""The tensors in a folder of `save_pretrained`, in one file or in many."""

import json
from collections.abc import Callable
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

NAME = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_tensors(folder: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """The tensors of these names, on CPU.

    Raises:
        ValueError: if there are no weights in the folder.
    """
    found: dict[str, Tensor] = {}
    for path in _files(folder):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys() if wanted(name)}  # noqa: SIM118
    return found


def _files(folder: Path) -> list[Path]:
    if (folder / NAME).exists():
        return [folder / NAME]
    if not (folder / INDEX).exists():
        raise ValueError(f"{folder} holds no weights: there is neither {NAME} nor {INDEX}.")
    names = json.loads((folder / INDEX).read_text())["weight_map"].values()
    return [folder / name for name in sorted(set(names))]
