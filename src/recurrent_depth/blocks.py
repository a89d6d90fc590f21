"""The Transformer block and its MLPs, and the stack that runs blocks in order."""

import abc
import inspect
from collections.abc import Callable, Iterable, Sequence

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from recurrent_depth.arguments import require_sizes
from recurrent_depth.contracts import At, BlockCost, KeyValues
from recurrent_depth.moments import Moment
from recurrent_depth.residual import Residual, ResidualProjection


class MLP(nn.Module):
    """The two-layer MLP of GPT-2, with the exact GELU.

    Raises:
        ValueError: if a size is below 1.
    """

    def __init__(self, dim: int, hidden: int, *, bias: bool = False):
        super().__init__()
        require_sizes(dim=dim, hidden=hidden)
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.out = ResidualProjection(hidden, dim, bias=bias)

    def forward(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch token dim"]:
        """`out(gelu(up(x)))`."""
        return self.out(F.gelu(self.up(x)))

    def cost(self) -> BlockCost:
        """Both layers."""
        return linear_cost(self)


class SwiGLU(nn.Module):
    """The gated MLP of Llama.

    Raises:
        ValueError: if a size is below 1.

    Reference: Shazeer, 2020, arXiv 2002.05202.
    """

    def __init__(self, dim: int, hidden: int, *, bias: bool = False):
        super().__init__()
        require_sizes(dim=dim, hidden=hidden)
        self.gate = nn.Linear(dim, hidden, bias=bias)
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.out = ResidualProjection(hidden, dim, bias=bias)

    def forward(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch token dim"]:
        """`out(silu(gate(x)) * up(x))`."""
        return self.out(F.silu(self.gate(x)) * self.up(x))

    def cost(self) -> BlockCost:
        """All three layers."""
        return linear_cost(self, num_widest=3)


class Block(nn.Module, abc.ABC):
    """What the loop calls: `block(x, at)` gives a tensor of the shape of `x`.

    A block of your own need not inherit from this; a module that is called so will do.
    """

    @abc.abstractmethod
    def forward(self, x: Float[Tensor, "batch token dim"], at: At) -> Float[Tensor, "batch token dim"]:
        """The block's output, its residuals included."""

    @abc.abstractmethod
    def cost(self) -> BlockCost:
        """Its matrix FLOPs and its memory per token."""


class PlainBlock(Block):
    """Lets a module that knows only `x` serve as a block; counted as if each of its linear layers ran once."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Float[Tensor, "batch token dim"], at: At) -> Float[Tensor, "batch token dim"]:
        """`module(x)`."""
        return self.module(x)

    def cost(self) -> BlockCost:
        """The module's linear layers."""
        return linear_cost(self.module)


class TransformerBlock(Block):
    """Attention, then an MLP, each inside a residual connection that places the norms.

    Args:
        attention: called as `attention(x, at)`.
        mlp: called as `mlp(x)`.
        residual: makes one residual connection; called twice. See `PreNorm` and its siblings.
    """

    def __init__(self, attention: nn.Module, mlp: nn.Module, residual: Callable[[], Residual]):
        super().__init__()
        self.attention, self.around_attention = attention, residual()
        self.mlp, self.around_mlp = mlp, residual()

    def forward(self, x: Float[Tensor, "batch token dim"], at: At) -> Float[Tensor, "batch token dim"]:
        """Both branches, one after the other."""
        x = self.around_attention(x, lambda inner: self.attention(inner, at))
        return self.around_mlp(x, self.mlp)

    def cost(self) -> BlockCost:
        """Attention and MLP."""
        # Each branch reads a norm's output; the block's input is held beside it, then the sum behind attention too.
        return self.attention.cost().beside(1).plus(self.mlp.cost().beside(2))


class Stack(nn.Module):
    """Blocks run in order. It knows layers; the loop knows steps; neither knows both.

    A stack that changes with the step (a low-rank correction for each, say) wraps this one and reads `step`.

    Raises:
        ValueError: if a block cannot be called as `block(x, at)`, or returns no tensor of the shape of `x`.
    """

    def __init__(self, blocks: Iterable[nn.Module]):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        for layer, block in enumerate(self.blocks):
            name = type(block).__name__
            wanted = f"block {layer} must be callable as block(x, at). If it takes only x: rd.PlainBlock({name}(...))"
            check_call(block, wanted, 2)

    def forward(
        self, x: Float[Tensor, "batch token dim"], at: At, step: int = 0, kv: Sequence[KeyValues] | None = None
    ) -> Float[Tensor, "batch token dim"]:
        """The last block's output; block `i` gets `kv[i]`."""
        for layer, block in enumerate(self.blocks):
            out = block(x, at._replace(layer=layer, kv=None if kv is None else kv[layer]))
            x = _checked(out, x, layer, block)
        return x

    def cost(self) -> BlockCost:
        """All blocks together."""
        total = BlockCost()
        for block in self.blocks:
            total = total.plus(_cost_of(block))
        return total


def linear_cost(module: nn.Module, num_widest: int = 2) -> BlockCost:
    """The cost of every linear layer of a module, each run once per token.

    Alive at once are its input and `num_widest` tensors as wide as its widest layer.
    """
    layers = [m for m in module.modules() if isinstance(m, nn.Linear)]
    widest = max((max(m.in_features, m.out_features) for m in layers), default=0)
    return BlockCost(
        linear=sum(2 * m.weight.numel() for m in layers), live=(Moment(states=1, numbers=num_widest * widest),)
    )


def check_call(module: nn.Module, otherwise: str, num_arguments: int) -> None:
    """Raises a ValueError, with what `otherwise` says, for a module that does not take so many arguments."""
    try:
        inspect.signature(module.forward).bind(*[None] * num_arguments)
    except TypeError:
        raise ValueError(f"{type(module).__name__} takes other arguments: {otherwise}.") from None


def _checked(out: object, x: Tensor, layer: int, block: nn.Module) -> Tensor:
    if not isinstance(out, Tensor) or out.shape != x.shape:
        got = f"a tensor of shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(
            f"Block {layer} ({type(block).__name__}) must return a tensor of its input's shape {tuple(x.shape)}, "
            f"got {got}."
        )
    return out


def _cost_of(block: nn.Module) -> BlockCost:
    if not callable(getattr(block, "cost", None)):
        raise ValueError(
            f"{type(block).__name__} does not say its FLOPs. Give it a method cost() that returns an rd.BlockCost, "
            "or wrap it in rd.PlainBlock where only its linear layers count."
        )
    return block.cost()
