"""A forward over new tokens that follow those which a cache holds."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from recurrent_depth.cache import DepthCache
from recurrent_depth.checks import checked_padding
from recurrent_depth.depth import Depth
from recurrent_depth.model import RecurrentTransformer
from recurrent_depth.settling import settle
from recurrent_depth.turn import Turn


def extend(
    model: RecurrentTransformer,
    tokens: Integer[Tensor, "batch token"],
    cache: DepthCache,
    num_steps: int | Depth | Sequence[int] | None = None,
    *,
    mask: Bool[Tensor, "batch key"] | Int[Tensor, "batch key"] | None = None,
    logits_to_keep: int | None = None,
) -> Float[Tensor, "batch kept vocab"]:
    """Logits of new tokens that follow those in the cache, which then holds them too.

    Under `KeepAll` they are those of a forward over all tokens, however the text is cut into chunks. With gradients
    enabled they flow through the cache, and nothing is written in place; decode under `torch.no_grad()`.

    Args:
        model: the model.
        tokens: the new tokens alone.
        cache: of the same rows; an exception leaves it as it was.
        num_steps: one number for all rows, one for each, or a `Depth`; full depth by default.
        mask: True at real tokens, over all keys, those in the cache too; by default all new tokens are real, and the
            old ones as they were.
        logits_to_keep: logits of so many last tokens alone; by default of all.

    Raises:
        ValueError: for what `RecurrentTransformer.forward` refuses, for a mask that does not cover all keys, and for a
            cache that is full, or of another batch, model or dtype.
    """
    opened = open_forward(tokens, cache, mask)
    logits = model(tokens, num_steps, **opened.where(), logits_to_keep=logits_to_keep)
    settle(opened.turn)
    opened.finish()
    return logits


class OpenForward(NamedTuple):
    """A forward over new tokens that has begun, and has not been counted as seen.

    Attributes:
        cache: what it adds to.
        turn: its business with the cache.
        padding: which of all tokens are real; None where all are.
        device: where the tokens are.
    """

    cache: DepthCache
    turn: Turn
    padding: Bool[Tensor, "batch key"] | None
    device: torch.device

    def where(self) -> dict[str, Any]:
        """The model's arguments: mask, positions and cache."""
        length, num_new = self.cache.length, self.turn.shape[1]
        positions = torch.arange(length, length + num_new, device=self.device)[None]
        return {
            "mask": self.padding,
            "positions": positions if self.padding is None else None,
            "kv": self.turn.kv(),
        }

    def finish(self) -> None:
        """Counts the new tokens as seen."""
        self.cache.advance(*self.turn.shape, self.padding)


def open_forward(tokens: Tensor, cache: DepthCache, mask: Tensor | None = None) -> OpenForward:
    """Checks tokens and mask against the cache, and opens a forward."""
    if tokens.ndim != 2 or tokens.shape[1] == 0:
        raise ValueError(f"tokens must be (batch, token) and not empty, got shape {tuple(tokens.shape)}.")
    batch, num_new = tokens.shape
    padding = _padding(mask, cache, batch, num_new, tokens.device)
    turn = cache.begin(batch, num_new, differentiable=torch.is_grad_enabled())
    return OpenForward(cache, turn, padding, tokens.device)


def _padding(mask: Tensor | None, cache: DepthCache, batch: int, num_new: int, device: torch.device) -> Tensor | None:
    if mask is None:
        if cache.mask is None:
            return None
        return torch.cat([cache.mask, cache.mask.new_ones(batch, num_new)], dim=1)
    if mask.shape != (batch, cache.length + num_new):
        raise ValueError(
            f"mask must be {(batch, cache.length + num_new)}, over the {cache.length} tokens in the cache and the "
            f"{num_new} new ones; got {tuple(mask.shape)}."
        )
    return checked_padding(mask, batch, num_new, cached=True)
