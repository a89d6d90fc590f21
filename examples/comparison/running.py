"""One run: a trunk at constant rate, and for each budget a cooldown that forks off it. Killed anywhere, it goes on."""

import hashlib
import math
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
from journal import Journal, read_journal

import recurrent_depth as rd
from comparison.checking import check
from comparison.describing import require_same, settings
from comparison.files import write_json
from comparison.locking import only_one
from comparison.parts import Comparison, Run
from comparison.stopping import StoppedError
from recurrent_depth import accounting
from recurrent_depth.training import Checkpoint, latest_checkpoint, load_checkpoint, parameter_groups, save_checkpoint

SAVE_EVERY = 200
TRUNK = "trunk"  # the folder of a run's trunk
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

    Args:
        comparison: what the run is part of.
        run: which it is.
        out: where the runs lie.
        stop: asked after each step whether to save and end.

    Raises:
        ValueError: if what lies there is of another run, or damaged.
    """

    def __init__(self, comparison: Comparison, run: Run, out: Path, stop: Callable[[], bool] = lambda: False):
        check(comparison)
        self.comparison, self.run, self.folder, self.stop = comparison, run, out / run.name, stop
        self.method = comparison.methods[run.method]
        self.data, described = comparison.data, comparison.data.open(out / "text")
        self._costs: dict[rd.Depth, float] = {}
        self._begin()
        self.config = {**settings(comparison, run), "data": described, "built": _built(self.trained)}
        warnings.filterwarnings("ignore", message=".* deeper than trained")  # a heavy tail is meant to go beyond

    def _begin(self) -> None:
        """The model before its first step: nothing of what this process trained before is left in it."""
        torch.manual_seed(self.run.seed)
        self.model = self.method.make(self.comparison.sizes())
        self.trained = self.data.objective(self.method, self.model)
        groups = parameter_groups(self.trained, self.comparison.protocol.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=self.run.rate, betas=(0.9, 0.95), fused=True)
        torch.manual_seed(self.run.seed + 1)
        self.sampler, self.step = self.method.sampler(self.model, self.run.seed), 0
        if self.comparison.compile:
            self.model.compile_step()

    def finish(self) -> None:
        """Trains and measures whatever is missing."""
        with only_one(self.folder):
            for budget in self.comparison.protocol.budgets[: self.run.num_budgets]:
                path = result_path(self.folder, budget)
                if not path.exists():
                    write_json(path, self._finish(budget))

    def _finish(self, budget: int) -> dict[str, Any]:
        trunk, cooldown = self.stages(budget)
        try:
            if latest_checkpoint(cooldown.folder) is None:  # else the trunk has done its part, and may be far beyond
                self.advance(trunk)
            self.advance(cooldown, fork_of=trunk)
            measured = self._measured()
        except DivergedError as error:
            return {**self.about(budget), "diverged": str(error)}
        records = _taken(trunk) + _taken(cooldown)
        sums = {name: sum(record[name] for record in records) for name in ("flops", "seconds")}
        first = [record["loss"] for record in records[: min(FIRST_STEPS, trunk.last)]]
        return {**self.about(budget), "training": sums, "measured": measured, "first_losses": first}

    def _measured(self) -> dict[str, Any]:
        self.model.eval()
        measured = self.data.measure(self.method, self.model)
        self.model.train()
        score = self.data.score(measured)
        if not math.isfinite(score):
            raise DivergedError(f"held-out loss {score}")
        return measured

    def stages(self, budget: int) -> tuple[Stage, Stage]:
        """The trunk up to the fork of a budget, and the cooldown from there."""
        protocol = self.comparison.protocol
        fork = protocol.fork(budget)
        trunk = Stage(self.folder / TRUNK, 0, fork, lambda step: min(1.0, (step + 1) / protocol.warmup))
        falling = Stage(
            self.folder / cooldown_name(budget), fork, budget, lambda step: (budget - step) / (budget - fork)
        )
        return trunk, falling

    def advance(self, stage: Stage, fork_of: Stage | None = None, watch: Callable[[float], None] | None = None) -> None:
        """Takes the stage's steps, from its newest checkpoint or from where it begins.

        Raises:
            ValueError: if that checkpoint lies beyond the steps asked for, or is of another run.
            StoppedError: if it was asked to stop, once all is saved.
        """
        self._enter(stage, fork_of)
        if self.step >= stage.last:
            return
        with closing(Journal(stage.folder, self.step)) as journal:
            while self.step < stage.last:
                record = self.take_step(stage.factor(self.step))
                journal.write(record)
                if watch is not None:
                    watch(record["loss"])
                stopping = self.stop()
                if stopping or self.step % SAVE_EVERY == 0 or self.step == stage.last:
                    journal.sync()
                    config = {**self.config, "stage": stage.folder.name}
                    save_checkpoint(
                        stage.folder, self.step, model=self.trained, optimizer=self.optimizer, config=config
                    )
                if stopping:
                    raise StoppedError

    def _enter(self, stage: Stage, fork_of: Stage | None) -> None:
        self._begin()
        for place, last in ((stage, stage.last), (fork_of, stage.first)):
            found = None if place is None else latest_checkpoint(place.folder)
            if found is not None:
                self._load(found, last)
                return

    def _load(self, found: Checkpoint, last: int) -> None:
        if found.step > last:
            raise ValueError(
                f"{found.path.parent} is already at step {found.step}, but step {last} is asked for, which is gone: "
                f"budgets can only be added behind the others. Give another --out, or delete {self.folder} to train it "
                "anew."
            )
        require_same(found.path, found.config, self.config, "method")
        # In what was saved before methods were described there is none to compare.
        described = {key: value for key, value in self.config.items() if key != "method"}
        described |= {key: value for key, value in found.config.items() if key == "method"}
        config = {**described, "stage": found.path.parent.name}
        load_checkpoint(found.path, model=self.trained, optimizer=self.optimizer, config=config)
        self.step = found.step

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


def cooldown_name(budget: int) -> str:
    """Of the folder of a budget's cooldown, in that of its run."""
    return f"cooldown-{budget}"


def result_path(folder: Path, budget: int) -> Path:
    """Where the result of a budget lies; complete if it is there."""
    return folder / f"result-{budget}.json"


def _built(trained: torch.nn.Module) -> str:
    return hashlib.sha256(repr(trained).encode()).hexdigest()[:16]


def _taken(stage: Stage) -> list[dict[str, Any]]:
    """The records of a stage's steps.

    Raises:
        ValueError: if one is missing: sums would come out too small.
    """
    path = stage.folder / "log.jsonl"
    records = [record for record in read_journal(path) if record["step"] <= stage.last]
    if [record["step"] for record in records] != list(range(stage.first + 1, stage.last + 1)):
        raise ValueError(
            f"{path} must tell of steps {stage.first + 1} to {stage.last}, each once, but tells of {len(records)}: "
            "delete that run's folder to train it anew."
        )
    return records
