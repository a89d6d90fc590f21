"""Builders of the designs that the GRT is compared with or builds on. Assembly only: every choice is a part."""

import math
from collections.abc import Callable
from functools import partial

from torch import nn

from recurrent_depth.arguments import check_types, require_whole
from recurrent_depth.behind import BehindLoop, NormEachStep
from recurrent_depth.borrowed import Borrowed
from recurrent_depth.builders import assemble, plain
from recurrent_depth.depth import Layout
from recurrent_depth.diagonal import DiagonalInjection, SquareMap
from recurrent_depth.embedding import scaled_embedding
from recurrent_depth.factorised import FactorisedEmbedding, FactorisedHead
from recurrent_depth.forms import Form, GPT2Form, LlamaForm
from recurrent_depth.injection import ConcatProjection
from recurrent_depth.model import RecurrentTransformer
from recurrent_depth.residual import BranchSandwich, ResidualSandwich
from recurrent_depth.start import RandomState
from recurrent_depth.update import ReplaceState
from recurrent_depth.weight_start import WeightStart, truncated_normal

HuginnForm = partial(LlamaForm, rotary_base=50000.0, arrangement=ResidualSandwich)
"""Huginn's blocks: a second norm on the residual stream itself. Its biases on queries and keys are left out."""

OuroForm = partial(LlamaForm, arrangement=BranchSandwich)
"""Ouro's blocks: both norms inside the branch."""

LIKE_EMBEDDING = math.sqrt(2 / 5)
"""The deviation of Huginn's embedding behind its scale, and of the initial state that looks like one."""


@check_types
def huginn(
    layout: Layout,
    *,
    dim: int,
    num_heads: int,
    vocab_size: int,
    context_length: int,
    form: Callable[..., Form] = HuginnForm,
    state_std: float | int = LIKE_EMBEDDING,
) -> RecurrentTransformer:
    """Huginn: a loop that starts from noise and sees the prelude's output anew at every step, by a concat adapter.

    The embedding is scaled by sqrt(dim), the final norm stands before the coda too, and all weights start from a
    truncated normal of deviation sqrt(2 / (5 dim)). Train it with `PoissonLogNormalDepth`, which truncates. In
    evaluation the loop starts from zeros, unless `start` is given.

    Args:
        layout: blocks before, in and behind the loop, and full depth: the mean of the depths that it is trained at.
        dim: the width.
        num_heads: attention heads.
        vocab_size: how many tokens there are.
        context_length: how many positions are learned (GPT-2 form).
        form: the family of blocks; `LlamaForm` is the same without the sandwich's second norms.
        state_std: standard deviation of the initial state in training; 0 starts from zeros.

    Raises:
        ValueError: if a number is below 1, `state_std` below 0, or heads don't divide the width.

    Reference: Geiping et al., 2025, arXiv 2502.05171.
    """
    _check_sizes(vocab_size, context_length)
    parts, std = form(dim, num_heads), math.sqrt(2 / (5 * dim))
    norm = parts.norm()
    update = ReplaceState(ConcatProjection(dim, bias=False), start=RandomState(state_std))
    return assemble(
        layout,
        parts,
        BehindLoop(update, Borrowed(norm)),
        vocab_size=vocab_size,
        context_length=context_length,
        embed=scaled_embedding(parts.embedding(vocab_size, context_length), math.sqrt(dim)),
        norm=norm,
        start=WeightStart(std, truncated_normal),
    )


@check_types
def ouro(
    layout: Layout,
    *,
    dim: int,
    num_heads: int,
    vocab_size: int,
    context_length: int,
    form: Callable[..., Form] = OuroForm,
) -> RecurrentTransformer:
    """Ouro: the whole stack is looped, with the final norm at the end of every loop.

    The norm's output is what the head reads, what an exit reads, and what the next loop starts from. The source has
    neither prelude nor coda, such as `0+24×4+0`; a coda reads the normed state, and has a norm of its own behind it.
    Train it with `every_step_loss` or `ExpectedExitLoss`; the learned exit belongs to that objective, not to the model.

    The other arguments and the errors are those of `grt`.

    Reference: Zhu et al., 2025, arXiv 2510.25741.
    """
    parts = form(dim, num_heads)
    update = NormEachStep(plain(dim), parts.norm())
    norm = parts.norm() if layout.coda else nn.Identity()
    return assemble(layout, parts, update, vocab_size=vocab_size, context_length=context_length, norm=norm)


@check_types
def albert(
    num_layers: int,
    *,
    dim: int,
    num_heads: int,
    vocab_size: int,
    context_length: int,
    inner_dim: int = 128,
    form: Callable[..., Form] = GPT2Form,
) -> RecurrentTransformer:
    """ALBERT as a decoder: one block run `num_layers` times, and a vocabulary in two factors.

    Tables and head are `inner_dim` wide; the head is tied to the token table. The source is post-norm and an encoder,
    with a loss on the order of sentences; `form=partial(GPT2Form, arrangement=PostNorm)` is its block.

    Args:
        num_layers: how often the block runs.
        dim: the width.
        num_heads: attention heads.
        vocab_size: how many tokens there are.
        context_length: how many positions are learned (GPT-2 form).
        inner_dim: the width of the tables.
        form: the family of blocks.

    Raises:
        ValueError: if a number is below 1, or heads don't divide the width.

    Reference: Lan et al., 2019, arXiv 1909.11942.
    """
    layout = Layout(0, 1, require_whole("num_layers", num_layers, at_least=1), 0)
    _check_sizes(vocab_size, context_length)
    parts = form(dim, num_heads)
    num_positions = parts.embedding(1, context_length).num_positions
    return assemble(
        layout,
        parts,
        plain(dim),
        vocab_size=vocab_size,
        context_length=context_length,
        embed=FactorisedEmbedding(vocab_size, inner_dim, dim, num_positions=num_positions),
        head=FactorisedHead(dim, inner_dim),
    )


@check_types
def parcae(
    layout: Layout,
    *,
    dim: int,
    num_heads: int,
    vocab_size: int,
    context_length: int,
    form: Callable[..., Form] = LlamaForm,
    state_std: float | int = LIKE_EMBEDDING,
) -> RecurrentTransformer:
    """Parcae's loop: the state decays feature by feature and the normed anchor refills it, before every step.

    Before the coda stands a square map that starts as the identity. Train it with `PoissonDepthPerRow`. The source's
    blocks (squared ReLU, norms on queries and keys, value embeddings) are left to `form`.

    Args:
        layout: blocks before, in and behind the loop, and full depth.
        dim: the width.
        num_heads: attention heads.
        vocab_size: how many tokens there are.
        context_length: how many positions are learned (GPT-2 form).
        form: the family of blocks.
        state_std: standard deviation of the initial state in training, zeros in evaluation; 0 starts from zeros.

    Raises:
        ValueError: if a number is below 1, `state_std` below 0, or heads don't divide the width.

    Reference: Parcae, 2026, arXiv 2604.12946.
    """
    parts = form(dim, num_heads)
    update = ReplaceState(DiagonalInjection(dim, norm=parts.norm()), start=RandomState(state_std))
    return assemble(
        layout, parts, BehindLoop(update, SquareMap(dim)), vocab_size=vocab_size, context_length=context_length
    )


def _check_sizes(vocab_size: int, context_length: int) -> None:
    require_whole("vocab_size", vocab_size, at_least=1)
    require_whole("context_length", context_length, at_least=1)
