"""Builders of designs whose steps differ from one another: they halt, have routers of their own, or know the time."""

import math
from collections.abc import Callable

from recurrent_depth.arguments import check_types, require_whole
from recurrent_depth.attention import Attention
from recurrent_depth.blocks import MLP
from recurrent_depth.builders import UpdateFactory, assemble, plain
from recurrent_depth.conditioned_block import ConditionedBlock
from recurrent_depth.core import RecurrentCore
from recurrent_depth.depth import Layout
from recurrent_depth.embedding import scaled_embedding
from recurrent_depth.factories import made
from recurrent_depth.forms import Form, GPT2Form
from recurrent_depth.halting import HaltingUpdate
from recurrent_depth.halting_unit import HaltingUnit, Mix, sum_states
from recurrent_depth.initialisation import initialise
from recurrent_depth.injection import KeepState
from recurrent_depth.memory_slots import MemorySlotsUpdate
from recurrent_depth.model import RecurrentTransformer
from recurrent_depth.norms import RMSNorm
from recurrent_depth.step_encoding import StepEncoding
from recurrent_depth.time_conditioning import CoarseTimes, TimeConditionedUpdate
from recurrent_depth.universal_form import UniversalForm
from recurrent_depth.update import DepthUpdate, ReplaceState
from recurrent_depth.weight_start import WeightStart


def step_encoded(dim: int) -> ReplaceState:
    """The Universal Transformer's update without halting, `h <- blocks(h + P^t)`; no weights, whatever the width."""
    return ReplaceState(StepEncoding())


@check_types
def halted(
    dim: int,
    *,
    inner: UpdateFactory = step_encoded,
    bias: float | int = 1.0,
    ponder: float | int = 0.01,
    epsilon: float | int = 0.01,
    mix: Mix = sum_states,
) -> HaltingUpdate:
    """Adaptive computation time around an update; `partial(halted, inner=gated)` halts tokens of a gated loop.

    Args:
        dim: the width.
        inner: makes the update that tokens take steps of.
        bias: where the halting unit's bias starts; from +1 tokens halt at their second step, -3 starts deep.
        ponder: the weight of the ponder cost.
        epsilon: how much of the mass may lack at halting.
        mix: how the states are weighed together: `sum_states` or `blend_states`.

    Raises:
        ValueError: if `dim` is below 1, `bias` no finite number, `ponder` below 0, or `epsilon` not between 0 and 1.

    Reference: Graves, 2016, arXiv 1603.08983; Dehghani et al., 2018, arXiv 1807.03819.
    """
    stepping, unit = made("inner", DepthUpdate, inner, dim), HaltingUnit(dim, bias=bias)
    return HaltingUpdate(stepping, unit, StepEncoding(), ponder=ponder, epsilon=epsilon, mix=mix)


@check_types
def universal(
    layout: Layout,
    *,
    dim: int,
    num_heads: int,
    vocab_size: int,
    context_length: int,
    form: Callable[..., Form] = UniversalForm,
    update: UpdateFactory = halted,
) -> RecurrentTransformer:
    """The Universal Transformer as a decoder: post-norm blocks told position and step, and tokens that halt.

    The source has neither prelude nor coda, such as `0+1×6+0`. Train it with `last_step_loss`, which adds the ponder
    cost. Weights start from a deviation of 1 / (2 sqrt(dim)), and the embedding is multiplied by 2 sqrt(dim), so that
    its features start from N(0, 1): unscaled, a token is hardly heard beside the sinusoids, which every step adds.

    Args:
        layout: blocks before, in and behind the loop, and the most steps that a token takes.
        dim: the width.
        num_heads: attention heads.
        vocab_size: how many tokens there are.
        context_length: how many positions are learned, by forms that learn some; this one doesn't.
        form: the family of blocks.
        update: makes the update; `partial(halted, bias=-3.0)` starts deep, `step_encoded` never halts.

    Raises:
        ValueError: if a number is below 1, or heads don't divide the width.

    Reference: Dehghani et al., 2018, arXiv 1807.03819.
    """
    require_whole("vocab_size", vocab_size, at_least=1)
    require_whole("context_length", context_length, at_least=1)
    # Half of Tensor2Tensor's: with its own, a wide model's tied head would start sure that each token comes again.
    parts, std = form(dim, num_heads), 0.5 / math.sqrt(dim)
    return assemble(
        layout,
        parts,
        made("update", DepthUpdate, update, dim),
        vocab_size=vocab_size,
        context_length=context_length,
        embed=scaled_embedding(parts.embedding(vocab_size, context_length), 1 / std),
        start=WeightStart(std),
    )


@check_types
def mesh(
    layout: Layout,
    *,
    dim: int,
    num_heads: int,
    vocab_size: int,
    context_length: int,
    form: Callable[..., Form] = GPT2Form,
    num_slots: int | None = None,
) -> RecurrentTransformer:
    """MeSH: a loop whose steps write to memory slots and read the next state from them.

    It takes no more steps than the layout has: each has routers of its own. The source's layouts are such as `3+6×3+3`.

    Args:
        layout: blocks before, in and behind the loop, and full depth.
        dim: the width.
        num_heads: attention heads.
        vocab_size: how many tokens there are.
        context_length: how many positions are learned (GPT-2 form).
        form: the family of blocks.
        num_slots: memory slots of each token; 3 more than steps by default.

    Raises:
        ValueError: if a number is below 1, or heads don't divide the width.

    Reference: Yu et al., 2025, arXiv 2510.07739.
    """
    slots = layout.num_steps + 3 if num_slots is None else num_slots
    update = MemorySlotsUpdate(KeepState(), dim, num_slots=slots, num_steps=layout.num_steps)
    return assemble(layout, form(dim, num_heads), update, vocab_size=vocab_size, context_length=context_length)


@check_types
def loopformer(
    layout: Layout,
    *,
    dim: int,
    num_heads: int,
    vocab_size: int,
    context_length: int,
    hidden: int | None = None,
    update: UpdateFactory = plain,
) -> RecurrentTransformer:
    """LoopFormer: a plain loop whose blocks are told the time and the length of each step.

    A run of k steps takes k longer ones, so it is no prefix of a deeper run. Train it with `WithConsistency`. The
    source has neither prelude nor coda, such as `0+3×8+0`; here their blocks, which know no time, are GPT-2's.

    Args:
        layout: blocks before, in and behind the loop, and full depth.
        dim: the width.
        num_heads: attention heads.
        vocab_size: how many tokens there are.
        context_length: how many positions are learned.
        hidden: the width inside the MLP of the loop; by default 4 times the width, in the source 2.5 times.
        update: makes the update that the blocks are called by.

    Raises:
        ValueError: if a number is below 1, or heads don't divide the width.

    Reference: Jeddi et al., 2026, arXiv 2602.11451.
    """
    parts, wide = GPT2Form(dim, num_heads), require_whole("hidden", 4 * dim if hidden is None else hidden, at_least=1)
    timed = TimeConditionedUpdate(made("update", DepthUpdate, update, dim), dim, CoarseTimes(layout.num_steps))
    blocks = [ConditionedBlock(Attention(dim, num_heads), MLP(dim, wide), dim) for _ in range(layout.core)]
    norm = RMSNorm(dim)
    model = assemble(layout, parts, timed, vocab_size=vocab_size, context_length=context_length, norm=norm)
    model.core = RecurrentCore(blocks, timed)
    initialise(model)
    return model
