"""The depth gate: how much of each feature a step may write."""

import abc

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from recurrent_depth.arguments import require_number, require_sizes
from recurrent_depth.contracts import PartCost, Tree
from recurrent_depth.injection import check_width
from recurrent_depth.numerics import at_least_float32
from recurrent_depth.optional import module_or_identity


class DepthGate(nn.Module, abc.ABC):
    """Says per feature how much of the candidate is written: the share `1 - g` of a gate `g`."""

    @abc.abstractmethod
    def begin(self, anchor: Float[Tensor, "batch token dim"]) -> Tree:
        """What every step needs of the anchor; leaves lead with (batch, token)."""

    @abc.abstractmethod
    def forward(self, h: Float[Tensor, "batch token dim"], context: Tree) -> Float[Tensor, "batch token dim"]:
        """The share of the candidate that is written, between 0 and 1, in float32."""

    @abc.abstractmethod
    def cost(self) -> PartCost:
        """Its matrix FLOPs per token."""


class WriteShare(nn.Module):
    """The gate's second layer and its sigmoid: `1 - sigmoid((W silu(x) + b) / temperature + noise)`.

    Logits and sigmoid are float32 whatever the dtype of the model, and `1 - sigmoid(z)` is computed as `sigmoid(-z)`:
    in bfloat16 `1 - sigmoid(z)` is exactly 0, with no gradient, from z = 6.25 on. The bias is a parameter of this
    module rather than of a linear layer, so that a host's rule for linear layers cannot reset it to zero.

    Args:
        dim: the width.
        bias: where `b` starts; +4 keeps 98% of the state at each step.
        temperature: divides the logits.
        noise: what is added to the logits, after the division; None for nothing.

    Raises:
        ValueError: if `dim` is below 1, `temperature` not positive, or it or `bias` not finite.
    """

    def __init__(self, dim: int, *, bias: float, temperature: float, noise: nn.Module | None):
        super().__init__()
        require_sizes(dim=dim)
        self.temperature = require_number("temperature of the gate", temperature, above=0)
        self.initial_bias = require_number("bias of the gate", bias)
        self.linear = nn.Linear(dim, dim, bias=False)
        self.bias = nn.Parameter(torch.full((dim,), self.initial_bias))
        self.noise = module_or_identity("noise", noise, "rd.GaussianNoise(0.1)")

    def reset_parameters(self) -> None:
        """Sets the bias to where it starts."""
        nn.init.constant_(self.bias, self.initial_bias)

    def forward(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch token dim"]:
        """The share that is written."""
        logits = at_least_float32(self.linear(F.silu(x))) + at_least_float32(self.bias)
        return torch.sigmoid(-self.noise(logits / self.temperature))


class AnchoredGate(DepthGate):
    """`g = sigmoid(f([LN(h); LN(anchor)]) / temperature + noise)`, with `f` a two-layer SiLU MLP, 2d to d to d.

    The first layer is held as two halves, and the anchor's half is computed once per forward.

    Args:
        dim: the width.
        bias: where the second layer's bias starts.
        temperature: divides the logits.
        noise: what is added to the logits; none by default.

    Raises:
        ValueError: if `dim` is below 1, `temperature` not positive, or it or `bias` not finite; in a forward, if the
            state has another width.

    Reference: Hegazy et al., 2026, arXiv 2608.15062.
    """

    def __init__(self, dim: int, *, bias: float = 4.0, temperature: float = 1.0, noise: nn.Module | None = None):
        super().__init__()
        require_sizes(dim=dim)
        self.state_norm = nn.LayerNorm(dim, bias=False)
        self.anchor_norm = nn.LayerNorm(dim, bias=False)
        self.state = nn.Linear(dim, dim, bias=False)
        self.anchor = nn.Linear(dim, dim)
        self.write = WriteShare(dim, bias=bias, temperature=temperature, noise=noise)

    def begin(self, anchor: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch token dim"]:
        """The anchor's half of the first layer."""
        check_width(anchor, self.anchor.in_features)
        return self.anchor(self.anchor_norm(anchor))

    def forward(
        self, h: Float[Tensor, "batch token dim"], context: Float[Tensor, "batch token dim"]
    ) -> Float[Tensor, "batch token dim"]:
        """The share that is written."""
        return self.write(self.state(self.state_norm(h)) + context)

    def cost(self) -> PartCost:
        """The anchor's half once; the state's half and the second layer at every step."""
        step = self.state.weight.numel() + self.write.linear.weight.numel()
        return PartCost(begin=2 * self.anchor.weight.numel(), step=2 * step)


class JointNormGate(DepthGate):
    """The same gate with one LayerNorm over the concatenation `[h; anchor]`.

    State and anchor share one mean and one variance, so nothing of the anchor's half is the same at every step: this
    variant executes all 6 d² of the gate's FLOPs at each. Arguments and errors are those of `AnchoredGate`.

    Reference: the other reading of Hegazy et al., 2026, arXiv 2608.15062.
    """

    def __init__(self, dim: int, *, bias: float = 4.0, temperature: float = 1.0, noise: nn.Module | None = None):
        super().__init__()
        require_sizes(dim=dim)
        self.norm = nn.LayerNorm(2 * dim, bias=False)
        self.state = nn.Linear(dim, dim, bias=False)
        self.anchor = nn.Linear(dim, dim)
        self.write = WriteShare(dim, bias=bias, temperature=temperature, noise=noise)

    def begin(self, anchor: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch token dim"]:
        """The anchor itself."""
        check_width(anchor, self.anchor.in_features)
        return anchor

    def forward(
        self, h: Float[Tensor, "batch token dim"], context: Float[Tensor, "batch token dim"]
    ) -> Float[Tensor, "batch token dim"]:
        """The share that is written."""
        state, anchor = self.norm(torch.cat([h, context], dim=-1)).chunk(2, dim=-1)
        return self.write(self.state(state) + self.anchor(anchor))

    def cost(self) -> PartCost:
        """Everything at every step."""
        halves = self.state.weight.numel() + self.anchor.weight.numel()
        return PartCost(step=2 * (halves + self.write.linear.weight.numel()))
