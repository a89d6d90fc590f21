"""Checkpoints of a training run: weights, optimizer, random numbers and configuration; nothing is pickled."""

import json
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor, nn

from recurrent_depth.arguments import require_whole
from recurrent_depth.running_state import (
    by_rank,
    of_rank,
    optimizer_outline,
    optimizer_state,
    optimizer_tensors,
    random_state,
    set_random_state,
)
from recurrent_depth.same_run import require_same_config, require_same_optimizer, require_same_tensors
from recurrent_depth.sealed import read_sealed, remove_leftovers, sealed_folders, write_sealed


class Checkpoint(NamedTuple):
    """A checkpoint that was found whole: where it lies, the optimizer steps done, and the configuration given."""

    path: Path
    step: int
    config: dict[str, Any]


def save_checkpoint(
    folder: str | Path,
    step: int,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: Mapping[str, Any],
    random_states: Sequence[Mapping[str, Tensor]] | None = None,
    keep: int = 2,
) -> Path:
    """Writes `folder/checkpoint-<step>` whole or not at all, then removes all but the last `keep` up to this step.

    Call it on one process only.

    Args:
        folder: where the checkpoints of this run lie.
        step: optimizer steps done.
        model: the bare model, not its data-parallel wrapper.
        optimizer: its optimizer.
        config: everything that must be the same when the run goes on; what JSON can hold.
        random_states: `random_state()` of each rank; by default of this process alone.
        keep: how many checkpoints stay, this one among them.

    Raises:
        OSError: if the disk is full or refuses; earlier checkpoints stay as they are.
        ValueError: if `step` or `keep` is no such number, something is neither a tensor nor what JSON can hold, or two
            names stand for one tensor (tied parameters).
    """
    step, keep = require_whole("step", step, at_least=0), require_whole("keep", keep, at_least=1)
    folder = Path(folder)
    target = folder / f"checkpoint-{step:06d}"
    state = {"step": step, "config": dict(config), "optimizer": optimizer_outline(model, optimizer)}
    files = {
        "model.safetensors": _to_bytes(model.state_dict()),
        "optimizer.safetensors": _to_bytes(optimizer_tensors(model, optimizer)),
        "random.safetensors": _to_bytes(by_rank(random_states or [random_state()])),
        "state.json": _to_json(state),
    }
    try:
        remove_leftovers(folder, "checkpoint-*")
        write_sealed(target, files)
    except OSError as error:
        message = f"{target} could not be saved ({error.strerror}). Earlier checkpoints are untouched."
        raise OSError(error.errno, message) from error
    for old in [path for path in _checkpoints(folder) if _step_of(path) <= step][keep:]:
        shutil.rmtree(old)
    return target


def latest_checkpoint(folder: str | Path) -> Checkpoint | None:
    """The newest whole checkpoint of a folder, None if it holds none; damaged ones are passed over with a warning.

    Raises:
        ValueError: if there are checkpoints and every one is damaged.
    """
    damage = []
    for path in _checkpoints(Path(folder)):
        try:
            checkpoint = read_checkpoint(path)
        except ValueError as error:
            damage.append(str(error))
            continue
        if damage:
            warnings.warn(f"{' '.join(damage)} The last good checkpoint is used: {path}.", stacklevel=2)
        return checkpoint
    if damage:
        raise ValueError(f"{' '.join(damage)} No good checkpoint is left in {folder}: start anew in another folder.")
    return None


def read_checkpoint(path: str | Path) -> Checkpoint:
    """What a checkpoint says of itself, once every one of its files was checked.

    Raises:
        ValueError: if it is damaged, half-written or none of ours.
    """
    state = json.loads(_read(Path(path))["state.json"])
    return Checkpoint(Path(path), state["step"], state["config"])


def load_checkpoint(
    path: str | Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: Mapping[str, Any] | None = None,
    rank: int = 0,
) -> Checkpoint:
    """Loads the weights, bit by bit as saved; given an optimizer, also its state and the random numbers, to train on.

    Nothing is changed unless everything fits.

    Args:
        path: a checkpoint folder.
        model: the bare model, built as it was.
        optimizer: its optimizer, built as it was.
        config: must equal the configuration that was saved; None compares nothing.
        rank: whose random numbers are restored.

    Raises:
        ValueError: if the checkpoint is damaged, or of another model, optimizer, configuration or number of ranks; says
            what was found, what was expected, and what to do.
    """
    path, files = Path(path), _read(Path(path))
    state, weights = json.loads(files["state.json"]), safetensors.torch.load(files["model.safetensors"])
    if config is not None:
        require_same_config(path, state["config"], json.loads(_to_json(config)))
    require_same_tensors(path, weights, model.state_dict())
    if optimizer is None:
        model.load_state_dict(weights)
    else:
        require_same_optimizer(path, state["optimizer"], optimizer_outline(model, optimizer))
        moments = safetensors.torch.load(files["optimizer.safetensors"])
        resumed = optimizer_state(model, optimizer, state["optimizer"], moments)
        random = of_rank(safetensors.torch.load(files["random.safetensors"]), rank)
        model.load_state_dict(weights)
        optimizer.load_state_dict(resumed)
        set_random_state(random)
    return Checkpoint(path, state["step"], state["config"])


def _checkpoints(folder: Path) -> list[Path]:
    """Newest first."""
    found = [path for path in sealed_folders(folder, "checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(found, key=_step_of, reverse=True)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("checkpoint-"))


def _read(path: Path) -> dict[str, bytes]:
    files = read_sealed(path)
    expected = {"model.safetensors", "optimizer.safetensors", "random.safetensors", "state.json"}
    if files.keys() != expected:
        raise ValueError(f"{path} is no checkpoint: it holds {sorted(files)}, expected {sorted(expected)}.")
    return files


def _to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    _require_untied(tensors)
    # To bytes first: a file that safetensors maps into memory would end in SIGBUS, not an error, on a full disk.
    return safetensors.torch.save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})


def _require_untied(tensors: Mapping[str, Tensor]) -> None:
    names: dict[tuple[torch.device, int], str] = {}
    for name, tensor in tensors.items():
        first = names.setdefault((tensor.device, tensor.data_ptr()), name) if tensor.numel() else name
        if first != name:
            raise ValueError(
                f"{first} and {name} are one tensor under two names, but a checkpoint stores each tensor once: "
                "let the state dict hold tied parameters under one name, as a RecurrentTransformer's does."
            )


def _to_json(value: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(value, indent=1, sort_keys=True).encode()
    except TypeError as error:
        raise ValueError(f"config and optimizer settings must be what JSON can hold: {error}.") from None
