"""What a graft's settings look like in a configuration that JSON can hold."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import recurrent_depth


def describe_factory(factory: Callable[..., Any]) -> dict[str, Any]:
    """A function by name, and what a `functools.partial` gives it: `{"name": "gated", "arguments": {"bias": 0.0}}`.

    One of this library goes by its name alone, another one by module and name.
    """
    if isinstance(factory, functools.partial):
        within = describe_factory(factory.func)
        given = {name: describe_factory(x) if callable(x) else x for name, x in factory.keywords.items()}
        return within | {"arguments": within["arguments"] | given}
    return {"name": name_of(factory), "arguments": {}}


def describe_part(part: Any) -> dict[str, Any]:
    """An object by its class and what its constructor was given, as far as it keeps that under the same name."""
    taken = [name for name in inspect.signature(type(part).__init__).parameters if name in vars(part)]
    return {"name": name_of(type(part)), "arguments": {name: vars(part)[name] for name in taken}}


def name_of(named: Any) -> str:
    """The name in this library, or module and name."""
    name = getattr(named, "__qualname__", type(named).__qualname__)
    if getattr(recurrent_depth, name, None) is named:
        return name
    return f"{getattr(named, '__module__', type(named).__module__)}:{name}"
