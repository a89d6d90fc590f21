"""The two families of Transformer that the builders build: GPT-2's and Llama's."""

import abc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from recurrent_depth.arguments import require_number, require_whole
from recurrent_depth.attention import Attention, Rotary, check_heads
from recurrent_depth.blocks import MLP, Block, SwiGLU, TransformerBlock
from recurrent_depth.embedding import Embedding, Head, PositionedEmbedding, TiedHead, TokenEmbedding
from recurrent_depth.norms import RMSNorm
from recurrent_depth.residual import PreNorm, Residual

Arrangement = Callable[[Callable[[], nn.Module]], Residual]
"""Makes a residual connection from a maker of norms: `PreNorm`, `PostNorm`, `ResidualSandwich`, `BranchSandwich`."""


class Form(abc.ABC):
    """Makes the parts of a Transformer of one family, each with weights of its own."""

    @abc.abstractmethod
    def block(self) -> Block:
        """A block."""

    @abc.abstractmethod
    def norm(self) -> nn.Module:
        """A norm of the width, as before the head."""

    @abc.abstractmethod
    def embedding(self, vocab_size: int, context_length: int) -> Embedding:
        """The embedding of the tokens."""

    @abc.abstractmethod
    def head(self, vocab_size: int) -> nn.Module:
        """The map to logits."""


@dataclass(frozen=True)
class GPT2Form(Form):
    """GPT-2: LayerNorm, learned positions, a GELU MLP of 4 times the width, a tied head.

    Without biases by default, as in the released GRT checkpoints; LayerNorms then have a weight alone.

    Args:
        dim: the width.
        num_heads: attention heads.
        bias: biases in linear layers and LayerNorms, as in OpenAI's GPT-2.
        arrangement: where the norms stand.

    Raises:
        ValueError: if a number is below 1, or heads don't divide the width.
    """

    dim: int
    num_heads: int
    bias: bool = False
    arrangement: Arrangement = PreNorm

    def __post_init__(self):
        check_heads(self.dim, self.num_heads, 1)

    def block(self) -> Block:
        """Attention and MLP on residuals."""
        attention = Attention(self.dim, self.num_heads, bias=self.bias)
        return TransformerBlock(
            attention, MLP(self.dim, 4 * self.dim, bias=self.bias), partial(self.arrangement, self.norm)
        )

    def norm(self) -> nn.Module:
        """A LayerNorm."""
        return nn.LayerNorm(self.dim, bias=self.bias)

    def embedding(self, vocab_size: int, context_length: int) -> Embedding:
        """Tokens and learned positions."""
        return PositionedEmbedding(vocab_size, self.dim, context_length)

    def head(self, vocab_size: int) -> nn.Module:
        """The embedding's own weight."""
        return TiedHead()


@dataclass(frozen=True)
class LlamaForm(Form):
    """Llama: RMSNorm, rotary positions, grouped key-value heads, SwiGLU, no biases.

    Args:
        dim: the width.
        num_heads: attention heads.
        num_kv_heads: key-value heads; as many as heads by default.
        hidden: the width inside the MLP; by default 8/3 of the width, rounded up to a multiple of 8, which costs about
            what GPT-2's MLP does.
        rotary_base: base of the rotary frequencies.
        tied: whether the head is the embedding's weight.
        arrangement: where the norms stand.

    Raises:
        ValueError: if a number is below 1, heads don't divide the width, groups don't divide the heads, or the size of
            a head is odd.
    """

    dim: int
    num_heads: int
    num_kv_heads: int | None = None
    hidden: int | None = None
    rotary_base: float = 10000.0
    tied: bool = True
    arrangement: Arrangement = PreNorm

    def __post_init__(self):
        check_heads(self.dim, self.num_heads, self.num_heads if self.num_kv_heads is None else self.num_kv_heads)
        if self.hidden is not None:
            require_whole("hidden", self.hidden, at_least=1)
        require_number("rotary_base", self.rotary_base, above=0)
        if self.dim // self.num_heads % 2:
            raise ValueError(f"Rotary positions need an even head size, got {self.dim} / {self.num_heads}.")

    def block(self) -> Block:
        """Attention and SwiGLU on residuals."""
        rotary = Rotary(self.rotary_base)
        attention = Attention(self.dim, self.num_heads, num_kv_heads=self.num_kv_heads, rotary=rotary)
        hidden = -(-8 * self.dim // 24) * 8 if self.hidden is None else self.hidden
        return TransformerBlock(attention, SwiGLU(self.dim, hidden), partial(self.arrangement, self.norm))

    def norm(self) -> nn.Module:
        """An RMSNorm."""
        return RMSNorm(self.dim)

    def embedding(self, vocab_size: int, context_length: int) -> Embedding:
        """Tokens alone: attention knows positions, and any length will do."""
        return TokenEmbedding(vocab_size, self.dim)

    def head(self, vocab_size: int) -> nn.Module:
        """The embedding's own weight, or one more."""
        return TiedHead() if self.tied else Head(self.dim, vocab_size)
