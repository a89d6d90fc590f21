"""What the blocks see at each step: the state, and what reaches them of the anchor. And the noise on it."""

import abc

import torch
from jaxtyping import Float
from torch import Tensor, nn

from recurrent_depth.arguments import require_number, require_whole
from recurrent_depth.contracts import Call, PartCost, Tree
from recurrent_depth.optional import module_or_identity


class GaussianNoise(nn.Module):
    """Adds N(0, std²) in training mode, drawn anew at every call from the global RNG.

    The global RNG, so that activation checkpointing replays the same noise. With `std=0`, and in evaluation mode
    unless `in_evaluation`, nothing is drawn and the RNG stays where it is.

    Args:
        std: the standard deviation.
        per_token: one draw per token, shared by its features, in place of one per element.
        in_evaluation: noise in evaluation mode too.

    Raises:
        ValueError: if `std` is negative or not finite.
    """

    def __init__(self, std: float, *, per_token: bool = False, in_evaluation: bool = False):
        super().__init__()
        self.std = require_number("std of the noise", std, at_least=0)
        self.per_token, self.in_evaluation = per_token, in_evaluation

    def forward(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch token dim"]:
        """`x + noise`, in the dtype of `x`."""
        if self.std == 0 or not (self.training or self.in_evaluation):
            return x
        return x + self.std * torch.randn_like(x[..., :1] if self.per_token else x)

    def extra_repr(self) -> str:
        """Its settings, for `print(model)`."""
        return f"std={self.std}, per_token={self.per_token}, in_evaluation={self.in_evaluation}"


class Injection(nn.Module, abc.ABC):
    """A function of state and anchor: what the blocks see at a step, or what goes around them.

    Work that no step changes is done once, in `begin`.
    """

    @abc.abstractmethod
    def begin(self, anchor: Float[Tensor, "batch token dim"], call: Call) -> Tree:
        """What every step needs of the anchor; leaves lead with (batch, token)."""

    @abc.abstractmethod
    def forward(
        self, h: Float[Tensor, "batch token dim"], context: Tree, step: int
    ) -> Float[Tensor, "batch token dim"]:
        """The input of the blocks, or what is added to their output."""

    @abc.abstractmethod
    def cost(self) -> PartCost:
        """Its matrix FLOPs per token."""

    def start_at_anchor(self) -> None:
        """Starts where the blocks see the anchor alone, if the injection can; what grafts start from."""


def check_width(anchor: Tensor, dim: int) -> None:
    """Raises a ValueError for an anchor that is not as wide as an update was built for."""
    if anchor.shape[-1] != dim:
        raise ValueError(f"x is {anchor.shape[-1]} wide, but the update was built for {dim}.")


class KeepState(Injection):
    """The state alone: what the blocks see in the plain loop."""

    def begin(self, anchor: Float[Tensor, "batch token dim"], call: Call) -> None:
        """Nothing."""

    def forward(
        self, h: Float[Tensor, "batch token dim"], context: None, step: int
    ) -> Float[Tensor, "batch token dim"]:
        """The state."""
        return h

    def cost(self) -> PartCost:
        """None."""
        return PartCost()


class AddAnchor(Injection):
    """The blocks see `h + anchor`: the input is re-injected by addition, without weights."""

    def begin(self, anchor: Float[Tensor, "batch token dim"], call: Call) -> Float[Tensor, "batch token dim"]:
        """The anchor itself."""
        return anchor

    def forward(
        self, h: Float[Tensor, "batch token dim"], context: Float[Tensor, "batch token dim"], step: int
    ) -> Float[Tensor, "batch token dim"]:
        """The sum."""
        return h + context

    def cost(self) -> PartCost:
        """None: additions are not counted."""
        return PartCost()


class ConcatProjection(Injection):
    """The blocks see `W [h + noise; anchor] + b`, a learned projection of state and anchor back to the width.

    `W` is held as a state half and an anchor half, since `W [h; a] = W_1 h + W_2 a` and `W_2 a + b` is the same at
    every step: it is computed once, which saves 2 d² FLOPs per token at each further step.

    Args:
        dim: the width.
        noise: what is added to the state before it is projected; the anchor half stays clean.
        bias: whether there is a `b`.

    Raises:
        ValueError: if `dim` is below 1.

    Reference: Geiping et al., 2025, arXiv 2502.05171; with noise Hegazy et al., 2026, arXiv 2608.15062.
    """

    def __init__(self, dim: int, noise: nn.Module | None = None, *, bias: bool = True):
        super().__init__()
        require_whole("dim", dim, at_least=1)
        self.state = nn.Linear(dim, dim, bias=False)
        self.anchor = nn.Linear(dim, dim, bias=bias)
        self.noise = module_or_identity("noise", noise, "rd.GaussianNoise(0.1)")

    def begin(self, anchor: Float[Tensor, "batch token dim"], call: Call) -> Float[Tensor, "batch token dim"]:
        """`W_2 anchor + b`.

        Raises:
            ValueError: if the anchor has another width.
        """
        check_width(anchor, self.anchor.in_features)
        return self.anchor(anchor)

    def forward(
        self, h: Float[Tensor, "batch token dim"], context: Float[Tensor, "batch token dim"], step: int
    ) -> Float[Tensor, "batch token dim"]:
        """`W_1 (h + noise)` and the anchor's half."""
        return self.state(self.noise(h)) + context

    def start_at_anchor(self) -> None:
        """Zero on the state, the identity on the anchor."""
        nn.init.zeros_(self.state.weight)
        nn.init.eye_(self.anchor.weight)
        if self.anchor.bias is not None:
            nn.init.zeros_(self.anchor.bias)

    def cost(self) -> PartCost:
        """One half once, the other at every step."""
        return PartCost(begin=2 * self.anchor.weight.numel(), step=2 * self.state.weight.numel())
