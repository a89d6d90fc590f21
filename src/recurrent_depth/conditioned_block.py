"""A block that is told when it runs: its branches are scaled and gated by a condition."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from recurrent_depth.arguments import require_sizes
from recurrent_depth.blocks import Block
from recurrent_depth.contracts import At, BlockCost


class ConditionedBlock(Block):
    """`x + g * branch(norm(x) * (1 + s))` around attention and MLP; gates `g` and scales `s` are made of a condition.

    `[g_a; g_m; s_a; s_m] = W silu(condition) + b`, with `W` and `b` zero at the start: the block is then the identity,
    and attention and MLP learn from the second training step on. The norms are RMSNorms without weights. (The source's
    code zeroes `W` too, and then draws it with all other weights; its paper means zero.)

    Args:
        attention: called as `attention(x, at)`.
        mlp: called as `mlp(x)`.
        dim: the width of state and condition.

    Raises:
        ValueError: if `dim` is below 1; in a forward, if nobody gave a condition, or one of another width.

    Reference: Jeddi et al., 2026, arXiv 2602.11451.
    """

    def __init__(self, attention: nn.Module, mlp: nn.Module, dim: int):
        super().__init__()
        require_sizes(dim=dim)
        self.attention, self.mlp = attention, mlp
        self.modulation = nn.Linear(dim, 4 * dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the modulation to zero."""
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Float[Tensor, "batch token dim"], at: At) -> Float[Tensor, "batch token dim"]:
        """Both branches, one after the other."""
        if at.condition is None:
            raise ValueError("at.condition is None, but must be given, by rd.TimeConditionedUpdate for example.")
        if at.condition.shape[-1] != self.modulation.in_features:
            raise ValueError(
                f"at.condition is {at.condition.shape[-1]} wide, but the block was built for "
                f"{self.modulation.in_features}: give both the same dim."
            )
        chunks = self.modulation(F.silu(at.condition)).chunk(4, dim=-1)
        attention_gate, mlp_gate, attention_scale, mlp_scale = (chunk.to(x.dtype) for chunk in chunks)
        x = x + attention_gate * self.attention(_normed(x) * (1 + attention_scale), at)
        return x + mlp_gate * self.mlp(_normed(x) * (1 + mlp_scale))

    def cost(self) -> BlockCost:
        """Attention and MLP; the modulation runs once per step, whatever the number of tokens, and is left out."""
        return self.attention.cost().beside(2).plus(self.mlp.cost().beside(2))


def _normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=1e-6)
