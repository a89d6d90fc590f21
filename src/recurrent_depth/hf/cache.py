"""The cache of a looped model's keys and values inside of any transformers cache."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from recurrent_depth.hf.cache_layout import CacheLayout, is_filled
from recurrent_depth.hf.cache_slots import CacheSlot, slot_of
from recurrent_depth.kv_policy import KeysValues, KVStepPolicy

Place = tuple[int, int]
"""Which copy of which block of the core."""


class StepSlots:
    """One forward's business with a transformers cache, in which a looped block has a layer for each copy it stores.

    Make one for each forward, before the core writes. Give the blocks of each step its `view`, and call `close()` after
    the last step: only then does the cache hold what the policy stores. A forward that fails before leaves layers
    behind that hold some of its tokens, as it does without a loop: such a cache is of no use any more.

    A step deeper than all before finds of the past what the deepest copy holds. Copies that a forward does not reach
    get what its last step wrote. So all layers have the same length, under every policy: that of the tokens seen.

    Args:
        cache: a `DynamicCache` or `StaticCache`, with or without sliding windows.
        first: the core's first block, counted from the model's first.
        num_core: blocks of the core.
        num_layers: blocks of the model, each counted once.
        policy: what is stored of the steps.
        num_steps: the most steps that this forward may take.

    Raises:
        ValueError: if the cache is of another kind, of another model, or was filled under another policy; later, if a
            step is taken beyond `num_steps`, or the cache is of another batch size or dtype.

    Attributes:
        length: tokens seen before this forward; a tensor where the cache is static.
        has_past: whether there may be any.
    """

    def __init__(
        self, cache: Cache, *, first: int, num_core: int, num_layers: int, policy: KVStepPolicy, num_steps: int
    ):
        self.layout = CacheLayout(cache, first, num_core, num_layers)
        self.layout.check(policy, num_steps)
        self.cache, self.policy, self.num_steps = cache, policy, num_steps
        self.length, self.has_past = self.layout.length(), self.layout.has_past()
        # By copy, the last step that reads or writes it: what stands in the cache for good need not be kept beside it.
        self.asked = {copy: step for step in range(num_steps) for copy in (policy.reads(step), policy.writes(step))}
        self.steps: list[int] = []
        self.slots: dict[Place, CacheSlot] = {}
        self.entries: dict[Place, KeysValues] = {}  # what copies will hold of the new tokens
        self.standing: set[Place] = set()  # those whose layers hold just that

    def view(self, step: int) -> "StepCache":
        """What stands in for the cache in a host's layers at this step."""
        if step >= self.num_steps:
            raise ValueError(f"step {step + 1} was asked for, but this forward was to take {self.num_steps} at most.")
        return StepCache(self, step)

    def update(self, step: int, block: int, new: KeysValues, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Takes what a block of the core makes at a step; gives what its queries attend to."""
        if step not in self.steps:
            self._begin(step, new)
        read, write = (self.policy.reads(step), block), (self.policy.writes(step), block)
        shown = self.slot(*read).show(new, *args, **kwargs)
        old = self.entries.get(write)
        merged = self.entries[write] = self.policy.merge(old, new, len(self.steps) - 1, block)
        self.standing.discard(read)
        if merged is not old:
            self.standing.discard(write)
        if merged is new and read == write:
            self.standing.add(write)
        self._forget(step, write)
        return shown

    def slot(self, copy: int, block: int) -> CacheSlot:
        """The layer of one copy of a core block, with the past in it."""
        place = copy, block
        if place not in self.slots:
            layer = self.layout.layer(copy, block)
            if self.has_past and not is_filled(layer):
                self.slot(copy - 1, block).fill(layer)
            self.slots[place] = slot_of(layer)
        return self.slots[place]

    def close(self) -> None:
        """Stores what the policy says of the steps that were taken."""
        if not self.steps:
            return
        last = self.policy.writes(self.steps[-1])
        touched = 1 + max(copy for copy, _ in self.slots | self.entries)
        num_copies = max(self.layout.num_copies(), touched)
        for place in ((copy, block) for copy in range(num_copies) for block in range(self.layout.num_core)):
            if place not in self.standing:
                new = self.entries.get(place) or self.entries[last, place[1]]
                self.slot(*place).show(KeysValues(*(x.to(self.dtype) for x in new)))
        self.layout.trim()

    def _begin(self, step: int, new: KeysValues) -> None:
        if not self.steps:
            self.layout.check_like(new)
            self.dtype = new.keys.dtype
        self.steps.append(step)

    def _forget(self, step: int, written: Place) -> None:
        """Lets go of what stands in the cache already, and no later step asks for; the last entry is kept."""
        for place in self.standing - {written}:
            if place[1] == written[1] and self.asked.get(place[0], 0) <= step:
                self.entries.pop(place, None)


class StepCache(Cache):
    """Stands in for a cache in the layers of a host, at one step of its loop."""

    def __init__(self, slots: StepSlots, step: int):
        self._slots, self._step = slots, step

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Takes a layer's keys and values to where this step keeps them."""
        new = KeysValues(key_states, value_states)
        return self._slots.update(self._step, layer_idx - self._slots.layout.first, new, *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """The tokens seen before this forward, whatever it wrote since."""
        return self._slots.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of a layer's mask, whatever this forward wrote since."""
        copy = self._slots.policy.reads(self._step)
        return self._slots.slot(copy, layer_idx - self._slots.layout.first).mask_sizes(query_length)

    def __len__(self) -> int:
        return len(self._slots.cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slots.cache, name)
