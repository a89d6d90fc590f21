"""Small looped models of transformers, one of every builder."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.utils import logging

from recurrent_depth.hf import RecurrentDepthConfig, RecurrentDepthForCausalLM

SIZES = {"dim": 16, "num_heads": 2, "vocab_size": 40, "context_length": 64}
ROUTED = {"token_choice": {"name": "token_choice"}, "expert_choice": "expert_choice"}

DESCRIPTIONS: dict[str, dict[str, Any]] = {
    "albert": {"builder": "albert", "layout": [0, 1, 3, 0], "builder_arguments": {"inner_dim": 8}},
    "dense": {"builder": "dense", "layout": [0, 3, 1, 0]},
    "grt": {},
    "grt-damped": {"update": {"name": "damped", "share": 0.25}},
    "grt-llama": {"form": {"name": "LlamaForm", "num_kv_heads": 1, "tied": False}},
    "grt-post-norm": {"form": {"name": "GPT2Form", "bias": True, "arrangement": "PostNorm"}},
    "grt-halted": {"update": {"name": "halted", "inner": {"name": "gated", "bias": 1.0}, "mix": "blend_states"}},
    "huginn": {"builder": "huginn"},
    "loopformer": {"builder": "loopformer"},
    "mesh": {"builder": "mesh", "builder_arguments": {"num_slots": 4}},
    "mod": {"builder": "mod"},
    "mor": {"builder": "mor"},
    "mor-gated": {
        "builder": "mor",
        "update": "gated",
        "builder_arguments": {"router": {"name": "token_choice", "balance": 0.2}, "combine": "Interpolate"},
    },
    "naive": {"builder": "naive"},
    "ouro": {"builder": "ouro"},
    "parcae": {"builder": "parcae"},
    "ple": {"builder": "ple", "builder_arguments": {"size": 4}},
    "rrt": {"builder": "rrt", "builder_arguments": {"rank": 2}},
    "universal": {"builder": "universal"},
}
PICKING = ("mod", "mor", "mor-gated")


def config_of(name: str = "grt", **changed: Any) -> RecurrentDepthConfig:
    """The configuration of a small model."""
    return RecurrentDepthConfig(**{"layout": [1, 2, 3, 1], **SIZES, **DESCRIPTIONS[name], **changed})


def made(name: str = "grt", **changed: Any) -> RecurrentDepthForCausalLM:
    """A small model in evaluation mode, whose weights are large enough that its steps differ."""
    model = RecurrentDepthForCausalLM(config_of(name, **changed)).eval()
    with torch.no_grad():
        for parameter in model.native.core.parameters():
            if parameter.ndim > 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def some_tokens(batch: int = 2, length: int = 7) -> torch.Tensor:
    """Token ids."""
    return torch.randint(1, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(length))


@contextmanager
def quiet() -> Iterator[None]:
    """Without progress bars."""
    logging.disable_progress_bar()
    yield
