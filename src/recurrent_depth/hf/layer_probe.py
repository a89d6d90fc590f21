"""A host's forward with some of its layers watched, left out or run again; nothing stays behind on the host."""

import inspect
from collections.abc import Callable, Iterator, Sequence
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
        after: the state that it gave.
        again: the same layer, called with another state and the same other arguments.
    """

    layer: nn.Module
    before: Tensor
    after: Tensor
    again: HostCall


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
        whole = isinstance(output, Tensor)
        # `forward` and not the layer itself, whose hooks would take it for one more call.
        before, again = noted(layer.forward, _first_name(layer), arguments, keywords)
        calls.append(LayerCall(layer, before, output if whole else output[0], again))
        if layer is not layers[-1] or change is nothing:
            return output
        return change(calls) if whole else (change(calls), *output[1:])

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(note, with_kwargs=True))
        yield calls


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
