"""What callers can get wrong, checked once per forward, where they get it wrong."""

import warnings

import torch
from torch import Tensor, nn

from recurrent_depth.arguments import require_instance
from recurrent_depth.update import DepthState
from recurrent_depth.update_answers import check_leaves


def checked_tokens(tokens: object, vocab_size: int) -> Tensor:
    """The tokens, in a dtype that an embedding takes.

    Their values are looked at on CPU only, and not under torch.compile, where looking would cost a synchronisation.

    Raises:
        ValueError: if they are not (batch, token), empty, no integers, or outside of the vocabulary.
    """
    tokens = checked_ids(tokens)
    if tokens.numel() == 0:
        raise ValueError(f"tokens must be (batch, token) and not empty, got shape {tuple(tokens.shape)}.")
    check_tokens_in(vocab_size, tokens)
    return tokens if tokens.dtype in (torch.int32, torch.int64) else tokens.long()


def check_tokens_in(vocab_size: int, tokens: Tensor, *, ignored: int | None = None) -> None:
    """Raises a ValueError for tokens outside of the vocabulary, where they are looked at; `ignored` stands for none."""
    if tokens.numel() == 0 or tokens.device.type != "cpu" or torch.compiler.is_compiling():
        return
    seen = tokens if ignored is None else tokens.masked_fill(tokens == ignored, 0)
    low, high = (int(value) for value in seen.aminmax())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"tokens must lie in 0 to {vocab_size - 1}, the vocabulary; got {low} to {high}.")


def checked_ids(tokens: object) -> Tensor:
    """The tokens, whatever their values.

    Raises:
        ValueError: if they are no tensor (batch, token) of integers.
    """
    if not isinstance(tokens, Tensor):
        raise ValueError(f"tokens must be a tensor (batch, token), got {type(tokens).__name__}.")
    if tokens.ndim != 2:
        raise ValueError(f"tokens must be (batch, token), got shape {tuple(tokens.shape)}.")
    if not _is_integer(tokens):
        raise ValueError(f"tokens must be integers, got {tokens.dtype}.")
    return tokens


def checked_padding(mask: object, batch: int, num_tokens: int, *, cached: bool) -> Tensor | None:
    """A padding mask (batch, key), as booleans; with a cache it covers earlier keys too.

    Raises:
        ValueError: if it has another shape, is of floats, or of integers other than 0 and 1 (looked at on CPU).
    """
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.is_floating_point():
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"mask must be boolean or of integers, True at real tokens; got {got}.")
    fits = mask.ndim == 2 and mask.shape[0] == batch
    if not fits or mask.shape[1] < num_tokens or (mask.shape[1] > num_tokens and not cached):
        raise ValueError(f"mask must be {(batch, num_tokens)} like tokens, got {tuple(mask.shape)}.")
    check_flags(mask)
    return mask.bool()


def check_flags(mask: Tensor) -> None:
    """Raises a ValueError for a mask of floats, and, where tokens are looked at, of integers other than 0 and 1."""
    if mask.is_floating_point():
        raise ValueError(f"mask must be boolean or of integers, True at real tokens; got {mask.dtype}.")
    if mask.dtype == torch.bool or mask.numel() == 0 or mask.device.type != "cpu" or torch.compiler.is_compiling():
        return
    low, high = (int(value) for value in mask.aminmax())
    if low < 0 or high > 1:
        raise ValueError(f"mask must be boolean, or of 1 at real tokens and 0 at padding; got {low} to {high}.")


def check_complete_mask(mask: Tensor, batch: int, num_tokens: int, *, cached: bool) -> None:
    """Raises a ValueError for a complete attention mask (batch, query, key) that is of another shape or not boolean."""
    fits = mask.ndim == 3 and mask.shape[0] in (1, batch) and mask.shape[1] == num_tokens
    if not fits or mask.shape[2] < num_tokens or (mask.shape[2] > num_tokens and not cached):
        wanted = f"{(batch, num_tokens)} like tokens, or {(batch, num_tokens, num_tokens)} with one row for each query"
        raise ValueError(f"mask must be {wanted}, got {tuple(mask.shape)}.")
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be boolean where it is complete (batch, query, key), got {mask.dtype}.")


def check_positions(positions: object, batch: int, num_tokens: int) -> None:
    """Raises a ValueError for positions that are no tensor of integers, or neither (batch, token) nor (1, token)."""
    if positions is None:
        return
    if not isinstance(positions, Tensor):
        got = type(positions).__name__
    elif positions.shape not in ((batch, num_tokens), (1, num_tokens)) or not _is_integer(positions):
        got = f"{tuple(positions.shape)} of {positions.dtype}"
    else:
        return
    raise ValueError(f"positions must be integers, {(batch, num_tokens)} or {(1, num_tokens)}, got {got}.")


def check_anchor(x: Tensor) -> None:
    """Raises a ValueError for a loop's input that is not (batch, token, dim) of floats."""
    if x.ndim != 3 or not x.is_floating_point():
        raise ValueError(f"x must be (batch, token, dim) of floats, got {tuple(x.shape)} of {x.dtype}.")


def check_like(name: str, given: Tensor, wanted: Tensor) -> None:
    """Raises a ValueError for a state that is no tensor, or has not the shape and dtype of another."""
    require_instance(name, given, Tensor)
    if given.shape != wanted.shape or given.dtype != wanted.dtype:
        raise ValueError(
            f"{name} must be {tuple(wanted.shape)} of {wanted.dtype} like the anchor, "
            f"got {tuple(given.shape)} of {given.dtype}."
        )


def check_step(update: object, after: object, before: DepthState) -> None:
    """Raises a ValueError for an update whose step gives no state, or one of other shapes or another dtype."""
    if not isinstance(after, DepthState):
        raise ValueError(f"{type(update).__name__} must return a DepthState from a step, got {type(after).__name__}.")
    check_like(f"The state that {type(update).__name__} returns", after.h, before.h)
    check_leaves(f"A step of {type(update).__name__}", after, write=after.write, carry=after.carry)


def warn_in_training_mode(name: str, model: nn.Module) -> None:
    """Warns of a model that would draw noise, or route as in training, where its answers are wanted."""
    if model.training:
        warnings.warn(
            f"{name} is in training mode, where steps may draw noise and routers see the whole text: call "
            f"{name}.eval() first.",
            stacklevel=4,
        )


def _is_integer(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
