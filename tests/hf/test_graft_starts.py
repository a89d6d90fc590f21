"""How a graft's weights start, also by transformers' own `init_weights` and from the meta device."""

from functools import partial

import hosts
import pytest
import torch
import transformers
from torch import nn

import recurrent_depth as rd
from recurrent_depth.hf import corrected, graft, load_graft, recurse


def on_meta(name: str = "llama", **settings):
    model, config, arguments = hosts.DECODERS[name]
    with torch.device("meta"):
        host = getattr(transformers, model)(getattr(transformers, config)(**arguments)).eval()
    return graft(host, range(1, 4), 3, **settings)


def from_meta(name: str = "llama", **settings):
    """A graft made on the meta device, then given memory that holds no numbers, then its weights."""
    model = on_meta(name, **settings).to_empty(device="cpu")
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            nn.init.constant_(tensor, torch.nan)
    torch.manual_seed(0)
    model.init_weights()
    return model


def bias_of(model):
    return model.recurrence.core.update.inner.gate.write.bias


UPDATES = {"the default": corrected, "gated": rd.gated, "an open gate": partial(rd.gated, bias=-1.5)}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_from_the_meta_device_a_gated_graft_is_its_host_at_every_depth(name, update):
    model = from_meta(name, update=update)
    expected = model(hosts.tokens(), num_steps=1).logits
    assert expected.isfinite().all()
    assert all(parameter.isfinite().all() for parameter in model.recurrence.parameters())
    for num_steps in (2, 4):
        assert torch.equal(model(hosts.tokens(), num_steps=num_steps).logits, expected)


@pytest.mark.parametrize("update", [corrected, rd.gated])
def test_from_the_meta_device_weights_start_as_elsewhere(update):
    model, twin = from_meta(update=update), graft(hosts.host("llama"), range(1, 4), 3, update=update)
    found, expected = (dict(one.recurrence.named_parameters()) for one in (model, twin))
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name].std(), weight.std(), rtol=0.2, atol=1e-8)
        torch.testing.assert_close(found[name].mean(), weight.mean(), rtol=0.0, atol=0.005)


def test_from_the_meta_device_a_plain_graft_is_its_host_at_one_step():
    model = from_meta(update=rd.plain)
    layers = [model(hosts.tokens(), num_steps=steps, output_hidden_states=True).hidden_states for steps in (1, 2)]
    assert torch.equal(layers[0][2], layers[1][2])
    assert layers[1][-1].isfinite().all()
    assert not list(model.recurrence.parameters())


def test_from_the_meta_device_a_learned_policy_starts_too():
    sizes = {"num_layers": 3, "num_steps": 3, "num_kv_heads": 2, "head_size": 8}
    model = from_meta(kv=rd.KeepBlend(**sizes))
    fresh = dict(rd.KeepBlend(**sizes).named_parameters())
    assert fresh
    assert all(torch.equal(weight, fresh[name]) for name, weight in model.recurrence.kv.named_parameters())


def test_from_the_meta_device_corrections_per_step_start_as_none():
    model, config, arguments = hosts.DECODERS["llama"]
    with torch.device("meta"):
        host = getattr(transformers, model)(getattr(transformers, config)(**arguments)).eval()
    recursive = recurse(host, range(1, 5), 2, rank=2).to_empty(device="cpu")
    recursive.init_weights()
    corrections = dict(recursive.recurrence.named_parameters())
    assert corrections
    assert not any(weight.any() for name, weight in corrections.items() if not name.endswith(".A"))
    assert recursive(hosts.tokens()).logits.isfinite().all()


@pytest.mark.parametrize("update", [corrected, rd.gated])
@pytest.mark.parametrize("again", [lambda model: model.init_weights(), lambda model: model.apply(model._init_weights)])
def test_weights_that_have_their_start_keep_it_and_what_they_learned(update, again):
    model = graft(hosts.host("llama"), range(1, 4), 3, update=update)
    for trained in (False, True):
        if trained:
            hosts.randomise(model.recurrence)
        before = {name: weight.clone() for name, weight in model.recurrence.state_dict().items()}
        again(model)
        assert all(torch.equal(weight, before[name]) for name, weight in model.recurrence.state_dict().items())


def test_a_loaded_graft_keeps_what_it_learned(tmp_path):
    model = hosts.grafted("llama")
    model.save_pretrained(tmp_path)
    again = load_graft(tmp_path).eval()
    again.init_weights()
    assert torch.equal(again(hosts.tokens()).logits, model(hosts.tokens()).logits)


def test_a_graft_of_a_part_keeps_what_it_learned_too():
    model = hosts.host("llama")
    graft(model.model, range(1, 4), 3)
    hosts.randomise(model.model.recurrence)
    expected = model(hosts.tokens()).logits
    model.init_weights()
    assert torch.equal(model(hosts.tokens()).logits, expected)


def test_a_new_layer_of_the_host_gets_the_hosts_start():
    model = hosts.grafted("llama", num_steps=2)
    model.resize_token_embeddings(hosts.VOCAB + 200, mean_resizing=False)
    added = model.get_input_embeddings().weight[hosts.VOCAB :]
    assert 0.015 < added.std() < 0.025


STARTS = {
    "the default": (corrected, 0.0),
    "a bias of ones own": (partial(corrected, bias=2.0), 2.0),
    "gated": (rd.gated, 0.0),
    "gated, another argument": (partial(rd.gated, state_noise=0.0), 0.0),
    "gated, the paper's bias": (partial(rd.gated, bias=4.0), 4.0),
    "gated, twice": (partial(partial(rd.gated, bias=-1.0), state_noise=0.0), -1.0),
    "a function of ones own": (lambda dim: rd.gated(dim), 4.0),
}


@pytest.mark.parametrize("update, bias", STARTS.values(), ids=STARTS)
def test_the_gates_bias_starts_at_0_unless_it_is_given(update, bias):
    assert (bias_of(graft(hosts.host("llama"), range(1, 4), 3, update=update)) == bias).all()


def test_a_gate_within_another_update_starts_at_0_too():
    model = graft(hosts.host("llama"), range(1, 4), 3, update=partial(rd.halted, inner=rd.gated, bias=-3.0))
    halting = model.recurrence.core.update.inner
    assert (halting.inner.gate.write.bias == 0).all()
    assert model.config.recurrence["update"]["arguments"]["bias"] == -3.0
    assert model.config.recurrence["update"]["arguments"]["inner"] == {"name": "gated", "arguments": {"bias": 0.0}}


def test_a_saved_graft_says_where_its_gate_started(tmp_path):
    model = graft(hosts.host("llama"), range(1, 4), 3, update=rd.gated)
    assert model.config.recurrence["update"] == {"name": "gated", "arguments": {"bias": 0.0}}
    hosts.randomise(model.recurrence)
    model.save_pretrained(tmp_path)
    again = load_graft(tmp_path).eval()
    assert again.config.recurrence["update"] == model.config.recurrence["update"]
    assert torch.equal(bias_of(again), bias_of(model))
