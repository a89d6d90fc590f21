"""A forward over new tokens that follow those which a cache holds."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from recurrent_depth.arguments import require_instance, require_whole
from recurrent_depth.cache import DepthCache
from recurrent_depth.cached_forward import OpenForward, open_forward
from recurrent_depth.contracts import At
from recurrent_depth.convergence import warn_if_misread
from recurrent_depth.depth import Depth
from recurrent_depth.early_exit import leave_early, rows_of_model
from recurrent_depth.exits import ExitRule
from recurrent_depth.model import RecurrentTransformer
from recurrent_depth.settling import settle
from recurrent_depth.update import DepthState
from recurrent_depth.views import views_of


def extend(
    model: RecurrentTransformer,
    tokens: Integer[Tensor, "batch token"],
    cache: DepthCache,
    num_steps: int | Depth | Sequence[int] | None = None,
    *,
    mask: Bool[Tensor, "batch key"] | Int[Tensor, "batch key"] | None = None,
    logits_to_keep: int | None = None,
) -> Float[Tensor, "batch kept vocab"]:
    """Logits of new tokens that follow those in the cache, which then holds them too.

    Under `KeepAll` they are those of a forward over all tokens, however the text is cut into chunks. With gradients
    enabled they flow through the cache, and nothing is written in place; decode under `torch.no_grad()`.

    Args:
        model: the model.
        tokens: the new tokens alone.
        cache: of the same rows; an exception leaves it as it was.
        num_steps: one number for all rows, one for each, or a `Depth`; full depth by default.
        mask: True at real tokens, over all keys, those in the cache too; by default all new tokens are real, and the
            old ones as they were.
        logits_to_keep: logits of so many last tokens alone; by default of all.

    Raises:
        ValueError: for what `RecurrentTransformer.forward` refuses, for a mask that does not cover all keys, and for a
            cache that is full, or of another batch, model or dtype.
    """
    require_instance("model", model, RecurrentTransformer)
    if logits_to_keep is not None:
        require_whole("logits_to_keep", logits_to_keep, at_least=1)
    opened = open_forward(tokens, cache, mask)
    logits = opened.logits(model, tokens, num_steps, logits_to_keep)
    opened.finish()
    return logits


class Left(NamedTuple):
    """Logits of a forward that rows left when they had enough.

    Attributes:
        logits: of each row's new token.
        num_steps: how many steps each row took; on the CPU.
    """

    logits: Float[Tensor, "batch vocab"]
    num_steps: Int[Tensor, " batch"]


def extend_until(
    model: RecurrentTransformer,
    tokens: Integer[Tensor, "batch 1"],
    cache: DepthCache,
    exit: ExitRule,  # noqa: A002
    num_steps: int | None = None,
    *,
    mask: Bool[Tensor, "batch key"] | Int[Tensor, "batch key"] | None = None,
) -> Left:
    """Logits of one new token per row; each row leaves the loop when the rule says so, and then costs nothing more.

    A row's logits and depth are those that it has alone. In the cache the copies that a row did not reach hold what its
    last step made. Arguments and errors are those of `extend`.

    Args:
        model: the model.
        tokens: one new token per row.
        cache: of the same rows.
        exit: when a row leaves.
        num_steps: at most so many steps; full depth by default.
        mask: True at real tokens, over all keys.

    Warns:
        UserWarning: if the rule reads a gate that the model has not, or looks for convergence over a router that lets
            tokens rest.
    """
    require_instance("model", model, RecurrentTransformer)
    require_instance("exit", exit, ExitRule)
    warn_if_misread(exit, model.core.update, stacklevel=2)
    opened = open_forward(tokens, cache, mask)
    left = logits_until(opened, model, tokens, exit, num_steps)
    opened.finish()
    return left


def logits_until(
    opened: OpenForward, model: RecurrentTransformer, tokens: Tensor, rule: ExitRule, num_steps: int | None
) -> Left:
    """Logits of an opened forward under an exit rule."""
    if tokens.shape[1] != 1:
        raise ValueError(f"An exit rule lets rows leave at one new token each, got {tokens.shape[1]} tokens.")
    most = model.num_steps if num_steps is None else require_whole("num_steps", num_steps, at_least=1)
    kv = views_of(opened.turn)
    begun = model.begin(tokens, most, **opened.where(), kv=kv)

    def readout(state: DepthState, at: At, rows: Tensor) -> Tensor:
        return model.readout(model.core.read(state), at, rows_of_model(kv, rows))

    state, depths = leave_early(model.core, begun.state, begun.at, kv.core, num_steps=most, rule=rule, readout=readout)
    logits = model.readout(model.core.read(state), begun.at, kv)
    settle(opened.turn)
    return Left(logits[:, -1], depths)
