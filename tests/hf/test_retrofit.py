"""Retrofitted recurrence, and layers taken out of a host for good."""

import copy
import math

import jaxtyping
import pytest
import torch
from hosts import DECODERS, cache_of, host, inputs, outcome, padded, randomise, tokens
from torch import nn
from torch.testing import assert_close

import recurrent_depth as rd
from recurrent_depth.hf import (
    HostFirst,
    adapted,
    anchor_start,
    draw_adapter,
    drop_layers,
    random_start,
    retrofit,
    zero_start,
)

KINDS = ["llama", "gpt2", "qwen3", "gemma3", "bloom"]
CORE = range(3, 5)
GREEDY = {"max_new_tokens": 5, "do_sample": False}


def dropped(name: str) -> list[int]:
    """Layers that may go: where kinds of attention take turns, two at once."""
    return [1, 2] if name.startswith("gemma") else [1]


def shorter(name: str):
    """A new host of the shorter configuration, with the weights that are left."""
    model = drop_layers(host(name), dropped(name))
    fresh = type(model)(type(model.config).from_dict(model.config.to_dict())).eval()
    fresh.load_state_dict(model.state_dict())
    return fresh


# Dropping


@pytest.mark.parametrize("name", [*DECODERS, "bert"])
def test_without_layers_it_is_the_host_that_its_configuration_describes(name):
    model, fresh = drop_layers(host(name), dropped(name)), shorter(name)
    assert torch.equal(outcome(model(**inputs(name))), outcome(fresh(**inputs(name))))
    assert len(model.state_dict()) < len(host(name).state_dict())


def test_what_is_left_are_the_hosts_own_layers():
    model, wanted = host("llama"), host("llama")
    drop_layers(model, [0, 3])
    for place, old in enumerate((1, 2, 4)):
        assert model.model.layers[place].self_attn.layer_idx == place
        ours, theirs = model.model.layers[place].state_dict(), wanted.model.layers[old].state_dict()
        assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())
    cache = cache_of(model(tokens(), use_cache=True))
    assert [cache.get_seq_length(layer) for layer in range(len(cache))] == [9] * 3


def test_nothing_dropped_is_nothing_done():
    model = host("llama")
    config = copy.deepcopy(model.config.to_dict())
    assert drop_layers(model, ()) is model
    assert model.config.to_dict() == config


# Retrofit


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("start", [random_start, zero_start, anchor_start])
def test_while_the_adapter_passes_the_prelude_every_depth_is_the_shorter_host(name, start):
    model, expected = retrofit(host(name), CORE, 3, drop=dropped(name), start=start), outcome(shorter(name)(tokens()))
    for mode in (model.eval(), model.train()):
        for num_steps in (1, 2, 3):
            assert torch.equal(outcome(mode(tokens(), num_steps=num_steps)), expected)


@pytest.mark.parametrize("start", [random_start, zero_start, anchor_start])
def test_it_is_the_recipe_written_down(start):
    model, x = retrofit(host("llama"), range(2, 4), 3, drop=[1], start=start).eval(), tokens()
    randomise(model.recurrence)
    inject = model.recurrence.core.update.inject
    adapter = torch.cat([inject.state.weight, inject.anchor.weight], dim=1)
    dense = shorter("llama")  # layers 0, 2, 3, 4 of the host
    run = dense.model.layers
    at = {"position_embeddings": dense.model.rotary_emb(dense.model.embed_tokens(x), torch.arange(9)[None])}
    e = run[0](dense.model.embed_tokens(x), **at)
    h = e if start is anchor_start else torch.zeros_like(e)
    for num_steps in (1, 2, 3):
        h = torch.cat([h, e], dim=-1) @ adapter.T
        for layer in (1, 2):
            h = run[layer](h, **at)
        expected = dense.lm_head(dense.model.norm(run[3](h, **at)))
        assert_close(model(x, num_steps=num_steps).logits, expected)


def test_the_start_is_random_in_training_alone():
    model = retrofit(host("llama"), CORE, 2)
    randomise(model.recurrence)
    first, second = (model.train()(tokens()).logits for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(model.eval()(tokens()).logits, model(tokens()).logits)
    state = random_start(32)(torch.zeros(64, 64, 32))
    assert state.std().item() == pytest.approx(math.sqrt(2 / (5 * 32)), rel=0.05)


def test_the_adapter_may_start_as_in_the_sources_file():
    inject = retrofit(host("llama"), CORE, 2, adapter_start=draw_adapter).recurrence.core.update.inject
    for half in (inject.state, inject.anchor):
        assert half.weight.abs().max() <= 1 / 8  # 1 / sqrt(2 * 32)
        assert half.weight.std().item() == pytest.approx(1 / 8 / math.sqrt(3), rel=0.1)


def test_without_an_adapter_at_the_first_step_one_step_is_always_the_shorter_host():
    model = retrofit(host("llama"), CORE, 2, drop=[1], host_first=True).eval()
    randomise(model.recurrence)
    assert isinstance(model.recurrence.core.update, HostFirst)
    expected = shorter("llama")(tokens()).logits
    assert torch.equal(model(tokens(), num_steps=1).logits, expected)
    assert not torch.equal(model(tokens(), num_steps=2).logits, expected)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_cached_is_uncached(name):
    model = retrofit(host(name), CORE, 3, drop=dropped(name)).eval()
    randomise(model.recurrence, std=0.1)
    prompt = padded()
    assert torch.equal(model.generate(**prompt, **GREEDY), model.generate(**prompt, **GREEDY, use_cache=False))


def test_it_learns_under_its_curriculum():
    model = retrofit(host("llama"), CORE, 4, drop=[1]).train()
    curriculum = rd.retrofit_curriculum(4, num_draws=4, grad_steps=2)
    for draw in range(4):
        model(tokens(), labels=tokens(), num_steps=curriculum(draw)).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())
    assert model.recurrence.core.update.inject.anchor.weight.grad.norm() > 0


# Bad input


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: retrofit(host("llama"), CORE, 2, drop=[3]), "overlaps with core"),
        (lambda: retrofit(host("llama"), CORE, 2, drop=[7]), "must name layers once each"),
        (lambda: retrofit(host("llama"), CORE, 0), "num_steps"),
        (lambda: drop_layers(host("llama"), range(5)), "one at least must stay"),
        (lambda: drop_layers(host("gemma2"), [1, 1]), "must name layers once each"),
        (lambda: drop_layers(host("dinov2"), [1]), "cannot say what 4 layers are left"),
        (lambda: adapted(0), "dim"),
    ],
    ids=["overlap", "outside", "no steps", "all", "twice", "config", "width"],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_number_is_no_list_of_layers(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as a user runs it
    with pytest.raises(ValueError, match="drop is 3, but must be a range or a list of layers"):
        drop_layers(host("llama"), 3)


def test_a_refusal_takes_no_layers_out():
    model = nn.Sequential(nn.ModuleList(nn.Linear(4, 4) for _ in range(4)))
    with pytest.raises(ValueError, match="give dim"):
        retrofit(model, [2], 2, drop=[1])
    assert len(model[0]) == 4
    assert len(retrofit(model, [2], 2, drop=[1], dim=4)[0]) == 3
