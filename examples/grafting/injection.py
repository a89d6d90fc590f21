"""What the later steps of a graft see: the anchor, corrected by what is learned, safe with a real host's outliers."""

import torch.nn.functional as F
from torch import Tensor, nn

import recurrent_depth as rd


class NormedCorrection(rd.Injection):
    """`anchor + W [norm(h); norm(anchor)] + b`, zero beside the anchor at the start.

    A pretrained model's hidden state holds a few features, at the first token above all, that are thousands of times
    larger than the others. A projection of the state as it is takes its gradient from those alone, and one optimizer
    step of the usual size throws them over, on which attention rests. Normalised, every feature counts.

    Args:
        dim: the width.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.state = nn.Linear(dim, dim, bias=False)
        self.anchor = nn.Linear(dim, dim)

    def begin(self, anchor: Tensor, call: rd.Call) -> Tensor:
        """The anchor with its own half of the correction."""
        return anchor + self.anchor(normed(anchor)).to(anchor.dtype)

    def forward(self, h: Tensor, context: Tensor, step: int) -> Tensor:
        """The state's half added."""
        return context + self.state(normed(h)).to(context.dtype)

    def start_at_anchor(self) -> None:
        """Both halves zero."""
        for half in (self.state, self.anchor):
            nn.init.zeros_(half.weight)
        nn.init.zeros_(self.anchor.bias)

    def cost(self) -> rd.PartCost:
        """One half once, the other at every step."""
        return rd.PartCost(begin=2 * self.anchor.weight.numel(), step=2 * self.state.weight.numel())


def normed(h: Tensor) -> Tensor:
    """Each token's features divided by their root mean square."""
    return F.rms_norm(h, h.shape[-1:])


def corrected(dim: int, *, bias: float) -> rd.DepthUpdate:
    """The gated update around that correction, without noise."""
    return rd.GatedDepthUpdate(NormedCorrection(dim), rd.AnchoredGate(dim, bias=bias))
