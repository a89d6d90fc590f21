"""What accounting knows of a grafted model: its layers, read off the host."""

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from recurrent_depth.arguments import check_types
from recurrent_depth.contracts import BlockCost
from recurrent_depth.depth import Layout, as_depth
from recurrent_depth.hf.grafting import is_graft
from recurrent_depth.hf.host_layers import text_config
from recurrent_depth.hf.slots import Passage, Slot
from recurrent_depth.outline import Outline
from recurrent_depth.update_answers import cost_of


@check_types
def graft_outline(model: nn.Module) -> Outline:
    """The outline of a grafted language model, for `rd.accounting`: FLOPs by part and depth, parameters, cache bytes.

    Layers are counted by their linear layers and their heads, as if each looked at all tokens before it: a sliding
    window costs and stores less. What activations take is not known of a host, so `decode_memory` is not for grafts.

    Raises:
        ValueError: if the model is no graft, has no head or no configured attention heads, or a layer holds matrices
            that belong to no linear layer, such as fused experts.
    """
    if not is_graft(model):
        raise ValueError(f"{type(model).__name__} is no graft: there is no loop to count.")
    recurrence: Any = model.recurrence
    layers = _layers(model)
    first, num_core, _ = recurrence.place
    behind = first + num_core
    core = layers[first : first + (recurrence.tied or num_core)]
    prelude, coda = (_in_use(part) for part in (layers[:first], layers[behind:]))
    attention = _attention(model)
    table, head = (_weight(model, name) for name in ("get_input_embeddings", "get_output_embeddings"))
    parameters = {id(x): x.numel() for x in model.parameters()}
    return Outline(
        layout=Layout(len(prelude), len(core), as_depth(recurrence.num_steps).num_steps, len(coda)),
        dim=table.shape[1],
        prelude=_cost(prelude, attention),
        core=_cost(core, attention).plus(_corrections(recurrence.core.stack)),
        coda=_cost(coda, attention),
        update=partial(cost_of, recurrence.core.update),
        head=2 * head.numel(),
        vocab_size=table.shape[0],
        num_parameters=sum(parameters.values()),
        num_embedding_parameters=sum({id(x): x.numel() for x in (table, head)}.values()),
        num_position_parameters=0,
        context_length=None,
        checkpointing=recurrence.core.checkpointing,
    )


def _layers(model: nn.Module) -> list[nn.Module]:
    lists = (list(part) for part in model.modules() if isinstance(part, nn.ModuleList))
    return next(layers for layers in lists if any(isinstance(layer, Slot) for layer in layers))


def _in_use(layers: Iterable[nn.Module]) -> list[nn.Module]:
    return [layer for layer in layers if not isinstance(layer, Passage)]


def _weight(model: Any, getter: str) -> nn.Parameter:
    module = getattr(model, getter, lambda: None)()
    if module is None:
        raise ValueError(f"{type(model).__name__} gives nothing by {getter}(): only language models are counted.")
    return module.weight


def _attention(model: nn.Module) -> BlockCost:
    """What one layer's attention costs per key, and stores."""
    config = text_config(model)
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        raise ValueError(f"config.num_attention_heads of {type(model).__name__} is not given.")
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return BlockCost(per_key=4 * heads * size, cached=2 * _kv_heads(config, heads) * size)


def _kv_heads(config: Any, heads: int) -> int:
    if getattr(config, "multi_query", False):  # Falcon's name for one head of keys and values
        return 1
    return getattr(config, "num_key_value_heads", None) or heads


def _cost(layers: list[nn.Module], attention: BlockCost) -> BlockCost:
    cost = BlockCost()
    for layer in layers:
        cost = cost.plus(attention._replace(linear=2 * _matrices(layer)))
    return cost


def _matrices(layer: nn.Module) -> int:
    """Numbers in the matrices of a layer's linear layers."""
    counted = 0
    for name, part in layer.named_modules():
        own = [weight for weight in part.parameters(recurse=False) if weight.ndim > 1]
        if own and not isinstance(part, nn.Linear | Conv1D):
            raise ValueError(
                f"{name!r}, a {type(part).__name__}, holds matrices but is no linear layer: what it costs is not known."
            )
        counted += sum(weight.numel() for weight in own)
    return counted


def _corrections(stack: Any) -> BlockCost:
    corrections = dict(stack.named_children()).get("corrections")
    return BlockCost() if corrections is None else corrections.cost()
