"""From a dense model to a recursive one: tied weights made of its blocks, and corrections that make up for the rest."""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import nn

from recurrent_depth.arguments import check_types, require_whole
from recurrent_depth.blocks import Stack
from recurrent_depth.core import RecurrentCore
from recurrent_depth.model import RecurrentTransformer
from recurrent_depth.numerics import at_least_float32
from recurrent_depth.relaxation import RelaxedStack
from recurrent_depth.update import is_plain

TiedStart = Callable[[Sequence[nn.Module], int], list[nn.Module]]
"""Makes so many tied blocks of the blocks of a dense model: `average_start` and its siblings."""


def stepwise_start(blocks: Sequence[nn.Module], num_tied: int) -> list[nn.Module]:
    """Copies of blocks at even distances, the first and the last among them; the best start where nothing is relaxed.

    Reference: Bae et al., 2024, arXiv 2410.20672.
    """
    distance = (len(blocks) - 1) / max(num_tied - 1, 1)
    return [copy.deepcopy(blocks[round(place * distance)]) for place in range(num_tied)]


def lower_start(blocks: Sequence[nn.Module], num_tied: int) -> list[nn.Module]:
    """Copies of the first blocks; with them a first step without corrections is that of the dense model.

    Reference: Bae et al., 2024, arXiv 2410.20672.
    """
    return [copy.deepcopy(block) for block in blocks[:num_tied]]


@torch.no_grad()
def average_start(blocks: Sequence[nn.Module], num_tied: int) -> list[nn.Module]:
    """The mean of all blocks that will share weights, of their norms too; the best start for relaxed tying.

    Reference: Bae et al., 2024, arXiv 2410.20672.
    """
    tied = lower_start(blocks, num_tied)
    for place, block in enumerate(tied):
        sharing = [dict(one.named_parameters()) for one in blocks[place::num_tied]]
        for name, weight in block.named_parameters():
            weight.copy_(torch.stack([at_least_float32(one[name]) for one in sharing]).mean(0))
    return tied


def relaxed_stack(
    blocks: Sequence[nn.Module],
    num_steps: int,
    rank: int,
    *,
    start: TiedStart = average_start,
    skip_first: bool = False,
    vectors: bool = True,
) -> RelaxedStack:
    """A stack that does in `num_steps` steps about what these blocks do one after the other; arguments are `relax`'s.

    Raises:
        ValueError: if the blocks are not a multiple of `num_steps`, or not alike.
    """
    num_tied, rest = divmod(len(blocks), require_whole("num_steps", num_steps, at_least=1))
    if rest or num_tied == 0:
        raise ValueError(f"num_steps is {num_steps}, but must divide the number of blocks, {len(blocks)}.")
    tied = Stack(start(blocks, num_tied))
    stack = RelaxedStack(tied, num_steps, rank, skip_first=skip_first, vectors=vectors)
    of_steps = [Stack(blocks[first : first + num_tied]) for first in range(0, len(blocks), num_tied)]
    stack.corrections.fit(tied, of_steps)
    return stack


@check_types
def relax(
    dense: RecurrentTransformer,
    num_steps: int,
    rank: int,
    *,
    start: TiedStart = average_start,
    skip_first: bool = False,
    vectors: bool = True,
) -> RecurrentTransformer:
    """A recursive model of a trained dense one: L blocks become L / `num_steps` tied ones with low-rank corrections.

    Block k of step r stands for block `r L / num_steps + k` of the dense model. Its corrections are the truncated
    singular value decomposition of what the tied weights lack, at scale 1, so that at full rank it is the dense model.
    All of its weights are then trained further, not the corrections alone. What stands before and behind the loop of
    the dense model, such as a first and a last block that are to share nothing, is copied as it is.

    Args:
        dense: the model, `rd.dense(...)` or another that takes one step; it is not changed.
        num_steps: how many steps its blocks are divided into.
        rank: of the corrections, cut to that of each layer.
        start: makes the tied blocks, such as `average_start`, `stepwise_start` or `lower_start`.
        skip_first: the first step runs the bare tied weights.
        vectors: norms and biases get an offset per step, without which a trained model is not met at any rank. The
            source shares them: False.

    Raises:
        ValueError: if the dense model takes more steps than one, or its step is not that of its blocks alone, as a
            gated one's; if its blocks are not a multiple of `num_steps` or not alike, or `rank` is below 0.

    Reference: Bae et al., 2024, arXiv 2410.20672.
    """
    if dense.num_steps != 1:
        raise ValueError(f"dense takes {dense.num_steps} steps at full depth, but must be a model of one step.")
    if not is_plain(dense.core.update):
        raise ValueError(
            f"dense has a {type(dense.core.update).__name__}, whose step is more than the blocks, so that no "
            "corrections make up for it: give rd.dense(...), or another model with the update rd.plain."
        )
    model = copy.deepcopy(dense)
    blocks = list(dense.core.stack.blocks)
    relaxed = relaxed_stack(blocks, num_steps, rank, start=start, skip_first=skip_first, vectors=vectors)
    model.core = RecurrentCore(relaxed, model.core.update)
    model.num_steps = num_steps
    return model
