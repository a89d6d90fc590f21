"""The log of a run: one JSON object a line, and TensorBoard beside it if asked for."""

import json
import os
from pathlib import Path
from typing import Any


def read_journal(path: Path) -> list[dict[str, Any]]:
    """The records of a log; a last line that a kill cut short is left out.

    Raises:
        ValueError: if another line is no JSON object: what stands behind it would be missing in every sum.
    """
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    records = [_record(line) for line in lines]
    kept = records[:-1] if records and records[-1] is None else records
    for number, record in enumerate(kept, 1):
        if record is None:
            raise ValueError(f"{path} is damaged: line {number} of {len(lines)} is no record of a step.")
    return [record for record in kept if record is not None]


def _record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


class Journal:
    """Appends to `log.jsonl`; what it holds beyond `step`, where a run goes on, is dropped, since it comes again.

    Processes beside the first write logs of their own.
    """

    def __init__(self, folder: Path, step: int, process: int = 0, tensorboard: bool = False):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / ("log.jsonl" if process == 0 else f"log-{process}.jsonl")
        kept = [record for record in read_journal(path) if record["step"] <= step]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in kept))
        temporary.replace(path)
        self._file = path.open("a")
        self._tensorboard = _tensorboard(folder / "tensorboard", step) if tensorboard and process == 0 else None

    def write(self, record: dict[str, Any]) -> None:
        """Adds a record; it has a `step`."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._tensorboard is not None:
            for name, value in record.items():
                if isinstance(value, float):
                    self._tensorboard.add_scalar(name, value, record["step"])

    def sync(self) -> None:
        """Makes sure that the disk has all records: a checkpoint must not be newer than its log."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Ends the log."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def _tensorboard(folder: Path, step: int):
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=step + 1)
