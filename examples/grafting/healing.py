"""How a graft or a control is trained: its loss, how deep it goes, and how it is measured on held-out text."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from plan import Job
from task import Task
from torch import Tensor, nn

import recurrent_depth as rd
from grafting.arguments import GraftArguments
from grafting.host import find_host, load_host
from grafting.methods import build, num_trained
from recurrent_depth.hf import is_graft


class HealingLoss(nn.Module):
    """The next-token loss, and how far the model is from its host if that weighs.

    Args:
        model: the graft or a control.
        host: what it was made of, kept as it was; None where its opinion does not weigh.
        weight: of the divergence.
        temperature: flattens both distributions.
    """

    def __init__(self, model: nn.Module, host: nn.Module | None, weight: float, temperature: float):
        super().__init__()
        self.model, self.weight, self.temperature = model, weight, temperature
        self._host = [host]  # in a list, so that it is none of what a wrapper trains

    def forward(self, tokens: Tensor, depth: rd.Depth) -> Tensor:
        """In nats per token, the divergence weighted."""
        logits = logits_of(self.model, tokens, depth)
        loss = rd.next_token_loss(logits, tokens)
        if self._host[0] is None:
            return loss
        with torch.no_grad():
            said = logits_of(self._host[0], tokens)
        return loss + self.weight * rd.distillation_loss(logits, said, temperature=self.temperature)


@dataclass(frozen=True)
class FromTwo(rd.DepthSampler):
    """Evenly from 2 steps: at one step a frozen host has nothing to learn."""

    max_steps: int
    seed: int

    def __call__(self, draw: int) -> rd.Depth:
        return rd.Depth(1 + rd.UniformDepth(self.max_steps - 1, self.seed)(draw).num_steps)

    def expected(self, draw: int = 0) -> rd.ExpectedDepth:
        mean = 1 + rd.UniformDepth(self.max_steps - 1, self.seed).expected(draw).num_steps
        return rd.ExpectedDepth(mean, mean)


def healing(job: Job, device: torch.device) -> Task:
    """The graft or a control, made of the host that the job names."""
    arguments, recipe = job.arguments.graft, job.arguments.recipe
    place = find_host(arguments.host)
    model = build(load_host(place).to(device), arguments).to(device)
    host = load_host(place).to(device) if arguments.distill else None
    depths = measured_depths(model, [arguments.num_steps])

    def look() -> dict[str, Any]:
        losses = window_losses(model, job.windows, depths, recipe.batch_size, recipe.bf16)
        return {"validation_loss": losses[-1].mean().item()}

    new = {"recurrence": 1.0, "recurrence.core.update.inner.gate": recipe.gate_lr_scale, "adapters": 1.0}
    parts = dict(model.named_modules())
    scales = {name: arguments.new_lr_scale * scale for name, scale in new.items() if name in parts}
    loss = HealingLoss(model, host, arguments.distill, arguments.temperature)
    about = f"{num_trained(model):,} trained parameters"
    return Task(about, trained_part(model), loss, sampler(arguments, recipe.seed), scales, look)


def sampler(arguments: GraftArguments, seed: int) -> rd.DepthSampler:
    """How deep each step of the training goes."""
    if arguments.method != "graft":
        return rd.FixedDepth(1)
    if arguments.depth == "fixed":
        return rd.FixedDepth(arguments.num_steps)
    learns_at_one = arguments.lora_rank > 0 or arguments.train_core
    return rd.UniformDepth(arguments.num_steps, seed) if learns_at_one else FromTwo(arguments.num_steps, seed)


def trained_part(model: nn.Module) -> nn.Module:
    """What is trained alone, under the names that it has in the model: all that a checkpoint must hold."""
    root = nn.Module()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            _add(root, name.split("."), parameter)
    return root


def logits_of(model: Any, tokens: Tensor, depth: int | rd.Depth | None = None) -> Tensor:
    """The logits of a graft at a depth; of anything else those of its one pass."""
    steps = {"num_steps": depth} if is_graft(model) else {}
    return model(tokens, use_cache=False, **steps).logits


def measured_depths(model: nn.Module, depths: Iterable[int]) -> list[int]:
    """Of those depths the ones that the model has."""
    return list(depths) if is_graft(model) else [1]


@torch.no_grad()
def window_losses(
    model: nn.Module,
    windows: Tensor,
    depths: Sequence[int],
    batch_size: int,
    bf16: bool,
    after: Callable[[int], object] = lambda num_windows: None,
) -> Tensor:
    """Nats per token of each window at each depth, (depth, window); `after` is told of each batch."""
    training, device = model.training, next(model.parameters()).device
    model.eval()
    losses: list[list[Tensor]] = [[] for _ in depths]
    for tokens in windows.to(device).split(batch_size):
        for depth, found in zip(depths, losses, strict=True):
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                logits = logits_of(model, tokens, depth)
            found += [rd.next_token_loss(*row) for row in zip(logits.split(1), tokens.split(1), strict=True)]
        after(len(tokens))
    model.train(training)
    return torch.stack([torch.stack(found) for found in losses]).double().cpu()


def _add(place: nn.Module, path: list[str], parameter: nn.Parameter) -> None:
    for name in path[:-1]:
        if name not in place._modules:
            place.add_module(name, nn.Module())
        place = place.get_submodule(name)
    place.register_parameter(path[-1], parameter)
