"""What `save_pretrained` of a graft writes: the host's own files, and in the configuration what loops."""

import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recurrent_depth.depth import as_depth
from recurrent_depth.hf.host_layers import text_config
from recurrent_depth.hf.saved_settings import CONFIG

SEALED = "a recurrent model, which its host's class alone cannot load: use recurrent_depth.hf.load_graft"


def with_recurrence(save_pretrained: Callable[..., Any]) -> Callable[..., Any]:
    """A host's `save_pretrained` for grafts.

    The host's parameters keep their names, the new ones are `recurrence.*`, and the configuration says under
    `recurrence` what the loop is. `load_graft` restores it all. Where one step is the host, plain `from_pretrained` of
    the folder is that host. Where it is not, since layers were dropped or share weights, or an adapter stands in front
    of the core, the folder is sealed: the number of layers in its configuration is a text, at which transformers
    raises.
    """

    @functools.wraps(save_pretrained)
    def save(self: Any, save_directory: Any, *arguments: Any, **keywords: Any) -> Any:
        settings = self.config.recurrence
        sealed = "tied" in settings or bool(settings["drop"]) or not self.recurrence.core.update.starts_plain
        asked = inspect.signature(save_pretrained).bind(self, save_directory, *arguments, **keywords).arguments
        if sealed and asked.get("push_to_hub"):
            raise ValueError("Save this graft to a folder, and upload that: its config.json is written last.")
        self.config.recurrence = settings | {"num_steps": as_depth(self.recurrence.num_steps).num_steps}
        if "tied" in settings:  # names of older releases would be put on the corrections too
            keywords = {"save_original_format": False} | keywords
        done = save_pretrained(self, save_directory, *arguments, **keywords)
        if sealed and asked.get("is_main_process", True) and (Path(save_directory) / CONFIG).exists():
            seal(Path(save_directory) / CONFIG, self)
        return done

    return save


def seal(path: Path, model: Any) -> None:
    """Makes a configuration unreadable for the host's own class, and keeps what `unsealed` puts back."""
    said, text = json.loads(path.read_text()), text_config(model)
    names = [name for name, part in vars(model.config).items() if part is text]
    place = [*names[:1], type(text).attribute_map.get("num_hidden_layers", "num_hidden_layers")]
    said["recurrence"]["sealed"] = {"place": place, "value": text.num_hidden_layers}
    _put(said, place, SEALED)
    path.write_text(json.dumps(said, indent=2, sort_keys=True) + "\n")


def unsealed(said: dict[str, Any]) -> dict[str, Any]:
    """The host's configuration, as a dictionary, of a folder that may be sealed."""
    sealed = said["recurrence"].get("sealed")
    if sealed is not None:
        _put(said, sealed["place"], sealed["value"])
    return said


def _put(said: dict[str, Any], place: list[str], value: Any) -> None:
    *outer, last = place
    for name in outer:
        said = said.setdefault(name, {})
    said[last] = value
