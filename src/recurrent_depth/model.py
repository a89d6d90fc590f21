"""The language model around the loop: embed, prelude, core, coda, head."""

import warnings
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor, nn

from recurrent_depth.arguments import require_whole
from recurrent_depth.attention import causal_mask
from recurrent_depth.blocks import Stack
from recurrent_depth.checks import check_complete_mask, check_positions, checked_padding, checked_tokens
from recurrent_depth.contracts import At, Call, ModelKeyValues, Notes
from recurrent_depth.core import CoreViews, RecurrentCore
from recurrent_depth.depth import Depth, Layout, as_depth
from recurrent_depth.embedding import Embedding
from recurrent_depth.trajectory import Trajectory
from recurrent_depth.update import DepthState, add_losses
from recurrent_depth.weight_start import WeightStart


class Begun(NamedTuple):
    """A forward that stands before its first step.

    Attributes:
        state: the state before the first step.
        depth: how many steps it takes.
        at: where the blocks are called.
        views: what a cache shows to the loop.
        notes: what the blocks before the loop said.
    """

    state: DepthState
    depth: Depth
    at: At
    views: CoreViews | None
    notes: Notes


class RecurrentTransformer(nn.Module):
    """A causal language model whose middle blocks are run again and again.

    A dense Transformer is the same model with one step of a plain core.

    Args:
        embed: called as `embed(tokens, positions)`; its `token.weight` is handed to the head.
        prelude: the blocks before the loop; what they give is the anchor.
        core: the loop.
        coda: the blocks behind the loop.
        norm: the final norm.
        head: called as `head(x, embedding_weight)`.
        num_steps: full depth.

    Raises:
        ValueError: if `num_steps` is below 1.

    Attributes:
        weight_start: how `initialise` draws its weights.
    """

    def __init__(
        self,
        embed: Embedding,
        prelude: Stack,
        core: RecurrentCore,
        coda: Stack,
        *,
        norm: nn.Module,
        head: nn.Module,
        num_steps: int,
    ):
        super().__init__()
        self.embed, self.prelude, self.core, self.coda, self.norm, self.head = embed, prelude, core, coda, norm, head
        self.num_steps = require_whole("num_steps", num_steps, at_least=1)
        self.decode: Callable[..., Tensor] | None = None
        self.weight_start = WeightStart()

    @property
    def layout(self) -> Layout:
        """Blocks before, in and behind the loop, and full depth."""
        return Layout(len(self.prelude.blocks), len(self.core.stack.blocks), self.num_steps, len(self.coda.blocks))

    def forward(
        self,
        tokens: Integer[Tensor, "batch token"],
        num_steps: int | Depth | Sequence[int] | None = None,
        *,
        mask: Bool[Tensor, "batch key"] | Int[Tensor, "batch key"] | Bool[Tensor, "#batch token key"] | None = None,
        positions: Int[Tensor, "#batch token"] | None = None,
        start: Float[Tensor, "batch token dim"] | None = None,
        kv: ModelKeyValues | None = None,
        logits_to_keep: int | None = None,
    ) -> Float[Tensor, "batch kept vocab"]:
        """Logits after `num_steps` steps; full depth by default, in training too: a sampler draws outside.

        Args:
            tokens: token ids.
            num_steps: one number for all rows, one for each, or a `Depth`.
            mask: True at real tokens, False at padding, over all keys; or a complete attention mask, True where a
                token may look.
            positions: by default 0, 1, 2, ..., counted from a row's first real token; a cache needs these or a mask.
            start: an initial state in place of the update's own.
            kv: what a cache shows of earlier tokens; `extend` gives it.
            logits_to_keep: logits of so many last tokens alone, or of all where there are fewer; by default of all.

        Raises:
            ValueError: for tokens that are empty, no integers or outside of the vocabulary (checked on CPU), for a mask
                of another shape, for more tokens than learned positions, and for an impossible depth.
        """
        if logits_to_keep is not None:
            require_whole("logits_to_keep", logits_to_keep, at_least=1)
        begun = self.begin(tokens, num_steps, mask=mask, positions=positions, start=start, kv=kv)
        (last,) = deque(self.core.steps(begun.state, begun.depth, begun.at, begun.views), maxlen=1)
        return self.readout(self.core.read(last), begun.at, kv, logits_to_keep=logits_to_keep)

    def trajectory(
        self,
        tokens: Integer[Tensor, "batch token"],
        num_steps: int | Depth | Sequence[int] | None = None,
        *,
        mask: Bool[Tensor, "batch key"] | Int[Tensor, "batch key"] | None = None,
        positions: Int[Tensor, "#batch token"] | None = None,
        start: Float[Tensor, "batch token dim"] | None = None,
        kv: ModelKeyValues | None = None,
        every_step: bool = False,
    ) -> Trajectory:
        """What `forward` goes through: the last state, or with `every_step` the state after each step."""
        begun = self.begin(tokens, num_steps, mask=mask, positions=positions, start=start, kv=kv)
        states = self.core.steps(begun.state, begun.depth, begun.at, begun.views)
        kept = tuple(states) if every_step else tuple(deque(states, maxlen=1))
        said = begun.notes
        readout = partial(self._output, begun.at, kv, said.losses, said)
        return Trajectory(kept, begun.depth.num_steps, readout, said, tokens, begun.depth.rows)

    def begin(
        self,
        tokens: Integer[Tensor, "batch token"],
        num_steps: int | Depth | Sequence[int] | None = None,
        *,
        mask: Bool[Tensor, "batch key"] | Int[Tensor, "batch key"] | Bool[Tensor, "#batch token key"] | None = None,
        positions: Int[Tensor, "#batch token"] | None = None,
        start: Float[Tensor, "batch token dim"] | None = None,
        kv: ModelKeyValues | None = None,
    ) -> Begun:
        """Runs what stands before the loop; arguments and errors are those of `forward`."""
        if kv is not None and not isinstance(kv, ModelKeyValues):
            raise ValueError(
                f"kv is of {type(kv).__name__}, but must be ModelKeyValues, the views of a cache; with a DepthCache "
                "call extend(model, tokens, cache)."
            )
        tokens = checked_tokens(tokens, self.embed.token.num_embeddings)
        check_positions(positions, *tokens.shape)
        depth = self._depth(num_steps, batch=tokens.shape[0])
        at, padding = _at(tokens, mask, positions, cached=kv is not None)
        embedding = self.embed(tokens, at.positions)
        said = Notes()
        anchor = self.prelude(embedding, at._replace(notes=said), kv=None if kv is None else kv.prelude())
        call = Call(depth.num_steps, tokens, embedding, at.positions, padding, start)
        return Begun(self.core.begin(anchor, call), depth, at, None if kv is None else kv.core, said)

    def _output(self, at: At, kv: ModelKeyValues | None, before: dict, said: Notes, state: DepthState) -> Tensor:
        coda = Notes()
        logits = self.readout(self.core.read(state), at._replace(notes=coda), kv)
        said.losses = add_losses(before, coda.losses)
        return logits

    def readout(
        self,
        x: Float[Tensor, "batch token dim"],
        at: At,
        kv: ModelKeyValues | None = None,
        *,
        logits_to_keep: int | None = None,
    ) -> Float[Tensor, "batch kept vocab"]:
        """Logits of what the loop gave: coda, final norm and head; the last two of so many last tokens alone."""
        return self.head(self.finish(x, at, kv, last=logits_to_keep), self.embed.token.weight)

    def finish(
        self,
        x: Float[Tensor, "batch token dim"],
        at: At,
        kv: ModelKeyValues | None = None,
        *,
        last: int | None = None,
    ) -> Float[Tensor, "batch kept dim"]:
        """What the head reads of what the loop gave: coda, and final norm of so many last tokens, by default of all."""
        x = self.coda(x, at, kv=None if kv is None else kv.coda())
        return self.norm(x if last is None else x[:, -last:])

    def compile_step(self, **arguments: Any) -> None:
        """Compiles one step of the loop with `torch.compile(**arguments)`; it serves every depth."""
        self.core.compile_step(**arguments)

    def _depth(self, num_steps: object, batch: int) -> Depth:
        depth = as_depth(self.num_steps if num_steps is None else num_steps, batch=batch)
        # In training a heavy tail is meant to go beyond: it is what trains those depths.
        if depth.num_steps > self.num_steps and not self.training:
            warnings.warn(
                f"{depth.num_steps} steps asked for, but full depth is {self.num_steps}: deeper than trained.",
                stacklevel=4,
            )
        return depth


def _at(tokens: Tensor, mask: Tensor | None, positions: Tensor | None, cached: bool) -> tuple[At, Tensor | None]:
    """Where the blocks are called, and the padding mask."""
    num_tokens = tokens.shape[1]
    if cached and positions is None and mask is None:
        raise ValueError("A forward with a cache needs positions or a mask over all keys: how many came before?")
    default = torch.arange(num_tokens, device=tokens.device)[None]
    complete = mask if isinstance(mask, Tensor) and mask.ndim == 3 else None
    if complete is not None:
        check_complete_mask(complete, *tokens.shape, cached=cached)
    padding = checked_padding(mask, *tokens.shape, cached=cached) if complete is None else None
    if padding is None:
        if cached and positions is None:
            raise ValueError("A forward with a cache and a complete mask needs positions: how many came before?")
        return At(default if positions is None else positions, complete), None
    counted = (padding.long().cumsum(1) - 1).clamp(min=0)[:, -num_tokens:]
    valid = padding[:, -num_tokens:]
    return At(counted if positions is None else positions, causal_mask(padding, num_tokens), valid), padding
