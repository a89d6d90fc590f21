"""One model in training: everything that a step changes, so that it can stop anywhere and go on as if it had not."""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from data import batch
from plan import Job
from task import Task
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

import recurrent_depth as rd
from recurrent_depth.training import (
    latest_checkpoint,
    load_checkpoint,
    parameter_groups,
    random_state,
    save_checkpoint,
    warmup_cosine,
)


class Trainer:
    """A task, its optimizer and where they stand: at the newest checkpoint of the job, or at the beginning.

    Args:
        job: what to train on, and how.
        accelerator: where.
        make: makes the task; its weights come from the global RNG.

    Raises:
        ValueError: if the checkpoints are damaged, or of a run with other arguments; more steps are others too.
    """

    def __init__(self, job: Job, accelerator: Accelerator, make: Callable[[Job, torch.device], Task]):
        recipe = job.arguments.recipe
        self.job, self.accelerator = job, accelerator
        torch.manual_seed(recipe.seed)
        self.task = make(job, accelerator.device)
        self.trained = self.task.trained
        groups = parameter_groups(self.trained, recipe.weight_decay, self.task.scales, lr=recipe.lr)
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.95), fused=True)
        torch.manual_seed(recipe.seed + 1 + accelerator.process_index)  # every process has noise of its own
        self.step = self._resume()
        factor = warmup_cosine(recipe.steps, job.arguments.warmup_steps, recipe.floor)
        self.schedule = LambdaLR(self.optimizer, factor, last_epoch=self.step - 1)
        self.wrapped = accelerator.prepare(self.task.loss)

    def _resume(self) -> int:
        found = latest_checkpoint(self.job.folder)
        if found is None:
            return 0
        steps, before = self.job.arguments.recipe.steps, found.config.get("recipe", {}).get("steps")
        if before not in (steps, None):  # None: no checkpoint of this script, which is told below
            raise ValueError(
                f"steps is {steps}, but the run in {self.job.folder} was begun with {before}, and the learning rate of "
                f"each step depends on it: a run cannot be extended. Give --steps {before}, or another folder."
            )
        rank = self.accelerator.process_index
        options = {"model": self.trained, "optimizer": self.optimizer, "config": self.job.config, "rank": rank}
        return load_checkpoint(found.path, **options).step

    def take_step(self) -> dict[str, Any]:
        """One optimizer step, at one depth for all of its forwards; returns what happened.

        Raises:
            ValueError: if the loss or its gradient is not finite; the weights are still those before the step.
        """
        started, recipe, depth = time.perf_counter(), self.job.arguments.recipe, self.task.sampler(self.step)
        loss = torch.stack([self._accumulate(tokens, depth, last) for tokens, last in self._batches()]).sum()
        loss = float(self.accelerator.reduce(loss, "mean"))
        norm = float(torch.nn.utils.clip_grad_norm_(self.trained.parameters(), recipe.clip))
        for name, value in (("loss", loss), ("norm of the gradient", norm)):
            if not math.isfinite(value):
                raise ValueError(
                    f"The {name} is {value} at step {self.step + 1}: start anew in another folder, with a lower lr."
                )
        [lr, *_] = self.schedule.get_last_lr()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.step += 1
        happened = {"step": self.step, "loss": loss, "num_steps": depth.num_steps, "lr": lr, "gradient_norm": norm}
        return {**happened, "seconds": time.perf_counter() - started}

    def _batches(self) -> list[tuple[Tensor, bool]]:
        recipe, processes = self.job.arguments.recipe, self.accelerator.num_processes
        num_rows = recipe.accumulation * processes * recipe.batch_size
        length = self.job.windows.shape[1]
        rows = batch(self.job.corpus.train, self.step, seed=recipe.seed, num_rows=num_rows, length=length)
        shares = rows.view(recipe.accumulation, processes, recipe.batch_size, length)[:, self.accelerator.process_index]
        return [(tokens, number == recipe.accumulation - 1) for number, tokens in enumerate(shares)]

    def _accumulate(self, tokens: Tensor, depth: rd.Depth, last: bool) -> Tensor:
        # Processes exchange gradients once per optimizer step.
        with nullcontext() if last else self.accelerator.no_sync(self.wrapped):
            loss = self.wrapped(tokens.to(self.accelerator.device), depth) / self.job.arguments.recipe.accumulation
            self.accelerator.backward(loss)
        return loss.detach()

    def look(self) -> dict[str, Any]:
        """What held-out text says of the task now."""
        return {"step": self.step, **self.task.look()}

    def save(self) -> None:
        """Writes a checkpoint, on one process with the random numbers of all."""
        states = gather_object([random_state()])
        if self.accelerator.is_main_process:
            options = {"model": self.trained, "optimizer": self.optimizer, "config": self.job.config}
            save_checkpoint(self.job.folder, self.step, **options, random_states=states)
        self.accelerator.wait_for_everyone()
