"""Writes text with a model that `train.py` trained, at any depth."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from models import build
from tokens import BytePairs, Bytes, Tokenizer

import recurrent_depth as rd
from recurrent_depth.training import latest_checkpoint, load_checkpoint

REPLACEMENT = "\N{REPLACEMENT CHARACTER}".encode()


@dataclass(frozen=True)
class Arguments:
    """Writes text with a model that train.py trained, at any depth."""

    run: Path = Path("runs/default/grt")
    """Folder of a model's checkpoints; the newest is used."""
    prompt: str = "def "
    """What the text starts with."""
    max_new_tokens: int = 400
    """How many tokens to write."""
    num_steps: int | None = None
    """Steps of the loop; fewer leave early. By default all."""
    exit_below: float | None = None
    """Leave the loop, token by token, once the gate writes a smaller share than this."""
    kv: Literal["all", "first", "last", "mean"] = "all"
    """Which steps' keys and values are kept for later tokens; all is exact."""
    temperature: float = 0.8
    """0 takes the likeliest token each time; 1 samples as the model says."""
    top_k: int | None = None
    """Choose among the likeliest so many only."""
    top_p: float | None = None
    """Choose among the likeliest tokens that make up this share only."""
    seed: int = 0
    """Of the choice."""


POLICIES = {"all": rd.KeepAll, "first": rd.KeepFirst, "last": rd.KeepLast, "mean": rd.KeepMean}


def load_model(folder: Path) -> tuple[rd.RecurrentTransformer, dict[str, Any]]:
    """The model of a run's newest checkpoint, and the configuration of the run.

    Raises:
        ValueError: if there is no checkpoint, or none is whole.
    """
    checkpoint = latest_checkpoint(folder)
    if checkpoint is None:
        raise ValueError(f"{folder} holds no checkpoint: name a model's folder, such as runs/default/grt.")
    model = build(checkpoint.config["model"])
    load_checkpoint(checkpoint.path, model=model)
    return model.eval(), checkpoint.config


def load_tokenizer(folder: Path, config: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a run.

    Raises:
        ValueError: if it was trained on ids alone, or its tokenizer.json is gone.
    """
    kind = config["data"]["kind"]
    if kind == "ids":
        raise ValueError(f"{folder} was trained on token ids alone: there is no tokenizer to write text with.")
    return Bytes() if kind == "bytes" else BytePairs.load(folder.parent / "tokenizer.json")


def continuation(model: rd.RecurrentTransformer, tokens: list[int], arguments: Arguments) -> Iterator[int]:
    """The tokens that follow, each as soon as it is chosen.

    Raises:
        ValueError: if there is no prompt, a number is out of its range, or the model has learned too few positions.
    """
    if not tokens:
        raise ValueError("prompt is empty, but must hold at least one token.")
    sampling = rd.Sampling(arguments.temperature or 1.0, arguments.top_k, arguments.top_p)
    new = rd.stream(
        model,
        torch.tensor([tokens], device=model.embed.token.weight.device),
        max_new_tokens=room(model, tokens, arguments.max_new_tokens),
        num_steps=arguments.num_steps,
        kv=POLICIES[arguments.kv](),
        exit=None if arguments.exit_below is None else rd.GateClosed(below=arguments.exit_below),
        choose=rd.Greedy() if arguments.temperature == 0 else sampling,
        seed=arguments.seed,
    )
    return (int(token) for token in new)


def room(model: rd.RecurrentTransformer, tokens: list[int], wanted: int) -> int:
    """How many tokens can be written: all that are wanted, or as many as positions are learned for."""
    learned = model.embed.num_positions
    if learned is None or len(tokens) + wanted - 1 <= learned or len(tokens) > learned:
        return wanted
    left = learned - len(tokens) + 1
    print(f"The model learned {learned} positions: {left} tokens in place of {wanted}.", file=sys.stderr)
    return left


def main(arguments: Arguments) -> None:
    """Loads, writes to the terminal as the tokens come."""
    model, config = load_model(arguments.run)
    tokenizer = load_tokenizer(arguments.run, config)
    prompt = arguments.prompt.encode()
    tokens = [int(token) for token in tokenizer.encode("prompt", prompt)]
    written = continuation(model, tokens, arguments)
    first = next(written)  # so that errors and warnings come before the text
    sys.stdout.buffer.write(prompt)
    waiting: list[int] = []
    for token in chain([first], written):
        waiting.append(token)
        text = tokenizer.decode(waiting)
        if text.endswith(REPLACEMENT) and len(waiting) < 4:  # perhaps half a character: the next token tells
            continue
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
        waiting.clear()
    sys.stdout.buffer.write(b"\n")


if __name__ == "__main__":
    try:
        main(tyro.cli(Arguments))
    except ValueError as error:
        sys.exit(f"error: {error}")
