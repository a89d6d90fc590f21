"""Processes that a test may kill: real ones, forked from a server that has imported everything once."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["processes", "train", "battery", "torch._dynamo", "torch.utils.tensorboard"])


def start(function: Callable[..., None], *arguments: Any, out: Path) -> BaseProcess:
    """Starts `function(*arguments)` in a process of its own, which writes its terminal output to `out`."""
    places = [str(Path(__file__).parent), str(EXAMPLES), os.environ.get("PYTHONPATH", "")]
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(places)  # for the server, which starts with the first process
    try:
        process = _context.Process(target=_run, args=(function, arguments, out))
        process.start()
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
    return process


def train(*command_line: str) -> None:
    """`python examples/train.py ...`."""
    import torch
    from train import main

    torch.set_num_threads(1)
    sys.argv = ["examples/train.py", *command_line]
    main()


def run_train(command_line: Sequence[str], out: Path) -> tuple[int | None, str]:
    """Runs a training script to its end; returns its exit code and what it said."""
    process = start(train, *command_line, out=out)
    process.join()
    return process.exitcode, out.read_text()


def wait_until(process: BaseProcess, condition: Callable[..., bool], *arguments: Any, seconds: float = 600) -> bool:
    """Waits until `condition(*arguments)`, looking all the time; False once the process has ended."""
    deadline = time.monotonic() + seconds
    while not condition(*arguments):
        if not process.is_alive():
            return False
        if time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"not there after {seconds} seconds")
        time.sleep(1e-4)
    return True


def kill(process: BaseProcess) -> bool:
    """SIGKILL; whether that is what ended the process."""
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL


def _run(function: Callable[..., None], arguments: tuple, out: Path) -> None:
    with out.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    function(*arguments)
