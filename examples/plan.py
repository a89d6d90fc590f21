"""From arguments to jobs: what each model is trained on, and everything that could be wrong, before any work."""

from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import torch
from arguments import Arguments, DataArguments
from data import Corpus, Documents, held_out_windows, require_window, standard_library, text, token_file, tokenize
from models import build, describe
from tokens import BytePairs, Bytes, Tokenizer
from torch import Tensor

import recurrent_depth as rd

WINDOWS_AT_A_LOOK = 64


class Job(NamedTuple):
    """One model to train.

    Attributes:
        name: of the model.
        folder: of its log and checkpoints.
        config: all that must be the same when it goes on.
        arguments: how to train.
        corpus: what to train on.
        windows: the held-out windows to look at now and then, (window, token).
    """

    name: str
    folder: Path
    config: dict[str, Any]
    arguments: Arguments
    corpus: Corpus
    windows: Tensor


def plan(arguments: Arguments, num_processes: int) -> list[Job]:
    """One job per model.

    Raises:
        ValueError: if the data is missing, empty or too short, or the arguments contradict each other or the data.
    """
    names = arguments.model.model if arguments.preset == "cpu" else (arguments.preset,)
    if not names or len(set(names)) < len(names):
        raise ValueError(f"model is {names}, but must name at least one model, each once.")
    corpus = load_corpus(arguments)
    length = arguments.model.context_length if arguments.preset == "cpu" else rd.presets.CONTEXT_LENGTH
    require_window(corpus, length)
    windows = held_out_windows(corpus, length, WINDOWS_AT_A_LOOK)
    return [_job(name, arguments, corpus, windows, num_processes) for name in names]


def load_corpus(arguments: Arguments) -> Corpus:
    """The token ids that the arguments ask for.

    Raises:
        ValueError: if there is no such data, or it does not go with the tokenizer or the vocabulary.
    """
    wanted = arguments.data
    if wanted.bpe is not None and wanted.gpt2_files is not None:
        raise ValueError("bpe and gpt2_files are two tokenizers: give one of them.")
    if wanted.data is not None and wanted.data.suffix in (".bin", ".npy"):
        return _token_file(wanted, wanted.data, arguments.preset)
    if wanted.vocab_size is not None:
        raise ValueError(f"vocab_size is {wanted.vocab_size}, but it is for token files only: text has its tokenizer.")
    documents = standard_library() if wanted.data is None else text(wanted.data)
    return tokenize(documents, _tokenizer(wanted, documents, arguments.run.out))


def require_writable(out: Path) -> None:
    """Makes the folder of a run.

    Raises:
        ValueError: if that cannot be, or nothing can be written in it.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=out).close()
    except OSError as error:
        raise ValueError(f"out is {out}, but nothing can be written there ({error.strerror}).") from None


def _token_file(wanted: DataArguments, path: Path, preset: str) -> Corpus:
    vocab_size = rd.presets.VOCAB_SIZE if wanted.vocab_size is None and preset != "cpu" else wanted.vocab_size
    if vocab_size is None:
        raise ValueError(f"vocab_size is missing: how many ids are there? {path} holds ids alone.")
    if wanted.bpe is not None or wanted.gpt2_files is not None:
        raise ValueError(f"bpe and gpt2_files are for text, but {path} holds token ids already.")
    return token_file(path, vocab_size)


def _tokenizer(wanted: DataArguments, documents: Documents, out: Path) -> Tokenizer:
    path, begun = out / "tokenizer.json", any(out.glob("*/checkpoint-*"))
    if wanted.bpe is None and wanted.gpt2_files is None:
        return Bytes()
    if wanted.gpt2_files is not None:
        tokenizer = BytePairs.gpt2(wanted.gpt2_files)
    else:
        tokenizer = BytePairs.load(path) if begun else BytePairs.train(documents.train, wanted.bpe or 0)
    if not begun:
        out.mkdir(parents=True, exist_ok=True)
        tokenizer.save(path)
    return tokenizer


def _job(name: str, arguments: Arguments, corpus: Corpus, windows: Tensor, num_processes: int) -> Job:
    if arguments.preset == "cpu":
        model = describe(name, arguments.model, corpus.vocab_size)
    else:
        model = {"builder": "preset", "name": name}
        if corpus.vocab_size > rd.presets.VOCAB_SIZE:
            raise ValueError(f"The data has {corpus.vocab_size} tokens, but {name} only {rd.presets.VOCAB_SIZE}.")
    with torch.device("meta"):
        build(model)  # complains of impossible sizes before the first model is trained
    config = {
        "model": model,
        "data": {"kind": corpus.kind, "checksum": corpus.checksum, "window": windows.shape[1]},
        "depth": asdict(arguments.depth),
        "recipe": {**asdict(arguments.recipe), "warmup": arguments.warmup_steps},
        "num_processes": num_processes,
    }
    return Job(name, arguments.run.out / name, config, arguments, corpus, windows)
