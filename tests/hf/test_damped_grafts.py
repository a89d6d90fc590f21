"""Training-free looping of a host's layers: the equations on real layers, no weights, and its two stashes."""

import copy
from functools import partial

import pytest
import torch
from hosts import cache_of, host, padded, tokens
from torch.testing import assert_close

import recurrent_depth as rd
from recurrent_depth.hf import graft

CORE = range(1, 3)
GREEDY = {"max_new_tokens": 5, "do_sample": False}


def written(model, num_steps: int, share: float):
    """The published equations over the layers of a llama."""
    run = model.model.layers
    x = model.model.embed_tokens(tokens())
    at = {"position_embeddings": model.model.rotary_emb(x, torch.arange(9)[None])}

    def window(x):
        for layer in CORE:
            x = run[layer](x, **at)
        return x

    x0 = x = run[0](x, **at)
    for _ in range(num_steps):
        x = (1 - 1 / num_steps) * x + window(x) / num_steps
    x = share * window(x0) + (1 - share) * x
    for layer in (3, 4):
        x = run[layer](x, **at)
    return model.lm_head(model.model.norm(x))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_it_is_the_published_equations(share):
    model = host("llama")
    looped = graft(copy.deepcopy(model), CORE, 3, update=partial(rd.damped, share=share))
    for num_steps in (1, 2, 3):
        assert_close(looped(tokens(), num_steps=num_steps).logits, written(model, num_steps, share))


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "gemma3", "bloom"])
def test_one_step_is_the_host_and_there_are_no_weights(name):
    model = host(name)
    looped = graft(copy.deepcopy(model), CORE, 3, update=rd.damped)
    assert list(looped.state_dict()) == list(model.state_dict())
    assert torch.equal(looped(tokens(), num_steps=1).logits, model(tokens()).logits)
    assert not torch.equal(looped(tokens()).logits, model(tokens()).logits)


@pytest.mark.parametrize("policy", [rd.KeepFirst, rd.KeepLast])
def test_a_cache_of_one_copy_is_as_large_as_the_hosts(policy):
    looped = graft(host("llama"), CORE, 3, update=rd.damped, kv=policy())
    cache = cache_of(looped(tokens(), use_cache=True))
    assert [cache.get_seq_length(layer) for layer in range(len(cache))] == [9] * 5
    assert looped.generate(**padded(), **GREEDY).shape == (2, 14)


def test_keeping_the_first_stores_what_the_host_stores():
    model = host("llama")
    looped = graft(copy.deepcopy(model), CORE, 3, update=rd.damped, kv=rd.KeepFirst())
    ours, theirs = (cache_of(each(tokens(), use_cache=True)) for each in (looped, model))
    for layer in (0, 1, 2):  # the window's and those in front of it
        assert torch.equal(ours.layers[layer].keys, theirs.layers[layer].keys)


def test_keeping_all_is_uncached():
    looped = graft(host("llama"), CORE, 3, update=rd.damped)
    expected = looped.generate(**padded(), **GREEDY, use_cache=False)
    assert torch.equal(looped.generate(**padded(), **GREEDY), expected)
