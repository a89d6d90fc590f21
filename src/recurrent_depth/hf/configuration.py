"""The configuration of a looped model, as Hugging Face's libraries read, write and load it."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from inspect import signature
from typing import Any, no_type_check

from transformers import PreTrainedConfig

import recurrent_depth as rd
from recurrent_depth.arguments import require_whole
from recurrent_depth.hf.parts import Named, build, builder_of, builders_with, part_of, policy_of
from recurrent_depth.initialisation import initialise

ELSEWHERE = {
    "num_hidden_layers": "it follows from layout and kv: give layout",
    "num_steps": "it is the third number of layout, and an argument of each call",
    "num_layers": "give layout, which says how many blocks are stored and how many steps are run",
    "num_key_value_heads": "it belongs to the form: form={'name': 'LlamaForm', 'num_kv_heads': ...}",
    "num_kv_heads": "it belongs to the form: form={'name': 'LlamaForm', 'num_kv_heads': ...}",
    "tie_word_embeddings": "it belongs to the form: form={'name': 'LlamaForm', 'tied': False}",
}
"""Names that other models' configurations have, and what says it here."""


@no_type_check  # transformers makes an __init__ of the fields below that takes whatever else it is given, too
class RecurrentDepthConfig(PreTrainedConfig):
    """What a looped model is made of, in words and numbers that JSON holds.

    A part is given by its name in the library, or by a dictionary of its name and its arguments:
    `update={"name": "gated", "bias": 0.0}`. `dim`, `num_heads` and `context_length` are taken for `hidden_size`,
    `num_attention_heads` and `max_position_embeddings`.

    Args:
        builder: the function of the library that makes the model: `"grt"`, `"huginn"`, `"rrt"`, ...
        layout: blocks before the loop, in it, steps at full depth, and blocks behind it. `[0, blocks, 1, 0]` for
            `"dense"`, `[0, 1, layers, 0]` for `"albert"`.
        hidden_size: the width.
        num_attention_heads: attention heads.
        vocab_size: how many tokens there are.
        max_position_embeddings: how many positions are learned, by forms that learn some.
        form: the family of blocks; the builder's own by default.
        update: the update; the builder's own by default.
        builder_arguments: whatever else the builder takes, such as `{"rank": 8}` or `{"router": "token_choice"}`.
        kv: which steps' keys and values a cache stores, `"KeepAll"` or another KV policy.
        initializer_range: standard deviation of linear layers and embeddings as they start; the builder's by default.
        use_cache: whether a forward in evaluation makes a cache.
        training: what the training example's checkpoint said of its run, for a model that comes from one.

    Raises:
        ValueError: if there is no such builder, part or policy, the layout is none, or a name is given that is no
            setting but close to one. Any other name is kept, as by every configuration of transformers. What the sizes
            must satisfy is checked when the model is made.
    """

    model_type = "recurrent_depth"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]
    attribute_map = {
        "dim": "hidden_size",
        "num_heads": "num_attention_heads",
        "context_length": "max_position_embeddings",
    }

    builder: str = "grt"
    layout: list[int] | tuple[int, ...] = (1, 1, 10, 1)
    hidden_size: int = 768
    num_attention_heads: int = 12
    vocab_size: int = 50304
    max_position_embeddings: int = 1024
    form: Named | None = None
    update: Named | None = None
    builder_arguments: dict[str, Any] | None = None
    kv: Named = "KeepAll"
    initializer_range: float | None = None
    use_cache: bool = True
    training: dict[str, Any] | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any):
        builder_of(self.builder)
        self._refuse_mistaken(kwargs)
        self.layout = list(_layout(self.layout))
        for part in ("form", "update"):
            _require_name(part, getattr(self, part))
        part_of(self.arguments)
        policy_of(self.kv)
        super().__post_init__(**kwargs)
        for size in ("hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings"):
            require_whole(size, getattr(self, size), at_least=1)

    def _refuse_mistaken(self, others: Mapping[str, Any]) -> None:
        defaults = {field.name: field.default for field in fields(RecurrentDepthConfig)}
        for alias, name in self.attribute_map.items():
            given = getattr(self, name)
            if given != defaults[name] and others.get(alias, given) != given:
                raise ValueError(f"{alias} is {others[alias]} and {name} is {given}, but they are one setting.")
        own = {*defaults, *self.attribute_map}
        for name in set(others) - own:
            if name in ELSEWHERE:
                raise ValueError(f"{name} cannot be given: {ELSEWHERE[name]}.")
            if name in signature(builder_of(self.builder)).parameters:
                raise ValueError(
                    f"{name} is an argument of {self.builder!r}: give builder_arguments={{{name!r}: ...}}."
                )
            if (others_of := builders_with(name)) and not hasattr(PreTrainedConfig, name):
                raise ValueError(f"{name} is no argument of {self.builder!r}, but one of {', '.join(others_of)}.")
            meant = get_close_matches(name, own | set(ELSEWHERE), n=1, cutoff=0.8)
            if meant and not hasattr(PreTrainedConfig, name):
                raise ValueError(f"{name} is no setting of RecurrentDepthConfig; is {meant[0]} meant?")

    @property
    def arguments(self) -> dict[str, Any]:
        """What the builder is given beside layout and sizes, parts by their names."""
        named = {"form": self.form, "update": self.update}
        return {name: part for name, part in named.items() if part is not None} | (self.builder_arguments or {})

    @property
    def num_hidden_layers(self) -> int:
        """The layers of a cache: one for each block, and for each copy of a core block that the policy stores."""
        layout = rd.Layout(*self.layout)
        copies = policy_of(self.kv).num_copies(layout.num_steps)
        return layout.prelude + layout.core * copies + layout.coda

    @property
    def num_key_value_heads(self) -> int:
        """Heads of keys and values."""
        return self._of_form("num_kv_heads") or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """The size of a head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def tie_word_embeddings(self) -> bool:
        """Whether the head is the embedding's weight."""
        return self._of_form("tied") is not False

    def _of_form(self, argument: str) -> Any:
        return None if self.form is None or isinstance(self.form, str) else self.form.get(argument)

    def build(self) -> rd.RecurrentTransformer:
        """The native model, its weights drawn anew.

        Raises:
            ValueError: if the builder refuses what it is given.
        """
        sizes = {"dim": self.hidden_size, "num_heads": self.num_attention_heads}
        sizes |= {"vocab_size": self.vocab_size, "context_length": self.max_position_embeddings}
        model = build(self.builder, rd.Layout(*self.layout), sizes, self.arguments)
        if self.initializer_range is not None:
            model.weight_start = model.weight_start._replace(std=self.initializer_range)
            initialise(model)
        return model


def _layout(given: Any) -> rd.Layout:
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != 4:
        raise ValueError(f"layout is {given!r}, but must be four numbers: [prelude, core, num_steps, coda].")
    return rd.Layout(*given)


def _require_name(part: str, given: Any) -> None:
    if isinstance(given, Mapping) and "name" not in given:
        raise ValueError(f"{part} is {given!r}, which names nothing: {{'name': ..., **arguments}}.")
