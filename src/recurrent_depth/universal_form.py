"""The Universal Transformer's family of blocks: GPT-2's with the norms behind, and no learned positions."""

from dataclasses import dataclass

from torch import nn

from recurrent_depth.blocks import Block
from recurrent_depth.embedding import PositionedEmbedding, TokenEmbedding
from recurrent_depth.forms import Form, GPT2Form
from recurrent_depth.residual import PostNorm


@dataclass(frozen=True)
class UniversalForm(Form):
    """Attention and MLP with `norm(x + branch(x))` around each; the loop knows positions, and any length will do.

    The MLP's activation is the GELU of the other forms; the source's is a ReLU.

    Args:
        dim: the width.
        num_heads: attention heads.
        bias: biases in linear layers and LayerNorms.

    Raises:
        ValueError: if a number is below 1, or heads don't divide the width.

    Reference: Dehghani et al., 2018, arXiv 1807.03819.
    """

    dim: int
    num_heads: int
    bias: bool = True

    def __post_init__(self):
        self._gpt2()

    def _gpt2(self) -> GPT2Form:
        return GPT2Form(self.dim, self.num_heads, bias=self.bias, arrangement=PostNorm)

    def block(self) -> Block:
        """Attention and MLP, each normed after the sum."""
        return self._gpt2().block()

    def norm(self) -> nn.Module:
        """A LayerNorm."""
        return self._gpt2().norm()

    def embedding(self, vocab_size: int, context_length: int) -> TokenEmbedding | PositionedEmbedding:
        """Tokens alone: `StepEncoding` adds the positions at every step."""
        return TokenEmbedding(vocab_size, self.dim)

    def head(self, vocab_size: int) -> nn.Module:
        """The embedding's own weight."""
        return self._gpt2().head(vocab_size)
