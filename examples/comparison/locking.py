"""One process a run: a lock that goes with the process that holds it."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class BusyError(ValueError):
    """Another process trains the run."""


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Keeps a second process from training the same run.

    Raises:
        BusyError: if one does already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BusyError(f"{folder} is being trained by another process.") from None
        yield


def is_held(folder: Path) -> bool:
    """Whether a process trains the run of this folder."""
    try:
        file = (folder / "lock").open()
    except FileNotFoundError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False
