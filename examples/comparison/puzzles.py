"""Tasks that take more depth, the more steps a question asks for."""

import abc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recurrent_depth as rd
from comparison.parts import Data, Method
from recurrent_depth.arguments import require_whole

IGNORED = -100
TEST_SEED = 2**31


class Puzzle(abc.ABC):
    """Questions that take 1 to `max_hops` steps.

    Attributes:
        max_hops: the most steps of a question.
    """

    max_hops: int

    @abc.abstractmethod
    def make(self, generator: np.random.Generator, hops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and targets, (row, token); `hops` are the steps of the questions, (row, question)."""

    @abc.abstractmethod
    def name(self) -> str:
        """In titles."""

    @abc.abstractmethod
    def sizes(self) -> tuple[int, int]:
        """How many tokens there are, and how many a sequence has."""

    @abc.abstractmethod
    def questions(self) -> int:
        """How many a sequence asks."""

    @abc.abstractmethod
    def chance(self) -> float:
        """The accuracy of a guess."""


@dataclass(frozen=True)
class PointerChasing(Puzzle):
    """The arrows of one circle in any order, each a token; then questions "from here, k times", each a token too.

    In a single circle no question leads back to where it began, so nothing but following the arrows beats a guess.

    Args:
        num_nodes: of the circle, more than `max_hops`.
        max_hops: the most steps of a question.
        num_questions: of a sequence.

    Raises:
        ValueError: if one of them is too small.
    """

    num_nodes: int = 8
    max_hops: int = 4
    num_questions: int = 24

    def __post_init__(self):
        require_whole("max_hops", self.max_hops, 1)
        require_whole("num_questions", self.num_questions, 1)
        require_whole("num_nodes", self.num_nodes, self.max_hops + 1)

    def name(self) -> str:
        return "pointer chasing"

    def sizes(self) -> tuple[int, int]:
        return self.num_nodes * (self.num_nodes + self.max_hops), self.num_nodes + self.num_questions

    def questions(self) -> int:
        return self.num_questions

    def chance(self) -> float:
        return 1 / (self.num_nodes - 1)

    def make(self, generator: np.random.Generator, hops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows, number = np.arange(len(hops))[:, None], self.num_nodes
        nodes = np.tile(np.arange(number), (len(hops), 1))
        circle, sources = generator.permuted(nodes, axis=1), generator.permuted(nodes, axis=1)
        place = circle.argsort(axis=1)
        begun = generator.integers(number, size=hops.shape)
        arrows = sources * number + circle[rows, (place[rows, sources] + 1) % number]
        asked = (number + hops - 1) * number + begun
        reached = circle[rows, (place[rows, begun] + hops) % number]
        return np.concatenate([arrows, asked], 1), np.concatenate([np.full_like(arrows, IGNORED), reached], 1)


@dataclass(frozen=True)
class Automaton(Puzzle):
    """Cells of a one-dimensional automaton; each says what it is k steps later.

    Rule 30, moved so that a cell looks at itself and the two before it, which causal attention allows.

    Args:
        num_cells: of a row.
        max_hops: the most steps of a question.

    Raises:
        ValueError: if one of them is below 1.
    """

    num_cells: int = 31
    max_hops: int = 4

    def __post_init__(self):
        require_whole("num_cells", self.num_cells, 1)
        require_whole("max_hops", self.max_hops, 1)

    def name(self) -> str:
        return "cellular automaton"

    def sizes(self) -> tuple[int, int]:
        return 2 + self.max_hops, 1 + self.num_cells

    def questions(self) -> int:
        return 1

    def chance(self) -> float:
        return 0.5

    def make(self, generator: np.random.Generator, hops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        cells = generator.integers(2, size=(len(hops), self.num_cells))
        later = cells
        for hop in range(self.max_hops):
            before = np.pad(later, ((0, 0), (2, 0)))
            stepped = before[:, :-2] ^ (before[:, 1:-1] | later)
            later = np.where(hop < hops, stepped, later)
        ignored = np.full_like(hops, IGNORED)
        return np.concatenate([2 + hops - 1, cells], 1), np.concatenate([ignored, later], 1)


class AnswerLoss(nn.Module):
    """The cross-entropy of the answers, plus auxiliary losses."""

    def __init__(self, model: rd.RecurrentTransformer):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor, depth: rd.Depth) -> Tensor:
        """Nats per answer."""
        trajectory = self.model.trajectory(tokens, depth)
        loss = F.cross_entropy(trajectory.output.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        return torch.stack([loss, *trajectory.losses.values()]).sum()


@dataclass(frozen=True)
class PuzzleData(Data):
    """Questions of one step first, of one more after each stretch of training, and of all alike in the end.

    Long questions teach little before short ones are answered. Measured one number of steps at a time, at every depth
    up to twice the full one.

    Args:
        puzzle: what is asked.
        num_rows: sequences of a batch.
        num_tested: sequences for each number of steps.
        stretch: optimizer steps after which questions may take one step more.

    Raises:
        ValueError: if a number is below 1.
    """

    puzzle: Puzzle
    num_rows: int = 64
    num_tested: int = 256
    stretch: int = 300

    def __post_init__(self):
        require_whole("num_rows", self.num_rows, 1)
        require_whole("num_tested", self.num_tested, 1)
        require_whole("stretch", self.stretch, 1)

    def reading(self, folder: Path) -> "PuzzleData":
        raise ValueError(f"text is {folder}, but {self.puzzle.name()} reads no text.")

    def sizes(self) -> tuple[int, int]:
        return self.puzzle.sizes()

    def batch_tokens(self) -> int:
        return self.num_rows * self.puzzle.sizes()[1]

    def open(self, folder: Path) -> dict[str, Any]:
        return {"puzzle": repr(self.puzzle), "num_rows": self.num_rows, "stretch": self.stretch}

    def batch(self, step: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = np.random.default_rng((seed, step))
        most = min(1 + step // self.stretch, self.puzzle.max_hops)
        hops = generator.integers(1, most + 1, size=(self.num_rows, self.puzzle.questions()))
        return self._made(generator, hops)

    def objective(self, method: Method, model: rd.RecurrentTransformer) -> nn.Module:
        if method.objective is not rd.WithObjective:
            raise ValueError(
                f"objective of {method.label} is one of its own, but {self.puzzle.name()} trains on the answers after "
                "the last step alone."
            )
        return AnswerLoss(model)

    @torch.no_grad()
    def measure(self, method: Method, model: rd.RecurrentTransformer) -> dict[str, Any]:
        by_hops = [self._accuracies(method, model, hops) for hops in range(1, self.puzzle.max_hops + 1)]
        return {"accuracy": [list(of_depth) for of_depth in zip(*by_hops, strict=True)], "full": model.num_steps}

    def misfit(self, measured: dict[str, Any]) -> str:
        by_depth, full = measured.get("accuracy"), measured.get("full")
        rows = by_depth if isinstance(by_depth, list) else []
        hops = self.puzzle.max_hops
        if not rows or not all(isinstance(row, list) and len(row) == hops for row in rows):
            return f"its accuracies are not {hops} at each depth"
        if not all(type(value) in (int, float) for row in rows for value in row):
            return "its accuracies are no numbers"
        return "" if type(full) is int and 1 <= full <= len(rows) else f"its full depth is {full}"

    def score(self, measured: dict[str, Any]) -> float:
        at_full = measured["accuracy"][measured["full"] - 1]
        return 1 - sum(at_full) / len(at_full)

    def _accuracies(self, method: Method, model: rd.RecurrentTransformer, hops: int) -> list[float]:
        """After each step."""
        asked = np.full((self.num_tested, self.puzzle.questions()), hops)
        tokens, targets = self._made(np.random.default_rng((TEST_SEED, hops)), asked)
        deepest = 1 if model.num_steps == 1 else 2 * model.num_steps
        is_asked = targets != IGNORED
        return [
            round(float((logits.argmax(-1) == targets)[is_asked].double().mean()), 5)
            for logits in method.exits(model, tokens, deepest)
        ]

    def _made(self, generator: np.random.Generator, hops: np.ndarray) -> tuple[Tensor, Tensor]:
        tokens, targets = self.puzzle.make(generator, hops)
        return torch.from_numpy(tokens), torch.from_numpy(targets)
