"""The graft, and two controls that train as many parameters on one pass: LoRA on the host, and linear maps."""

from functools import partial
from typing import Any

import peft
import torch.nn.functional as F
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

import recurrent_depth as rd
from grafting.arguments import GraftArguments
from recurrent_depth.hf import corrected, graft, ungraft
from recurrent_depth.hf.host_layers import find_layers

ALPHA = 16  # of every LoRA, whatever its rank, so that one learning rate moves all of them equally far


def build(host: Any, arguments: GraftArguments) -> Any:
    """Makes of the host what `arguments.method` names, in place; what is to be trained needs gradients, nothing else.

    Raises:
        ValueError: if the core does not fit the host, or too few layers for the adapter's maps.
    """
    return METHODS[arguments.method](host, arguments)


def num_trained(model: nn.Module) -> int:
    """How many parameters are trained."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def grafted(host: Any, arguments: GraftArguments) -> Any:
    """The loop, and what is trained beside it."""
    layers = find_layers(host, None)
    model = _beside(_looped(host, arguments), layers, arguments)
    model.recurrence.requires_grad_(True)
    return model


def adapted(host: Any, arguments: GraftArguments) -> Any:
    """Linear maps behind layers of the core, evenly spread, as many as have the loop's parameters."""
    wanted, layers, dim = _loop_parameters(host, arguments), find_layers(host, None), host.config.hidden_size
    first, end = arguments.core
    number = round(wanted / (dim * dim + dim))
    if number > end - first:
        raise ValueError(
            f"The loop has the parameters of {number} linear maps, but the core only {end - first} layers to put them "
            "behind: give a wider core."
        )
    model = _beside(host, layers, arguments)
    model.adapters = nn.ModuleList(LinearAdapter(dim) for _ in range(number))
    for index, adapter in enumerate(model.adapters):
        layers[first + (index + 1) * (end - first) // number - 1].register_forward_hook(adapter.behind)
    return model


def lora(host: Any, arguments: GraftArguments) -> Any:
    """LoRA on all linear maps of all layers, of the rank that gives as many parameters as the graft trains."""
    layers = find_layers(host, None)
    linear = _linear(host, layers)
    wanted = _loop_parameters(host, arguments) + arguments.lora_rank * sum(linear.values())
    if arguments.train_core:
        core = layers[slice(*arguments.core)]
        wanted += sum(parameter.numel() for parameter in core.parameters())
    return _with_lora(host, _ranks(linear, wanted))


def merged(model: Any) -> Any:
    """The model with every LoRA added to the weights that it corrects: a graft of the host's own kind of layers."""
    for name, part in list(model.named_modules()):
        if isinstance(part, BaseTunerLayer):
            part.merge()
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, part.get_base_layer())
    return model


class LinearAdapter(nn.Module):
    """`h + W norm(h) + b`, at the start zero beside the identity."""

    def __init__(self, dim: int):
        super().__init__()
        self.map = nn.Linear(dim, dim)
        nn.init.zeros_(self.map.weight)
        nn.init.zeros_(self.map.bias)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.map(F.rms_norm(h, h.shape[-1:])).to(h.dtype)

    def behind(self, layer: nn.Module, inputs: tuple, out: Any) -> Any:
        """What a layer gave, with its hidden state adapted."""
        return (self(out[0]), *out[1:]) if isinstance(out, tuple) else self(out)


INJECTIONS = {"normed": corrected, "concat": rd.gated}

METHODS = {"graft": grafted, "lora": lora, "adapter": adapted}


def _looped(host: Any, arguments: GraftArguments) -> Any:
    return graft(
        host,
        range(*arguments.core),
        arguments.num_steps,
        update=partial(INJECTIONS[arguments.inject], bias=arguments.gate_bias),
    )


def _loop_parameters(host: Any, arguments: GraftArguments) -> int:
    model = _looped(host, arguments)
    number = sum(parameter.numel() for parameter in model.recurrence.parameters())
    ungraft(model)
    return number


def _beside(model: Any, layers: nn.ModuleList, arguments: GraftArguments) -> Any:
    if arguments.lora_rank:
        model = _with_lora(model, dict.fromkeys(_linear(model, layers), arguments.lora_rank))
    if arguments.train_core:
        layers[slice(*arguments.core)].requires_grad_(True)
    return model


def _linear(host: Any, layers: nn.ModuleList) -> dict[str, int]:
    """The linear maps of all layers by name, and how many parameters a LoRA of rank 1 has there."""
    inside = {id(part) for part in layers.modules() if isinstance(part, nn.Linear)}
    return {name: part.in_features + part.out_features for name, part in host.named_modules() if id(part) in inside}


def _ranks(linear: dict[str, int], wanted: int) -> dict[str, int]:
    """Ranks that differ by one at most, and have as many parameters as wanted, or the fewest above."""
    rank, left = divmod(wanted, sum(linear.values()))
    ranks = dict.fromkeys(linear, rank)
    for name, size in linear.items():
        if left > 0:
            ranks[name], left = rank + 1, left - size
    return {name: rank for name, rank in ranks.items() if rank}


def _with_lora(model: Any, ranks: dict[str, int]) -> Any:
    config = peft.LoraConfig(lora_alpha=ALPHA, target_modules=list(ranks), rank_pattern=ranks)
    return peft.inject_adapter_in_model(config, model)
