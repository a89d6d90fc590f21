"""Between the training example's checkpoints and models of transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recurrent_depth.hf.example_run import fresh_optimizer, fresh_random_states
from recurrent_depth.hf.example_tokens import tokenizer_of
from recurrent_depth.hf.example_words import config_of, description_of
from recurrent_depth.hf.modeling import RecurrentDepthForCausalLM
from recurrent_depth.training import Checkpoint, latest_checkpoint, load_checkpoint, read_checkpoint, save_checkpoint


def from_checkpoint(path: str | Path) -> RecurrentDepthForCausalLM:
    """The model of a checkpoint of the training example, bit for bit; what it says of its run is in `config.training`.

    Its text ends where the run's tokenizer says so, if that is known and has a sign for it.

    Args:
        path: a checkpoint, or the folder of a model's checkpoints, of which the newest is taken.

    Raises:
        ValueError: if there is none, or it is damaged, or its configuration describes no model.
    """
    found = find_checkpoint(path)
    config, tokenizer = config_of(found.config.get("model")), tokenizer_of(found)
    end: Any = None if tokenizer is None else tokenizer.eos_token_id
    config.eos_token_id = end
    config.training = {"step": found.step, "config": found.config}
    model = RecurrentDepthForCausalLM(config)
    load_checkpoint(found.path, model=model.native)
    return model.eval()


def find_checkpoint(path: str | Path) -> Checkpoint:
    """A checkpoint of the training example, or the newest one of a folder.

    Raises:
        ValueError: if there is none, or it is damaged.
    """
    found = read_checkpoint(path) if (Path(path) / "state.json").exists() else latest_checkpoint(path)
    if found is None:
        raise ValueError(f"{path} holds no checkpoint of the training example.")
    return found


def to_checkpoint(model: RecurrentDepthForCausalLM, folder: str | Path) -> Path:
    """Writes a checkpoint that the training example reads; gives its path.

    Weights, step and the run's configuration are those of the checkpoint that the model came from, bit for bit, if it
    came from one: the run then goes on at the learning rate that its schedule has at that step. The optimizer's moments
    and the random numbers are not in a model: they start anew.

    Args:
        model: of a builder that the example knows, `"grt"`, `"naive"` or `"dense"`.
        folder: the folder of a model's checkpoints.

    Raises:
        ValueError: if the example cannot describe the model.
    """
    said: Mapping[str, Any] = model.config.training or {}
    step, config = said.get("step", 0), {**said.get("config", {}), "model": description_of(model.config)}
    parts = {"model": model.native, "optimizer": fresh_optimizer(model.native, step, config.get("recipe"))}
    return save_checkpoint(folder, step, **parts, config=config, random_states=fresh_random_states(config))
