"""Text to compare on: a local byte-pair encoding, batches, and bits per byte on everything held out."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
import torch.nn.functional as F
from data import Corpus, Documents, batch, require_window, standard_library, text, tokenize
from tokens import BytePairs
from torch import Tensor, nn

import recurrent_depth as rd
from comparison.files import read_json
from comparison.parts import Data, Method
from recurrent_depth.arguments import require_whole

NUM_PARTS = 128  # the held-out text is measured in so many parts of neighbouring windows, by which methods are paired
ROWS_AT_ONCE = 32
FEWEST_TOKENS = 257  # every byte is one, and so is the end of a document
TOLD = ("asked", "checksum", "bytes_per_token", "train_tokens", "held_out_tokens")


@dataclass
class TextData(Data):
    """Next-token prediction on text files.

    Every held-out token is predicted once: windows share one token with the next, which is context alone.

    Args:
        folder: of text files; by default the Python standard library of this machine.
        vocab_size: tokens of the byte-pair encoding, which is trained on the text.
        length: tokens of a window.
        num_rows: windows of a batch.
        most_held_out: at most so many held-out windows are measured.

    Raises:
        ValueError: if one of them is too small.
    """

    folder: Path | None = None
    vocab_size: int = 1024
    length: int = 128
    num_rows: int = 16
    most_held_out: int = 1 << 30
    opened: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self):
        require_whole("vocab_size", self.vocab_size, FEWEST_TOKENS)
        require_whole("length", self.length, 2)
        require_whole("num_rows", self.num_rows, 1)
        require_whole("most_held_out", self.most_held_out, 1)

    def reading(self, folder: Path) -> "TextData":
        """The same with another folder of text."""
        return replace(self, folder=folder.resolve(), opened={})

    def sizes(self) -> tuple[int, int]:
        return self.vocab_size, self.length

    def batch_tokens(self) -> int:
        return self.num_rows * self.length

    def open(self, folder: Path) -> dict[str, Any]:
        about = folder / "text.json"
        if not about.exists():
            self._prepare(folder)
        said = read_json(about, *TOLD)
        if _resolved(said["asked"]) != _resolved(self._asked()):
            raise ValueError(f"{folder} holds {said['asked']}, but {self._asked()} is asked for: give another --out.")
        arrays = {name: _array(folder / f"{name}.npy") for name in ("train", "held_out", "token_bytes")}
        self.opened = {**arrays, **said}
        return {"checksum": said["checksum"], "vocab_size": self.vocab_size, "window": [self.num_rows, self.length]}

    def batch(self, step: int, seed: int) -> tuple[Tensor]:
        return (batch(self.opened["train"], step, seed=seed, num_rows=self.num_rows, length=self.length),)

    def objective(self, method: Method, model: rd.RecurrentTransformer) -> nn.Module:
        return method.objective(model)

    @torch.no_grad()
    def measure(self, method: Method, model: rd.RecurrentTransformer) -> dict[str, Any]:
        windows = self._windows()
        nats = torch.cat([self._nats(method, model, part) for part in windows.split(ROWS_AT_ONCE)], 1).double()
        groups, part_bytes = self._parts(windows)
        grouped = torch.zeros(len(nats), len(part_bytes), dtype=torch.double).index_add(1, groups, nats)
        bits = grouped / part_bytes / math.log(2)
        exits = nats.sum(1) / part_bytes.sum() / math.log(2)
        return {
            "exits": _rounded(exits),
            "first_parts": _rounded(bits[0]),
            "last_parts": _rounded(bits[-1]),
            "part_bytes": part_bytes.int().tolist(),
            "stepped": _rounded(torch.stack(list(_stepped(model, windows[:ROWS_AT_ONCE])))),
        }

    def misfit(self, measured: dict[str, Any]) -> str:
        rows = [measured.get(name) for name in ("exits", "first_parts", "last_parts")]
        if not all(_are_numbers(row) for row in rows):
            return "its losses are no numbers"
        part_bytes = self._parts(self._windows())[1].int().tolist()
        if measured.get("part_bytes") != part_bytes or any(len(row) != len(part_bytes) for row in rows[1:]):
            return "it is of other held-out windows"
        return ""

    def score(self, measured: dict[str, Any]) -> float:
        return measured["exits"][-1]

    def _nats(self, method: Method, model: rd.RecurrentTransformer, windows: Tensor) -> Tensor:
        """The loss of each window after each step, summed over its tokens."""
        targets = windows[:, 1:].flatten()
        return torch.stack(
            [
                F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="none").view(len(windows), -1).sum(1)
                for logits in method.exits(model, windows, model.layout.num_steps)
            ]
        )

    def _parts(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        """Which part each window belongs to, and how many bytes each part has."""
        num_parts = min(NUM_PARTS, len(windows))
        num_bytes = torch.from_numpy(self.opened["token_bytes"])[windows[:, 1:]].sum(1).double()
        groups = torch.arange(len(windows)) * num_parts // len(windows)
        return groups, torch.zeros(num_parts, dtype=torch.double).index_add(0, groups, num_bytes)

    def _windows(self) -> Tensor:
        tokens, stride = self.opened["held_out"], self.length - 1
        number = min((len(tokens) - 1) // stride, self.most_held_out)
        places = np.arange(number)[:, None] * stride + np.arange(self.length)
        return torch.from_numpy(tokens[places].astype(np.int64))

    def _asked(self) -> dict[str, Any]:
        source = "the Python standard library" if self.folder is None else str(self.folder)
        return {"source": source, "vocab_size": self.vocab_size}

    def _prepare(self, folder: Path) -> None:
        documents = standard_library() if self.folder is None else _read(self.folder)
        tokenizer = BytePairs.train(documents.train, self.vocab_size)
        corpus = tokenize(documents, tokenizer)
        require_window(corpus, self.length)
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(folder / "tokenizer.json")
        np.save(folder / "train.npy", corpus.train)
        np.save(folder / "held_out.npy", corpus.held_out)
        np.save(folder / "token_bytes.npy", tokenizer.token_bytes())
        about = folder / "text.json.tmp"  # written last: what is there is whole
        about.write_text(json.dumps({"asked": self._asked(), **_told(corpus)}, indent=1))
        about.replace(folder / "text.json")


def _read(folder: Path) -> Documents:
    try:
        return text(folder)
    except ValueError as error:
        raise ValueError(f"text is {folder}, but nothing can be read there: {error}") from None


def _resolved(asked: dict[str, Any]) -> dict[str, Any]:
    return {**asked, "source": str(Path(asked["source"]).resolve())}


def _array(path: Path) -> np.ndarray:
    try:
        return np.load(path)
    except (OSError, ValueError, EOFError) as error:
        again = f"Delete {path.parent / 'text.json'}, and the same command makes it again."
        raise ValueError(f"{path} is damaged or gone ({error}). {again}") from None


def _stepped(model: rd.RecurrentTransformer, windows: Tensor) -> Iterator[Tensor]:
    """The share of tokens whose state each step changed: those that a router let take it, or that had not halted."""
    before = model.begin(windows).state.h
    for state in model.trajectory(windows, every_step=True).states:
        yield (state.h != before).any(-1).double().mean()
        before = state.h


def _told(corpus: Corpus) -> dict[str, Any]:
    numbers = {"train_tokens": corpus.train.size, "held_out_tokens": corpus.held_out.size}
    return {"checksum": corpus.checksum, "bytes_per_token": corpus.bytes_per_token, **numbers}


def _are_numbers(row: object) -> TypeGuard[list[float]]:
    return isinstance(row, list) and bool(row) and all(type(value) in (int, float) for value in row)


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 6) for value in values.tolist()]
