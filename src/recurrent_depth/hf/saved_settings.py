"""What the config.json of a saved graft says of its loop, read and checked: people edit it, and disks fill up."""

import json
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from recurrent_depth.hf.description import is_described

CONFIG = "config.json"


class Check(NamedTuple):
    """Whether a value can stand in a field, and in words what can."""

    holds: Callable[[Any], bool]
    expected: str


def _whole(value: Any, at_least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def _core(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_whole, value)) and value[0] < value[1]


def _sealed(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"place", "value"} and _whole(value["value"]) and _path(value)


def _path(value: dict[str, Any]) -> bool:
    place = value["place"]
    return isinstance(place, list) and 1 <= len(place) <= 2 and all(isinstance(name, str) for name in place)


COUNT = Check(lambda value: _whole(value, 1), "a whole number of at least 1")
SIZE = Check(_whole, "a whole number of at least 0")
SWITCH = Check(lambda value: isinstance(value, bool), "true or false")
MADE = Check(is_described, 'a name and arguments, such as {"name": "gated", "arguments": {"bias": 0.0}}')
LAYERS = Check(lambda value: isinstance(value, list) and all(map(_whole, value)), "a list of layers, such as [0, 7]")
CORE = Check(_core, "the first layer of the core and the one behind its last, such as [2, 6]")
PATH = Check(lambda value: isinstance(value, str), "the path of the host's list of layers, such as model.layers")
SEALED = Check(_sealed, "what save_pretrained wrote there: the place of a value in the configuration, and the value")

BOTH = {"core": CORE, "num_steps": COUNT, "layers": PATH}
GRAFTED = BOTH | {"dim": COUNT, "update": MADE, "kv": MADE, "drop": LAYERS, "host_first": SWITCH}
TIED = BOTH | {"tied": COUNT, "rank": SIZE, "skip_first": SWITCH, "vectors": SWITCH}


def read_configuration(folder: Path) -> dict[str, Any]:
    """The whole configuration of a graft's folder, with checked settings under `recurrence`.

    Raises:
        ValueError: if there is no such folder, it is no graft's, or its config.json is damaged; names the file, the
            field, what is there and what is expected.
    """
    if not folder.is_dir():
        raise ValueError(
            f"There is no folder {folder}: load_graft takes a local one. What a hub has under a name is to be "
            "downloaded first, by huggingface_hub.snapshot_download, which says to which folder."
        )
    path = folder / CONFIG
    if not path.exists():
        raise ValueError(f"{folder} is no folder of a saved model: there is no {CONFIG} in it.")
    said = read_object(path)
    if "recurrence" not in said:
        raise ValueError(f"{folder} holds a model without a grafted loop: load it by from_pretrained.")
    _check(path, said["recurrence"])
    return said


def read_object(path: Path) -> dict[str, Any]:
    """What a JSON file holds.

    Raises:
        ValueError: if that is no object; names the file.
    """
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON or of UTF-8
        raise ValueError(f"{path} is damaged or was not written to its end: it is no JSON ({error}).") from None
    return require(path, said, Check(lambda value: isinstance(value, dict), "an object, {...}"), "the whole file")


def require(path: Path, value: Any, check: Check, field: str) -> Any:
    """The value, if it passes.

    Raises:
        ValueError: if not; names the file, the field, what is there and what is expected.
    """
    if not check.holds(value):
        shown = json.dumps(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        raise ValueError(f"{path}: {field} is {shown}, but must be {check.expected}.")
    return value


def _check(path: Path, settings: Any) -> None:
    require(path, settings, Check(lambda value: isinstance(value, dict), "the object that graft wrote"), "recurrence")
    fields = TIED if "tied" in settings else GRAFTED
    for name in settings.keys() - fields.keys() - {"sealed"}:
        meant = get_close_matches(name, fields, n=1, cutoff=0.75)
        hint = f"is {meant[0]} meant?" if meant else f"known are {', '.join(fields)}."
        raise ValueError(f"{path}: recurrence.{name} is not known to this version of recurrent_depth; {hint}")
    for name, check in fields.items():
        if name not in settings:
            raise ValueError(f"{path}: recurrence.{name} is missing, and must be {check.expected}.")
        require(path, settings[name], check, f"recurrence.{name}")
    if "sealed" in settings:
        require(path, settings["sealed"], SEALED, "recurrence.sealed")
    if "tied" in settings:
        _check_tied(path, settings)


def _check_tied(path: Path, settings: dict[str, Any]) -> None:
    size = settings["core"][1] - settings["core"][0]
    divides = Check(lambda value: size % value == 0, f"a divisor of the {size} layers in core")
    num_steps = size // require(path, settings["tied"], divides, "recurrence.tied")
    at_most = Check(lambda value: value <= num_steps, f"at most {num_steps}, the number of steps with layers")
    require(path, settings["num_steps"], at_most, "recurrence.num_steps")
