"""What makes a part for the sizes of a model: called, and what it makes checked."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch import nn

from recurrent_depth.arguments import require_instance

Part = TypeVar("Part", bound=nn.Module)


def made(
    name: str,
    kind: type[Part],
    factory: Callable[..., object],
    *sizes: int,
    example: str = "rd.gated or partial(rd.gated, bias=0.0)",
) -> Part:
    """The part, of this kind, that a builder's argument makes for these sizes.

    Raises:
        ValueError: if the argument is a part, rather than what makes one; if it cannot be called with these sizes, or
            is a class that refuses them; and if what it makes is of another kind.
    """
    if isinstance(factory, nn.Module):
        got = type(factory).__name__
        raise ValueError(f"{name} must be what makes the part, such as {example}; got {got}, which is made already.")
    part = called(name, factory, *sizes, example=example)
    require_instance(f"What {name} makes", part, kind, f"what {example} makes")
    return part


def called(name: str, factory: Callable[..., object], *sizes: int, example: str) -> Any:
    """What a maker gives for these sizes.

    Raises:
        ValueError: if it takes other arguments, or is a class that refuses them; what else it raises is its own.
    """
    try:
        return factory(*sizes)
    except Exception as error:
        if not (isinstance(_origin(factory), type) or _takes_others(factory, sizes)):
            raise
        call = f"{_origin(factory).__name__}({', '.join(map(str, sizes))})"
        raise ValueError(
            f"{name} must be what makes the part for these sizes, such as {example}; it was called as "
            f"{call}, which failed: {error}"
        ) from error


def _origin(factory: Any) -> Any:
    """The function or the class that is called in the end."""
    return _origin(factory.func) if isinstance(factory, partial) else factory


def _takes_others(factory: Callable[..., object], sizes: tuple[int, ...]) -> bool:
    try:
        inspect.signature(factory).bind(*sizes)
    except TypeError:
        return True
    except ValueError:  # a signature that is not known, as of some functions written in C
        return False
    return False
