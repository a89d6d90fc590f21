"""What an update answers, checked where it is asked: a mistake of a new method is told by its name."""

from jaxtyping import Float
from torch import Tensor
from torch.utils._pytree import tree_leaves

from recurrent_depth.contracts import Call, Tree, UpdateCost
from recurrent_depth.update import DepthState, DepthUpdate


def begun_by(update: DepthUpdate, anchor: Float[Tensor, "batch token dim"], call: Call) -> DepthState:
    """The state that an update begins with.

    Raises:
        ValueError: if it gives something else, such as a bare tensor, or one of its tensors is not for each token.
    """
    state = update.begin(anchor, call)
    if not isinstance(state, DepthState):
        name, got = type(update).__name__, type(state).__name__
        raise ValueError(
            f"begin of {name} must return a DepthState, got {got}: rd.initial_state(h, context, carry) makes one."
        )
    check_leaves(
        f"begin of {type(update).__name__}", state, write=state.write, context=state.context, carry=state.carry
    )
    return state


def read_by(update: DepthUpdate, state: DepthState) -> Float[Tensor, "batch token dim"]:
    """What an update reads of the last state.

    Raises:
        ValueError: if it gives something else than a tensor of as many tokens, such as the state itself.
    """
    read = update.read(state)
    if not isinstance(read, Tensor) or read.shape[:2] != state.h.shape[:2]:
        got = f"a tensor of shape {tuple(read.shape)}" if isinstance(read, Tensor) else type(read).__name__
        raise ValueError(
            f"read of {type(update).__name__} must return a tensor (batch, token, dim) for {tuple(state.h.shape[:2])} "
            f"tokens, such as state.h; got {got}."
        )
    return read


def cost_of(update: DepthUpdate, num_steps: int) -> UpdateCost:
    """What an update says that it spends.

    Raises:
        ValueError: if it gives something else, such as a number.
    """
    cost = update.cost(num_steps)
    if not isinstance(cost, UpdateCost):
        name, got = type(update).__name__, type(cost).__name__
        raise ValueError(
            f"cost of {name} must return an rd.UpdateCost, got {got}: UpdateCost(begin=, step=) in FLOPs per token, or "
            "UpdateCost() where it spends nothing beside the blocks."
        )
    return cost


def check_leaves(said_by: str, state: DepthState, **parts: Tree) -> None:
    """Raises a ValueError for a part of a state with a tensor that is not for each token: none can be picked."""
    wanted = state.h.shape[:2]
    for name, tree in parts.items():
        leaves = [tree] if isinstance(tree, Tensor) else tree_leaves(tree) if tree else ()
        odd = next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.shape[:2] != wanted), None)
        if odd is None and name == "write" and state.write.ndim != 2:
            odd = state.write
        if odd is not None:
            raise ValueError(
                f"{said_by} gives a {name} of shape {tuple(odd.shape)}, but every tensor of it must lead with (batch, "
                f"token), here {tuple(wanted)}{', and write have no more' if name == 'write' else ''}."
            )
