"""The names by which a configuration, which is JSON, calls builders and parts: those that they have in the library."""

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import Any

import recurrent_depth as rd
from recurrent_depth.relatives import HuginnForm, OuroForm
from recurrent_depth.stepwise_relatives import step_encoded

Named = str | Mapping[str, Any]
"""What a configuration says of a part: its name, or a dictionary of its name and its arguments."""


def build(builder: str, layout: rd.Layout, sizes: Mapping[str, int], arguments: Mapping[str, Any]) -> Any:
    """The model that a builder makes of a layout, sizes and further arguments.

    Raises:
        ValueError: if a builder or a part has no such name, or it takes no such argument.
    """
    return _called(f"builder {builder!r}", builder_of(builder), layout, **sizes, **part_of(arguments))


def builder_of(name: str) -> Callable[..., rd.RecurrentTransformer]:
    """The builder of that name, called with a layout.

    Raises:
        ValueError: if there is none.
    """
    return _lookup("builder", name, BUILDERS)


def builders_with(argument: str) -> list[str]:
    """The names of the builders that take an argument."""
    return [name for name, builder in BUILDERS.items() if argument in signature(builder).parameters]


def part_of(value: Any) -> Any:
    """What a value of a configuration stands for: names become parts, everything else stays.

    A dictionary with a `name` is a part with arguments: `{"name": "gated", "bias": 0.0}` is `partial(gated, bias=0.0)`.

    Raises:
        ValueError: if a part has no such name, or a value is nothing that JSON holds.
    """
    if isinstance(value, str):
        return _lookup("part", value, PARTS)
    if isinstance(value, Mapping):
        arguments = {key: part_of(inner) for key, inner in value.items() if key != "name"}
        return partial(part_of(value["name"]), **arguments) if "name" in value else arguments
    if isinstance(value, list | tuple):
        return [part_of(inner) for inner in value]
    if value is None or isinstance(value, int | float):
        return value
    raise ValueError(f"{value!r} is nothing that JSON holds: give the part's name, one of {sorted(PARTS)}.")


def policy_of(value: Named) -> rd.KVStepPolicy:
    """The KV policy that a configuration names.

    Raises:
        ValueError: if there is no such policy, or it takes no such argument.
    """
    if not isinstance(value, str | Mapping):
        raise ValueError(f"kv is {value!r}, but a configuration, which is JSON, names the policy: kv='KeepMean'.")
    given = {"name": value} if isinstance(value, str) else dict(value)
    policy = _lookup("KV policy", given.pop("name", None), POLICIES)
    return _called(f"KV policy {policy.__name__!r}", policy, **given)


def _called(what: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    try:
        return function(*arguments, **named)
    except TypeError as error:  # an argument that there is not, or one that lacks
        raise ValueError(f"{what} does not take what the configuration gives: {error}.") from error


def _lookup(kind: str, name: Any, known: Mapping[str, Any]) -> Any:
    if name not in known:
        raise ValueError(f"there is no {kind} {name!r}; those that a configuration can name are {sorted(known)}.")
    return known[name]


def _dense(layout: rd.Layout, **arguments: Any) -> rd.RecurrentTransformer:
    if layout != (0, layout.core, 1, 0):
        raise ValueError(f"layout is {layout}, but a dense model has core blocks alone, run once: [0, blocks, 1, 0].")
    return rd.dense(layout.core, **arguments)


def _albert(layout: rd.Layout, **arguments: Any) -> rd.RecurrentTransformer:
    if layout != (0, 1, layout.num_steps, 0):
        raise ValueError(f"layout is {layout}, but ALBERT has one block, run again and again: [0, 1, layers, 0].")
    return rd.albert(layout.num_steps, **arguments)


# The only dictionaries from names to code in this library, since JSON can hold no function. Another builder or part
# joins by one line.
BUILDERS: dict[str, Callable[..., rd.RecurrentTransformer]] = {
    "albert": _albert,
    "dense": _dense,
    "grt": rd.grt,
    "huginn": rd.huginn,
    "loopformer": rd.loopformer,
    "mesh": rd.mesh,
    "mod": rd.mod,
    "mor": rd.mor,
    "naive": rd.naive,
    "ouro": rd.ouro,
    "parcae": rd.parcae,
    "ple": rd.ple,
    "rrt": rd.rrt,
    "universal": rd.universal,
}

PARTS: dict[str, Callable[..., Any]] = {
    # forms, and where their norms stand
    "GPT2Form": rd.GPT2Form,
    "LlamaForm": rd.LlamaForm,
    "HuginnForm": HuginnForm,
    "OuroForm": OuroForm,
    "UniversalForm": rd.UniversalForm,
    "PreNorm": rd.PreNorm,
    "PostNorm": rd.PostNorm,
    "BranchSandwich": rd.BranchSandwich,
    "ResidualSandwich": rd.ResidualSandwich,
    # updates, and how halted states are mixed
    "damped": rd.damped,
    "gated": rd.gated,
    "plain": rd.plain,
    "halted": rd.halted,
    "step_encoded": step_encoded,
    "sum_states": rd.sum_states,
    "blend_states": rd.blend_states,
    # routers, and how a token's result joins what was there
    "expert_choice": rd.expert_choice,
    "token_choice": rd.token_choice,
    "every_other": rd.every_other,
    "AddWeighted": rd.AddWeighted,
    "Interpolate": rd.Interpolate,
}

POLICIES: dict[str, type[rd.KVStepPolicy]] = {
    "KeepAll": rd.KeepAll,
    "KeepBlend": rd.KeepBlend,
    "KeepCyclic": rd.KeepCyclic,
    "KeepFirst": rd.KeepFirst,
    "KeepLast": rd.KeepLast,
    "KeepMean": rd.KeepMean,
}
