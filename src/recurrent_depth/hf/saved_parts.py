"""The parts of a saved graft: those that its settings name, or the caller's."""

from typing import Any

from recurrent_depth.builders import UpdateFactory
from recurrent_depth.depth import Depth
from recurrent_depth.hf.description import describe_factory, factory_of, written
from recurrent_depth.hf.recurrence import whole_depth
from recurrent_depth.hf.update_start import half_open
from recurrent_depth.kv_policy import KVStepPolicy


def checked_depth(settings: dict[str, Any], given: int | Depth | None) -> int | Depth:
    """The depth of a forward that is told none: the caller's, or the saved one.

    Raises:
        ValueError: if it is no depth that all rows share, or more than a recursive model has layers for.
    """
    if given is None:
        return settings["num_steps"]
    asked, (first, end) = whole_depth(given).num_steps, settings["core"]
    if "tied" in settings and asked > (most := (end - first) // settings["tied"]):
        raise ValueError(f"num_steps is {asked}, but this model has layers for {most} steps.")
    return given


def saved_update(settings: dict[str, Any], given: UpdateFactory | None) -> Any:
    """What makes the update; None for a recursive model.

    Raises:
        ValueError: if the saved one cannot be restored by itself and none is given, or it can and another is given.
    """
    if "tied" in settings:
        return _refuse("update", given)
    if given is None:
        return factory_of("update", settings["update"])
    try:
        restored = factory_of("update", settings["update"])
    except ValueError:
        return given
    asked, saved = describe_factory(half_open(given)), describe_factory(half_open(restored))
    if asked != saved:
        raise ValueError(
            f"update is {written(asked)}, but the graft was made with {written(saved)}, whose weights mean something "
            "else. It is restored by itself: leave update out."
        )
    return given


def saved_policy(settings: dict[str, Any], given: KVStepPolicy | None) -> KVStepPolicy | None:
    """What a cache stores; None for a recursive model.

    Raises:
        ValueError: if the saved one cannot be restored by itself and none is given.
    """
    if "tied" in settings:
        return _refuse("kv", given)
    if given is not None:
        return given
    make = factory_of("kv", settings["kv"])
    try:
        return make()
    except TypeError as error:
        raise ValueError(f"The graft was made with kv={written(settings['kv'])}: {error}.") from None


def _refuse(name: str, given: object) -> None:
    if given is not None:
        raise ValueError(f"{name} is given, but the folder holds a model that was made by recurse, which takes none.")
