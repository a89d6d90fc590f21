"""Ends runs where nothing is lost: on a signal, and where the process that began them is gone."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StoppedError(Exception):
    """A run was asked to stop, and has saved what it did."""

    def __str__(self) -> str:
        return "Stopped; nothing is lost. The same command goes on."


@contextmanager
def stop_request(parent: int | None = None) -> Iterator[Callable[[], bool]]:
    """Says whether Ctrl-C, SIGTERM or the end of the terminal asked to stop; the second such signal ends the process.

    With the id of a parent it is also a wish to stop that this process is no longer its child. A signal that is ignored
    stays so, as under `nohup`.
    """
    asked: list[int] = []

    def ask(number: int, frame: object) -> None:
        asked.append(number)
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, ask)
    try:
        yield lambda: bool(asked) or (parent is not None and os.getppid() != parent)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
