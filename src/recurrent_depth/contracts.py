"""What the loop tells an update and a block: the small contracts that every part of the library shares."""

import abc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor

from recurrent_depth.moments import Moment

Tree = Any
"""A tensor, or tuples, lists, dictionaries and None of them, nested."""


class Call(NamedTuple):
    """What one forward knows besides the anchor; an update reads it once, in `begin`.

    Attributes:
        num_steps: how many steps this forward takes at most.
        tokens: the token ids, where there are any.
        embedding: their embedding, before the prelude.
        positions: the position of each token in its row.
        mask: the padding mask, True at real tokens.
        start: an initial state given by the caller; it takes the place of the update's own.
    """

    num_steps: int
    tokens: Int[Tensor, "batch token"] | None = None
    embedding: Float[Tensor, "batch token dim"] | None = None
    positions: Int[Tensor, "#batch token"] | None = None
    mask: Bool[Tensor, "batch key"] | None = None
    start: Float[Tensor, "batch token dim"] | None = None


class KeyValues(abc.ABC):
    """The keys and values of earlier tokens that one block attends to at one step: a view of a cache."""

    @abc.abstractmethod
    def update(
        self, keys: Float[Tensor, "batch head token size"], values: Float[Tensor, "batch head token size"]
    ) -> tuple[Float[Tensor, "batch head key size"], Float[Tensor, "batch head key size"]]:
        """Takes the current tokens' keys and values; returns all that the current tokens attend to, newest last."""

    @property
    def valid(self) -> Bool[Tensor, "batch key"] | None:
        """Which of those keys hold something; None where all do. With a router, tokens that it left out don't."""
        return None


class ModelKeyValues(NamedTuple):
    """One model's cache as its forward sees it. Each of the three gives a sequence of views, one per block.

    Attributes:
        prelude: called as `prelude()`.
        core: called as `core(step)`; with `rows=` where only these rows (a slice, or indices) take the step, and with
            `pick=` where only the picked tokens do: they look at all keys, the others' as holes that `valid` tells.
        coda: called as `coda()`; with `rows=` where only these rows are looked at.
    """

    prelude: Callable[..., Sequence[KeyValues]]
    core: Callable[..., Sequence[KeyValues]]
    coda: Callable[..., Sequence[KeyValues]]


class Notes:
    """What the blocks say beside their output during one step: losses, and the memory for their next step."""

    def __init__(self, memory: Mapping[int, Tree] | None = None):
        self.losses: dict[str, Float[Tensor, ""]] = {}
        self.before: Mapping[int, Tree] = memory or {}
        self.after: dict[int, Tree] = {}

    def add_loss(self, name: str, value: Float[Tensor, ""]) -> None:
        """Adds to the loss of that name."""
        self.losses[name] = self.losses[name] + value if name in self.losses else value


class At(NamedTuple):
    """Where a block is called: everything that it may read beside its input.

    A block is called as `block(x, at)` and may ignore all of `at`. It never learns that a loop exists.

    Attributes:
        positions: the position of each token in its row.
        mask: None (causal or full, whichever the block is), the padding mask (batch, key), True at real tokens, or a
            complete attention mask (batch, query, key), True where a query may look.
        valid: which of the current tokens are real; None where all are. For losses, which leave padding out.
        kv: the keys and values of earlier tokens; None without a cache.
        condition: what a step-conditioned block reads, a time embedding for example; it comes from the update.
        extra: the caller's own arguments, passed through untouched.
        layer: which block of its stack this is.
        notes: where losses and memory go, written by `add_loss` and `remember`; None where nobody takes notes.
    """

    positions: Int[Tensor, "#batch token"] | None = None
    mask: Bool[Tensor, "batch key"] | Bool[Tensor, "batch query key"] | None = None
    valid: Bool[Tensor, "batch token"] | None = None
    kv: KeyValues | None = None
    condition: Tree = None
    extra: Mapping[str, Any] = {}
    layer: int = 0
    notes: Notes | None = None

    def add_loss(self, name: str, value: Float[Tensor, ""]) -> None:
        """Adds to the auxiliary loss of that name, summed over blocks and steps; goes nowhere if nobody takes notes."""
        if self.notes is not None:
            self.notes.add_loss(name, value)

    @property
    def memory(self) -> Tree:
        """What this block remembered at the step before; None at the first. Leaves lead with (batch, token)."""
        return None if self.notes is None else self.notes.before.get(self.layer)

    def remember(self, memory: Tree) -> None:
        """Keeps a tree of tensors, each leading with (batch, token), for this block's next step."""
        if self.notes is not None:
            self.notes.after[self.layer] = memory


class PartCost(NamedTuple):
    """Matrix FLOPs per token of a part that has step-invariant work; a multiply-add counts as two.

    Attributes:
        begin: spent once per forward.
        step: spent at every step.
    """

    begin: int = 0
    step: int = 0

    def plus(self, other: "PartCost") -> "PartCost":
        """Both parts' work together."""
        return PartCost(self.begin + other.begin, self.step + other.step)


class BlockCost(NamedTuple):
    """What a block costs per token: matrix FLOPs, `linear + per_key * keys` where it attends to so many, and memory.

    Attributes:
        linear: FLOPs, however many keys there are.
        per_key: FLOPs for each key.
        cached: numbers that it stores in a cache, keys and values together.
        live: the moments at which most may be alive in a forward without gradients, from the block's input on.
        max_steps: how many steps there are weights for; None where any number will do.
    """

    linear: int = 0
    per_key: int = 0
    cached: int = 0
    live: tuple[Moment, ...] = ()
    max_steps: int | None = None

    def plus(self, other: "BlockCost") -> "BlockCost":
        """One block's work after the other's."""
        live = tuple(dict.fromkeys(self.live + other.live))
        sums = (self.linear + other.linear, self.per_key + other.per_key, self.cached + other.cached)
        limits = [most for most in (self.max_steps, other.max_steps) if most is not None]
        return BlockCost(*sums, live, min(limits, default=None))

    def beside(self, num_states: int) -> "BlockCost":
        """The same work while so many more tensors as wide as the state are held."""
        return self._replace(live=tuple(moment.plus(Moment(num_states)) for moment in self.live))


class UpdateCost(NamedTuple):
    """What an update spends beside the blocks, in matrix FLOPs per token, and which tokens take its steps.

    Attributes:
        begin: spent once per forward.
        step: spent at every step, on average over the steps and over all tokens.
        shares: the share of the tokens that takes each step; empty where every token takes all.
        selects: whether the update chooses tokens, as routers do.
        picked: spent at every step on each token that takes it, beside `step`.
        counts: for each step, how many of so many tokens take it; empty where that is their share, rounded. Whoever
            changes `shares` changes these too.
    """

    begin: int = 0
    step: float | int = 0
    shares: tuple[float, ...] = ()
    selects: bool = False
    picked: float | int = 0
    counts: tuple[Callable[[int], int], ...] = ()

    def takers(self, num_steps: int) -> tuple[Callable[[int], int], ...]:
        """For each step, how many of so many tokens take it."""
        return self.counts or tuple(partial(_rounded, share) for share in self.shares or (1.0,) * num_steps)


def _rounded(share: float, num_tokens: int) -> int:
    return round(share * num_tokens)
