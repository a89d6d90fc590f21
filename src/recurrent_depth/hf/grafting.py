"""Grafting: the middle layers of a pretrained model become a loop, and the model stays what it is."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from typing import Any

from torch import nn

from recurrent_depth.arguments import require_instance, require_whole
from recurrent_depth.builders import UpdateFactory
from recurrent_depth.core import RecurrentCore
from recurrent_depth.hf.anchor_correction import corrected
from recurrent_depth.hf.description import describe_factory, describe_part
from recurrent_depth.hf.host_calls import HostStack
from recurrent_depth.hf.host_class import host_class, mark_started, with_steps
from recurrent_depth.hf.host_first import HostFirst
from recurrent_depth.hf.host_inputs import require_model
from recurrent_depth.hf.host_layers import check_core, find_layers, state_width
from recurrent_depth.hf.layer_form import check_answerable
from recurrent_depth.hf.read_from_gguf import unmark_gguf
from recurrent_depth.hf.recurrence import Place, Recurrence
from recurrent_depth.hf.slots import Seat, original_class, passage_class, slot_class
from recurrent_depth.hf.update_start import half_open, make_update
from recurrent_depth.hf.wrapped import check_bare
from recurrent_depth.kv_policy import KeepAll, KVStepPolicy


def graft(
    model: Any,
    core: Sequence[int],
    num_steps: int,
    *,
    update: UpdateFactory = corrected,
    kv: KVStepPolicy | None = None,
    drop: Sequence[int] = (),
    layers: nn.ModuleList | str | None = None,
    host_first: bool = True,
    dim: int | None = None,
) -> Any:
    """Turns some layers of a model into the core of a loop, in place, and returns the same object.

    No weight is copied. The host's parameters keep their names, the new ones are `recurrence.*`, and the model keeps
    its class, `generate` and tokenizer. Its `forward` and `generate` take `num_steps` for a call of another depth.

    Step 0 is the host's own pass. What the later ones see starts as the anchor, so each starts as that same pass again:
    with a gated update, `corrected` or `rd.gated`, the model is exactly its host at every depth, gate bias and policy
    until something is trained, and at one step always.

    Args:
        model: a decoder, encoder or vision model of transformers, a module with a list of layers such as
            `nn.TransformerEncoder`, or a list of modules, which comes back as an `nn.ModuleList`. Give the whole
            model, as it is saved: `save_pretrained` of a model knows nothing of a part that was grafted by itself.
        core: the layers of the core, counted from 0, in a row.
        num_steps: how often the core runs where a call says nothing else; kept as `model.recurrence.num_steps`.
        update: makes the update for the width: `corrected`, a `functools.partial` of it, `rd.gated`, `rd.plain`, ...
            The gate of `rd.gated` starts at 0 here too, where half of a step is written, and not at the paper's 4,
            unless `bias` is given: `functools.partial(rd.gated, bias=4.0)`. A function of yours starts as it says.
        kv: what a cache stores of the steps; `rd.KeepAll()` by default, exactly the model without a cache.
        drop: layers that are left out.
        layers: where the layers are, or the path to there, if they are not found.
        host_first: whether step 0 is the host's own pass. Without, the update takes that step too, as it always does
            if its first step is a plain pass anyway, like that of `rd.damped`.
        dim: the width of the hidden state, if it is not found.

    Raises:
        ValueError: if the layers are not found or hand on more than the hidden state, `core` or `drop` do not fit
            them, the model is grafted already, has adapters or is wrapped, `update` gives no update or one that picks
            tokens, or `num_steps` is below 1.

    Reference: for recurrence from pretrained layers McLeish et al., 2025, arXiv 2511.07384; the start is ours.
    """
    model = nn.ModuleList(model) if isinstance(model, list | tuple) else model
    found = host_layers(model, layers)
    first, end = check_core(core, drop, len(found))
    require_instance("kv", kv := kv or KeepAll(), KVStepPolicy, "rd.KeepMean()")
    require_whole("num_steps", num_steps, at_least=1)
    width = state_width(model, found[first], dim)
    update = half_open(update)
    made = make_update(update, width, like=found[first])
    recurrence = Recurrence(
        RecurrentCore(HostStack(), HostFirst(made) if host_first and not made.starts_plain else made),
        kv,
        Place(first, end - first, len(found)),
        num_steps,
    )
    settings = {"core": [first, end], "num_steps": num_steps, "kv": describe_part(kv), "dim": width}
    settings |= {"update": describe_factory(update), "drop": list(drop), "host_first": host_first}
    return plant(model, found, recurrence, drop=drop, settings=settings)


def plant(
    model: Any, layers: nn.ModuleList, recurrence: Recurrence, *, drop: Iterable[int], settings: dict[str, Any]
) -> Any:
    """Puts a loop into a model whose layers and settings were checked. Other ways to graft end here too.

    Args:
        model: the host.
        layers: its layers.
        recurrence: the loop.
        drop: layers that are left out.
        settings: what the host's configuration says of it.
    """
    first, num_core, _ = recurrence.place
    unmark_gguf(model)
    recurrence.train(model.training)
    mark_started(recurrence)
    chosen: list[Any] = list(layers[first : first + num_core])
    recurrence.gradient_checkpointing = any(getattr(layer, "gradient_checkpointing", False) for layer in chosen)
    for index, layer in enumerate(chosen):
        layer.__class__ = slot_class(type(layer))
        layer.__dict__["_seat"] = Seat(model, index, num_core)
    for index in drop:
        layer = layers[index]
        layer.__class__ = passage_class(type(layer))
        layer.__dict__["_layer"] = index
    model.__class__ = host_class(type(model))
    model.add_module("recurrence", recurrence)
    if "forward" in vars(model):  # hung there, as accelerate does: it takes the place of the class's
        vars(model)["forward"] = partial(with_steps(_on_its_own(vars(model)["forward"])), model)
    if hasattr(model, "config"):
        model.config.recurrence = settings | {"layers": _path(model, layers)}
    return model


def _path(model: nn.Module, layers: nn.ModuleList) -> str:
    return next(path for path, part in model.named_modules() if part is layers)


def ungraft(model: Any) -> Any:
    """Takes a loop out again: the model is its host, with the weights that it now has.

    Raises:
        ValueError: if there is none, or the host's layers share weights.
    """
    if not is_graft(model):
        raise ValueError(f"{type(model).__name__} is no graft: there is nothing to take out.")
    if model.recurrence.tied is not None:
        raise ValueError(f"{type(model).__name__} was made recursive: the weights of its own layers are gone.")
    for layer in model.modules():
        if hasattr(type(layer), "_original_class"):
            layer.__class__ = original_class(layer)
            for name in ("_seat", "_layer"):
                layer.__dict__.pop(name, None)
            if "gradient_checkpointing" in vars(layer) or "_gradient_checkpointing_func" in vars(layer):
                layer.gradient_checkpointing = model.recurrence.gradient_checkpointing
    del model.recurrence
    if "forward" in vars(model):
        vars(model)["forward"] = vars(model)["forward"].func.__wrapped__.__wrapped__
    if hasattr(model, "config"):
        del model.config.recurrence
    return model


def is_graft(model: object) -> bool:
    """Whether a model has a grafted loop."""
    return isinstance(model, nn.Module) and isinstance(model._modules.get("recurrence"), Recurrence)


def _on_its_own(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def method(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return forward(*arguments, **keywords)

    return method


def host_layers(model: object, layers: nn.ModuleList | str | None) -> nn.ModuleList:
    """The layers of a model that can be grafted.

    Raises:
        ValueError: if it is no module, is a graft or holds one, has another part of the name `recurrence` or takes
            `num_steps` already, has adapters or is wrapped, its layers are not found, or they hand something on beside
            the hidden state.
    """
    require_model(model)
    assert isinstance(model, nn.Module)
    if any(isinstance(part, Recurrence) or hasattr(type(part), "_original_class") for part in model.modules()):
        raise ValueError(
            f"{type(model).__name__} is a graft already. For other settings take the loop out first: ungraft(model)."
        )
    check_bare(model)
    if hasattr(model, "recurrence"):
        raise ValueError(f"{type(model).__name__} has a part of its own that is named recurrence.")
    if "num_steps" in inspect.signature(model.forward).parameters:
        raise ValueError(f"{type(model).__name__} takes num_steps of its own: it has a loop, or means something else.")
    found = find_layers(model, layers)
    for layer in found:
        check_answerable(layer)
    return found
