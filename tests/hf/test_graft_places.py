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


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("implementation", ["eager", pytest.param("flex_attention", marks=pytest.mark.slow)])
def test_every_attention_gives_the_same(implementation, name):
    torch.compiler.reset()  # flex attention is compiled once more for each shape, up to a limit
    model, found = hosts.grafted(name), []
    for chosen in ("sdpa", implementation):
        model.set_attn_implementation(chosen)
        with torch.no_grad():
            whole = model(**hosts.padded(), use_cache=False).logits
        written = model.generate(**hosts.padded(), max_new_tokens=3, do_sample=False)
        found.append((whole[hosts.padded()["attention_mask"].bool()], written))
    assert_close(found[1], found[0], atol=2e-5, rtol=1e-4)
