"""How the next token is chosen: logits become a distribution, and one uniform number per row draws from it."""

import abc
import numbers
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from recurrent_depth.depth import require_whole
from recurrent_depth.numerics import at_least_float32

BLOCK = 256  # tokens


class TokenChoice(abc.ABC):
    """Turns the logits of the next token into the distribution that it is drawn from."""

    @abc.abstractmethod
    def probabilities(
        self,
        logits: Float[Tensor, "batch vocab"],
        seen: Int[Tensor, "batch key"],
        seen_mask: Bool[Tensor, "batch key"] | None = None,
    ) -> Float[Tensor, "batch vocab"]:
        """Each row's distribution after all filters, in float32 (float64 for logits in float64).

        `seen` holds prompt and continuation so far; where `seen_mask` is False is padding, which was not seen.
        """


@dataclass(frozen=True)
class Greedy(TokenChoice):
    """Always the most probable token, the first in the vocabulary among equals.

    Raises:
        ValueError: if `repetition_penalty`, that of `Sampling`, is no number from 0.001 to 1000.
    """

    repetition_penalty: float | int = 1.0

    def __post_init__(self) -> None:
        _require_between("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)

    def probabilities(
        self,
        logits: Float[Tensor, "batch vocab"],
        seen: Int[Tensor, "batch key"],
        seen_mask: Bool[Tensor, "batch key"] | None = None,
    ) -> Float[Tensor, "batch vocab"]:
        logits = _penalised(at_least_float32(logits), seen, seen_mask, self.repetition_penalty)
        return torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)


@dataclass(frozen=True)
class Sampling(TokenChoice):
    """Random tokens from a filtered distribution; None leaves a filter out.

    In this order, each on what the one before has left, as in Hugging Face's `generate`:
    - `repetition_penalty`: divides the logits of seen tokens where they are positive, multiplies them where negative
      (the paper always divides, which rewards repetition there); below 1 it rewards repetition.
    - `temperature`: divides all logits.
    - `top_k`: the k most probable tokens stay, or all if there are fewer.
    - `top_p`: the smallest set of most probable tokens whose mass reaches p stays, never less than one token.
    - `min_p`: the tokens at least p times as probable as the most probable one stay.

    Of equally probable tokens at the edge of `top_k` or `top_p` the first in the vocabulary stay (Hugging Face keeps
    more than k): `top_k=1` is `Greedy`. Padding counts as seen there, not here.

    Raises:
        ValueError: if `temperature` is no number from 1e-30 to 1e30, `top_k` no whole number of at least 1, `top_p`
            no number from 1e-30 to 1, `min_p` none from 0 to 1, `repetition_penalty` none from 0.001 to 1000.

    References: Keskar et al., 2019, arXiv 1909.05858 (repetition penalty); Fan et al., 2018, arXiv 1805.04833 (top-k);
    Holtzman et al., 2019, arXiv 1904.09751 (top-p); Nguyen et al., 2024, arXiv 2407.01082 (min-p).
    """

    temperature: float | int = 1.0
    top_k: int | None = None
    top_p: float | int | None = None
    min_p: float | int | None = None
    repetition_penalty: float | int = 1.0

    def __post_init__(self) -> None:
        _require_between("temperature", self.temperature, 1e-30, 1e30)
        if self.top_k is not None:
            require_whole("top_k", self.top_k, at_least=1)
        if self.top_p is not None:
            _require_between("top_p", self.top_p, 1e-30, 1)
        if self.min_p is not None:
            _require_between("min_p", self.min_p, 0, 1)
        _require_between("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)

    def probabilities(
        self,
        logits: Float[Tensor, "batch vocab"],
        seen: Int[Tensor, "batch key"],
        seen_mask: Bool[Tensor, "batch key"] | None = None,
    ) -> Float[Tensor, "batch vocab"]:
        logits = _penalised(at_least_float32(logits), seen, seen_mask, self.repetition_penalty)
        # Relative to the largest, which no temperature can then overflow.
        logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature
        logits = logits if self.top_k is None else _top_k(logits, self.top_k)
        logits = logits if self.top_p is None else _top_p(logits, self.top_p)
        logits = logits if self.min_p is None else _min_p(logits, self.min_p)
        return logits.softmax(-1)


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


def check_logits(logits: Float[Tensor, "batch vocab"]) -> None:
    """Raises a ValueError that names the rows from which no token can be chosen: with NaN, +inf or nothing but -inf."""
    if logits.amax(-1).isfinite().all():
        return
    kinds = {"NaN": logits.isnan().any(-1), "+inf": logits.isposinf().any(-1), "only -inf": logits.isneginf().all(-1)}
    found = "; ".join(f"{kind} in rows {bad.nonzero().flatten().tolist()}" for kind, bad in kinds.items() if bad.any())
    raise ValueError(
        f"logits hold {found}, so no token can be chosen there. "
        "Check that the weights are finite, or compute in bfloat16 or float32 where float16 overflows."
    )


def _penalised(logits: Tensor, seen: Tensor, seen_mask: Tensor | None, penalty: float | int) -> Tensor:
    if penalty == 1:
        return logits
    batch, vocab = logits.shape
    # Padding may hold any number; one more column takes it.
    places = seen.long() if seen_mask is None else seen.long().masked_fill(~seen_mask, vocab)
    is_seen = logits.new_zeros(batch, vocab + 1, dtype=torch.bool).scatter(-1, places, True)[:, :vocab]
    return torch.where(is_seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def _top_k(logits: Tensor, k: int) -> Tensor:
    last = logits.topk(min(k, logits.shape[-1])).values[:, -1:]
    above, tied = logits > last, logits == last
    room = k - above.sum(-1, keepdim=True)
    return logits.masked_fill(~(above | (tied & (tied.cumsum(-1) <= room))), -torch.inf)


def _top_p(logits: Tensor, p: float | int) -> Tensor:
    if p == 1:  # rounding could cut the tail
        return logits
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    reached = ranked.softmax(-1).cumsum(-1) >= p
    beyond = F.pad(reached[:, :-1], (1, 0))
    return logits.masked_fill(torch.empty_like(beyond).scatter(-1, order, beyond), -torch.inf)


def _min_p(logits: Tensor, p: float | int) -> Tensor:
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < p * probabilities.amax(-1, keepdim=True), -torch.inf)


def _require_between(name: str, value: object, low: float | int, high: float | int) -> None:
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or not low <= float(value) <= high:
        raise ValueError(f"{name} is {value!r}, but must be a number from {low:g} to {high:g}.")
