"""A vocabulary in two factors: a narrow table, and a projection between its width and the model's."""

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from recurrent_depth.arguments import optional_steps, require_sizes
from recurrent_depth.embedding import Embedding, check_learned


class FactorisedEmbedding(Embedding):
    """Tables `inner_dim` wide, and a projection up to the width: `W (token + position)`.

    Args:
        vocab_size: how many tokens there are.
        inner_dim: the width of the tables.
        dim: the width of the model.
        num_positions: how many positions are learned; None where blocks know positions themselves.

    Raises:
        ValueError: if a number is below 1; in a forward, if a token stands at no learned position.

    Reference: Lan et al., 2019, arXiv 1909.11942.
    """

    def __init__(self, vocab_size: int, inner_dim: int, dim: int, *, num_positions: int | None = None):
        super().__init__()
        require_sizes(vocab_size=vocab_size, inner_dim=inner_dim, dim=dim)
        optional_steps("num_positions", num_positions)
        self.token = nn.Embedding(vocab_size, inner_dim)
        self.position = None if num_positions is None else nn.Embedding(num_positions, inner_dim)
        self.project = nn.Linear(inner_dim, dim, bias=False)
        self.num_positions, self.dim = num_positions, dim

    def forward(
        self, tokens: Int[Tensor, "batch token"], positions: Int[Tensor, "#batch token"]
    ) -> Float[Tensor, "batch token dim"]:
        """The projected embedding of each token at its position."""
        x = self.token(tokens)
        if self.position is not None:
            check_learned(positions, tokens.shape[1], self.position.num_embeddings)
            x = x + self.position(positions)
        return self.project(x)


class FactorisedHead(nn.Module):
    """Logits by a projection down to the width of the token table, then that table's own weight.

    Reference: Lan et al., 2019, arXiv 1909.11942, without its activation and norm in between.
    """

    def __init__(self, dim: int, inner_dim: int):
        super().__init__()
        require_sizes(dim=dim, inner_dim=inner_dim)
        self.project = nn.Linear(dim, inner_dim, bias=False)

    def forward(
        self, x: Float[Tensor, "batch token dim"], embedding: Float[Tensor, "vocab inner"]
    ) -> Float[Tensor, "batch token vocab"]:
        """The scalar product of the projected state with each token's embedding."""
        return F.linear(self.project(x), embedding)

    def cost(self, embedding: Float[Tensor, "vocab inner"]) -> int:
        """Its matrix FLOPs per token."""
        return 2 * (self.project.weight.numel() + embedding.numel())
