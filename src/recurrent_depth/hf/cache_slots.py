"""Layers of a transformers cache as one forward uses them: it may write each of them more than once."""

import abc
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

from recurrent_depth.kv_policy import KeysValues


class CacheSlot(abc.ABC):
    """One layer of a cache, and what it held before this forward: the past."""

    @abc.abstractmethod
    def show(self, new: KeysValues, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Makes the layer hold the past and these new tokens; gives what they attend to."""

    @abc.abstractmethod
    def mask_sizes(self, num_new: int) -> tuple[int, int]:
        """What the layer answered before the forward, asked for the length and offset of a mask."""

    @abc.abstractmethod
    def sibling(self) -> Any:
        """An empty layer of the same kind, with the same arguments."""

    @abc.abstractmethod
    def fill(self, empty: Any) -> None:
        """Makes an empty layer hold the past of this one."""


class DynamicSlot(CacheSlot):
    """A layer that joins tensors, with or without a sliding window. What it held before is never written to."""

    def __init__(self, layer: Any):
        self.layer, self.before = layer, _state(layer)
        self.length: int | None = None  # of the past, where it is to be cut from what was joined
        self.written = False

    def show(self, new: KeysValues, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The past joined with the new tokens."""
        if self.written:
            vars(self.layer).update(self.past())
        keys = self.layer.keys
        shown = self.layer.update(*new, *args, **kwargs)
        if not self.layer.is_sliding and keys is not None and keys.numel():
            # A window drops some of the past; without one it is in memory once, as it is without a loop.
            self.length, self.before["keys"], self.before["values"] = keys.shape[-2], None, None
        self.written = True
        return shown

    def past(self) -> dict[str, Any]:
        """What the layer held before the forward."""
        if self.length is None:
            return self.before
        return self.before | {name: getattr(self.layer, name)[:, :, : self.length] for name in ("keys", "values")}

    def mask_sizes(self, num_new: int) -> tuple[int, int]:
        """Those of the past and so many new tokens."""
        now = _state(self.layer)
        vars(self.layer).update(self.past())
        sizes = self.layer.get_mask_sizes(num_new)
        vars(self.layer).update(now)
        return sizes

    def sibling(self) -> Any:
        """A layer without tokens."""
        window = {name: vars(self.layer)[name] for name in ("sliding_window",) if name in vars(self.layer)}
        return _with_flags(type(self.layer)(**window), self.layer)

    def fill(self, empty: Any) -> None:
        """Shares the tensors: they are never written to."""
        past = self.past()
        empty.lazy_initialization(past["keys"], past["values"])
        vars(empty).update(past)


class StaticSlot(CacheSlot):
    """A layer with a buffer, written in place at a position that it counts itself."""

    def __init__(self, layer: Any):
        self.layer, self.num_written = layer, 0

    def show(self, new: KeysValues, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The whole buffer: the newest tokens are not the last, and a mask must hide what is behind them."""
        self.layer.cumulative_length.sub_(self.num_written)
        self.num_written = new.keys.shape[-2]
        return _apart(self.layer.update(*new, *args, **kwargs))

    def mask_sizes(self, num_new: int) -> tuple[int, int]:
        """The whole buffer's."""
        return self.layer.get_mask_sizes(num_new)

    def sibling(self) -> Any:
        """A layer that has no buffer yet."""
        return StaticLayer(max_cache_len=self.layer.max_cache_len)

    def fill(self, empty: Any) -> None:
        """Copies the buffer."""
        empty.lazy_initialization(self.layer.keys, self.layer.values)
        empty.keys.copy_(self.layer.keys)
        empty.values.copy_(self.layer.values)
        empty.cumulative_length.copy_(self.layer.cumulative_length).sub_(self.num_written)


class StaticSlidingSlot(CacheSlot):
    """A buffer for a window, which pushes its oldest tokens out: then it is copied before it is written."""

    def __init__(self, layer: Any):
        self.layer, self.num_seen = layer, layer.cumulative_length_int
        self.num_counted = 0
        self.before: tuple[Tensor, Tensor] | None = None

    def show(self, new: KeysValues, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The window and the new tokens, or the whole buffer while it is not full."""
        num_new = new.keys.shape[-2]
        self._rewind()
        overflows = self.num_seen + num_new > self.layer.max_cache_len
        if overflows and self.num_seen and self.before is None:
            self.before = (self.layer.keys.clone(), self.layer.values.clone())
        self.num_counted = 0 if overflows else num_new
        return _apart(self.layer.update(*new, *args, **kwargs))

    def mask_sizes(self, num_new: int) -> tuple[int, int]:
        """Those of the window and so many new tokens."""
        now = self.layer.cumulative_length_int
        self.layer.cumulative_length_int = self.num_seen
        sizes = self.layer.get_mask_sizes(num_new)
        self.layer.cumulative_length_int = now
        return sizes

    def sibling(self) -> Any:
        """A layer that has no buffer yet."""
        window = self.layer.max_cache_len
        return _with_flags(StaticSlidingWindowLayer(max_cache_len=window, sliding_window=window), self.layer)

    def fill(self, empty: Any) -> None:
        """Copies the buffer, as it was."""
        keys, values = self.before or (self.layer.keys, self.layer.values)
        empty.lazy_initialization(keys, values)
        empty.keys.copy_(keys)
        empty.values.copy_(values)
        empty.cumulative_length.copy_(self.layer.cumulative_length).sub_(self.num_counted)
        empty.cumulative_length_int = self.num_seen

    def _rewind(self) -> None:
        self.layer.cumulative_length.sub_(self.num_counted)
        self.layer.cumulative_length_int = self.num_seen
        if self.before is not None:
            self.layer.keys.copy_(self.before[0])
            self.layer.values.copy_(self.before[1])


KINDS: dict[type, type] = {
    DynamicLayer: DynamicSlot,
    DynamicSlidingWindowLayer: DynamicSlot,
    StaticLayer: StaticSlot,
    StaticSlidingWindowLayer: StaticSlidingSlot,
}
"""Which slot each kind of layer is. A layer of another class may keep what is not known here."""


def slot_of(layer: Any) -> CacheSlot:
    """The slot of a layer."""
    return KINDS[type(layer)](layer)


def check_kind(layer: Any) -> None:
    """Raises a ValueError where a layer is of no kind that can be written again."""
    if type(layer) not in KINDS:
        known = ", ".join(kind.__name__ for kind in KINDS)
        raise ValueError(
            f"The cache has a {type(layer).__name__} for a block of the loop, which goes with {known}. Without a cache "
            "(use_cache=False) the model is exact whatever its layers are."
        )


def _state(layer: Any) -> dict[str, Any]:
    names = ("keys", "values", "is_initialized", "cumulative_length")
    return {name: vars(layer)[name] for name in names if name in vars(layer)}


def _with_flags(layer: Any, like: Any) -> Any:
    flags = ("record_past", "_is_croppable")  # assisted decoding sets the first, from transformers 5.9 on
    vars(layer).update({name: vars(like)[name] for name in flags if name in vars(like)})
    return layer


def _apart(both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Buffers that the backward pass will read are copied: a later step writes to them."""
    keys, values = both
    return (keys.clone(), values.clone()) if keys.requires_grad or values.requires_grad else both
