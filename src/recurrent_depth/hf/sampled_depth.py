"""A depth for each optimiser step of transformers' Trainer."""

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import recurrent_depth as rd
from recurrent_depth.hf.modeling import RecurrentDepthModel
from recurrent_depth.hf.recurrence import Recurrence


class SampleDepth(TrainerCallback):
    """Draws how deep each optimiser step of a `Trainer` goes: `Trainer(..., callbacks=[SampleDepth(sampler)])`.

    All forwards of a step, on all ranks, take the same depth. It is a function of the sampler's seed and the number of
    steps done, so that a resumed run goes on with the depths that it would have had. Evaluation goes to full depth.

    Args:
        sampler: draws the depth, `rd.UniformDepth(10, seed=0)` for example.

    Raises:
        ValueError: if `sampler` is none; when training begins, if the model has no loop.
    """

    def __init__(self, sampler: rd.DepthSampler):
        if not callable(sampler):
            raise ValueError(f"sampler is {sampler!r}, but must be a DepthSampler, such as rd.UniformDepth(10).")
        self.sampler = sampler
        self._before: list[tuple[Any, int | rd.Depth]] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Looks for the loop, and puts the depth back that a training which broke off had set."""
        self._put_back()
        if not loops(kwargs["model"]):
            raise ValueError(f"model is a {type(kwargs['model']).__name__}, which has no loop to go deeper.")

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Sets this step's depth."""
        depth = self.sampler(state.global_step)
        self._before = [(loop, loop.num_steps) for loop in loops(kwargs["model"])]
        for loop, _ in self._before:
            loop.num_steps = depth

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Puts the depth back."""
        self._put_back()

    def _put_back(self) -> None:
        for loop, depth in self._before:
            loop.num_steps = depth
        self._before = []


def loops(model: nn.Module) -> list[RecurrentDepthModel | Recurrence]:
    """The modules of a model that have a `num_steps`: the loop of a native model, or of a graft."""
    return [module for module in model.modules() if isinstance(module, RecurrentDepthModel | Recurrence)]
