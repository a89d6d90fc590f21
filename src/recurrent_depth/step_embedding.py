"""An embedding of the token for each step, after the per-layer embeddings of Gemma 3n."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from recurrent_depth.arguments import require_instance, require_sizes
from recurrent_depth.behind import require_all_step
from recurrent_depth.checks import check_tokens_in
from recurrent_depth.contracts import Call, Tree, UpdateCost
from recurrent_depth.injection import check_width
from recurrent_depth.norms import RMSNorm
from recurrent_depth.step import StepBlocks
from recurrent_depth.update import DepthState, DepthUpdate
from recurrent_depth.update_answers import begun_by, cost_of


class StepEmbedding(nn.Module):
    """A short vector per token and step: a table's entry, and what the token's own embedding says about the step.

    `(norm(W x / sqrt(dim)) + sqrt(size) * table[token]) / sqrt(2)`, cut into one slice per step.

    Args:
        vocab_size: how many tokens there are.
        dim: the width of the model.
        num_steps: how many slices.
        size: how long each of them is.

    Raises:
        ValueError: if a number is below 1.

    Reference: the per-layer embeddings of Gemma 3n (Google, 2025).
    """

    def __init__(self, vocab_size: int, dim: int, num_steps: int, size: int):
        super().__init__()
        require_sizes(vocab_size=vocab_size, dim=dim, num_steps=num_steps, size=size)
        self.table = nn.Embedding(vocab_size, num_steps * size)
        self.context = nn.Linear(dim, num_steps * size, bias=False)
        self.norm = RMSNorm(size)
        self.num_steps, self.size = num_steps, size

    def forward(self, call: Call) -> Float[Tensor, "batch token step size"]:
        """The vectors of all steps.

        Raises:
            ValueError: if there are no tokens, as in a bare core; if they are outside of the vocabulary (looked at on
                CPU), or their embedding has another width.
        """
        if call.tokens is None or call.embedding is None:
            raise ValueError("tokens is None, but an embedding per step needs the token ids: call the model.")
        check_tokens_in(self.table.num_embeddings, call.tokens)
        if call.embedding.shape[-1] != self.context.in_features:
            raise ValueError(
                f"The tokens' embedding is {call.embedding.shape[-1]} wide, but that of the steps was built for "
                f"{self.context.in_features}: give it the model's dim."
            )
        token = self.table(call.tokens) * self.size**0.5
        context = self.context(call.embedding) * call.embedding.shape[-1] ** -0.5
        steps = (self.num_steps, self.size)
        return (self.norm(context.unflatten(-1, steps)) + token.unflatten(-1, steps)) * 2**-0.5

    def cost(self) -> int:
        """Matrix FLOPs per token: the context's half; a look-up costs none."""
        return 2 * self.context.weight.numel()


class AddStepEmbedding(DepthUpdate):
    """`h <- x + norm(W (gelu(V x) * e))`, with `x` what another update makes of the step and `e` the step's embedding.

    Args:
        inner: the update that takes the step.
        embedding: the embedding per step.
        dim: the width.

    Raises:
        ValueError: if `inner` is no update, or one in which tokens halt or are routed, `embedding` is none, or `dim`
            below 1; in a forward, at a step that has no embedding, without tokens, or for a state of another width.

    Reference: the per-layer embeddings of Gemma 3n (Google, 2025), one slice per step in place of one per layer.
    """

    def __init__(self, inner: DepthUpdate, embedding: StepEmbedding, dim: int):
        super().__init__()
        require_instance("inner", inner, DepthUpdate, "rd.plain(dim)")
        require_instance("embedding", embedding, StepEmbedding)
        require_sizes(dim=dim)
        require_all_step(inner, "moved", "AddStepEmbedding(update, embedding, dim)")
        self.inner, self.embedding = inner, embedding
        self.narrow = nn.Linear(dim, embedding.size, bias=False)
        self.widen = nn.Linear(embedding.size, dim, bias=False)
        self.norm = RMSNorm(dim)

    def begin(self, anchor: Float[Tensor, "batch token dim"], call: Call) -> DepthState:
        """The inner update's start, and the embeddings of all steps."""
        self._check(call.num_steps)
        check_width(anchor, self.narrow.in_features)
        state = begun_by(self.inner, anchor, call)
        return state._replace(context=(state.context, self.embedding(call)))

    def _check(self, num_steps: int) -> None:
        if num_steps > self.embedding.num_steps:
            raise ValueError(f"{num_steps} steps asked for, but there are embeddings for {self.embedding.num_steps}.")

    def forward(self, state: DepthState, blocks: StepBlocks, step: int) -> DepthState:
        """The inner update's step, then what the step's embedding adds."""
        context, embeddings = state.context
        after = self.inner(state._replace(context=context), blocks, step)
        added = self.norm(self.widen(self._gated(after.h, embeddings.select(2, step))))
        return after._replace(h=after.h + added.to(after.h.dtype), context=state.context)

    def _gated(self, x: Tensor, embedding: Tensor) -> Tensor:
        return F.gelu(self.narrow(x), approximate="tanh") * embedding

    def read(self, state: DepthState) -> Float[Tensor, "batch token dim"]:
        """What the inner update reads."""
        return self.inner.read(self._inside(state))

    def _inside(self, state: DepthState) -> DepthState:
        context: Tree = state.context[0]
        return state._replace(context=context)

    def cost(self, num_steps: int) -> UpdateCost:
        """The inner update's; the embeddings once, both maps at each step, of the tokens that take it or not.

        Raises:
            ValueError: for more steps than there are embeddings.
        """
        self._check(num_steps)
        cost = cost_of(self.inner, num_steps)
        both = 2 * (self.narrow.weight.numel() + self.widen.weight.numel())
        return cost._replace(begin=cost.begin + self.embedding.cost(), step=cost.step + both)
