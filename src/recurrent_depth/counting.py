"""Conventions of counting FLOPs, and the FLOPs of one forward under them."""

from collections.abc import Callable
from typing import NamedTuple

from recurrent_depth.contracts import BlockCost
from recurrent_depth.outline import Outline


def full_attention(num_tokens: int) -> int:
    """Pairs of query and key as most tables count them, and kernels that don't skip: all, the masked ones too."""
    return num_tokens * num_tokens


def causal_attention(num_tokens: int) -> int:
    """Pairs of query and key that a causal mask leaves: each token's with itself and those before it."""
    return num_tokens * (num_tokens + 1) // 2


def once(num_steps: int) -> int:
    """Work that no step changes is done once per forward: what this library executes."""
    return 1


def every_step(num_steps: int) -> int:
    """Work that no step changes is done again at each step: what the paper's formula counts."""
    return num_steps


class Counting(NamedTuple):
    """A convention of counting FLOPs.

    Attributes:
        attention: how many pairs of query and key a sequence of so many tokens has.
        begin: how often a forward of so many steps does the work that no step changes, such as the anchor's half of
            projection and gate.
        head: whether the head counts.
    """

    attention: Callable[[int], int] = full_attention
    begin: Callable[[int], int] = once
    head: bool = True


EXECUTED = Counting()
"""What a forward of this library executes, head included."""

PAPER = Counting(begin=every_step, head=False)
"""`(n_pre + n_rec R + n_coda)(24 d² + 4 S d) + R 10 d²` per token for a GRT. Reference: arXiv 2608.15062."""


class Flops(NamedTuple):
    """FLOPs of one forward of one sequence, by what spends them.

    Attributes:
        prelude: the blocks before the loop.
        begin: the update's work that no step changes.
        core: the shared blocks, all steps together.
        update: the rest of the update, all steps together.
        coda: the blocks behind the loop.
        head: the logits of all tokens.
    """

    prelude: int
    begin: int
    core: int
    update: int
    coda: int
    head: int

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(self)

    @property
    def overhead(self) -> float:
        """What the update spends, as a share of all else."""
        update = self.begin + self.update
        return update / (self.total - update)


def forward_flops(of: Outline, num_tokens: int, num_steps: int, counting: Counting) -> Flops:
    """The closed form: one sequence of `num_tokens`.

    Raises:
        ValueError: for more steps than the model has weights for.
    """
    if of.core.max_steps is not None and num_steps > of.core.max_steps:
        raise ValueError(f"{num_steps} steps asked for, but the blocks have weights for {of.core.max_steps} at most.")
    update = of.update(num_steps)
    taken = [count(num_tokens) for count in update.takers(num_steps)]
    return Flops(
        prelude=_stack(of.prelude, num_tokens, counting),
        begin=counting.begin(num_steps) * update.begin * num_tokens,
        core=sum(_stack(of.core, number, counting) for number in taken),
        # An average over the steps may be a fraction, of which so many make whole FLOPs.
        update=round(num_steps * update.step * num_tokens + update.picked * sum(taken)),
        coda=_stack(of.coda, num_tokens, counting),
        head=of.head * num_tokens * counting.head,
    )


def _stack(cost: BlockCost, num_tokens: int, counting: Counting) -> int:
    return cost.linear * num_tokens + cost.per_key * counting.attention(num_tokens)
