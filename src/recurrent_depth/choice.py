"""How the next token is chosen: logits become a distribution, and one uniform number per row draws from it."""

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from recurrent_depth.arguments import require_number, require_whole
from recurrent_depth.draw import draw
from recurrent_depth.numerics import at_least_float32


class NextTokenRule(abc.ABC):
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

    def choose(
        self,
        logits: Float[Tensor, "batch vocab"],
        seen: Int[Tensor, "batch key"],
        seen_mask: Bool[Tensor, "batch key"] | None,
        uniforms: Callable[[], Float[Tensor, " batch"]],
    ) -> Int[Tensor, " batch"]:
        """Each row's next token: drawn by its number in [0, 1), for which `uniforms` is asked where chance decides."""
        return draw(self.probabilities(logits, seen, seen_mask), uniforms())


@dataclass(frozen=True)
class Greedy(NextTokenRule):
    """Always the most probable token, the first in the vocabulary among equals.

    Raises:
        ValueError: if `repetition_penalty`, that of `Sampling`, is no number from 0.001 to 1000.
    """

    repetition_penalty: float | int = 1.0

    def __post_init__(self) -> None:
        require_number("repetition_penalty", self.repetition_penalty, at_least=1e-3, at_most=1e3)

    def probabilities(
        self,
        logits: Float[Tensor, "batch vocab"],
        seen: Int[Tensor, "batch key"],
        seen_mask: Bool[Tensor, "batch key"] | None = None,
    ) -> Float[Tensor, "batch vocab"]:
        best = self.choose(logits, seen, seen_mask, lambda: logits.new_empty(0))
        return torch.zeros_like(at_least_float32(logits)).scatter(-1, best[:, None], 1.0)

    def choose(
        self,
        logits: Float[Tensor, "batch vocab"],
        seen: Int[Tensor, "batch key"],
        seen_mask: Bool[Tensor, "batch key"] | None,
        uniforms: Callable[[], Float[Tensor, " batch"]],
    ) -> Int[Tensor, " batch"]:
        return _penalised(logits, seen, seen_mask, self.repetition_penalty).argmax(-1)


@dataclass(frozen=True)
class Sampling(NextTokenRule):
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
        require_number("temperature", self.temperature, at_least=1e-30, at_most=1e30)
        if self.top_k is not None:
            require_whole("top_k", self.top_k, at_least=1)
        if self.top_p is not None:
            require_number("top_p", self.top_p, at_least=1e-30, at_most=1)
        if self.min_p is not None:
            require_number("min_p", self.min_p, at_least=0, at_most=1)
        require_number("repetition_penalty", self.repetition_penalty, at_least=1e-3, at_most=1e3)

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


def check_logits(logits: Float[Tensor, "batch vocab"], rows: Sequence[int] | None = None) -> None:
    """Raises a ValueError that names the rows from which no token can be chosen: with NaN, +inf or nothing but -inf.

    `rows` are their numbers, where the logits are not those of all rows in order.
    """
    if logits.amax(-1).isfinite().all():
        return
    kinds = {"NaN": logits.isnan().any(-1), "+inf": logits.isposinf().any(-1), "only -inf": logits.isneginf().all(-1)}
    numbers = range(len(logits)) if rows is None else rows
    places = {kind: [numbers[i] for i in bad.nonzero().flatten().tolist()] for kind, bad in kinds.items()}
    found = "; ".join(f"{kind} in rows {sorted(bad)}" for kind, bad in places.items() if bad)
    raise ValueError(
        f"logits hold {found}, so no token can be chosen there. "
        "Check that the weights are finite, or compute in bfloat16 or float32 where float16 overflows."
    )


def _penalised(logits: Tensor, seen: Tensor, seen_mask: Tensor | None, penalty: float | int) -> Tensor:
    if penalty == 1:
        return logits
    logits = at_least_float32(logits)
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
