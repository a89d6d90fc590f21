"""What a graft's settings look like in a configuration that JSON can hold."""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

import recurrent_depth


def describe_factory(factory: Callable[..., Any]) -> dict[str, Any]:
    """A function by name, and what a `functools.partial` gives it: `{"name": "gated", "arguments": {"bias": 0.0}}`.

    One of this library goes by its name alone, another one by module and name.
    """
    if isinstance(factory, functools.partial):
        within = describe_factory(factory.func)
        given = {name: _described(value) for name, value in factory.keywords.items()}
        return within | {"arguments": within["arguments"] | given}
    return {"name": name_of(factory), "arguments": {}}


def describe_part(part: Any) -> dict[str, Any]:
    """An object by its class and what its constructor was given, as far as it keeps that under the same name."""
    taken = [name for name in inspect.signature(type(part).__init__).parameters if name in vars(part)]
    return {"name": name_of(type(part)), "arguments": {name: _described(vars(part)[name]) for name in taken}}


def factory_of(argument: str, described: dict[str, Any]) -> Callable[..., Any]:
    """The function or class that was described, with its arguments.

    Args:
        argument: under which name a caller could give it instead.
        described: what `describe_factory` or `describe_part` said.

    Raises:
        ValueError: if it is not of this library, or not of this version of it, or does not take these arguments.
    """
    given = {
        name: factory_of(argument, value) if isinstance(value, dict) and "arguments" in value else value
        for name, value in described["arguments"].items()
    }
    made = _named(argument, described["name"])
    try:
        inspect.signature(made).bind_partial(**given)
    except TypeError as error:
        raise ValueError(f"The graft was made with {argument}={written(described)}: {error}.") from None
    return functools.partial(made, **given) if given else made


def written(described: dict[str, Any]) -> str:
    """A description as a call of Python, for messages: `gated(bias=0.0)`."""
    given = (f"{name}={_written(value)}" for name, value in described["arguments"].items())
    return f"{described['name']}({', '.join(given)})"


def _written(value: Any) -> str:
    return written(value) if is_described(value) else repr(value)


def is_described(value: Any) -> bool:
    """Whether a value has the form of `describe_factory`, so that `factory_of` can read it."""
    if not isinstance(value, dict) or value.keys() != {"name", "arguments"}:
        return False
    name, given = value["name"], value["arguments"]
    if not isinstance(name, str) or not isinstance(given, dict):
        return False
    return all(is_described(inner) for inner in given.values() if isinstance(inner, dict))


def _named(argument: str, name: str) -> Any:
    module, _, inside = name.rpartition(":")
    if not module and name in recurrent_depth.__all__:
        return getattr(recurrent_depth, name)
    if module.partition(".")[0] != "recurrent_depth":
        raise ValueError(f"The graft was made with {argument}={name}, which is not of this library: give {argument}.")
    try:
        made = getattr(importlib.import_module(module), inside)
    except (ImportError, AttributeError):
        made = None
    if not callable(made) or name_of(made) != name:
        raise ValueError(f"The graft was made with {argument}={name}, which this version has not: give {argument}.")
    return made


def _described(value: Any) -> Any:
    """A value as JSON holds it; of other objects the class alone, so that whoever loads it is asked for it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_described(inner) for inner in value]
    if callable(value) and not isinstance(value, nn.Module):
        return describe_factory(value)
    return {"name": f"object:{type(value).__qualname__}", "arguments": {}}


def name_of(named: Any) -> str:
    """The name in this library, or module and name."""
    name = getattr(named, "__qualname__", type(named).__qualname__)
    if getattr(recurrent_depth, name, None) is named:
        return name
    return f"{getattr(named, '__module__', type(named).__module__)}:{name}"
