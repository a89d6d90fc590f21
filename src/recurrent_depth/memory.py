"""Bytes that decoding takes, in closed form: weights, the cache of keys and values, and activations."""

from typing import NamedTuple

import torch

from recurrent_depth.activations import activation_bytes
from recurrent_depth.arguments import check_types, require_whole
from recurrent_depth.kv_policy import KeepAll, KVStepPolicy
from recurrent_depth.model import RecurrentTransformer
from recurrent_depth.outline import Outline, outline


class DecodeMemory(NamedTuple):
    """Bytes that decoding takes, by what takes them; prints in GiB or MiB.

    Attributes:
        weights: all parameters.
        cache: keys and values, at the cache's full capacity.
        prefill: the most that activations take while the prompt is read.
        decoding: the most that they take while one token is decoded.
    """

    weights: int
    cache: int
    prefill: int
    decoding: int

    @property
    def stored(self) -> int:
        """Weights and cache: what is there between two forwards, and what published figures count."""
        return self.weights + self.cache

    @property
    def total(self) -> int:
        """The peak: what is stored, and the larger of the two activations."""
        return self.stored + max(self.prefill, self.decoding)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {_short(num_bytes)}" for name, num_bytes in self._asdict().items())
        return f"{_short(self.total)}: {parts}"


@check_types
def weight_bytes(model: RecurrentTransformer | Outline, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes of all parameters in one dtype, embeddings included, each tensor once however often it is used.

    Raises:
        ValueError: if `dtype` is not a floating one.
    """
    return outline(model).num_parameters * _itemsize(dtype)


@check_types
def cache_bytes(
    model: RecurrentTransformer | Outline,
    tokens: int | None = None,
    num_steps: int | None = None,
    *,
    batch: int,
    dtype: torch.dtype = torch.bfloat16,
    kv: KVStepPolicy | None = None,
) -> int:
    """Bytes of the keys and values that a cache holds: exactly what `DepthCache.num_bytes` reports.

    Args:
        model: the model or its outline.
        tokens: the cache's capacity; by default all positions that the model has learned.
        num_steps: the deepest forward that writes into it; full depth by default.
        batch: rows.
        dtype: of keys and values.
        kv: which of the steps' keys and values are stored; `KeepAll()` by default.

    Raises:
        ValueError: if a number is below 1, `tokens` missing where no positions are learned, or `dtype` not floating.
    """
    of = outline(model)
    copies = (kv or KeepAll()).num_copies(_steps(of, num_steps))
    per_token = of.prelude.cached + copies * of.core.cached + of.coda.cached
    return require_whole("batch", batch, at_least=1) * _capacity(of, tokens) * per_token * _itemsize(dtype)


@check_types
def decode_memory(
    model: RecurrentTransformer | Outline,
    tokens: int | None = None,
    num_steps: int | None = None,
    *,
    batch: int,
    prompt: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    kv: KVStepPolicy | None = None,
) -> DecodeMemory:
    """Bytes that a decoding model takes: weights, cache, and the peak of its activations.

    Activations are those of a prompt without padding that is read in one piece into a new cache of fixed capacity, and
    of a token that follows, uncompiled and without gradients, the logits of the last position included. A new cache
    makes room block by block, so that at the loop's peak the coda's is still free; where a cache is used again it is
    not. A cache that grows holds one block's keys and values twice while it does.

    Left out are the scratch memory of kernels, token ids and positions, what choosing a token takes, the masks that
    padding brings (`batch * prompt**2` elements), and what an update carries from step to step beside the state. An
    update without matrix products is taken for the plain loop; each row has rotary tables of its own; and the norms
    stand before the branches: `PostNorm` takes a state less.

    Args:
        model: the model or its outline.
        tokens: the cache's capacity; by default all positions that the model has learned.
        num_steps: steps taken; full depth by default.
        batch: rows.
        prompt: tokens read at once before the first is decoded; by default as many as the cache holds.
        dtype: of weights, cache and activations. What the library computes in float32 is counted so.
        kv: which of the steps' keys and values are stored; `KeepAll()` by default.

    Raises:
        ValueError: if a number is below 1, `tokens` missing where no positions are learned, `prompt` longer than
            `tokens`, or `dtype` not floating.
    """
    of, kv = outline(model), kv or KeepAll()
    capacity, steps = _capacity(of, tokens), _steps(of, num_steps)
    length = require_whole("prompt", capacity if prompt is None else prompt, at_least=1)
    if length > capacity:
        raise ValueError(f"prompt is {length}, but must be at most {capacity}, the tokens that the cache holds.")
    return DecodeMemory(
        weights=weight_bytes(of, dtype),
        cache=cache_bytes(of, capacity, steps, batch=batch, dtype=dtype, kv=kv),
        prefill=batch * activation_bytes(of, length, steps, kv=kv, dtype=dtype, capacity=capacity),
        decoding=batch * activation_bytes(of, 1, steps, kv=kv, dtype=dtype, capacity=0),
    )


def _capacity(of: Outline, tokens: int | None) -> int:
    return of.length(None) if tokens is None else require_whole("tokens", tokens, at_least=1)


def _steps(of: Outline, num_steps: int | None) -> int:
    return of.layout.num_steps if num_steps is None else require_whole("num_steps", num_steps, at_least=1)


def _itemsize(dtype: torch.dtype) -> int:
    if not dtype.is_floating_point:
        raise ValueError(f"dtype is {dtype}, but must be a floating one, such as torch.bfloat16.")
    return dtype.itemsize


def _short(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
