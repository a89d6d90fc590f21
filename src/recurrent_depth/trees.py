"""Trees of tensors: what `context`, `carry` and `memory` of a state are made of."""

from collections.abc import Callable

from torch import Tensor
from torch.utils._pytree import tree_map

from recurrent_depth.contracts import Tree


def map_tensors(change: Callable[..., Tensor], tree: Tree, *others: Tree) -> Tree:
    """Applies `change` to each tensor of a tree, with its counterparts in further trees; all else stays."""
    return tree_map(lambda leaf, *more: change(leaf, *more) if isinstance(leaf, Tensor) else leaf, tree, *others)
