"""A forward through a cache, from its opening to the moment at which its tokens count as seen."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from recurrent_depth.arguments import require_instance
from recurrent_depth.cache import DepthCache
from recurrent_depth.checks import checked_padding
from recurrent_depth.compiled_decoding import compiled_logits, is_fixed
from recurrent_depth.depth import Depth, as_depth
from recurrent_depth.model import RecurrentTransformer
from recurrent_depth.settling import settle
from recurrent_depth.turn import Turn
from recurrent_depth.views import views_of


class OpenForward(NamedTuple):
    """A forward over new tokens that has begun, and is not counted as seen before it is finished.

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
        """Mask and positions as the model takes them."""
        if self.padding is not None:
            return {"mask": self.padding}
        begin = self.cache.length
        return {"positions": torch.arange(begin, begin + self.turn.shape[1], device=self.device)[None]}

    def logits(
        self,
        model: RecurrentTransformer,
        tokens: Tensor,
        num_steps: int | Depth | Sequence[int] | None,
        logits_to_keep: int | None = None,
    ) -> Tensor:
        """Logits after so many steps."""
        if model.decode is not None:
            depth = as_depth(model.num_steps if num_steps is None else num_steps, batch=len(tokens))
            if depth.rows is None and is_fixed(self.cache, self.turn, depth.num_steps):
                return compiled_logits(model, tokens, self.cache, self.turn, self.padding, depth.num_steps)
        logits = model(tokens, num_steps, **self.where(), kv=views_of(self.turn), logits_to_keep=logits_to_keep)
        settle(self.turn)
        return logits

    def finish(self) -> None:
        """Counts the new tokens as seen."""
        self.cache.advance(*self.turn.shape, self.padding)


def open_forward(tokens: Tensor, cache: DepthCache, mask: Tensor | None = None) -> OpenForward:
    """Checks tokens and mask against the cache, and opens a forward."""
    require_instance("cache", cache, DepthCache)
    if not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.numel() == 0:
        got = f"shape {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(f"tokens must be (batch, token) and not empty, got {got}.")
    padding = _padding(mask, cache, *tokens.shape)
    turn = cache.begin(*tokens.shape, differentiable=torch.is_grad_enabled())
    return OpenForward(cache, turn, padding, tokens.device)


def _padding(mask: Tensor | None, cache: DepthCache, batch: int, num_new: int) -> Tensor | None:
    if mask is None:
        if cache.mask is None:
            return None
        return torch.cat([cache.mask, cache.mask.new_ones(len(cache.mask), num_new)], dim=1)
    if isinstance(mask, Tensor) and mask.shape != (batch, cache.length + num_new):
        raise ValueError(
            f"mask must be {(batch, cache.length + num_new)}, over the {cache.length} tokens in the cache and the "
            f"{num_new} new ones; got {tuple(mask.shape)}."
        )
    padding = checked_padding(mask, batch, num_new, cached=True)
    _check_past(padding, cache)
    return padding


def _check_past(padding: Tensor | None, cache: DepthCache) -> None:
    """Refuses another mask over the tokens seen, whose positions are stored with them; looks on CPU only."""
    if padding is None or padding.device.type != "cpu" or cache.length == 0:
        return
    past = padding[:, : cache.length]
    if not bool((past if cache.mask is None else past == cache.mask).all()):
        raise ValueError(
            f"mask says something else of the {cache.length} tokens in the cache than the mask that they came with. "
            "Leave it out to keep that one."
        )
