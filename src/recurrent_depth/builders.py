"""One small builder per published design. Assembly only: every choice is a part."""

from collections.abc import Callable

from torch import nn

from recurrent_depth.arguments import check_types, require_instance, require_whole
from recurrent_depth.blocks import Stack
from recurrent_depth.core import RecurrentCore
from recurrent_depth.depth import Layout
from recurrent_depth.embedding import Embedding
from recurrent_depth.factories import made
from recurrent_depth.forms import Form, GPT2Form
from recurrent_depth.gate import AnchoredGate
from recurrent_depth.initialisation import initialise
from recurrent_depth.injection import ConcatProjection, GaussianNoise, KeepState
from recurrent_depth.model import RecurrentTransformer
from recurrent_depth.update import DepthUpdate, GatedDepthUpdate, ReplaceState
from recurrent_depth.weight_start import WeightStart

UpdateFactory = Callable[[int], DepthUpdate]
"""Makes an update for a width: `gated`, `plain`, or a `functools.partial` of them."""


@check_types
def gated(
    dim: int,
    *,
    bias: float | int = 4.0,
    state_noise: float | int = 0.1,
    gate_noise: float | int = 0.1,
    temperature: float | int = 1.0,
) -> GatedDepthUpdate:
    """The update of the Gated Recurrent Transformer.

    Args:
        dim: the width.
        bias: where the gate's bias starts; +4 keeps 98% of the state per step, 0 half of it.
        state_noise: standard deviation of the noise on the state that is projected, in training.
        gate_noise: standard deviation of the noise on the gate's logits, in training.
        temperature: divides the gate's logits.

    Raises:
        ValueError: if `dim` is below 1, a noise below 0, or the temperature not above 0.

    Reference: Hegazy et al., 2026, arXiv 2608.15062.
    """
    require_whole("dim", dim, at_least=1)
    inject = ConcatProjection(dim, noise=GaussianNoise(state_noise))
    return GatedDepthUpdate(
        inject, AnchoredGate(dim, bias=bias, temperature=temperature, noise=GaussianNoise(gate_noise))
    )


def plain(dim: int) -> ReplaceState:
    """The update of the plain loop, `h <- blocks(h)`; it has no weights, whatever the width."""
    return ReplaceState(KeepState())


@check_types
def grt(
    layout: Layout,
    *,
    dim: int,
    num_heads: int,
    vocab_size: int,
    context_length: int,
    form: Callable[..., Form] = GPT2Form,
    update: UpdateFactory = gated,
) -> RecurrentTransformer:
    """The Gated Recurrent Transformer: prelude, a gated loop anchored at the prelude's output, coda.

    Args:
        layout: blocks before, in and behind the loop, and full depth.
        dim: the width.
        num_heads: attention heads.
        vocab_size: how many tokens there are.
        context_length: how many positions are learned (GPT-2 form).
        form: the family of blocks, called with width and heads: `GPT2Form`, or a `functools.partial` of `LlamaForm`.
        update: makes the update for the width, for example `functools.partial(gated, bias=0.0)`.

    Raises:
        ValueError: if a number is below 1, or heads don't divide the width.

    Reference: Hegazy et al., 2026, arXiv 2608.15062.
    """
    return assemble(
        layout,
        form(dim, num_heads),
        made("update", DepthUpdate, update, dim),
        vocab_size=vocab_size,
        context_length=context_length,
    )


@check_types
def naive(
    layout: Layout,
    *,
    dim: int,
    num_heads: int,
    vocab_size: int,
    context_length: int,
    form: Callable[..., Form] = GPT2Form,
) -> RecurrentTransformer:
    """The plain weight-tied loop: no injection, no noise, no gate; in comparisons `0+3×4+0`.

    Arguments and errors are those of `grt`.
    """
    return assemble(layout, form(dim, num_heads), plain(dim), vocab_size=vocab_size, context_length=context_length)


@check_types
def dense(
    num_blocks: int,
    *,
    dim: int,
    num_heads: int,
    vocab_size: int,
    context_length: int,
    form: Callable[..., Form] = GPT2Form,
) -> RecurrentTransformer:
    """A Transformer without recurrence: `num_blocks` blocks, each run once.

    The other arguments and the errors are those of `grt`.
    """
    layout = Layout(0, require_whole("num_blocks", num_blocks, at_least=1), 1, 0)
    return assemble(layout, form(dim, num_heads), plain(dim), vocab_size=vocab_size, context_length=context_length)


def assemble(
    layout: Layout,
    form: Form,
    update: DepthUpdate,
    *,
    vocab_size: int,
    context_length: int,
    embed: Embedding | None = None,
    norm: nn.Module | None = None,
    head: nn.Module | None = None,
    start: WeightStart | None = None,
) -> RecurrentTransformer:
    """Puts a form's parts around an update, and initialises them; what every builder ends with.

    Embedding, final norm and head may be given in place of the form's own; `start` says how the weights are drawn.

    Raises:
        ValueError: if `form` is no form, or `vocab_size` or `context_length` below 1.
    """
    require_instance("form", form, Form, "rd.GPT2Form(dim, num_heads)")
    require_whole("vocab_size", vocab_size, at_least=1)
    require_whole("context_length", context_length, at_least=1)
    model = RecurrentTransformer(
        embed or form.embedding(vocab_size, context_length),
        Stack(form.block() for _ in range(layout.prelude)),
        RecurrentCore([form.block() for _ in range(layout.core)], update),
        Stack(form.block() for _ in range(layout.coda)),
        norm=norm or form.norm(),
        head=head or form.head(vocab_size),
        num_steps=layout.num_steps,
    )
    model.weight_start = start or WeightStart()
    initialise(model)
    return model
