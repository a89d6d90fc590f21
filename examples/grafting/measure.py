"""What one method came to: its losses on held-out windows before and after, kept so that a stop loses little."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from data import held_out_windows
from journal import read_journal
from plan import Job
from torch import Tensor, nn
from tqdm import tqdm

from grafting.healing import measured_depths, window_losses
from grafting.host import find_host, load_host
from grafting.methods import build, merged, num_trained

Losses = dict[str, list[float]]
"""By number of steps, in nats per token of each window."""


def untrained(job: Job, device: torch.device) -> tuple[Losses, Losses]:
    """The losses of the host, and of a graft of it that is not trained; the controls start as the host itself."""
    arguments = job.arguments
    host = load_host(find_host(arguments.graft.host)).to(device)
    bare = measured(job.folder.with_name("host.json"), host, [1], job, compared=("data",))
    if arguments.graft.method != "graft":
        return bare, {}
    model = build(host, arguments.graft).to(device)
    return bare, measured(job.folder / "before.json", model, arguments.text.depths, job, compared=("graft", "data"))


def summary(job: Job, accelerator: Accelerator, trained: nn.Module) -> dict[str, Any]:
    """Everything that the table and the plot need of this method; `trained` are its weights after the last step.

    A graft is also saved as a model, the LoRA merged into it.
    """
    arguments, device = job.arguments, accelerator.device
    host, before = untrained(job, device)
    model = build(load_host(find_host(arguments.graft.host)).to(device), arguments.graft).to(device)
    model.load_state_dict(trained.state_dict(), strict=False)
    depths = measured_depths(model, arguments.text.depths)
    after = measured(job.folder / "after.json", model, depths, job, compared=tuple(job.config))
    number = num_trained(model)
    if arguments.graft.method == "graft":
        merged(model).save_pretrained(job.folder / "model")
    recipe, taken = arguments.recipe, [r for r in read_journal(job.folder / "log.jsonl") if "loss" in r]
    rows = recipe.batch_size * recipe.accumulation * accelerator.num_processes
    return {
        "config": job.config,
        "text": job.corpus.source,
        "trained_parameters": number,
        "tokens": recipe.steps * rows * job.windows.shape[1],
        "seconds": sum(record["seconds"] for record in taken),
        "host": host,
        "before": before,
        "after": after,
    }


def measured(path: Path, model: nn.Module, depths: Sequence[int], job: Job, compared: Sequence[str]) -> Losses:
    """Losses on the windows of the table; read from `path` if they were measured before in the same way.

    `compared` are the parts of the configuration on which they depend.
    """
    recipe, windows = job.arguments.recipe, final_windows(job)
    way = {name: job.config[name] for name in compared}
    way |= {"host": job.config["graft"]["host"], "bf16": recipe.bf16, "windows": len(windows), "depths": list(depths)}
    way = json.loads(json.dumps(way))  # as it is read again
    if path.exists() and (found := json.loads(path.read_text()))["way"] == way:
        return found["losses"]
    with tqdm(total=len(windows), desc=f"measuring {path.stem}", unit="window", leave=False) as bar:
        losses = window_losses(model, windows, depths, recipe.batch_size, recipe.bf16, bar.update)
    named = {str(depth): of_depth.tolist() for depth, of_depth in zip(depths, losses, strict=True)}
    write(path, {"way": way, "losses": named})
    return named


def final_windows(job: Job) -> Tensor:
    """The held-out windows of the table."""
    return held_out_windows(job.corpus, job.windows.shape[1], job.arguments.text.measured)


def write(path: Path, content: dict[str, Any]) -> None:
    """JSON, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1))
    temporary.replace(path)
