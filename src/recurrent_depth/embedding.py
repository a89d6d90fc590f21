"""From token ids to states, and from states to logits."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn


class TokenEmbedding(nn.Module):
    """A table of token embeddings, for models whose blocks know positions themselves.

    Attributes:
        num_positions: None, since there is no bound.
    """

    num_positions = None

    def __init__(self, vocab_size: int, dim: int):
        super().__init__()
        self.token = nn.Embedding(vocab_size, dim)

    def forward(
        self, tokens: Int[Tensor, "batch token"], positions: Int[Tensor, "#batch token"]
    ) -> Float[Tensor, "batch token dim"]:
        """The embedding of each token."""
        return self.token(tokens)


class PositionedEmbedding(nn.Module):
    """Token embeddings plus learned positions, as in GPT-2.

    Raises:
        ValueError: in a forward, if a token stands at no learned position; positions given are looked at on CPU only.

    Attributes:
        num_positions: how many positions are learned.
    """

    def __init__(self, vocab_size: int, dim: int, context_length: int):
        super().__init__()
        self.token = nn.Embedding(vocab_size, dim)
        self.position = nn.Embedding(context_length, dim)
        self.num_positions = context_length

    def forward(
        self, tokens: Int[Tensor, "batch token"], positions: Int[Tensor, "#batch token"]
    ) -> Float[Tensor, "batch token dim"]:
        """The embedding of each token at its position."""
        last = self.position.num_embeddings - 1
        low, high = 0, tokens.shape[1] - 1
        if positions.device.type == "cpu" and not torch.compiler.is_compiling():
            low, high = min(low, int(positions.min())), max(high, int(positions.max()))
        if low < 0 or high > last:
            raise ValueError(f"The model learned positions 0 to {last}, but the sequence has {low} to {high}.")
        return self.token(tokens) + self.position(positions)


class TiedHead(nn.Module):
    """Logits by the token embedding's own weight, which is handed over at call time: one name per parameter."""

    def forward(
        self, x: Float[Tensor, "batch token dim"], embedding: Float[Tensor, "vocab dim"]
    ) -> Float[Tensor, "batch token vocab"]:
        """The scalar product with each token's embedding."""
        return F.linear(x, embedding)


class Head(nn.Module):
    """Logits by a weight of its own."""

    def __init__(self, dim: int, vocab_size: int):
        super().__init__()
        self.linear = nn.Linear(dim, vocab_size, bias=False)

    def forward(
        self, x: Float[Tensor, "batch token dim"], embedding: Float[Tensor, "vocab dim"]
    ) -> Float[Tensor, "batch token vocab"]:
        """A linear map."""
        return self.linear(x)
