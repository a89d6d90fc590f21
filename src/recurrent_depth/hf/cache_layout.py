"""Which layer of a transformers cache belongs to which copy of which block."""

from typing import Any, NamedTuple

from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache

from recurrent_depth.hf.cache_slots import check_kind, slot_of
from recurrent_depth.kv_policy import KeysValues, KVStepPolicy

OTHER_MODEL = "it belongs to another model. Use DynamicCache(), or make it from this model's config."


class CacheLayout(NamedTuple):
    """A cache, and where a looped model's blocks have their layers in it.

    Block b of the model has layer b. Where a policy stores more copies than one, copy c >= 1 of the core's block i has
    layer `num_layers + (c - 1) * num_core + i`, as in transformers' own looped models: a host's layers stay where they
    are. A cache with a fixed list of layers is extended at its end, with layers of the kind of copy 0; layers for
    copies that no forward reached are taken off.

    Attributes:
        cache: transformers' own.
        first: the core's first block.
        num_core: blocks of the core.
        num_layers: blocks of the model, each counted once.
    """

    cache: Cache
    first: int
    num_core: int
    num_layers: int

    def layer(self, copy: int, block: int) -> Any:
        """The layer of one copy of a core block, made where there is none."""
        layers = self.cache.layers
        index = self.first + block if copy == 0 else self.num_layers + (copy - 1) * self.num_core + block
        while len(layers) <= index:
            layers.append(self._new_layer(len(layers)))
        return layers[index]

    def _new_layer(self, index: int) -> Any:
        if self.cache.layer_class_to_replicate is not None:
            return self.cache.layer_class_to_replicate()
        like = (index - self.num_layers) % self.num_core
        return slot_of(self.cache.layers[self.first + like]).sibling()

    def length(self) -> Any:
        """Tokens seen; of a static cache a tensor, which does not change with the cache's own."""
        length = self.cache.get_seq_length(self.first)
        return length.clone() if isinstance(length, Tensor) else length

    def has_past(self) -> bool:
        """Whether there may be tokens seen."""
        return len(self.cache.layers) > self.first and is_filled(self.cache.layers[self.first])

    def num_copies(self) -> int:
        """Copies that were written, or made ready to be."""
        behind: list[Any] = self.cache.layers[self.num_layers :]
        return 1 + -(-sum(layer.is_initialized for layer in behind) // self.num_core)

    def trim(self) -> None:
        """Takes off layers that no forward has reached, so that cropping and reordering find none without tokens."""
        layers: list[Any] = self.cache.layers
        while len(layers) > self.num_layers and not layers[-1].is_initialized:
            layers.pop()

    def check(self, policy: KVStepPolicy, num_steps: int) -> None:
        """Refuses a cache that cannot be this model's, or cannot be right under this policy."""
        self._check_kind()
        self._check_size()
        for layer in self._core():
            check_kind(layer)
        filled = self.num_copies()
        allowed = policy.num_copies(max(num_steps, filled))
        if filled > allowed:
            raise ValueError(
                f"The cache holds {filled} copies of the core's keys and values, but {type(policy).__name__} stores "
                f"{allowed}: it was filled under another policy."
            )
        self._check_lengths()

    def check_without_copies(self) -> None:
        """Refuses a cache that cannot be this model's, where each layer of the model has its own and none has more."""
        self._check_kind()
        size, growing = len(self.cache.layers), self.cache.layer_class_to_replicate is not None
        if size > self.num_layers or (size < self.num_layers and not growing):
            raise ValueError(f"The cache has {size} layers, but this model goes with {self.num_layers}: {OTHER_MODEL}")
        self._check_lengths()

    def _check_kind(self) -> None:
        if isinstance(self.cache, EncoderDecoderCache) or self.cache.offloading:
            raise ValueError(
                f"A looped model goes with DynamicCache and StaticCache without offloading, got {self.cache}."
            )

    def _check_size(self) -> None:
        size, growing = len(self.cache.layers), self.cache.layer_class_to_replicate is not None
        if (size < self.num_layers and not growing) or (size > self.num_layers and self._left_over()):
            raise ValueError(
                f"The cache has {size} layers, but this model goes with {self.num_layers}, and {self.num_core} more "
                f"for each further copy: {OTHER_MODEL}"
            )

    def _left_over(self) -> int:
        return (len(self.cache.layers) - self.num_layers) % self.num_core

    def _check_lengths(self) -> None:
        num_filled = sum(is_filled(layer) for layer in self.cache.layers[self.first : self.first + self.num_core])
        if 0 < num_filled < self.num_core:
            raise ValueError(
                f"{num_filled} of the core's {self.num_core} layers of the cache hold tokens, but all or none must: a "
                "forward failed halfway, or it belongs to another model."
            )
        lengths = [layer.get_seq_length() for layer in self._core() if is_filled(layer)]
        lengths = [length for length in lengths if not isinstance(length, Tensor)]  # asking would wait for a device
        if any(length != lengths[0] for length in lengths):
            raise ValueError(
                f"The core's layers of the cache hold {lengths} tokens, but must hold as many each: a forward failed "
                "halfway, or it belongs to another model."
            )

    def _core(self) -> list[Any]:
        layers = self.cache.layers
        return layers[self.first : self.first + self.num_core] + layers[self.num_layers :]

    def check_like(self, new: KeysValues) -> None:
        """Refuses keys and values that do not go with those that the cache holds."""
        if not self.has_past():
            return
        layer: Any = self.cache.layers[self.first]
        held, made = (len(layer.keys), layer.keys.dtype), (len(new.keys), new.keys.dtype)
        if held != made:
            raise ValueError(
                f"The cache holds {held[0]} rows of {held[1]}, but the model makes {made[0]} of {made[1]}."
            )


def is_filled(layer: Any) -> bool:
    """Whether a layer holds tokens. A static one that has its buffer counts: asking it would wait for a device."""
    if not layer.is_initialized:
        return False
    length = layer.get_seq_length()
    return isinstance(length, Tensor) or length > 0
