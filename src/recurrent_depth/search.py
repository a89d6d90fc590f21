"""The layouts that cost what a dense model costs: isoFLOPS and isoPARAMS."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import count, takewhile
from typing import NamedTuple

import torch

from recurrent_depth.accounting import EXECUTED, Counting, Outline, flops, outline
from recurrent_depth.arguments import check_types, require_number, require_whole
from recurrent_depth.builders import UpdateFactory, gated
from recurrent_depth.contracts import BlockCost, UpdateCost
from recurrent_depth.depth import Layout
from recurrent_depth.factories import made
from recurrent_depth.layout_costs import LayoutCosts
from recurrent_depth.model import RecurrentTransformer
from recurrent_depth.update import DepthUpdate
from recurrent_depth.update_answers import cost_of

Match = Callable[[Outline], int | float]
"""What is to be equal: `accounting.flops`, `executed_blocks`, `num_parameters`, or a `functools.partial` of one."""


@check_types
def search_layouts(
    dense: RecurrentTransformer,
    match: Match = flops,
    within: float | int = 0.07,
    max_steps: int | None = None,
    *,
    min_prelude: int = 1,
    min_coda: int = 1,
    update: UpdateFactory = gated,
    tokens: int | None = None,
    counting: Counting = EXECUTED,
) -> LayoutCosts:
    """All layouts of two steps or more that cost what a dense model costs, closest first; none of them is built.

    Matching FLOPs gives isoFLOPS, matching parameters isoPARAMS. Where the width is small, projection and gate weigh
    much (`1+1×10+1` at width 768 costs 1.13 times its dense model), so isoFLOPS layouts are also looked for by their
    executed blocks. Of equally close layouts those come first that store fewer blocks, then those that have more of
    them in the loop. The table has one row for all ways to split the same blocks over prelude and coda.

    Args:
        dense: the model to be matched; blocks, width and vocabulary are its own. One on the meta device will do.
        match: what is to be equal: a function of an `Outline` that never falls where a block or a step is added.
        within: how far a layout may be off, as a share of the dense model's value.
        max_steps: the most steps; needed where steps don't change what is matched, as with parameters.
        min_prelude: the fewest blocks before the loop.
        min_coda: the fewest blocks behind the loop.
        update: makes the layouts' update for a width.
        tokens: the length of the sequence that the table counts; by default all positions that the model has learned.
        counting: the convention of the table's FLOPs; the match has its own.

    Raises:
        ValueError: if `dense` is no dense model, a number is too small, `tokens` beyond the positions that it has
            learned, or `max_steps` missing where it is needed.
    """
    _check(dense, within, max_steps, min_prelude, min_coda)
    of, frame, smallest = outline(dense), _frame(dense, update), Layout(min_prelude, 1, 2, min_coda)
    target = match(of)

    @cache
    def excess(layout: Layout) -> float:
        return match(frame.outline(layout)) / target - 1

    def fits(layout: Layout) -> bool:
        return excess(layout) <= within and (max_steps is None or layout.num_steps <= max_steps)

    def rank(layout: Layout) -> tuple:
        uneven = abs(layout.prelude - layout.coda)
        return abs(excess(layout)), layout.stored, -layout.core, layout.num_steps, uneven, layout.prelude

    if max_steps is None and excess(smallest) == excess(smallest._replace(num_steps=3)):
        raise ValueError(
            "max_steps is None, but must be given: what is matched does not grow with the number of steps."
        )
    near = sorted((layout for layout in _grown(smallest, fits) if excess(layout) >= -within), key=rank)
    found = [frame.outline(layout) for layout in near]
    return LayoutCosts(of, found, tokens=of.length(tokens), counting=counting, within=within)


class _Frame(NamedTuple):
    """All of a model but its layout."""

    dense: Outline
    block: BlockCost
    block_parameters: int
    update: Callable[[int], UpdateCost]
    other_parameters: int

    def outline(self, layout: Layout) -> Outline:
        return self.dense._replace(
            layout=layout,
            prelude=_times(layout.prelude, self.block),
            core=_times(layout.core, self.block),
            coda=_times(layout.coda, self.block),
            update=self.update,
            num_parameters=layout.stored * self.block_parameters + self.other_parameters,
        )


def _frame(dense: RecurrentTransformer, factory: UpdateFactory) -> _Frame:
    with torch.device("meta"):
        update = made("update", DepthUpdate, factory, dense.embed.dim)
    of, stored = outline(dense), dense.layout.stored
    blocks = of.prelude.plus(of.core).plus(of.coda)
    in_blocks = sum(p.numel() for stack in (dense.prelude, dense.core, dense.coda) for p in stack.parameters())
    return _Frame(
        dense=of,
        block=BlockCost(blocks.linear // stored, blocks.per_key // stored, blocks.cached // stored, blocks.live),
        block_parameters=in_blocks // stored,
        update=partial(cost_of, update),
        other_parameters=of.num_parameters - in_blocks + sum(p.numel() for p in update.parameters()),
    )


def _grown(smallest: Layout, fits: Callable[[Layout], bool]) -> Iterator[Layout]:
    """All layouts that fit, none with a part below that of the smallest. What is too large stays so with more."""

    def grown(layout: Layout, part: str) -> Iterator[Layout]:
        return takewhile(fits, (layout._replace(**{part: size}) for size in count(getattr(layout, part))))

    for with_prelude in grown(smallest, "prelude"):
        for with_coda in grown(with_prelude, "coda"):
            for with_core in grown(with_coda, "core"):
                yield from grown(with_core, "num_steps")


def _times(num_blocks: int, block: BlockCost) -> BlockCost:
    linear, per_key, cached = (num_blocks * number for number in block[:3])
    return BlockCost(linear, per_key, cached, block.live if num_blocks else ())


def _check(
    dense: RecurrentTransformer, within: float | int, max_steps: int | None, min_prelude: int, min_coda: int
) -> None:
    if dense.layout.num_steps != 1 or any(True for _ in dense.core.update.parameters()):
        raise ValueError(
            f"dense is a recurrent model, {dense.layout}, but must be one without recurrence: rd.dense(...)."
        )
    require_number("within", within, at_least=0, below=1)
    if max_steps is not None:
        require_whole("max_steps", max_steps, at_least=2)
    require_whole("min_prelude", min_prelude, at_least=0)
    require_whole("min_coda", min_coda, at_least=0)
