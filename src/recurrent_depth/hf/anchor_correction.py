"""What the later steps of a graft see: the anchor, and a learned correction that a real host's outliers leave alone."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from recurrent_depth.arguments import check_types, require_whole
from recurrent_depth.contracts import Call, PartCost
from recurrent_depth.gate import AnchoredGate
from recurrent_depth.injection import Injection
from recurrent_depth.update import GatedDepthUpdate


class AnchorCorrection(Injection):
    """The blocks see `anchor + W [norm(h); norm(anchor)] + b`, which is the anchor itself at the start.

    A pretrained model's hidden state holds a few features, at the first token above all, that are thousands of times
    as large as the others, and attention rests on them. A projection of the state as it is takes its gradient from
    those alone, and an optimizer step of the usual size throws them over. Each token divided by its root mean square,
    every feature counts, and the anchor itself goes past the projection.

    Args:
        dim: the width.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.state = nn.Linear(dim, dim, bias=False)
        self.anchor = nn.Linear(dim, dim)

    def begin(self, anchor: Float[Tensor, "batch token dim"], call: Call) -> Float[Tensor, "batch token dim"]:
        """The anchor, with its own half of the correction."""
        return anchor + self.anchor(_normed(anchor)).to(anchor.dtype)

    def forward(
        self, h: Float[Tensor, "batch token dim"], context: Float[Tensor, "batch token dim"], step: int
    ) -> Float[Tensor, "batch token dim"]:
        """That and the state's half."""
        return context + self.state(_normed(h)).to(context.dtype)

    def start_at_anchor(self) -> None:
        """Sets the correction to zero."""
        for half in (self.state, self.anchor):
            nn.init.zeros_(half.weight)
        nn.init.zeros_(self.anchor.bias)

    def cost(self) -> PartCost:
        """One half once, the other at every step."""
        return PartCost(begin=2 * self.anchor.weight.numel(), step=2 * self.state.weight.numel())


def _normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


@check_types
def corrected(dim: int, *, bias: float | int = 0.0) -> GatedDepthUpdate:
    """The gated update of a graft: `AnchorCorrection` in the projection's place, and no noise.

    Args:
        dim: the width.
        bias: where the gate's bias starts; at 0 half of each later step is written.

    Raises:
        ValueError: if `dim` is below 1, or `bias` not finite.
    """
    require_whole("dim", dim, at_least=1)
    return GatedDepthUpdate(AnchorCorrection(dim), AnchoredGate(dim, bias=bias))
