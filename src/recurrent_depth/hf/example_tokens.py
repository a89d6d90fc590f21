"""The tokenizer of a run of the training example, as one of transformers."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from recurrent_depth.training import Checkpoint

END_OF_TEXT = "<|endoftext|>"
FILE = "tokenizer.json"


def tokenizer_of(checkpoint: Checkpoint) -> PreTrainedTokenizerFast | None:
    """The tokenizer that a run was trained with; None where nobody knows it.

    That is the case for a run on token ids, and where the run's `tokenizer.json`, which lies beside the folders of its
    models, is gone.
    """
    kind, path = _kind(checkpoint.config), checkpoint.path.resolve().parents[1] / FILE
    if kind == "bytes":
        return _of_transformers(byte_tokenizer())
    return _of_transformers(Tokenizer.from_file(str(path))) if kind == "pairs" and path.is_file() else None


def put_back(folder: Path, checkpoint: Checkpoint) -> None:
    """Puts the tokenizer of a folder of `save_pretrained` where the run of a checkpoint has it, unless one is there."""
    path = checkpoint.path.resolve().parents[1] / FILE
    if _kind(checkpoint.config) == "pairs" and (folder / FILE).is_file() and not path.exists():
        shutil.copyfile(folder / FILE, path)


def byte_tokenizer() -> Tokenizer:
    """Every byte of a text is a token, and its value the id: a byte-pair encoding that has merged nothing."""
    vocabulary = {_name(byte): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _kind(config: Mapping[str, Any]) -> str | None:
    """What a token of a run is: "bytes", "pairs" of a byte-pair encoding, or "ids" whose meaning nobody told."""
    return config.get("data", {}).get("kind")


def _of_transformers(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    ends: dict[str, Any] = {} if tokenizer.token_to_id(END_OF_TEXT) is None else {"eos_token": END_OF_TEXT}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **ends)


def _name(byte: int) -> str:
    """The character that stands for a byte: itself if it can be seen, else the next one behind the 256."""
    return chr(byte) if _is_seen(byte) else chr(256 + sum(not _is_seen(other) for other in range(byte)))


def _is_seen(byte: int) -> bool:
    return 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174
