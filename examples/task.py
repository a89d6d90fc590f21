"""What a trainer trains: the weights, their loss, how deep it goes, and how to look at the outcome."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from evaluation import evaluate
from models import build, has_gate, sampler
from plan import Job
from torch import nn

import recurrent_depth as rd
from recurrent_depth import accounting


class Task(NamedTuple):
    """What is trained.

    Attributes:
        about: what it is, for people.
        trained: holds the weights that are trained, and perhaps others; checkpoints hold all of it.
        loss: gives the loss of some tokens at a depth.
        sampler: how deep each optimizer step goes.
        scales: multiples of the learning rate by the beginning of a parameter's name.
        look: gives what held-out text says of it, by name.
    """

    about: str
    trained: nn.Module
    loss: nn.Module
    sampler: rd.DepthSampler
    scales: Mapping[str, float]
    look: Callable[[], dict[str, Any]]


def language_model(job: Job, device: torch.device) -> Task:
    """A model of `models.py`, as the job describes it."""
    recipe, depth = job.arguments.recipe, job.arguments.depth
    model = build(job.config["model"]).to(device)
    model.core.checkpointing = recipe.checkpointing
    if recipe.compile:
        model.compile_step()
    if depth.depth == "poisson":  # its tail is meant to go beyond full depth
        warnings.filterwarnings("ignore", message=".* deeper than trained")
    scales = {"core.update.gate": recipe.gate_lr_scale} if has_gate(model) else {}

    def look() -> dict[str, Any]:
        full = model.layout.num_steps
        losses, gates = evaluate(model, job.windows, [full], recipe.batch_size)
        record = {"validation_loss": losses[0]}
        return {**record, "mean_gate": sum(gates) / full, "gates": gates} if has_gate(model) else record

    layout, size = model.layout, f"{accounting.num_parameters(model):,} parameters"
    about = f"layout {layout}, {size}, {layout.executed} blocks run of {layout.stored} stored"
    return Task(about, model, rd.WithObjective(model), sampler(model, depth, recipe.seed), scales, look)
