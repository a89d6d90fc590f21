"""Random choice, one uniform number per row, so that no row depends on another or on a global RNG."""

import random
import secrets
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from recurrent_depth.arguments import require_whole

BLOCK = 256  # tokens


class RowStreams:
    """A stream of uniform numbers in [0, 1) for each row, set by the seed and the row's number alone.

    Rows may stop at any time without changing the others' numbers. No global RNG is touched or read. Without a seed
    the operating system gives a fresh one; `seed` tells it, so that a run can be repeated.

    Raises:
        ValueError: if `num_rows` is no whole number of at least 0, or `seed` none at all.
    """

    def __init__(self, num_rows: int, seed: int | None = None) -> None:
        self.seed = secrets.randbits(63) if seed is None else require_whole("seed", seed)
        num_rows = require_whole("num_rows", num_rows, at_least=0)
        # Seeding with a string hashes it, so neighbouring rows and seeds are unrelated.
        self._streams = [random.Random(f"{self.seed}/{row}") for row in range(num_rows)]

    def uniforms(self, rows: Sequence[int]) -> Float[Tensor, " batch"]:
        """The next number of each of these rows, in float64."""
        return torch.tensor([self._streams[row].random() for row in rows], dtype=torch.float64)


def draw(probabilities: Float[Tensor, "batch vocab"], uniforms: Float[Tensor, " batch"]) -> Int[Tensor, " batch"]:
    """The token of each row at which the cumulated distribution passes the row's uniform number in [0, 1).

    No token of probability 0 is ever drawn, whatever the rounding, and no row depends on another. Probabilities need
    not sum to exactly 1.
    """
    # First a block, then a token in it: only so few numbers are cheap to cumulate in float64.
    blocks = F.pad(probabilities, (0, -probabilities.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    shares = blocks.sum(-1, dtype=torch.float64)
    block, rest = _passed(shares, uniforms.to(shares)[:, None] * shares.sum(-1, keepdim=True))
    token, _ = _passed(blocks.take_along_dim(block[..., None], 1).squeeze(1).double(), rest)
    return (block * BLOCK + token).squeeze(-1)


def _passed(shares: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The place at which the cumulated shares first exceed the target, and how far into its share the target is."""
    mass = shares.cumsum(-1)
    possible = mass * (shares > 0)  # a parallel cumsum may grow by rounding where a share is 0
    total = possible.amax(-1, keepdim=True)
    target = torch.minimum(target, total.nextafter(torch.zeros_like(total)))
    place = (possible > target).int().argmax(-1, keepdim=True)
    return place, (target - (mass - shares).gather(-1, place)).clamp(min=0)
