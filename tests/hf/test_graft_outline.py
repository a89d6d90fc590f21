"""What accounting says of grafts: PyTorch's FLOP counter and the bytes of a real cache are the oracles."""

from typing import Any

import pytest
import torch
from hosts import DECODERS, host, tokens
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

import recurrent_depth as rd
from recurrent_depth.hf import graft, graft_outline, recurse
from recurrent_depth.hf.versions import CACHE

WINDOWED = {"mistral", "gemma2", "gemma3"}  # store no more than their window
LINEAR = [name for name in DECODERS if name != "qwen3_moe"]
HEADS = {"gpt_neox": {"num_key_value_heads": 4}, "opt": {"num_key_value_heads": 4}}  # they share none


def counted(model: nn.Module, **how: Any) -> int:
    """FLOPs of a forward, without those that transformers 5.8 spends on the angles of rotary positions."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens(), use_cache=False, **how)
    angles = [sum(count.values()) for name, count in counter.get_flop_counts().items() if name.endswith("rotary_emb")]
    return counter.get_total_flops() - sum(angles)


@pytest.mark.parametrize("name", LINEAR)
def test_flops_are_those_that_torch_counts(name: str):
    model = graft(host(name, attn_implementation="eager"), core=range(1, 4), num_steps=3)
    outline = graft_outline(model)
    for num_steps in (1, 2, 3):
        assert rd.accounting.flops(outline, 9, num_steps) * 2 == counted(model, num_steps=num_steps)
        fixed = rd.accounting.training_flops(outline, rd.FixedDepth(num_steps), 9)
        assert fixed == 3 * rd.accounting.flops(outline, 9, num_steps)
    depth = rd.PoissonLogNormalDepth(1, 2)  # its first step is the host's own, and cheaper
    assert rd.accounting.training_flops(outline, depth, 9) > rd.accounting.training_flops(outline, rd.FixedDepth(1), 9)
    assert outline.num_parameters == rd.accounting.num_parameters(model)
    assert str(outline.layout) == "1+3×3+1"


@pytest.mark.parametrize("name", [name for name in LINEAR if name not in WINDOWED])
@pytest.mark.parametrize("kv", [rd.KeepAll(), rd.KeepMean(), rd.KeepCyclic(2)], ids=["all", "mean", "cyclic"])
def test_cache_takes_the_bytes_that_are_told(name: str, kv: rd.KVStepPolicy):
    model = graft(host(name, **HEADS.get(name, {})), core=range(1, 4), num_steps=3, kv=kv)
    cache = DynamicCache()
    with torch.no_grad():
        model(tokens(), **{CACHE: cache})
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert held == rd.accounting.cache_bytes(graft_outline(model), 9, batch=2, dtype=torch.float32, kv=kv)


def test_layers_left_out_and_tied_ones_are_not_counted():
    eager = {"attn_implementation": "eager"}
    dropped = graft(host("llama", **eager), core=range(2, 4), num_steps=2, drop=[1])
    assert rd.accounting.flops(graft_outline(dropped), 9) * 2 == counted(dropped)
    tied = recurse(host("llama", **eager), range(1, 5), num_steps=2, rank=3)
    assert rd.accounting.flops(graft_outline(tied), 9) * 2 == counted(tied)
    assert str(graft_outline(tied).layout) == "1+2×2+0"


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(ValueError, match="no graft"):
        graft_outline(host("llama"))
    with pytest.raises(ValueError, match=r"mlp\.experts.*no linear layer"):
        graft_outline(graft(host("qwen3_moe"), core=range(1, 3), num_steps=2))
    with pytest.raises(ValueError, match="get_output_embeddings"):
        graft_outline(graft(host("bert"), core=range(1, 3), num_steps=2))
