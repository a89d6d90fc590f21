"""From token ids to states, and from states to logits."""

import abc

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from recurrent_depth.arguments import require_instance, require_number, require_sizes


class Embedding(nn.Module, abc.ABC):
    """Makes a state of each token.

    Attributes:
        token: the table of the tokens; its weight is handed to the head.
        num_positions: how many positions are learned; None where there is no bound.
        dim: the width of the states.
    """

    token: nn.Embedding
    num_positions: int | None
    dim: int

    @abc.abstractmethod
    def forward(
        self, tokens: Int[Tensor, "batch token"], positions: Int[Tensor, "#batch token"]
    ) -> Float[Tensor, "batch token dim"]:
        """The state of each token at its position."""


class TokenEmbedding(Embedding):
    """A table of token embeddings, for models whose blocks know positions themselves.

    Attributes:
        num_positions: None, since there is no bound.
    """

    num_positions = None

    def __init__(self, vocab_size: int, dim: int):
        super().__init__()
        require_sizes(vocab_size=vocab_size, dim=dim)
        self.token, self.dim = nn.Embedding(vocab_size, dim), dim

    def forward(
        self, tokens: Int[Tensor, "batch token"], positions: Int[Tensor, "#batch token"]
    ) -> Float[Tensor, "batch token dim"]:
        """The embedding of each token."""
        return self.token(tokens)


class PositionedEmbedding(Embedding):
    """Token embeddings plus learned positions, as in GPT-2.

    Raises:
        ValueError: in a forward, if a token stands at no learned position; positions given are looked at on CPU only.

    Attributes:
        num_positions: how many positions are learned.
    """

    def __init__(self, vocab_size: int, dim: int, context_length: int):
        super().__init__()
        require_sizes(vocab_size=vocab_size, dim=dim, context_length=context_length)
        self.token = nn.Embedding(vocab_size, dim)
        self.position = nn.Embedding(context_length, dim)
        self.num_positions, self.dim = context_length, dim

    def forward(
        self, tokens: Int[Tensor, "batch token"], positions: Int[Tensor, "#batch token"]
    ) -> Float[Tensor, "batch token dim"]:
        """The embedding of each token at its position."""
        check_learned(positions, tokens.shape[1], self.position.num_embeddings)
        return self.token(tokens) + self.position(positions)


class ScaledTable(nn.Embedding):
    """A table whose rows are multiplied when they are looked up; a tied head reads the weight as it is stored.

    Args:
        vocab_size: how many tokens there are.
        dim: the width.
        scale: what the rows are multiplied by.

    Reference: `sqrt(dim)` in Geiping et al., 2025, arXiv 2502.05171.
    """

    def __init__(self, vocab_size: int, dim: int, *, scale: float):
        require_sizes(vocab_size=vocab_size, dim=dim)
        super().__init__(vocab_size, dim)
        self.scale = require_number("scale", scale, above=0)

    def forward(self, tokens: Int[Tensor, "batch token"]) -> Float[Tensor, "batch token dim"]:
        """The scaled embedding of each token."""
        return self.scale * super().forward(tokens)


def scaled_embedding(embedding: Embedding, scale: float) -> Embedding:
    """The embedding, changed so that its tables are multiplied by `scale` when they are looked up; weights are kept.

    Learned positions too, which would start unheard beside the tokens. With `sqrt(dim)` weights that are small enough
    for a tied head make a state that is large enough for the blocks.

    Raises:
        ValueError: if `embedding` is none, such as the model, or is scaled already, as that of `huginn` and of
            `universal` is; if `scale` is not above 0.

    Reference: Vaswani et al., 2017, arXiv 1706.03762.
    """
    require_instance("embedding", embedding, Embedding, "model.embed")
    require_number("scale", scale, above=0)
    if isinstance(embedding.token, ScaledTable):
        raise ValueError(
            f"embedding is multiplied by {embedding.token.scale:.4g} already: leave it, or set the scale of its tables."
        )
    for name, table in list(embedding.named_children()):
        if isinstance(table, nn.Embedding):
            changed = ScaledTable(table.num_embeddings, table.embedding_dim, scale=scale)
            changed.weight = table.weight
            setattr(embedding, name, changed)
    return embedding


def check_learned(positions: Int[Tensor, "#batch token"], num_tokens: int, num_positions: int) -> None:
    """Raises a ValueError where a token stands at no learned position; looks at positions on CPU only."""
    low, high = 0, num_tokens - 1
    if positions.device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = min(low, int(positions.min())), max(high, int(positions.max()))
    if low < 0 or high >= num_positions:
        raise ValueError(f"The model learned positions 0 to {num_positions - 1}, but the sequence has {low} to {high}.")


class TiedHead(nn.Module):
    """Logits by the token embedding's own weight, which is handed over at call time: one name per parameter."""

    def forward(
        self, x: Float[Tensor, "batch token dim"], embedding: Float[Tensor, "vocab dim"]
    ) -> Float[Tensor, "batch token vocab"]:
        """The scalar product with each token's embedding."""
        return F.linear(x, embedding)

    def cost(self, embedding: Float[Tensor, "vocab dim"]) -> int:
        """Its matrix FLOPs per token."""
        return 2 * embedding.numel()


class Head(nn.Module):
    """Logits by a weight of its own."""

    def __init__(self, dim: int, vocab_size: int):
        super().__init__()
        require_sizes(dim=dim, vocab_size=vocab_size)
        self.linear = nn.Linear(dim, vocab_size, bias=False)

    def forward(
        self, x: Float[Tensor, "batch token dim"], embedding: Float[Tensor, "vocab dim"]
    ) -> Float[Tensor, "batch token vocab"]:
        """A linear map."""
        return self.linear(x)

    def cost(self, embedding: Float[Tensor, "vocab dim"]) -> int:
        """Its matrix FLOPs per token."""
        return 2 * self.linear.weight.numel()
