"""How the training example describes models, in the words of a configuration, and back."""

from typing import Any

import torch

import recurrent_depth as rd
from recurrent_depth.hf.configuration import RecurrentDepthConfig
from recurrent_depth.hf.parts import Named

FORMS = {"gpt2": "GPT2Form", "llama": "LlamaForm"}
SIZES = {
    "dim": "hidden_size",
    "num_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
}


def config_of(description: Any) -> RecurrentDepthConfig:
    """The configuration of a model that the training example describes.

    Raises:
        ValueError: if it describes none.
    """
    try:
        return _preset(**description) if description["builder"] == "preset" else _described(**description)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{description!r} describes no model of the training example: {error!r}.") from error


def description_of(config: RecurrentDepthConfig) -> dict[str, Any]:
    """How the training example describes the model of a configuration: as it did, where the model came from it.

    Raises:
        ValueError: if it cannot.
    """
    said = (config.training or {}).get("config", {}).get("model")
    if said is not None and _parts(config_of(said)) == _parts(config):
        return said
    (form, forms), (update, updates) = (_named(part) for part in (config.form or "GPT2Form", config.update or "gated"))
    known = form in FORMS.values() and not forms and update == "gated" and config.builder in ("grt", "naive", "dense")
    if not known or config.builder_arguments or (config.update and config.builder != "grt"):
        raise ValueError(
            f"The training example has no words for {config.builder!r} with {config.arguments}: it knows 'grt' with "
            f"the gated update, 'naive' and 'dense', and the forms {sorted(FORMS.values())} as they are."
        )
    layout = {"num_blocks": config.layout[1]} if config.builder == "dense" else {"layout": list(config.layout)}
    more = {"update": updates} if config.builder == "grt" else {}
    std = 0.02 if config.initializer_range is None else config.initializer_range
    words = {"form": next(word for word, name in FORMS.items() if name == form), "init_std": std}
    sizes = {word: getattr(config, name) for word, name in SIZES.items()}
    return {"builder": config.builder, **layout, **more, **words, **sizes}


def _named(part: Named) -> tuple[str, dict[str, Any]]:
    """The name and the arguments of a part."""
    given = {"name": part} if isinstance(part, str) else dict(part)
    return given.pop("name"), given


def _parts(config: RecurrentDepthConfig) -> tuple[Any, ...]:
    """What makes the model, how its weights start aside."""
    return config.builder, config.layout, config.arguments, *(getattr(config, name) for name in SIZES.values())


def _described(
    *,
    builder: str,
    form: str,
    init_std: float,
    layout: list[int] | None = None,
    num_blocks: int = 1,
    update: dict[str, float] | None = None,
    **sizes: Any,
) -> RecurrentDepthConfig:
    return RecurrentDepthConfig(
        builder=builder,
        layout=[0, num_blocks, 1, 0] if layout is None else layout,
        form=FORMS[form],
        update=None if update is None else {"name": "gated", **update},
        initializer_range=init_std,
        **{SIZES[word]: size for word, size in sizes.items()},
    )


def _preset(*, builder: str, name: str) -> RecurrentDepthConfig:
    with torch.device("meta"):
        model: rd.RecurrentTransformer = getattr(rd.presets, name)()
    attention: Any = model.core.stack.blocks[0].attention
    return RecurrentDepthConfig(
        builder="grt" if name.startswith("grt") else "dense",
        layout=list(model.layout),
        hidden_size=model.embed.dim,
        num_attention_heads=attention.num_heads,
        vocab_size=model.embed.token.num_embeddings,
        max_position_embeddings=model.embed.num_positions or rd.presets.CONTEXT_LENGTH,
    )
