"""Builders of the designs in which each step has weights of its own. Assembly only."""

from collections.abc import Callable

from recurrent_depth.arguments import check_types, require_whole
from recurrent_depth.builders import UpdateFactory, grt, plain
from recurrent_depth.core import RecurrentCore
from recurrent_depth.depth import Layout
from recurrent_depth.factories import made
from recurrent_depth.forms import Form, GPT2Form
from recurrent_depth.model import RecurrentTransformer
from recurrent_depth.relaxation import RelaxedStack
from recurrent_depth.step_embedding import AddStepEmbedding, StepEmbedding
from recurrent_depth.update import DepthUpdate


@check_types
def rrt(
    layout: Layout,
    *,
    dim: int,
    num_heads: int,
    vocab_size: int,
    context_length: int,
    rank: int,
    form: Callable[..., Form] = GPT2Form,
    update: UpdateFactory = plain,
    skip_first: bool = False,
) -> RecurrentTransformer:
    """A Relaxed Recursive Transformer from scratch: the plain loop, with a low-rank correction per step.

    Every linear layer of the loop's blocks is corrected. It starts as the naive loop, which it is at rank 0. For one
    that starts from a trained dense model see `relax`.

    Args:
        layout: blocks before, in and behind the loop, and full depth: there are corrections for so many steps.
        dim: the width.
        num_heads: attention heads.
        vocab_size: how many tokens there are.
        context_length: how many positions are learned (GPT-2 form).
        rank: of the corrections; the source uses 64 to 512 at widths of 2,048.
        form: the family of blocks.
        update: makes the update for the width; `gated` gives a gate with a low-rank correction per step.
        skip_first: the first step runs the bare tied weights.

    Raises:
        ValueError: if a number is below 1, `rank` below 0, or heads don't divide the width; in a forward of more steps
            than the layout's.

    Reference: Bae et al., 2024, arXiv 2410.20672.
    """
    sizes = {"dim": dim, "num_heads": num_heads, "vocab_size": vocab_size, "context_length": context_length}
    model = grt(layout, **sizes, form=form, update=update)
    relaxed = RelaxedStack(model.core.stack, layout.num_steps, rank, skip_first=skip_first)
    model.core = RecurrentCore(relaxed, model.core.update)
    return model


@check_types
def ple(
    layout: Layout,
    *,
    dim: int,
    num_heads: int,
    vocab_size: int,
    context_length: int,
    size: int = 256,
    form: Callable[..., Form] = GPT2Form,
    update: UpdateFactory = plain,
) -> RecurrentTransformer:
    """A loop with an embedding of the token for each step, as Gemma 3n has one for each layer.

    Args:
        layout: blocks before, in and behind the loop, and full depth: there are embeddings for so many steps.
        dim: the width.
        num_heads: attention heads.
        vocab_size: how many tokens there are.
        context_length: how many positions are learned (GPT-2 form).
        size: the length of a step's embedding; 256 in Gemma 3n.
        form: the family of blocks.
        update: makes the update for the width, which takes the step.

    Raises:
        ValueError: if a number is below 1, or heads don't divide the width; in a forward of more steps than the
            layout's.

    Reference: the per-layer embeddings of Gemma 3n (Google, 2025).
    """
    require_whole("size", size, at_least=1)

    def embedded(dim: int) -> AddStepEmbedding:
        inner = made("update", DepthUpdate, update, dim)
        return AddStepEmbedding(inner, StepEmbedding(vocab_size, dim, layout.num_steps, size), dim)

    sizes = {"dim": dim, "num_heads": num_heads, "vocab_size": vocab_size, "context_length": context_length}
    return grt(layout, **sizes, form=form, update=embedded)
