"""What a comparison is made of: methods, data, the protocol that all cells share, and the cells in their order."""

import abc
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import recurrent_depth as rd
from recurrent_depth import accounting


class Sizes(NamedTuple):
    """What every builder is told."""

    dim: int
    num_heads: int
    vocab_size: int
    context_length: int


def uniform(model: rd.RecurrentTransformer, seed: int) -> rd.DepthSampler:
    """Evenly from 1 to full depth; a model of one step has nothing to sample."""
    full = model.layout.num_steps
    return rd.FixedDepth(1) if full == 1 else rd.UniformDepth(full, seed=seed)


def full_depth(model: rd.RecurrentTransformer, seed: int) -> rd.DepthSampler:
    """Always all steps."""
    return rd.FixedDepth(model.layout.num_steps)


def cost(model: rd.RecurrentTransformer, depth: rd.Depth, length: int, *, every_step: bool = False) -> float:
    """FLOPs that a training step at this depth executes for one sequence."""
    drawn = [rd.Depth(rows, depth.grad_steps) for rows in depth.rows or (depth.num_steps,)]
    costs = [
        accounting.training_flops(model, rd.FixedDepth(*each[:2]), length, read_every_step=every_step) for each in drawn
    ]
    return sum(costs) / len(costs)


@torch.no_grad()
def prefix_exits(model: rd.RecurrentTransformer, tokens: Tensor, num_steps: int) -> Iterator[Tensor]:
    """Logits after each step of one run."""
    trajectory = model.trajectory(tokens, num_steps, every_step=True)
    yield from (trajectory.after(step) for step in range(1, num_steps + 1))


@torch.no_grad()
def separate_exits(model: rd.RecurrentTransformer, tokens: Tensor, num_steps: int) -> Iterator[Tensor]:
    """Logits of runs of each length, for methods whose shallower runs are no prefix of deeper ones."""
    yield from (model(tokens, step) for step in range(1, num_steps + 1))


class Method(NamedTuple):
    """A design and how it is trained.

    Attributes:
        label: its name in tables.
        build: called with `dim`, `num_heads`, `vocab_size` and `context_length`.
        sampler: makes the sampler of depths of the model and a seed.
        objective: puts model and loss behind one forward, called with tokens and a depth.
        cost: FLOPs of a training step, called with the model, a `Depth` and the length of a sequence.
        exits: logits after 1, 2, ... steps.
        init_std: of the initial weights; None leaves the builder's own start as it is.
        rate_of: the name of the method whose learning rate it takes, None for one of its own trials.
        scale_embedding: multiply the embedding by sqrt(dim), where the start is not the builder's own.
    """

    label: str
    build: Callable[..., rd.RecurrentTransformer]
    sampler: Callable[[rd.RecurrentTransformer, int], rd.DepthSampler] = uniform
    objective: Callable[[rd.RecurrentTransformer], nn.Module] = rd.WithObjective
    cost: Callable[..., float] = cost
    exits: Callable[[rd.RecurrentTransformer, Tensor, int], Iterable[Tensor]] = prefix_exits
    init_std: float | None = 0.06
    rate_of: str | None = None
    scale_embedding: bool = True

    def make(self, sizes: Sizes) -> rd.RecurrentTransformer:
        """The model, its weights from the global RNG."""
        model = self.build(**sizes._asdict())
        if self.init_std is not None:
            if self.scale_embedding:
                rd.scaled_embedding(model.embed, math.sqrt(sizes.dim))
            rd.initialise(model, std=self.init_std)
        return model


class Protocol(NamedTuple):
    """What all cells share.

    Attributes:
        budgets: optimizer steps of each complete run; all but the last fork off the trunk of the longest.
        cooldown: the last share of each budget, in which the rate falls to 0.
        warmup: steps in which it rises.
        rates: the learning rates of which each method tries those around its best, at the first budget, with one seed.
        weight_decay: of matrices.
        clip: the largest norm of a gradient.
    """

    budgets: tuple[int, ...]
    cooldown: float = 0.2
    warmup: int = 100
    rates: tuple[float, ...] = (1.5e-3, 3e-3, 6e-3, 12e-3, 24e-3)
    weight_decay: float = 0.1
    clip: float = 1.0

    def fork(self, budget: int) -> int:
        """The step of the trunk after which the cooldown of a budget begins."""
        return budget - math.ceil(self.cooldown * budget)

    def steps(self, num_budgets: int) -> int:
        """Optimizer steps of a run with its first so many budgets, trunk and cooldowns together."""
        budgets = self.budgets[:num_budgets]
        return self.fork(budgets[-1]) + sum(budget - self.fork(budget) for budget in budgets)


class Data(abc.ABC):
    """What is learned, and how well it was. Pure functions of seed and step, so there is nothing to resume."""

    @abc.abstractmethod
    def reading(self, folder: Path) -> "Data":
        """The same, with the text files of a folder.

        Raises:
            ValueError: if it reads none.
        """

    @abc.abstractmethod
    def sizes(self) -> tuple[int, int]:
        """How many tokens there are, and how many a sequence has."""

    @abc.abstractmethod
    def batch_tokens(self) -> int:
        """How many tokens a step trains on."""

    @abc.abstractmethod
    def open(self, folder: Path) -> dict[str, Any]:
        """Makes it ready, in `folder` if it needs one; returns what identifies it."""

    @abc.abstractmethod
    def batch(self, step: int, seed: int) -> tuple[Tensor, ...]:
        """What the objective is called with before the depth: tokens first, (row, token)."""

    @abc.abstractmethod
    def objective(self, method: Method, model: rd.RecurrentTransformer) -> nn.Module:
        """Model and loss behind one forward."""

    @abc.abstractmethod
    def measure(self, method: Method, model: rd.RecurrentTransformer) -> dict[str, Any]:
        """How good the model is, at every exit; what JSON can hold."""

    @abc.abstractmethod
    def misfit(self, measured: dict[str, Any]) -> str:
        """In words, why something read from a file is no measurement on this data; empty if it is one."""

    @abc.abstractmethod
    def score(self, measured: dict[str, Any]) -> float:
        """One number of a measurement, lower is better; trials are chosen by it."""


class Run(NamedTuple):
    """One training: a method at one rate and seed, up to so many of the budgets."""

    method: str
    rate: float
    seed: int
    num_budgets: int

    @property
    def name(self) -> str:
        """Also of its folder; a trial and the run that goes on from it share one."""
        return f"{self.method}-lr{self.rate:g}-seed{self.seed}"


class Trials(NamedTuple):
    """The learning rates that a method needs to try, at the first budget."""

    method: str


class Full(NamedTuple):
    """A method at its best rate.

    Attributes:
        method: its name.
        seed: of weights, order of the data and depths.
        num_budgets: it is trained up to so many of the budgets; None for all. A cell further down the plan may go on.
    """

    method: str
    seed: int
    num_budgets: int | None = None


class Comparison(NamedTuple):
    """Everything that a comparison is: the file of cells makes one and calls it COMPARISON.

    Attributes:
        data: what is learned.
        methods: by name.
        protocol: what all cells share.
        plan: the cells in the order in which they are run.
        dim: the width.
        num_heads: attention heads.
        baseline: the method that the others are set beside.
        floor: the method with the same stored blocks run once; the headroom is its loss less the baseline's.
        publish: writes the report, called with the comparison, the folder of its runs, and where to write.
        pairs: methods whose difference is a finding, the second taken from the first.
        compile: compile the loop's step; at small width on CPUs that gains nothing.
    """

    data: Data
    methods: dict[str, Method]
    protocol: Protocol
    plan: tuple[Trials | Full, ...]
    dim: int
    num_heads: int
    baseline: str
    floor: str
    publish: Callable[["Comparison", Path, Path], str]
    pairs: tuple[tuple[str, str], ...] = ()
    compile: bool = False

    def sizes(self) -> Sizes:
        """What every builder is told."""
        return Sizes(self.dim, self.num_heads, *self.data.sizes())
