"""Writes text with a model that `train.py` trained, at any depth."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

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
    temperature: float = 0.8
    """0 takes the likeliest token each time; 1 samples as the model says."""
    top_k: int | None = None
    """Choose among the likeliest so many only."""
    seed: int = 0
    """Of the choice."""


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


@torch.no_grad()
def sample(
    model: rd.RecurrentTransformer,
    tokens: list[int],
    *,
    window: int,
    max_new_tokens: int,
    num_steps: int | None = None,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """Yields the tokens that follow, one by one; each costs a forward over the last `window` tokens.

    Raises:
        ValueError: if there is no prompt, or a number is out of its range.
    """
    _check(tokens, max_new_tokens, temperature, top_k)
    device, tokens = model.norm.weight.device, list(tokens)
    generator = torch.Generator(device).manual_seed(seed)
    for _ in range(max_new_tokens):
        logits = model(torch.tensor([tokens[-window:]], device=device), num_steps)[0, -1].float()
        tokens.append(_choose(logits, temperature, top_k, generator))
        yield tokens[-1]


def _choose(logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None:
        logits = logits.masked_fill(logits < logits.topk(min(top_k, logits.numel())).values[-1], -torch.inf)
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))


def _check(tokens: list[int], max_new_tokens: int, temperature: float, top_k: int | None) -> None:
    if not tokens:
        raise ValueError("prompt is empty, but must hold at least one token.")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}, but must be at least 1.")
    if not temperature >= 0:
        raise ValueError(f"temperature is {temperature}, but must be at least 0.")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}, but must be at least 1.")


def main(arguments: Arguments) -> None:
    """Loads, writes to the terminal as the tokens come."""
    model, config = load_model(arguments.run)
    tokenizer = load_tokenizer(arguments.run, config)
    prompt = arguments.prompt.encode()
    tokens = [int(token) for token in tokenizer.encode("prompt", prompt)]
    written = sample(
        model,
        tokens,
        window=config["data"]["window"],
        max_new_tokens=arguments.max_new_tokens,
        num_steps=arguments.num_steps,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        seed=arguments.seed,
    )
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
