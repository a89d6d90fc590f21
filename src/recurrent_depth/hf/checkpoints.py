"""Between the training example's checkpoints and models of transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from recurrent_depth.hf.example_words import config_of, description_of
from recurrent_depth.hf.modeling import RecurrentDepthForCausalLM
from recurrent_depth.training import (
    latest_checkpoint,
    load_checkpoint,
    parameter_groups,
    read_checkpoint,
    save_checkpoint,
)


def from_checkpoint(path: str | Path) -> RecurrentDepthForCausalLM:
    """The model of a checkpoint of the training example, bit for bit; what it says of its run is in `config.training`.

    Args:
        path: a checkpoint, or the folder of a model's checkpoints, of which the newest is taken.

    Raises:
        ValueError: if there is none, or it is damaged, or its configuration describes no model.
    """
    found = read_checkpoint(path) if (Path(path) / "state.json").exists() else latest_checkpoint(path)
    if found is None:
        raise ValueError(f"{path} holds no checkpoint of the training example.")
    config = config_of(found.config.get("model"))
    config.training = {"step": found.step, "config": found.config}
    model = RecurrentDepthForCausalLM(config)
    load_checkpoint(found.path, model=model.native)
    return model.eval()


def to_checkpoint(model: RecurrentDepthForCausalLM, folder: str | Path) -> Path:
    """Writes a checkpoint that the training example reads; gives its path.

    Weights, step and the run's configuration are those of the checkpoint that the model came from, if it came from one.
    The optimizer's moments and the random numbers are not in a model: they start anew.

    Args:
        model: of a builder that the example knows, `"grt"`, `"naive"` or `"dense"`.
        folder: the folder of a model's checkpoints.

    Raises:
        ValueError: if the example cannot describe the model.
    """
    said: Mapping[str, Any] = model.config.training or {}
    config = {**said.get("config", {}), "model": description_of(model.config)}
    optimizer = torch.optim.AdamW(parameter_groups(model.native), lr=0.0, betas=(0.9, 0.95))
    optimizer.zero_grad()
    return save_checkpoint(folder, said.get("step", 0), model=model.native, optimizer=optimizer, config=config)
