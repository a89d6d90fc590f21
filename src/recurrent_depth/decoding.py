"""A forward over new tokens that follow those which a cache holds."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from recurrent_depth.cache import DepthCache
from recurrent_depth.checks import checked_padding
from recurrent_depth.contracts import At
from recurrent_depth.depth import Depth, require_whole
from recurrent_depth.early_exit import leave_early, rows_of_model
from recurrent_depth.exits import ExitRule
from recurrent_depth.kv_policy import KVStepPolicy
from recurrent_depth.model import RecurrentTransformer
from recurrent_depth.settling import settle
from recurrent_depth.slots import Key, Places, Slot
from recurrent_depth.turn import Turn
from recurrent_depth.update import DepthState
from recurrent_depth.views import views_of


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
    logits = opened.logits(model, tokens, num_steps, logits_to_keep)
    opened.finish()
    return logits


class Left(NamedTuple):
    """Logits of a forward that rows left when they had enough.

    Attributes:
        logits: of each row's new token.
        num_steps: how many steps each row took.
    """

    logits: Float[Tensor, "batch vocab"]
    num_steps: Int[Tensor, " batch"]


def extend_until(
    model: RecurrentTransformer,
    tokens: Integer[Tensor, "batch 1"],
    cache: DepthCache,
    exit: ExitRule,  # noqa: A002
    num_steps: int | None = None,
    *,
    mask: Bool[Tensor, "batch key"] | Int[Tensor, "batch key"] | None = None,
) -> Left:
    """Logits of one new token per row; each row leaves the loop when the rule says so, and then costs nothing more.

    A row's logits and depth are those that it has alone. In the cache the copies that a row did not reach hold what its
    last step made. Arguments and errors are those of `extend`.

    Args:
        model: the model.
        tokens: one new token per row.
        cache: of the same rows.
        exit: when a row leaves.
        num_steps: at most so many steps; full depth by default.
        mask: True at real tokens, over all keys.
    """
    opened = open_forward(tokens, cache, mask)
    left = opened.left(model, tokens, exit, num_steps)
    opened.finish()
    return left


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
        if model.decode is not None and self._fixed(model, tokens, num_steps):
            return self._compiled_logits(model.decode, model, tokens, num_steps)
        logits = model(tokens, num_steps, **self.where(), kv=views_of(self.turn), logits_to_keep=logits_to_keep)
        settle(self.turn)
        return logits

    def _fixed(self, model: RecurrentTransformer, tokens: Tensor, num_steps: object) -> bool:
        """Whether nothing but values of tensors will change from token to token: what a compiled step is for."""
        steps = model.num_steps if num_steps is None else num_steps
        begun, fixed = self.cache.length > 0, self.cache.max_tokens is not None and self.turn.span.in_place
        if not (tokens.shape[1] == 1 and begun and fixed and isinstance(steps, int)):
            return False
        return self.cache.policy.num_copies(steps) <= self.cache.num_copies

    def _compiled_logits(
        self, compiled: Callable[..., Tensor], model: RecurrentTransformer, tokens: Tensor, num_steps: Any
    ) -> Tensor:
        turn, length, room, batch = self.turn, self.cache.length, self.cache.capacity, len(tokens)
        mask = (torch.arange(room, device=self.device) <= length).expand(batch, 1, room)
        positions = torch.full((batch, 1), length, device=self.device)
        if self.padding is not None:
            mask = mask & F.pad(self.padding, (0, room - length - 1))[:, None]
            positions = self.padding.sum(1, keepdim=True) - 1
        where = mask.contiguous(), positions, torch.tensor([length], device=self.device)
        return compiled(model, tokens.clone(), num_steps, *where, turn.slots, turn.valid, turn.policy)

    def left(self, model: RecurrentTransformer, tokens: Tensor, rule: ExitRule, num_steps: int | None) -> Left:
        """Logits under an exit rule."""
        if tokens.shape[1] != 1:
            raise ValueError(f"An exit rule lets rows leave at one new token each, got {tokens.shape[1]} tokens.")
        most = model.num_steps if num_steps is None else require_whole("num_steps", num_steps, at_least=1)
        kv = views_of(self.turn)
        begun = model.begin(tokens, most, **self.where(), kv=kv)

        def readout(state: DepthState, at: At, rows: Tensor) -> Tensor:
            return model.readout(model.core.update.read(state), at, rows_of_model(kv, rows))

        state, depths = leave_early(
            model.core, begun.state, begun.at, kv.core, num_steps=most, rule=rule, readout=readout
        )
        logits = model.readout(model.core.update.read(state), begun.at, kv)
        settle(self.turn)
        return Left(logits[:, -1], depths)

    def finish(self) -> None:
        """Counts the new tokens as seen."""
        self.cache.advance(*self.turn.shape, self.padding)


def decode(
    model: RecurrentTransformer,
    tokens: Tensor,
    num_steps: int | None,
    mask: Tensor,
    positions: Tensor,
    place: Tensor,
    slots: dict[Key, Slot],
    valid: dict[int, Tensor],
    policy: KVStepPolicy,
) -> Tensor:
    """A whole forward of one token per row, in which only values of tensors change with the length of the text."""
    shape = (tokens.shape[0], tokens.shape[1])
    turn = Turn(slots, valid, policy, Places(place), shape=shape, length=1, capacity=mask.shape[-1])
    logits = model(tokens, num_steps, mask=mask, positions=positions, kv=views_of(turn))
    settle(turn)
    return logits


def compile_decoding(model: RecurrentTransformer, **arguments: Any) -> None:
    """Compiles the whole forward of one token per row with `torch.compile(**arguments)`.

    `extend`, `generate` and `stream` then use it wherever a cache of fixed capacity holds a prompt and all rows take
    the same number of steps. It compiles anew for another batch, capacity, depth or policy, never for a longer text.
    """
    model.decode = torch.compile(decode, **arguments)


def open_forward(tokens: Tensor, cache: DepthCache, mask: Tensor | None = None) -> OpenForward:
    """Checks tokens and mask against the cache, and opens a forward."""
    if tokens.ndim != 2 or tokens.shape[1] == 0:
        raise ValueError(f"tokens must be (batch, token) and not empty, got shape {tuple(tokens.shape)}.")
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
    return checked_padding(mask, batch, num_new, cached=True)
