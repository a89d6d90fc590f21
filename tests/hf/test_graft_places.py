"""Grafts at either end of a host and over all of it, and under each implementation of attention."""

import hosts
import pytest
import torch
from torch.testing import assert_close

from recurrent_depth.hf import graft

CORES = {"first layers": range(2), "last layers": range(3, 5), "all layers": range(5)}


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "qwen3_moe", "bert", "vit"])
@pytest.mark.parametrize("core", CORES.values(), ids=CORES)
def test_a_core_may_lie_at_either_end(core, name):
    model, inputs = hosts.host(name), hosts.inputs(name)
    expected = hosts.outcome(model(**inputs))
    graft(model, core, 3)
    assert torch.equal(hosts.outcome(model(**inputs)), expected)
    hosts.randomise(model.recurrence)
    assert torch.equal(hosts.outcome(model(**inputs, num_steps=1)), expected)
    assert not torch.allclose(hosts.outcome(model(**inputs)), expected, atol=1e-2)
    if name in hosts.DECODERS:
        settings = {"max_new_tokens": 4, "do_sample": False}
        cached = model.generate(**hosts.padded(), **settings)
        assert torch.equal(cached, model.generate(**hosts.padded(), **settings, use_cache=False))


def moved(name):
    """A graft with heads of 16, since torch makes no flex attention for smaller ones on a CPU."""
    model = graft(hosts.host(name, num_attention_heads=2, num_key_value_heads=1, head_dim=16), range(1, 4), 3)
    hosts.randomise(model.recurrence)
    return model


@torch.no_grad()
def read(model):
    """Logits of padded rows, those of padding left out."""
    return model(**hosts.padded(), use_cache=False).logits[hosts.padded()["attention_mask"].bool()]


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_eager_attention_gives_the_same(name):
    model, found = moved(name), []
    for chosen in ("sdpa", "eager"):
        model.set_attn_implementation(chosen)
        found.append((read(model), model.generate(**hosts.padded(), max_new_tokens=3, do_sample=False)))
    assert_close(found[1], found[0], atol=2e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask")  # transformers gives it
def test_flex_attention_gives_the_same():
    torch.compiler.reset()  # it is compiled
    model = moved("llama")
    expected = read(model)
    model.set_attn_implementation("flex_attention")
    assert_close(read(model), expected, atol=2e-5, rtol=1e-4)
