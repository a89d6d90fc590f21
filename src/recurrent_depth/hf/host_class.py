"""A host's class that takes `num_steps`, and is the host's own in everything else."""

import functools
import inspect
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from recurrent_depth.depth import Depth
from recurrent_depth.hf.auxiliary import add_to_output
from recurrent_depth.hf.generation_depth import told_depth
from recurrent_depth.hf.saving import with_recurrence
from recurrent_depth.hf.slots import named_like, refuse_mistaken


class Host:
    """A model with a grafted loop; mixed into the model's own class."""

    recurrence: Any
    _original_class: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _revive, (self._original_class,), vars(self)


class HostList(Host):
    """A list of layers with a grafted loop, which is no layer of it."""

    def __len__(self) -> int:
        return super().__len__() - 1  # pyright: ignore[reportAttributeAccessIssue]

    def __iter__(self) -> Iterator[nn.Module]:
        return islice(super().__iter__(), len(self))  # pyright: ignore[reportAttributeAccessIssue]

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return nn.ModuleList(list(self)[at])
        return super().__getitem__(at)  # pyright: ignore[reportAttributeAccessIssue]


@functools.cache
def host_class(model: type[nn.Module]) -> Any:
    """The class of grafted models of a class: its `forward` takes `num_steps`, and so does `generate`."""
    own: dict[str, Any] = named_like(model) | {"_original_class": model}
    if issubclass(model, nn.ModuleList):
        return type(model.__name__, (HostList, model), own)
    own["forward"] = with_steps(model.forward)
    if issubclass(model, PreTrainedModel):
        own["save_pretrained"] = with_recurrence(model.save_pretrained)
        own["_init_weights"] = _beside_the_loop(model._init_weights)
    if issubclass(model, GenerationMixin):
        own["_prepare_generation_config"] = told_depth(model)
    return type(model.__name__, (Host, model), own)


def with_steps(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A host's `forward` that takes `num_steps` for the time of a call, and refuses what is close to that name.

    The loop's auxiliary losses are added to the host's loss.
    """
    signature = inspect.signature(forward)
    names = tuple(signature.parameters)[1:]  # behind self
    known = frozenset(signature.parameters)

    @functools.wraps(forward)
    def deeper(self: Any, *arguments: Any, num_steps: int | Depth | None = None, **keywords: Any) -> Any:
        refuse_mistaken(keywords, known)
        with self.recurrence.at_depth(num_steps):
            output = forward(self, *arguments, **keywords)
            given = {**dict(zip(names, arguments, strict=False)), **keywords}
            return add_to_output(output, self.recurrence.losses, given)

    vars(deeper)["__signature__"] = _with_steps(signature)
    return deeper


def _with_steps(signature: inspect.Signature) -> inspect.Signature:
    steps = inspect.Parameter("num_steps", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=int | Depth | None)
    given = list(signature.parameters.values())
    rest = [parameter for parameter in given if parameter.kind is parameter.VAR_KEYWORD]
    return signature.replace(parameters=[p for p in given if p not in rest] + [steps, *rest])


def mark_started(recurrence: nn.Module) -> None:
    """Tells transformers that a loop's weights have their start; one on the meta device has none yet."""
    if not any(tensor.is_meta for tensor in chain(recurrence.parameters(), recurrence.buffers())):
        for module in recurrence.modules():
            module._is_hf_initialized = True  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]


def _beside_the_loop(init_weights: Callable[..., None]) -> Callable[..., None]:
    """A host's rule for the start of a module, where the loop has a rule of its own."""

    @functools.wraps(init_weights)
    def start(self: Any, module: nn.Module) -> None:
        recurrence = self.recurrence
        if module is recurrence and not getattr(recurrence, "_is_hf_initialized", False):
            recurrence.reset_parameters()
        elif all(module is not part for part in recurrence.modules()):
            init_weights(self, module)

    return start


def _revive(model: type[nn.Module]) -> nn.Module:
    made = host_class(model)
    return made.__new__(made)
