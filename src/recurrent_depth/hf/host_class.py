"""A host's class that takes `num_steps`, and is the host's own in everything else."""

import functools
import inspect
from typing import Any

from torch import nn

from recurrent_depth.depth import Depth
from recurrent_depth.hf.slots import named_like


class Host:
    """A model with a grafted loop; mixed into the model's own class."""

    recurrence: Any
    _original_class: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _revive, (self._original_class,), vars(self)


@functools.cache
def host_class(model: type[nn.Module]) -> type[nn.Module]:
    """The class of grafted models of a class: its `forward` takes `num_steps`, and so does `generate`."""
    own = model.forward

    @functools.wraps(own)
    def forward(self: Any, *arguments: Any, num_steps: int | Depth | None = None, **keywords: Any) -> Any:
        with self.recurrence.at_depth(num_steps):
            return own(self, *arguments, **keywords)

    forward.__signature__ = _with_steps(inspect.signature(own))  # pyright: ignore[reportFunctionMemberAccess]
    return type(model.__name__, (Host, model), named_like(model) | {"forward": forward, "_original_class": model})


def _with_steps(signature: inspect.Signature) -> inspect.Signature:
    steps = inspect.Parameter("num_steps", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=int | Depth | None)
    given = list(signature.parameters.values())
    rest = [parameter for parameter in given if parameter.kind is parameter.VAR_KEYWORD]
    return signature.replace(parameters=[p for p in given if p not in rest] + [steps, *rest])


def _revive(model: type[nn.Module]) -> nn.Module:
    made = host_class(model)
    return made.__new__(made)
