"""What the costs of a model follow from, read off a model or put together for a layout that nobody has built."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from recurrent_depth.arguments import require_whole
from recurrent_depth.blocks import linear_cost
from recurrent_depth.contracts import BlockCost, UpdateCost
from recurrent_depth.depth import Layout
from recurrent_depth.model import RecurrentTransformer
from recurrent_depth.update_answers import cost_of


class Outline(NamedTuple):
    """All that accounting knows of a model.

    Attributes:
        layout: its blocks, and full depth.
        dim: the width of the state.
        prelude: what the blocks before the loop cost, and what the embedding multiplies.
        core: what the blocks in the loop cost, for one step.
        coda: what the blocks behind the loop cost.
        update: what the update spends beside the blocks in so many steps.
        head: matrix FLOPs of the head per token.
        vocab_size: how many tokens there are.
        num_parameters: all unique parameters.
        num_embedding_parameters: those of the token and the position table, and of a head that is not tied.
        num_position_parameters: those of the position table.
        context_length: how many positions were learned; None where blocks know positions themselves.
        checkpointing: whether the backward pass recomputes each step.
    """

    layout: Layout
    dim: int
    prelude: BlockCost
    core: BlockCost
    coda: BlockCost
    update: Callable[[int], UpdateCost]
    head: int
    vocab_size: int
    num_parameters: int
    num_embedding_parameters: int
    num_position_parameters: int
    context_length: int | None
    checkpointing: bool

    def length(self, tokens: int | None) -> int:
        """How long a sequence to count: `tokens`, or else all positions that were learned.

        Raises:
            ValueError: if `tokens` is below 1, above the positions that were learned, or missing where none are.
        """
        if tokens is None and self.context_length is None:
            raise ValueError("tokens is None, but must be given: this model has learned no positions to bound them.")
        length = require_whole("tokens", self.context_length if tokens is None else tokens, at_least=1)
        if self.context_length is not None and length > self.context_length:
            raise ValueError(f"tokens is {length}, but must be at most {self.context_length}, the positions learned.")
        return length


def outline(model: RecurrentTransformer | Outline) -> Outline:
    """The outline of a model; an outline is its own."""
    if isinstance(model, Outline):
        return model
    parameters = dict(model.named_parameters())
    position, token, prelude = parameters.get("embed.position.weight"), model.embed.token.weight, model.prelude.cost()
    return Outline(
        layout=model.layout,
        dim=model.embed.dim,
        prelude=prelude._replace(linear=prelude.linear + linear_cost(model.embed).linear),
        core=model.core.stack.cost(),
        coda=model.coda.cost(),
        update=partial(cost_of, model.core.update),
        head=model.head.cost(token),
        vocab_size=token.shape[0],
        num_parameters=sum(p.numel() for p in parameters.values()),
        num_embedding_parameters=sum(
            p.numel() for name, p in parameters.items() if name.startswith(("embed.", "head."))
        ),
        num_position_parameters=0 if position is None else position.numel(),
        context_length=None if position is None else position.shape[0],
        checkpointing=model.core.checkpointing,
    )
