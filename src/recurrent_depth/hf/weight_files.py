"""The tensors in a folder of `save_pretrained`, in one file or in many."""

from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from recurrent_depth.hf.saved_settings import Check, read_object, require

SHARDS = Check(
    lambda value: isinstance(value, dict) and all(isinstance(name, str) for name in value.values()),
    "the file of each weight by the weight's name",
)


def read_tensors(folder: Path, wanted: Callable[[str], bool], variant: str | None = None) -> dict[str, Tensor]:
    """The tensors of these names, on CPU.

    Args:
        folder: where they are.
        wanted: tells which.
        variant: the one that `save_pretrained` was given, which stands in the names of the files.

    Raises:
        ValueError: if there are no weights in the folder, or a file of them is missing or damaged; names it.
    """
    found: dict[str, Tensor] = {}
    for path in _files(folder, variant):
        try:
            with safe_open(path, framework="pt") as file:
                found |= {name: file.get_tensor(name) for name in file.keys() if wanted(name)}  # noqa: SIM118
        except FileNotFoundError:
            raise ValueError(f"{path} is missing: not all files of the weights are in the folder.") from None
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged or was not written to its end: {error}.") from None
    return found


def _files(folder: Path, variant: str | None) -> list[Path]:
    middle = "" if variant is None else f".{variant}"
    name, index = f"model{middle}.safetensors", f"model.safetensors.index{middle}.json"
    if (folder / name).exists():
        return [folder / name]
    if not (folder / index).exists():
        there = ", ".join(sorted(path.name for path in folder.glob("*.safetensors")))
        hint = f" There are {there}: variant= of save_pretrained is to be given to load_graft too." if there else ""
        raise ValueError(f"{folder} holds no weights: there is neither {name} nor {index}.{hint}")
    names = require(folder / index, read_object(folder / index).get("weight_map"), SHARDS, "weight_map")
    return [folder / name for name in sorted(set(names.values()))]
