"""The loop under an exit rule: rows that have had enough are gathered out, and cost nothing more."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from recurrent_depth.contracts import At, ModelKeyValues, Tree
from recurrent_depth.core import CoreViews, RecurrentCore
from recurrent_depth.exits import ExitRule, ask, leaving
from recurrent_depth.numerics import at_least_float32
from recurrent_depth.rows import map_changing, map_rows, map_rows_of_at
from recurrent_depth.trees import map_tensors
from recurrent_depth.update import DepthState

RowReadout = Callable[[DepthState, At, Tensor], Tensor]
"""Makes the logits of some rows: of their states, where they are called, and which rows they are."""


class Working(NamedTuple):
    """The rows that are still at work.

    Attributes:
        rows: which ones.
        state: their states.
        at: where the blocks are called for them.
        carry: what the exit rule carries for them.
        survival: their chance not to have left.
    """

    rows: Int[Tensor, " row"]
    state: DepthState
    at: At
    carry: Tree
    survival: Tensor

    def where(self, chosen: Bool[Tensor, " row"]) -> "Working":
        """Those of them that are chosen."""
        if chosen.all():
            return self
        carry, survival = map_tensors(lambda leaf: leaf[chosen], (self.carry, self.survival))
        state = map_rows(lambda leaf: leaf[chosen], self.state)
        at = map_rows_of_at(lambda leaf: leaf[chosen], self.at)
        return Working(self.rows[chosen], state, at, carry, survival)


def leave_early(
    core: RecurrentCore,
    begun: DepthState,
    at: At,
    kv: CoreViews,
    *,
    num_steps: int,
    rule: ExitRule,
    readout: RowReadout,
) -> tuple[DepthState, Int[Tensor, " batch"]]:
    """Takes at most `num_steps` steps with one new token per row; each row leaves when the rule says so.

    A row that has left is gathered out of all that the loop computes. None depends on its neighbours.

    Returns:
        The state that each row left with, and the number of steps that it took.
    """
    batch = begun.h.shape[0]
    survival = torch.ones_like(at_least_float32(begun.h[..., 0]))
    work = Working(torch.arange(batch, device=begun.h.device), begun, at, None, survival)
    gone: list[Working] = []
    depths = torch.full((batch,), num_steps)
    for step in range(num_steps):
        views = kv if len(work.rows) == batch else partial(kv, rows=work.rows)
        work = work._replace(state=core.step(work.state, work.at, step, views))
        if step == num_steps - 1:
            break
        stays, work = _asked(rule, work, step, readout)
        if not stays.all():
            gone.append(work.where(~stays))
            depths[gone[-1].rows.cpu()] = step + 1
            if not stays.any():
                return _together(gone, begun), depths
            work = work.where(stays)
    return _together([*gone, work], begun), depths


def _asked(rule: ExitRule, work: Working, step: int, readout: RowReadout) -> tuple[Bool[Tensor, " row"], Working]:
    """Which rows stay after a step."""
    look = partial(_look, readout, work)
    carry, hazard = ask(rule, work.carry, work.state, look, step)
    survival, leaves = leaving(work.survival, hazard, rule.quantile)
    return ~leaves[:, 0], work._replace(carry=carry, survival=survival)


def _look(readout: RowReadout, work: Working, state: DepthState) -> Tensor:
    return readout(state, work.at, work.rows)


def _together(parts: list[Working], begun: DepthState) -> DepthState:
    """The states of all rows, as the caller gave them; what blocks remember ends here."""
    back = torch.cat([part.rows for part in parts]).argsort()
    states = [part.state._replace(memory={}) for part in parts]
    whole = map_changing(lambda *leaves: torch.cat(leaves)[back], *states)
    return whole._replace(context=begun.context)


def rows_of_model(kv: ModelKeyValues, rows: Tensor) -> ModelKeyValues:
    """What a cache shows to these rows alone."""
    return ModelKeyValues(kv.prelude, partial(kv.core, rows=rows), partial(kv.coda, rows=rows))
