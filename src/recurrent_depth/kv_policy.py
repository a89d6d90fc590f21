"""KV step policies: which of the keys and values that a loop makes at its many steps are stored for later tokens."""

import abc
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from recurrent_depth.arguments import require_whole
from recurrent_depth.numerics import at_least_float32


class KeysValues(NamedTuple):
    """Keys and values of the same tokens."""

    keys: Float[Tensor, "batch head token size"]
    values: Float[Tensor, "batch head token size"]


class KVStepPolicy(nn.Module, abc.ABC):
    """What is stored of the keys and values that a core block makes at each step, and which of it a later step reads.

    The new tokens of a forward always attend to their own keys and values of the step at hand; a policy decides what
    is stored of them, and so what later tokens find. A prompt is read exactly, and compressed afterwards: under a
    policy that shares copies, reading it in chunks differs from reading it whole.

    A copy that a token's steps did not write, because it left the loop early, is filled with what its last step wrote.
    """

    @abc.abstractmethod
    def num_copies(self, num_steps: int) -> int:
        """How many copies of keys and values a core block stores per token in a forward of so many steps."""

    @abc.abstractmethod
    def reads(self, step: int) -> int:
        """The copy of earlier tokens that this step, counted from 0, attends to."""

    @abc.abstractmethod
    def writes(self, step: int) -> int:
        """The copy that this step's keys and values of the new tokens go into."""

    @abc.abstractmethod
    def merge(self, old: KeysValues | None, new: KeysValues, step: int | Tensor, layer: int) -> KeysValues:
        """What a copy holds of the new tokens after this step.

        A mean must be computed in float32 or finer: it is rounded once, when it is stored.

        Args:
            old: what it held before; None where nothing was written yet.
            new: this step's.
            step: how many steps these tokens have taken before this one; a tensor (batch, 1, token, 1) where a router
                lets each token take other steps.
            layer: which block of the core.
        """


class KeepAll(KVStepPolicy):
    """Every step has a copy of its own: exactly the model without a cache, for `num_steps` times the memory."""

    def num_copies(self, num_steps: int) -> int:
        """One for each step."""
        return num_steps

    def reads(self, step: int) -> int:
        """Its own."""
        return step

    def writes(self, step: int) -> int:
        """Its own."""
        return step

    def merge(self, old: KeysValues | None, new: KeysValues, step: int | Tensor, layer: int) -> KeysValues:
        """The new."""
        return new


class OneCopy(KVStepPolicy):
    """A policy that stores one copy, whatever the number of steps: all steps read and write the same."""

    def num_copies(self, num_steps: int) -> int:
        """One."""
        return 1

    def reads(self, step: int) -> int:
        """The only one."""
        return 0

    def writes(self, step: int) -> int:
        """The only one."""
        return 0


class KeepFirst(OneCopy):
    """Later tokens find the first step's keys and values, at every step."""

    def merge(self, old: KeysValues | None, new: KeysValues, step: int | Tensor, layer: int) -> KeysValues:
        """The old, once there is one."""
        return new if old is None else old


class KeepLast(OneCopy):
    """Later tokens find the last step's keys and values, at every step."""

    def merge(self, old: KeysValues | None, new: KeysValues, step: int | Tensor, layer: int) -> KeysValues:
        """The new."""
        return new


class KeepMean(OneCopy):
    """Later tokens find the mean over the steps that a token took.

    Keys are rotated before they are averaged, which is exact: the rotation of a token is the same at every step.

    Reference: Hegazy et al., 2026, arXiv 2608.15062.
    """

    def merge(self, old: KeysValues | None, new: KeysValues, step: int | Tensor, layer: int) -> KeysValues:
        """The running mean."""
        if old is None:
            return new
        return KeysValues(*(_towards(was, now, 1 / (step + 1)) for was, now in zip(old, new, strict=True)))


class KeepCyclic(KVStepPolicy):
    """So many copies, used in turn: step `r` reads and writes copy `r % num`, and the latest step stays.

    A prompt is stored as it is read later, by the latest step of each residue.

    Raises:
        ValueError: if `num` is below 1.

    Reference: Geiping et al., 2025, arXiv 2502.05171.
    """

    def __init__(self, num: int):
        super().__init__()
        self.num = require_whole("num", num, at_least=1)

    def num_copies(self, num_steps: int) -> int:
        """`num`, or one for each step where there are fewer."""
        return min(self.num, num_steps)

    def reads(self, step: int) -> int:
        """`step % num`."""
        return step % self.num

    def writes(self, step: int) -> int:
        """`step % num`."""
        return step % self.num

    def merge(self, old: KeysValues | None, new: KeysValues, step: int | Tensor, layer: int) -> KeysValues:
        """The new."""
        return new


class KeepBlend(OneCopy):
    """Later tokens find a learned mean over the steps: a softmax weight per block, step, head and feature.

    Starts as `KeepMean`, and is fitted after training, with the model frozen, on text that is read in chunks through a
    cache: gradients reach the weights from whatever later chunks attend to. A token that leaves early is blended from
    the steps that it took. The two features that a rotation turns together share a weight for their keys, so that
    blending stays exact under rotary positions. A light form of MELT, which learns its gates while it trains.

    Args:
        num_layers: blocks of the core.
        num_steps: the deepest forward.
        num_kv_heads: heads of keys and values.
        head_size: features of a head.

    Raises:
        ValueError: if a number is below 1, or `head_size` odd; in a forward, if it goes deeper than `num_steps`, or a
            router picks tokens.

    Reference: for MELT arXiv 2605.07721.
    """

    def __init__(self, *, num_layers: int, num_steps: int, num_kv_heads: int, head_size: int):
        super().__init__()
        sizes = {"num_layers": num_layers, "num_steps": num_steps, "num_kv_heads": num_kv_heads}
        leading = [require_whole(name, size, at_least=1) for name, size in sizes.items()]
        if require_whole("head_size", head_size, at_least=1) % 2:
            raise ValueError(f"head_size is {head_size}, but must be even: pairs of features share a weight.")
        self.num_layers, self.num_steps, self.num_kv_heads, self.head_size = *leading, head_size
        self.keys = nn.Parameter(torch.empty(*leading, 1, head_size // 2))
        self.values = nn.Parameter(torch.empty(*leading, 1, head_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts as the mean."""
        nn.init.zeros_(self.keys)
        nn.init.zeros_(self.values)

    def merge(self, old: KeysValues | None, new: KeysValues, step: int | Tensor, layer: int) -> KeysValues:
        """The running blend."""
        num_layers, num_steps = self.keys.shape[:2]
        if not isinstance(step, int):
            raise ValueError("KeepBlend has weights for whole steps, and goes with no update that picks tokens.")
        if step >= num_steps or layer >= num_layers:
            raise ValueError(
                f"step {step + 1} of block {layer + 1} was run, but this KeepBlend was built for {num_steps} steps of "
                f"{num_layers} blocks."
            )
        built, made = (self.keys.shape[2], 2 * self.keys.shape[4]), (new.keys.shape[1], new.keys.shape[3])
        if made not in (built, (1, 1)):  # by a single number the accountant asks what is put aside
            raise ValueError(
                f"KeepBlend was built for num_kv_heads={built[0]} and head_size={built[1]}, but the core's blocks make "
                f"{made[0]} heads of {made[1]}."
            )
        if old is None:
            return new
        keys, values = (weight[layer, : step + 1].softmax(0)[-1] for weight in (self.keys, self.values))
        keys = torch.cat([keys, keys], dim=-1)
        return KeysValues(_towards(old.keys, new.keys, keys), _towards(old.values, new.values, values))


def _towards(old: Tensor, new: Tensor, share: float | Tensor) -> Tensor:
    old, new = at_least_float32(old), at_least_float32(new)
    return old + (new - old) * share
