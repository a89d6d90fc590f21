"""Trains recurrent-depth Transformers on text, one after the other, and compares them.

    python examples/train.py                                  # a GRT and a dense model on Python sources, 2 CPU cores
    python examples/train.py --model grt --data my_texts/     # one model, on your own text
    python examples/train.py --preset grt_medium --data tokens.bin --out runs/medium

Stop it with Ctrl-C, or let it be killed: the same command goes on from the last checkpoint.
"""

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from arguments import parse
from journal import Journal
from plan import Job, plan, require_writable
from report import report
from task import Task, language_model
from tqdm import tqdm
from trainer import Trainer


class StopRequest:
    """Turns Ctrl-C or SIGTERM into a wish to stop after the running step; the second one ends the process at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: object) -> None:
        self.signal = number
        signal.signal(number, signal.SIG_DFL)
        tqdm.write("\nStopping after this step; once more to stop at once.")

    def forget(self) -> None:
        """From here on a signal ends the process as usual."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)

    def agreed(self, accelerator: Accelerator) -> bool:
        """Whether any process was asked to stop: all must stop after the same step."""
        if self.signal is not None:
            accelerator.set_trigger()
        return accelerator.check_trigger()


def start_accelerator(bf16: bool) -> Accelerator:
    """On the GPUs if there are any, else on the CPU.

    Raises:
        ValueError: if the processes did not find each other, or the weights are to be sharded.
    """
    accelerator = Accelerator(mixed_precision="bf16" if bf16 else "no", cpu=not torch.cuda.is_available())
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != started:
        raise ValueError(f"{started} processes were started, but each sees {accelerator.num_processes}: use torchrun.")
    if accelerator.distributed_type in ("FSDP", "DEEPSPEED"):
        raise ValueError(f"Whole weights are trained and saved here, but {accelerator.distributed_type} shards them.")
    return accelerator


@contextmanager
def told_plainly() -> Iterator[None]:
    """Where arguments, data, the disk or Ctrl-C end the script and not the code, a message is enough."""
    try:
        yield
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("Stopped before the training began.")


def train(
    job: Job, accelerator: Accelerator, stop: StopRequest, make: Callable[[Job, torch.device], Task] = language_model
) -> Trainer:
    """Trains one model to the end, or until asked to stop."""
    trainer = Trainer(job, accelerator, make)
    steps, run, main = job.arguments.recipe.steps, job.arguments.run, accelerator.is_main_process
    if main:
        print(f"\n{job.name}: {_where(trainer, steps)}", flush=True)
    if trainer.step == steps:
        return trainer
    job.folder.with_name("metrics.json").unlink(missing_ok=True)
    journal = Journal(job.folder, trainer.step, accelerator.process_index, run.tensorboard)
    bar = tqdm(initial=trainer.step, total=steps, desc=job.name, unit="step", disable=None if main else True)
    with bar, closing(journal):
        advance(trainer, journal, bar, stop)
    return trainer


def advance(trainer: Trainer, journal: Journal, bar: tqdm, stop: StopRequest) -> None:
    """Takes steps, looks, saves."""
    steps, run, accelerator = trainer.job.arguments.recipe.steps, trainer.job.arguments.run, trainer.accelerator
    stopping = False
    while trainer.step < steps and not stopping:
        record = trainer.take_step()
        journal.write(record)
        bar.set_postfix_str(f"loss {record['loss']:.3f}", refresh=False)
        bar.update()
        stopping, last = stop.agreed(accelerator), trainer.step == steps
        if last or trainer.step % run.eval_every == 0:
            looked = trainer.look()
            journal.write(looked)
            if accelerator.is_main_process:
                tqdm.write(_in_words(record, looked))
        if last or stopping or trainer.step % run.save_every == 0:
            journal.sync()
            trainer.save()


def _where(trainer: Trainer, steps: int) -> str:
    about = trainer.task.about
    if trainer.step == steps:
        return f"{about}; trained to the end before"
    if not trainer.step:
        return f"{about}; training begins"
    moments = "" if trainer.optimizer.state else " with weights alone: the optimizer's moments start anew"
    return f"{about}; goes on after step {trainer.step}{moments}"


def _in_words(record: dict[str, Any], looked: dict[str, Any]) -> str:
    gate = f", mean gate {looked['mean_gate']:.3f}" if "mean_gate" in looked else ""
    losses = f"training loss {record['loss']:.3f}, held-out loss {looked['validation_loss']:.3f}"
    return f"  step {record['step']:>5}: {losses}{gate}"


def introduce(jobs: list[Job], num_processes: int) -> None:
    """Says what is about to happen."""
    corpus, recipe, unit = jobs[0].corpus, jobs[0].arguments.recipe, jobs[0].corpus.unit
    num_tokens = recipe.batch_size * recipe.accumulation * num_processes * jobs[0].windows.shape[1]
    names = ", ".join(job.name for job in jobs)
    print(f"Text:    {corpus.source} (checksum {corpus.checksum[:16]})")
    print(f"         {corpus.train.size:,} {unit} to train on, {corpus.held_out.size:,} held out")
    print(f"Models:  {names}; each takes {recipe.steps:,} steps of {num_tokens:,} {unit}")
    print(f"Folder:  {jobs[0].arguments.run.out}; stop with Ctrl-C, and the same command goes on", flush=True)


def leave_unless_finished(trainer: Trainer, stop: StopRequest) -> None:
    """Ends the process where the training was stopped, and says how to go on."""
    if trainer.step < trainer.job.arguments.recipe.steps:
        if trainer.accelerator.is_main_process:
            print(f"Stopped; nothing is lost. To go on: python {shlex.join(sys.argv)}")
        sys.exit(128 + (stop.signal or signal.SIGTERM))


def main() -> None:
    """Plans, trains each model, reports."""
    with told_plainly():
        arguments = parse()
        accelerator = start_accelerator(arguments.recipe.bf16)
        jobs = plan(arguments, accelerator.num_processes)
        require_writable(arguments.run.out)
    stop, main_process = StopRequest(), accelerator.is_main_process
    if main_process:
        introduce(jobs, accelerator.num_processes)
    for job in jobs:
        with told_plainly():
            trainer = train(job, accelerator, stop)
        leave_unless_finished(trainer, stop)
    stop.forget()
    if main_process:
        with told_plainly():
            report(jobs, accelerator.device)


if __name__ == "__main__":
    main()
