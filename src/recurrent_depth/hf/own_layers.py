"""A cache in which every step of a loop has layers of the host's own: those that the step stands for."""

from typing import Any

from torch import Tensor
from transformers import Cache

from recurrent_depth.hf.cache_layout import CacheLayout
from recurrent_depth.kv_policy import KeysValues


class OwnLayers:
    """One forward's business with a cache that has a layer for each step of each tied block already.

    Block k of step r has the layer of the host that it stands for. Steps that a forward does not take get what its
    last step wrote, so that all layers hold as many tokens.

    Args:
        cache: any of transformers' for decoders, without offloading.
        first: the core's first layer, counted from the host's first.
        num_core: layers of the core, each step's counted.
        num_layers: layers of the host.
        num_tied: blocks of a step.
        num_steps: steps that this forward takes.

    Raises:
        ValueError: if the cache is of another kind or another model; later, if it is of another batch size or dtype.
    """

    def __init__(self, cache: Cache, *, first: int, num_core: int, num_layers: int, num_tied: int, num_steps: int):
        self.layout = CacheLayout(cache, first, num_core, num_layers)
        self.layout.check_without_copies()
        self.cache, self.num_tied, self.max_steps, self.num_steps = cache, num_tied, num_core // num_tied, num_steps
        self.last: list[tuple[int, tuple[Any, ...], dict[str, Any]]] = []

    def view(self, step: int) -> "StepLayers":
        """What stands in for the cache in the tied blocks at this step."""
        return StepLayers(self, step)

    def update(self, step: int, layer: int, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Takes what a block makes at a step; gives what its queries attend to."""
        place = layer + step * self.num_tied
        if place == self.layout.first:
            self.layout.check_like(KeysValues(*given[:2]))
        if step + 1 == self.num_steps < self.max_steps:
            self.last.append((place, given, named))
        return self.cache.update(*given[:2], place, *given[2:], **named)

    def close(self) -> None:
        """Stores what the last step wrote for the steps that were not taken."""
        for beyond in range(1, 1 + self.max_steps - self.num_steps):
            for place, given, named in self.last:
                self.cache.update(*given[:2], place + beyond * self.num_tied, *given[2:], **named)


class StepLayers(Cache):
    """Stands in for a cache in the tied blocks, at one step: each finds the layer of the host that it stands for."""

    def __init__(self, own: OwnLayers, step: int):
        self._own, self._step = own, step

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Takes a block's keys and values to the layer of this step."""
        return self._own.update(self._step, layer_idx, (key_states, value_states, *args), kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """The tokens that the layer of this step holds."""
        return self._own.cache.get_seq_length(layer_idx + self._step * self._own.num_tied)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of the mask of the layer of this step."""
        return self._own.cache.get_mask_sizes(query_length, layer_idx + self._step * self._own.num_tied)

    def __len__(self) -> int:
        return len(self._own.cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own.cache, name)
