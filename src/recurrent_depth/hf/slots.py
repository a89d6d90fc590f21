"""Slots: a host's layers that answer the host at once, and run when the loop calls them."""

import functools
import inspect
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache

from recurrent_depth.hf.host_calls import HostCall
from recurrent_depth.hf.layer_form import gives_tuple


class Seat(NamedTuple):
    """Where a slot is: its host (the loop is `host.recurrence`), its place in the core, and the core's size."""

    host: Any
    index: int
    num_core: int


class Slot:
    """A layer of the core; mixed into the layer's own class.

    The host calls it once: it notes what it was called with, and the last one runs the loop. The loop then calls the
    layer itself by `run_layer`, with all its hooks, once for each step. Nothing of the layer changes but its class.
    """

    _seat: Seat
    _hidden: str
    _tuple: bool
    _known: frozenset[str]

    @property
    def gradient_checkpointing(self) -> bool:
        """False: the loop recomputes whole steps, and nothing inside of them."""
        return False

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, value: bool) -> None:
        """Is told the loop as well."""

    def run_layer(self, *arguments: Any, **keywords: Any) -> Any:
        """The layer's own call."""
        return super().__call__(*arguments, **keywords)  # pyright: ignore[reportAttributeAccessIssue]

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if "num_steps" in keywords:
            raise ValueError(
                "num_steps reached a layer of the core, where it means nothing: it was given to a part of the graft. "
                "Call the graft itself, or the part within `with graft.recurrence.at_depth(num_steps):`."
            )
        refuse_mistaken(keywords, self._known)
        x, call = noted(self.run_layer, self._hidden, arguments, keywords)
        seat = self._seat
        recurrence = seat.host.recurrence
        calls = recurrence.note(seat.index, x, call)
        h = recurrence(x, calls) if seat.index + 1 == seat.num_core else x
        return (h, None) if self._tuple else h  # attentions are no one's: each step has its own

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _revive, (original_class(self), slot_class), vars(self)


class Passage:
    """A layer that is left out; mixed into the layer's own class. It hands its input on.

    In a cache it counts tokens like any other layer, since a host may ask any layer how many there are.
    """

    _hidden: str
    _tuple: bool
    _layer: int

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        x, call = noted(None, self._hidden, arguments, keywords)
        if call.cache is not None:
            _count(call.cache, self._layer, x)
        return (x, None) if self._tuple else x

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _revive, (original_class(self), passage_class), vars(self)


@functools.cache
def slot_class(layer: type[nn.Module]) -> type[nn.Module]:
    """The class of a slot for layers of a class."""
    return _mixed(Slot, layer)


@functools.cache
def passage_class(layer: type[nn.Module]) -> type[nn.Module]:
    """The class of a layer of this class that is left out."""
    return _mixed(Passage, layer)


def original_class(layer: Any) -> type[nn.Module]:
    """The class that a slot had before."""
    return layer._original_class


def named_like(host: type) -> dict[str, Any]:
    """What a class needs so that it passes for the host's: code that looks names up finds the host's."""
    return {"__module__": host.__module__, "__qualname__": host.__qualname__, "__doc__": host.__doc__}


def _mixed(mixin: type, layer: type[nn.Module]) -> type[nn.Module]:
    known = list(inspect.signature(layer.forward).parameters)[1:]
    own = {"_original_class": layer, "_hidden": next(iter(known), "hidden_states"), "_tuple": gives_tuple(layer)}
    own |= {"_known": frozenset(known)}
    return type(layer.__name__, (mixin, layer), named_like(layer) | own)


def _revive(layer: type[nn.Module], make: Any) -> nn.Module:
    made = make(layer)
    return made.__new__(made)


def refuse_mistaken(given: Iterable[str], known: Collection[str]) -> None:
    """Refuses a keyword that is close to `num_steps`, which a host that takes any would pass over in silence.

    Raises:
        ValueError: names it, and what is meant.
    """
    for name in given:
        if name not in known and get_close_matches(name, ["num_steps"], cutoff=0.7):
            raise ValueError(f"{name} is no argument of this graft; is num_steps meant?")


def noted(run: Any, hidden: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Tensor, HostCall]:
    """The hidden state among the arguments, and the call without it."""
    if (arguments[0] if arguments else keywords[hidden]).is_nested:
        raise ValueError(
            "The hidden state is a nested tensor, which a loop does not take. An nn.TransformerEncoder makes none with "
            "`encoder.use_nested_tensor = False`."
        )
    if arguments:
        return arguments[0], HostCall(run, None, arguments[1:], keywords)
    return keywords[hidden], HostCall(run, hidden, (), {k: v for k, v in keywords.items() if k != hidden})


def _count(cache: Cache, layer: int, x: Tensor) -> None:
    held: Any = cache.layers[layer] if layer < len(cache.layers) else None
    heads, size = (1, 1) if getattr(held, "keys", None) is None else (held.keys.shape[1], held.keys.shape[3])
    blank = torch.zeros(x.shape[0], heads, x.shape[1], size, dtype=x.dtype, device=x.device)
    cache.update(blank, blank, layer)
