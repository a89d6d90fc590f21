"""Parameters, FLOPs and bytes of a model, in closed form: nothing is run.

FLOPs are those of matrix products, a multiply-add counting as two; norms, activations, the embedding lookup and the
elementwise part of a gate are left out, as everywhere. All functions take a model, on any device, or its `Outline`.
"""

from torch import nn

from recurrent_depth.arguments import check_types, require_whole
from recurrent_depth.counting import (
    EXECUTED,
    PAPER,
    Counting,
    Flops,
    causal_attention,
    every_step,
    forward_flops,
    full_attention,
    once,
)
from recurrent_depth.memory import DecodeMemory, cache_bytes, decode_memory, weight_bytes
from recurrent_depth.model import RecurrentTransformer
from recurrent_depth.moments import Moment
from recurrent_depth.outline import Outline, outline
from recurrent_depth.sampling import DepthSampler, ExpectedDepth
from recurrent_depth.training_cost import law_of, loop_flops

__all__ = [
    "EXECUTED",
    "PAPER",
    "Counting",
    "DecodeMemory",
    "Flops",
    "Moment",
    "Outline",
    "cache_bytes",
    "causal_attention",
    "decode_memory",
    "every_step",
    "executed_blocks",
    "flops",
    "flops_breakdown",
    "flops_per_token",
    "full_attention",
    "num_nanogpt_parameters",
    "num_non_embedding_parameters",
    "num_parameters",
    "once",
    "outline",
    "training_flops",
    "weight_bytes",
]


@check_types
def num_parameters(model: nn.Module | Outline) -> int:
    """All parameters, each tensor once, however often it is used: the same at every number of steps."""
    return model.num_parameters if isinstance(model, Outline) else sum(p.numel() for p in model.parameters())


@check_types
def num_non_embedding_parameters(model: RecurrentTransformer | Outline) -> int:
    """All parameters but the token and the position table and the head, whether the head is tied or not."""
    of = outline(model)
    return of.num_parameters - of.num_embedding_parameters


@check_types
def num_nanogpt_parameters(model: RecurrentTransformer | Outline) -> int:
    """All parameters but the position table: what nanoGPT prints as the model's size."""
    of = outline(model)
    return of.num_parameters - of.num_position_parameters


@check_types
def executed_blocks(model: RecurrentTransformer | Outline, num_steps: int | None = None) -> int:
    """Blocks that a forward runs: `prelude + core * num_steps + coda`; at full depth by default.

    Raises:
        ValueError: if `num_steps` is below 1.
    """
    layout = outline(model).layout
    return layout._replace(num_steps=layout.num_steps if num_steps is None else num_steps).executed


@check_types
def flops(
    model: RecurrentTransformer | Outline,
    tokens: int | None = None,
    num_steps: int | None = None,
    *,
    counting: Counting = EXECUTED,
) -> int:
    """FLOPs of one forward of one sequence.

    Args:
        model: the model or its outline.
        tokens: the length of the sequence; by default all positions that the model has learned.
        num_steps: steps taken; full depth by default.
        counting: the convention.

    Raises:
        ValueError: if `tokens` or `num_steps` is below 1, or `tokens` is beyond the learned positions, or missing where
            none are learned; and for more steps than the model has weights for.
    """
    return flops_breakdown(model, tokens, num_steps, counting=counting).total


@check_types
def flops_per_token(
    model: RecurrentTransformer | Outline,
    tokens: int | None = None,
    num_steps: int | None = None,
    *,
    counting: Counting = EXECUTED,
) -> float:
    """FLOPs of one forward of one sequence over its number of tokens; arguments and errors are those of `flops`."""
    of = outline(model)
    return flops(of, tokens, num_steps, counting=counting) / of.length(tokens)


@check_types
def flops_breakdown(
    model: RecurrentTransformer | Outline,
    tokens: int | None = None,
    num_steps: int | None = None,
    *,
    counting: Counting = EXECUTED,
) -> Flops:
    """FLOPs of one forward of one sequence, part by part; arguments and errors are those of `flops`."""
    of = outline(model)
    steps = of.layout.num_steps if num_steps is None else require_whole("num_steps", num_steps, at_least=1)
    return forward_flops(of, of.length(tokens), steps, counting)


@check_types
def training_flops(
    model: RecurrentTransformer | Outline,
    depth: DepthSampler | ExpectedDepth,
    tokens: int | None = None,
    *,
    draw: int = 0,
    read_every_step: bool = False,
    counting: Counting = EXECUTED,
) -> float:
    """FLOPs that training spends on one sequence, on average over the sampler's draws.

    Each step counts what it adds to a forward, as often as it is taken: with routers later steps are cheaper. Those
    beyond full depth count as the first of them.

    A forward counts once, its backward twice, that of steps without gradients not at all, and steps that a
    checkpointing core recomputes once more. Attention's backward counts twice too, though fused kernels compute its
    scores again; and everything outside of the loop is counted as differentiated, as it is where the anchor reaches
    the last steps. A truncated run saves a gradient more: that of the state which its last steps start from.

    Args:
        model: the model or its outline.
        depth: the sampler; or its expected depth, where all steps cost the same.
        tokens: the length of the sequence; by default all positions that the model has learned.
        draw: the draw that a curriculum is asked for.
        read_every_step: the objective reads the logits after each step, as `every_step_loss` and `ExpectedExitLoss`
            do: coda and head run at each, and once more in the backward pass, which makes the logits anew.
        counting: the convention.

    Raises:
        ValueError: if `tokens` is below 1, or missing where no positions are learned; if the sampler draws more steps
            than the model has weights for; and if steps cost differently, but how likely each is taken is not known:
            for an expected depth, and for a sampler without `expected_at`.
    """
    of, law = outline(model), law_of(depth, draw)
    parts = forward_flops(of, of.length(tokens), 1, counting)
    readout = (parts.coda + parts.head) * (4 * law.expected.num_steps if read_every_step else 3)
    return 3 * parts.prelude + loop_flops(of, law, of.length(tokens), counting) + readout
