"""How text becomes token ids, and ids text again."""

import abc
from collections.abc import Iterable
from pathlib import Path

import numpy as np

END_OF_TEXT = "<|endoftext|>"


class Tokenizer(abc.ABC):
    """Text to ids and back.

    Attributes:
        kind: what a checkpoint calls its tokens.
        vocab_size: how many ids there are.
        end: the id that ends a document, if there is one.
    """

    kind: str
    vocab_size: int
    end: int | None

    @abc.abstractmethod
    def encode(self, name: str, content: bytes) -> np.ndarray:
        """The ids of a text; `name` is for messages."""

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> bytes:
        """The bytes of some ids; they may end within a character."""


class Bytes(Tokenizer):
    """Every byte is a token: nothing to train, nothing to download, and a loss in nats per byte."""

    kind = "bytes"
    vocab_size = 256
    end = None

    def encode(self, name: str, content: bytes) -> np.ndarray:
        return np.frombuffer(content, dtype=np.uint8)

    def decode(self, ids: Iterable[int]) -> bytes:
        return bytes(ids)


class BytePairs(Tokenizer):
    """A byte-level BPE of the `tokenizers` library.

    Raises:
        ValueError: if a file is missing or no such tokenizer, or a document is not UTF-8.
    """

    kind = "pairs"

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.get_vocab_size()
        self.end = tokenizer.token_to_id(END_OF_TEXT)

    @classmethod
    def load(cls, path: Path) -> "BytePairs":
        """From a `tokenizer.json`."""
        import tokenizers

        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises nothing more specific
            raise ValueError(f"{path} is missing or no tokenizer.json: {error}") from None

    @classmethod
    def gpt2(cls, folder: Path) -> "BytePairs":
        """From GPT-2's own `encoder.json` and `vocab.bpe`."""
        import tokenizers

        vocabulary, merges = folder / "encoder.json", folder / "vocab.bpe"
        for path in (vocabulary, merges):
            if not path.is_file():
                raise ValueError(f"{folder} must hold GPT-2's encoder.json and vocab.bpe, but {path.name} is missing.")
        try:
            return cls(tokenizers.ByteLevelBPETokenizer(str(vocabulary), str(merges)))
        except Exception as error:  # the library raises nothing more specific
            raise ValueError(f"{folder} holds no readable encoder.json and vocab.bpe: {error}") from None

    @classmethod
    def train(cls, documents: Iterable[tuple[str, bytes]], vocab_size: int) -> "BytePairs":
        """Learns at most `vocab_size` tokens from these documents."""
        import tokenizers

        if vocab_size <= 256:
            raise ValueError(f"bpe is {vocab_size}, but must be above 256: every byte is a token of its own already.")
        tokenizer = tokenizers.ByteLevelBPETokenizer()
        texts = (_text(name, content) for name, content in documents)
        tokenizer.train_from_iterator(texts, vocab_size, special_tokens=[END_OF_TEXT], show_progress=False)
        return cls(tokenizer)

    def save(self, path: Path) -> None:
        """As one `tokenizer.json`."""
        self._tokenizer.save(str(path))

    def token_bytes(self) -> np.ndarray:
        """How many bytes of text each id stands for; none for the sign that ends a document."""
        names = [self._tokenizer.id_to_token(number) for number in range(self.vocab_size)]
        return np.array([0 if name == END_OF_TEXT else len(name) for name in names])  # a character of a name is a byte

    def encode(self, name: str, content: bytes) -> np.ndarray:
        return np.asarray(self._tokenizer.encode(_text(name, content)).ids, dtype=np.uint32)

    def decode(self, ids: Iterable[int]) -> bytes:
        return self._tokenizer.decode(list(ids)).encode()


def _text(name: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text ({error}); train on bytes (no --bpe), or convert it.") from None
