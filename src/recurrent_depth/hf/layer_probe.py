"""A host's forward with some of its layers watched, or told what to give; nothing stays behind on the host."""

import inspect
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from recurrent_depth.hf.host_calls import HostCall
from recurrent_depth.hf.slots import noted


class LayerCall(NamedTuple):
    """One layer's call within a host's forward.

    Attributes:
        layer: the layer.
        before: the state that it was given.
        output: all that it gave.
        again: the same layer, called with another state and the same other arguments.
    """

    layer: nn.Module
    before: Tensor
    output: Any
    again: HostCall

    @property
    def after(self) -> Tensor:
        """The state that it gave."""
        return self.output if isinstance(self.output, Tensor) else self.output[0]

    def giving(self, h: Tensor) -> Any:
        """What it gave, with a copy of another state in it, which whoever gets it may change in place."""
        return h.clone() if isinstance(self.output, Tensor) else (h.clone(), *self.output[1:])


Change = Callable[[Sequence[LayerCall]], Tensor]
"""Makes the state behind consecutive layers of their calls, in place of what the last of them gave."""


def nothing(calls: Sequence[LayerCall]) -> Tensor:
    """The host's own."""
    return calls[-1].after


def skip(calls: Sequence[LayerCall]) -> Tensor:
    """The state that the first layer was given, as if the layers were not there."""
    return calls[0].before


class Loop(NamedTuple):
    """Runs the layers so many times in all, each with the arguments of its own call."""

    num_steps: int

    def __call__(self, calls: Sequence[LayerCall]) -> Tensor:
        """The state behind the last run."""
        h = calls[-1].after
        for call in list(calls) * (self.num_steps - 1):
            h = call.again(h)[0]
        return h


@contextmanager
def watched(layers: Sequence[nn.Module], change: Change = nothing) -> Iterator[list[LayerCall]]:
    """For one forward of the host: notes these consecutive layers' calls, and changes what the last of them gives."""
    calls: list[LayerCall] = []

    def note(layer: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
        # `forward` and not the layer itself, whose hooks would take it for one more call.
        before, again = noted(layer.forward, _first_name(layer), arguments, keywords)
        calls.append(LayerCall(layer, before, output, again))
        return output if layer is not layers[-1] or change is nothing else calls[-1].giving(change(calls))

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(note, with_kwargs=True))
        yield calls


def write_aside(calls: Sequence[LayerCall]) -> bool:
    """Whether layers may hand something on beside the state, as gemma4's do keys and values: then each has to run."""
    given = (value for call in calls for value in (*call.again.arguments, *call.again.keywords.values()))
    return any(isinstance(value, MutableMapping | MutableSequence) for value in given)


@contextmanager
def replayed(calls: Sequence[LayerCall], h: Tensor) -> Iterator[None]:
    """In forwards inside, these layers, the host's first, do not run but give what they gave; the last gives `h`."""
    states = [*(call.after for call in calls[:-1]), h]
    with ExitStack() as places:
        for call, after in zip(calls, states, strict=True):
            places.enter_context(_giving(call, after))
        yield


@contextmanager
def _giving(call: LayerCall, h: Tensor) -> Iterator[None]:
    layer, own = call.layer, vars(call.layer)
    before = own.get("forward")  # hung there, as accelerate does
    own["forward"] = lambda *_, **__: call.giving(h)
    try:
        # The host's own hooks see it too, and one that changes it has done so when it was noted.
        with layer.register_forward_hook(lambda *_: call.giving(h)):
            yield
    finally:
        own.pop("forward")
        if before is not None:
            own["forward"] = before


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards each module is in the mode that it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _first_name(layer: nn.Module) -> str:
    return next(iter(inspect.signature(layer.forward).parameters))
