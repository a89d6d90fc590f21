"""One run: a trunk at constant rate, and for each budget a cooldown that forks off it. Killed anywhere, it goes on."""

import fcntl
import hashlib
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from journal import Journal, read_journal

import recurrent_depth as rd
from comparison.parts import Comparison, Run
from recurrent_depth import accounting
from recurrent_depth.training import latest_checkpoint, load_checkpoint, parameter_groups, save_checkpoint

SAVE_EVERY = 200
FIRST_STEPS = 200  # whose losses are part of the result, for `--verify`


class Stage(NamedTuple):
    """Optimizer steps `first + 1` to `last`; `factor` of a step is what its learning rate is multiplied with."""

    folder: Path
    first: int
    last: int
    factor: Callable[[int], float]


class DivergedError(Exception):
    """The loss or its gradient is no finite number."""


class Running:
    """A model in training, in `out/<name of the run>`.

    Raises:
        ValueError: if what lies there is of another run, or damaged.
    """

    def __init__(self, comparison: Comparison, run: Run, out: Path):
        self.comparison, self.run, self.folder = comparison, run, out / run.name
        self.method = comparison.methods[run.method]
        self.data, described = comparison.data, comparison.data.open(out / "text")
        torch.manual_seed(run.seed)
        self.model = self.method.make(comparison.sizes())
        self.trained = self.data.objective(self.method, self.model)
        groups = parameter_groups(self.trained, comparison.protocol.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=run.rate, betas=(0.9, 0.95), fused=True)
        torch.manual_seed(run.seed + 1)
        self.sampler = self.method.sampler(self.model, run.seed)
        self.config = _config(comparison, run, described, self.trained)
        self.step, self._costs = 0, {}
        if comparison.compile:
            self.model.compile_step()
        warnings.filterwarnings("ignore", message=".* deeper than trained")  # a heavy tail is meant to go beyond

    def finish(self) -> None:
        """Trains and measures whatever is missing."""
        with _only_one(self.folder):
            for budget in self.comparison.protocol.budgets[: self.run.num_budgets]:
                path = result_path(self.folder, budget)
                if not path.exists():
                    _write(path, self._finish(budget))

    def _finish(self, budget: int) -> dict[str, Any]:
        trunk, cooldown = self.stages(budget)
        try:
            self.advance(trunk)
            self.advance(cooldown, fork_of=trunk)
        except DivergedError as error:
            return {**self.about(budget), "diverged": str(error)}
        self.model.eval()
        measured = self.data.measure(self.method, self.model)
        self.model.train()
        records = self._taken(trunk) + self._taken(cooldown)
        sums = {name: sum(record[name] for record in records) for name in ("flops", "seconds")}
        first = [record["loss"] for record in self._taken(trunk)[:FIRST_STEPS]]
        return {**self.about(budget), "training": sums, "measured": measured, "first_losses": first}

    def stages(self, budget: int) -> tuple[Stage, Stage]:
        """The trunk up to the fork of a budget, and the cooldown from there."""
        protocol = self.comparison.protocol
        fork = protocol.fork(budget)
        trunk = Stage(self.folder / "trunk", 0, fork, lambda step: min(1.0, (step + 1) / protocol.warmup))
        falling = Stage(
            self.folder / f"cooldown-{budget}", fork, budget, lambda step: (budget - step) / (budget - fork)
        )
        return trunk, falling

    def advance(self, stage: Stage, fork_of: Stage | None = None, watch: Callable[[float], None] | None = None) -> None:
        """Takes the stage's steps, from its newest checkpoint or from where it begins."""
        self._enter(stage, fork_of)
        if self.step >= stage.last:
            return
        with closing(Journal(stage.folder, self.step)) as journal:
            while self.step < stage.last:
                record = self.take_step(stage.factor(self.step))
                journal.write(record)
                if watch is not None:
                    watch(record["loss"])
                if self.step % SAVE_EVERY == 0 or self.step == stage.last:
                    journal.sync()
                    config = {**self.config, "stage": stage.folder.name}
                    save_checkpoint(
                        stage.folder, self.step, model=self.trained, optimizer=self.optimizer, config=config
                    )

    def _enter(self, stage: Stage, fork_of: Stage | None) -> None:
        for place in (stage, fork_of):
            found = None if place is None else latest_checkpoint(place.folder)
            if place is not None and found is not None:
                config = {**self.config, "stage": place.folder.name}
                load_checkpoint(found.path, model=self.trained, optimizer=self.optimizer, config=config)
                self.step = found.step
                return

    def take_step(self, factor: float) -> dict[str, Any]:
        """One optimizer step at one depth.

        Raises:
            DivergedError: if the loss or its gradient is no finite number.
        """
        started, depth = time.process_time(), self.sampler(self.step)  # of the core, whoever else runs on it
        for group in self.optimizer.param_groups:
            group["lr"] = self.run.rate * factor
        batch = self.data.batch(self.step, self.run.seed)
        loss = self.trained(*batch, depth)
        loss.backward()
        loss = loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.trained.parameters(), self.comparison.protocol.clip)
        if not math.isfinite(float(loss)) or not math.isfinite(float(norm)):
            raise DivergedError(f"loss {float(loss)}, norm of the gradient {float(norm)} at step {self.step + 1}")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        happened = {"step": self.step, "loss": float(loss), "flops": self._flops(depth, batch[0])}
        return {**happened, "seconds": time.process_time() - started}

    def _flops(self, depth: rd.Depth, tokens: torch.Tensor) -> float:
        if depth not in self._costs:
            self._costs[depth] = self.method.cost(self.model, depth, tokens.shape[1])
        return self._costs[depth] * tokens.shape[0]

    def _taken(self, stage: Stage) -> list[dict[str, Any]]:
        return [record for record in read_journal(stage.folder / "log.jsonl") if record["step"] <= stage.last]

    def about(self, budget: int) -> dict[str, Any]:
        """What is known before training."""
        model, length = self.model, self.comparison.sizes().context_length
        return {
            **self.run._asdict(),
            "budget": budget,
            "tokens": budget * self.data.batch_tokens(),
            "layout": str(model.layout),
            "parameters": accounting.num_parameters(model),
            "non_embedding": accounting.num_non_embedding_parameters(model),
            "flops_per_token": accounting.flops_per_token(model, length),
            "config": self.config,
        }


def result_path(folder: Path, budget: int) -> Path:
    """Where the result of a budget lies; complete if it is there."""
    return folder / f"result-{budget}.json"


def _write(path: Path, result: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(result))
    temporary.replace(path)


def _config(comparison: Comparison, run: Run, data: dict[str, Any], trained: torch.nn.Module) -> dict[str, Any]:
    """All that must be the same when a run goes on; budgets may be added."""
    protocol = {**comparison.protocol._asdict(), "budgets": None, "rates": None}
    built = hashlib.sha256(repr(trained).encode()).hexdigest()[:16]
    sizes = [comparison.dim, comparison.num_heads]
    return {"run": run.name, "protocol": protocol, "data": data, "sizes": sizes, "built": built}


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Keeps a second process from training the same run; the lock goes with the process that holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{folder} is being trained by another process.") from None
        yield
