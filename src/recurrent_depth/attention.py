"""Causal multi-head self-attention in the GPT-2 and the Llama form, with or without a cache."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from recurrent_depth.arguments import require_number, require_sizes
from recurrent_depth.contracts import At, BlockCost
from recurrent_depth.moments import Moment
from recurrent_depth.numerics import at_least_float32
from recurrent_depth.residual import ResidualProjection


class Rotary(nn.Module):
    """Rotates queries and keys by their positions, the halves of a head paired as in Llama.

    Nothing is stored, so that a model built on the meta device needs no special care.

    Attributes:
        num_copies: tensors of the size of `x` that are alive at once in here, beside a float32 one of a narrower `x`.

    Raises:
        ValueError: if `base` is not above 0.

    Reference: Su et al., 2021, arXiv 2104.09864.
    """

    num_copies = 2

    def __init__(self, base: float = 10000.0):
        super().__init__()
        self.base = require_number("base", base, above=0)

    def forward(
        self, x: Float[Tensor, "batch head token size"], positions: Int[Tensor, "#batch token"]
    ) -> Float[Tensor, "batch head token size"]:
        """The rotated queries or keys, in the dtype that came in; computed in float32 or finer."""
        first, second = at_least_float32(x).chunk(2, dim=-1)
        exponents = torch.arange(0, x.shape[-1], 2, device=x.device, dtype=first.dtype) / x.shape[-1]
        angles = positions[:, None, :, None].to(first.dtype) * self.base**-exponents
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class NoRotary(nn.Module):
    """Leaves queries and keys as they are, for models with learned positions."""

    def forward(
        self, x: Float[Tensor, "batch head token size"], positions: Int[Tensor, "#batch token"] | None
    ) -> Float[Tensor, "batch head token size"]:
        """The queries or keys, untouched."""
        return x


def causal_mask(padding: Bool[Tensor, "batch key"], num_queries: int) -> Bool[Tensor, "batch query key"]:
    """Where each of the newest `num_queries` tokens may look: at real tokens up to itself, and always at itself.

    The mask is lower-right aligned: the newest query sees the whole past. A padded query sees itself alone, since a
    softmax over nothing is not a number, and would reach real tokens as 0 * nan.
    """
    num_keys = padding.shape[1]
    past = torch.ones(num_queries, num_keys, dtype=torch.bool, device=padding.device).tril(num_keys - num_queries)
    itself = past & ~past.tril(num_keys - num_queries - 1)
    return past & padding[:, None] | itself


Attend = Callable[..., Tensor]
"""Gathers values by queries and keys, called as `attend` is."""


def attend(
    queries: Float[Tensor, "batch head token size"],
    keys: Float[Tensor, "batch kv_head key size"],
    values: Float[Tensor, "batch kv_head key size"],
    mask: Bool[Tensor, "#batch #head #token key"] | None,
    *,
    causal: bool,
) -> Float[Tensor, "batch head token size"]:
    """What each query gathers, by torch's kernels: where the mask is True, or `causal`, or everywhere."""
    gathered = F.scaled_dot_product_attention(
        _asked_twice(queries),
        keys,
        values,
        attn_mask=mask,
        is_causal=causal,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    return gathered[:, :, : queries.shape[2]]


class Attention(nn.Module):
    """Multi-head self-attention; `num_kv_heads` below `num_heads` groups the queries (GQA).

    Causal unless told otherwise. With `at.kv` the current tokens attend to what the cache returns, of which they are
    the newest.

    Raises:
        ValueError: if `dim` is not divisible by `num_heads`, or `num_heads` not by `num_kv_heads`; in a forward, if the
            mask does not cover all keys.

    Attributes:
        attend: computes what is gathered of keys and values, called as `attend` of this file is: torch's kernels.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        bias: bool = False,
        rotary: nn.Module | None = None,
        causal: bool = True,
    ):
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_heads if num_kv_heads is None else num_kv_heads
        check_heads(dim, self.num_heads, self.num_kv_heads)
        self.head_size, self.causal = dim // num_heads, causal
        self.qkv = nn.Linear(dim, (num_heads + 2 * self.num_kv_heads) * self.head_size, bias=bias)
        self.rotary = rotary if rotary is not None else NoRotary()
        self.attend: Attend = attend
        self.out = ResidualProjection(dim, dim, bias=bias)

    def forward(self, x: Float[Tensor, "batch token dim"], at: At) -> Float[Tensor, "batch token dim"]:
        """What each token gathers from the tokens that it may look at."""
        qkv = rearrange(self.qkv(x), "batch token (head size) -> batch head token size", size=self.head_size)
        rotated, values = qkv.split([self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=1)
        queries, keys = self.rotary(rotated, at.positions).split([self.num_heads, self.num_kv_heads], dim=1)
        if at.kv is not None:
            keys, values = at.kv.update(keys, values)
        mask = self._mask(at.mask, queries.shape[2], keys.shape[2], x.device)
        causal = self.causal and at.mask is None and queries.shape[2] == keys.shape[2]
        gathered = self.attend(queries, keys, values, mask, causal=causal)
        return self.out(rearrange(gathered, "batch head token size -> batch token (head size)"))

    def _mask(self, mask: Tensor | None, num_queries: int, num_keys: int, device: torch.device) -> Tensor | None:
        if mask is not None and mask.shape[-1] != num_keys:
            # A mask of one column would be broadcast, and show the padding of a cached prompt.
            raise ValueError(f"mask must cover all {num_keys} keys, those of a cache too; it covers {mask.shape[-1]}.")
        if mask is not None and mask.ndim == 3:
            return mask[:, None]
        if not self.causal:
            return None if mask is None else mask[:, None, None]
        if mask is not None:
            return causal_mask(mask, num_queries)[:, None]
        if num_queries in (1, num_keys):
            return None
        return causal_mask(torch.ones(1, num_keys, dtype=torch.bool, device=device), num_queries)[:, None]

    def cost(self) -> BlockCost:
        """Projections, and per key the scores and the weighted sum of the values. Kernels' own memory is left out."""
        linear = self.qkv.weight.numel() + self.out.weight.numel()
        queries, keys = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        return BlockCost(2 * linear, per_key=4 * queries, cached=2 * keys, live=self._live(queries, keys))

    def _live(self, queries: int, keys: int) -> tuple[Moment, ...]:
        qkv, copies = queries + 2 * keys, getattr(self.rotary, "num_copies", 0)
        turned, tables = (queries + keys, 3 * self.head_size // 2) if copies else (0, 0)
        return (
            Moment(states=1, numbers=qkv, wide=copies * turned + tables, cast=turned, unmade=2 * keys),
            # Keys and values are averaged one after the other: two operands and two results, a sum's included.
            Moment(states=1, numbers=qkv + turned, folded=4 * keys),
            # What was gathered is copied, heads last, and projected.
            Moment(states=2, numbers=qkv + 2 * queries + turned),
        )


def _asked_twice(queries: Tensor) -> Tensor:
    """A single query in half precision on CPU, repeated: torch 2.13 answers two of them in half the time of one."""
    narrow = queries.dtype in (torch.bfloat16, torch.float16)
    if queries.shape[2] == 1 and queries.device.type == "cpu" and narrow:
        return queries.expand(-1, -1, 2, -1)
    return queries


def check_heads(dim: int, num_heads: int, num_kv_heads: int) -> None:
    """Raises a ValueError where one is no whole number of at least 1, or one does not divide the other."""
    require_sizes(dim=dim, num_heads=num_heads, num_kv_heads=num_kv_heads)
    if dim % num_heads:
        raise ValueError(f"dim must be divisible by num_heads, got dim={dim} and num_heads={num_heads}.")
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads must be divisible by num_kv_heads, got num_heads={num_heads} and num_kv_heads={num_kv_heads}."
        )
