"""What a checkpoint of the training example holds beside its weights, as at the start of a run."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

import recurrent_depth as rd
from recurrent_depth.training import parameter_groups, warmup_cosine

GATE = "core.update.gate"


def fresh_optimizer(
    native: rd.RecurrentTransformer, step: int, recipe: Mapping[str, Any] | None
) -> torch.optim.Optimizer:
    """The optimizer that the example makes by this recipe, at the learning rate of this step, without moments.

    Without a recipe it says of its groups which parameters they hold, and nothing else, so that whoever loads it keeps
    settings of their own.
    """
    if recipe is None:
        optimizer = torch.optim.AdamW(parameter_groups(native))
        for group in optimizer.param_groups:
            for setting in group.keys() - {"params"}:
                del group[setting]
        return optimizer
    has_gate = any(name.startswith(f"{GATE}.") for name, _ in native.named_parameters())
    scales = {GATE: recipe["gate_lr_scale"]} if has_gate else {}
    groups = parameter_groups(native, recipe["weight_decay"], scales, lr=recipe["lr"])
    optimizer = torch.optim.AdamW(groups, lr=recipe["lr"], betas=(0.9, 0.95), fused=True)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]  # as a schedule notes it that begins with the run
    LambdaLR(optimizer, warmup_cosine(recipe["steps"], recipe["warmup"], recipe["floor"]), last_epoch=step - 1)
    return optimizer


def fresh_random_states(config: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """The random numbers with which each process of a run begins."""
    seed = config.get("recipe", {}).get("seed", 0)
    ranks = range(config.get("num_processes", 1))
    return [{"cpu": torch.Generator().manual_seed(seed + 1 + rank).get_state()} for rank in ranks]
