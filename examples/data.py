"""What to train on: where the text comes from, how it is split, and which batch belongs to which step."""

import hashlib
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tokens import Tokenizer
from torch import Tensor

HELD_OUT = 20  # one file in so many is held out, and of a single file the last so manieth part
NOT_OURS = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}


class Documents(NamedTuple):
    """Named texts, split by file into those to train on and those held out."""

    source: str
    train: list[tuple[str, bytes]]
    held_out: list[tuple[str, bytes]]


class Corpus(NamedTuple):
    """Token ids, ready to train on.

    Attributes:
        source: where they come from, in words.
        kind: what a token is: "bytes", "pairs" of a BPE, or "ids" whose meaning the file does not tell.
        train: the ids to train on; may be memory-mapped.
        held_out: the ids held out.
        vocab_size: how many different ids there can be.
        bytes_per_token: of the held-out text; None where only ids are known.
        checksum: SHA-256 of both parts, in hexadecimal.
    """

    source: str
    kind: str
    train: np.ndarray
    held_out: np.ndarray
    vocab_size: int
    bytes_per_token: float | None
    checksum: str

    @property
    def unit(self) -> str:
        """What is counted: bytes, or tokens of several bytes."""
        return "bytes" if self.kind == "bytes" else "tokens"


def standard_library() -> Documents:
    """The Python sources of the standard library on this machine, without its tests: text that everybody has."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in root.rglob("*.py") if not NOT_OURS.intersection(path.relative_to(root).parts)]
    return _split("the Python standard library", _read_all(root, paths))


def text(path: Path) -> Documents:
    """A text file, or all text files of a folder (hidden ones and those that are not UTF-8 are left out).

    Raises:
        ValueError: if there is nothing there, or no text in it.
    """
    if path.is_file():
        documents = [(path.name, path.read_bytes())]
    elif path.is_dir():
        paths = [p for p in path.rglob("*") if p.is_file() and not _is_hidden(p.relative_to(path))]
        documents = [(name, content) for name, content in _read_all(path, paths) if _is_text(content)]
    else:
        raise ValueError(f"data is {path}, but there is no such file or folder.")
    if not any(content for _, content in documents):
        raise ValueError(f"data is {path}, but there is no text in it.")
    return _split(str(path), documents)


def tokenize(documents: Documents, tokenizer: Tokenizer) -> Corpus:
    """The ids of all documents, one after the other, each ended by the tokenizer's own sign if it has one."""
    train, held_out = (_join(part, tokenizer) for part in (documents.train, documents.held_out))
    bytes_per_token = sum(len(content) for _, content in documents.held_out) / max(1, held_out.size)
    return Corpus(
        documents.source,
        tokenizer.kind,
        train,
        held_out,
        tokenizer.vocab_size,
        bytes_per_token,
        _checksum(train, held_out),
    )


def token_file(path: Path, vocab_size: int) -> Corpus:
    """Token ids in a file, uint16: raw (.bin) or NumPy's (.npy). Memory-mapped; the last part is held out.

    Raises:
        ValueError: if the file is missing, empty, of another kind, or holds ids outside of the vocabulary.
    """
    tokens = _map_tokens(path)
    highest = max((int(part.max()) for part in _parts(tokens)), default=0)
    if highest >= vocab_size:
        raise ValueError(f"{path} holds the token id {highest}, but the vocabulary ends at {vocab_size - 1}.")
    border = tokens.size - tokens.size // HELD_OUT
    train, held_out = tokens[:border], tokens[border:]
    return Corpus(str(path), "ids", train, held_out, vocab_size, None, _checksum(train, held_out))


def require_window(corpus: Corpus, length: int) -> None:
    """Raises a ValueError unless both parts of the corpus hold at least one window of `length` tokens."""
    for name, tokens in (("to train on", corpus.train), ("held out", corpus.held_out)):
        if tokens.size < length:
            raise ValueError(
                f"{corpus.source} gives {tokens.size:,} tokens {name}, but one window takes {length:,}: "
                "give more text, or a shorter context_length."
            )


def batch(tokens: np.ndarray, step: int, *, seed: int, num_rows: int, length: int) -> Tensor:
    """The rows of a step: windows at random places. A pure function of (seed, step), so there is nothing to resume."""
    starts = np.random.default_rng((seed, step)).integers(0, tokens.size - length + 1, size=num_rows)
    return _windows(tokens, starts, length)


def held_out_windows(corpus: Corpus, length: int, most: int) -> Tensor:
    """At most so many windows, spread evenly over the held-out tokens, without overlap."""
    num_windows = min(most, corpus.held_out.size // length)
    starts = np.linspace(0, corpus.held_out.size - length, num_windows).astype(np.int64)
    return _windows(corpus.held_out, starts, length)


def _windows(tokens: np.ndarray, starts: np.ndarray, length: int) -> Tensor:
    return torch.from_numpy(np.stack([tokens[start : start + length] for start in starts]).astype(np.int64))


def _read_all(root: Path, paths: Iterable[Path]) -> list[tuple[str, bytes]]:
    return sorted((path.relative_to(root).as_posix(), path.read_bytes()) for path in paths)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _is_text(content: bytes) -> bool:
    try:
        return "\0" not in content.decode()
    except UnicodeDecodeError:
        return False


def _split(source: str, documents: list[tuple[str, bytes]]) -> Documents:
    if len(documents) == 1:
        [(name, content)] = documents
        border = _character_before(content, len(content) - len(content) // HELD_OUT)
        return Documents(source, [(name, content[:border])], [(name, content[border:])])
    # By the hash of its name a file is on one side for good, whatever other files come or go.
    held_out = {name for name, _ in documents if _hash(name) % HELD_OUT == 0}
    if len(held_out) in (0, len(documents)):
        held_out = {min((name for name, _ in documents), key=_hash)}
    train = [document for document in documents if document[0] not in held_out]
    return Documents(source, train, [document for document in documents if document[0] in held_out])


def _character_before(content: bytes, border: int) -> int:
    while 0 < border < len(content) and content[border] & 0xC0 == 0x80:  # within a character of UTF-8
        border -= 1
    return border


def _hash(name: str) -> int:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16)


def _join(documents: list[tuple[str, bytes]], tokenizer: Tokenizer) -> np.ndarray:
    end = np.array([] if tokenizer.end is None else [tokenizer.end])
    parts = [np.append(tokenizer.encode(name, content), end) for name, content in documents]
    return (
        np.concatenate(parts).astype(np.min_scalar_type(tokenizer.vocab_size - 1)) if parts else np.zeros(0, np.uint8)
    )


def _map_tokens(path: Path) -> np.ndarray:
    if not path.is_file() or path.stat().st_size == 0:
        raise ValueError(f"data is {path}, but there is no such file, or it is empty.")
    try:
        tokens = (
            np.load(path, mmap_mode="r", allow_pickle=False) if path.suffix == ".npy" else np.memmap(path, "<u2", "r")
        )
    except ValueError as error:
        raise ValueError(f"{path} does not hold token ids as uint16: {error}.") from None
    if tokens.ndim != 1 or tokens.dtype != np.uint16:
        raise ValueError(f"{path} holds {tokens.dtype} of shape {tokens.shape}, but must hold uint16 in one row.")
    return tokens


def _parts(tokens: np.ndarray) -> Iterable[np.ndarray]:
    size = 1 << 24  # so that a file larger than memory can be looked through
    return (tokens[start : start + size] for start in range(0, tokens.size, size))


def _checksum(train: np.ndarray, held_out: np.ndarray) -> str:
    digest = hashlib.sha256()
    for tokens in (train, held_out):
        digest.update(f"{tokens.dtype} {tokens.size} ".encode())
        for part in _parts(tokens):
            digest.update(np.ascontiguousarray(part))
    return digest.hexdigest()
