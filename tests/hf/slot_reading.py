"""What tests of caches share: our own models, read through a transformers cache."""

import pytest
import torch
from battery import lively
from reading import Script
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, StaticCache
from transformers.cache_utils import Cache

import recurrent_depth as rd
from recurrent_depth.hf.cache import StepSlots
from recurrent_depth.hf.cache_views import model_views


def host_config(model: rd.RecurrentTransformer, **arguments) -> LlamaConfig:
    layout = model.layout
    return LlamaConfig(num_hidden_layers=layout.prelude + layout.core + layout.coda, **arguments)


KINDS = {
    "growing": lambda model: DynamicCache(),
    "listed": lambda model: DynamicCache(config=host_config(model)),
    "static": lambda model: StaticCache(config=host_config(model), max_cache_len=12),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def tiny_model() -> rd.RecurrentTransformer:
    torch.manual_seed(0)
    form = {"form": rd.LlamaForm, "dim": 8, "num_heads": 2, "vocab_size": 23, "context_length": 16}
    return lively(rd.grt(rd.Layout(1, 2, 4, 1), **form)).double().eval()


def slots_of(model: rd.RecurrentTransformer, cache: Cache, policy: rd.KVStepPolicy, num_steps: int) -> StepSlots:
    prelude, core, _, coda = model.layout
    places = {"first": prelude, "num_core": core, "num_layers": prelude + core + coda}
    return StepSlots(cache, **places, policy=policy, num_steps=num_steps)


def same_depth(script: Script) -> Script:
    """All rows as deep as the first."""
    return script._replace(num_steps=[[steps[0]] * len(steps) for steps in script.num_steps])


def read_hf(
    model: rd.RecurrentTransformer,
    script: Script,
    cache: Cache,
    policy: rd.KVStepPolicy,
    differentiable: bool = False,
    start: int = 0,
) -> Tensor:
    """The logits of all tokens, read chunk by chunk with a transformers cache that holds so many others."""
    logits = []
    for begin, end, steps in script.chunks:
        slots = slots_of(model, cache, policy, steps[0])
        where = where_of(script, cache, begin, end, start)
        with torch.set_grad_enabled(differentiable):
            logits.append(model(script.tokens[:, begin:end], steps[0], kv=model_views(slots), **where))
            slots.close()
    return torch.cat(logits, dim=1)


def where_of(script: Script, cache: Cache, begin: int, end: int, start: int) -> dict[str, Tensor]:
    """Positions and a complete mask over all keys that the cache gives, as transformers' own would be."""
    batch, seen = len(script.tokens), start + begin
    real = torch.ones(batch, start + end, dtype=torch.bool) if script.mask is None else script.mask[:, :end]
    num_keys = cache.get_mask_sizes(end - begin, 0)[0]
    padded = torch.cat([real, real.new_zeros(batch, num_keys - real.shape[1])], dim=1)
    at = torch.arange(seen, start + end)
    mask = (torch.arange(num_keys) <= at[:, None]) & padded[:, None]
    mask |= torch.arange(num_keys) == at[:, None]
    positions = (real.long().cumsum(1) - 1).clamp(min=0)[:, seen:]
    return {"mask": mask, "positions": positions}


def num_bytes(cache: Cache) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
