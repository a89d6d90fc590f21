"""Laws of a graft on every architecture: the host at one step, and at every depth before something is trained."""

import copy
import itertools
from functools import partial

import hosts
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import recurrent_depth as rd
from recurrent_depth.hf import corrected, graft, is_graft, ungraft
from recurrent_depth.hf.versions import CACHE

each_host = pytest.mark.parametrize("name", [*hosts.DECODERS, *hosts.ENCODERS])
each_decoder = pytest.mark.parametrize("name", hosts.DECODERS)
POLICIES = [rd.KeepAll(), rd.KeepFirst(), rd.KeepLast(), rd.KeepMean(), rd.KeepCyclic(2)]


each_update = pytest.mark.parametrize("update", [corrected, rd.gated, rd.plain])


def grads(model, name, **arguments):
    model.zero_grad()
    hosts.outcome(model(**hosts.inputs(name), **arguments)).square().mean().backward()
    return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


@each_host
@each_update
def test_one_step_is_the_host_whatever_was_learned(update, name):
    model, inputs = hosts.host(name), hosts.inputs(name)
    expected = hosts.outcome(model(**inputs))
    graft(model, range(1, 4), 3, update=update)
    hosts.randomise(model.recurrence)
    assert torch.equal(hosts.outcome(model(**inputs, num_steps=1)), expected)
    assert not torch.allclose(hosts.outcome(model(**inputs)), expected, atol=1e-2)


@each_host
@each_update
def test_gradients_of_one_step_are_the_hosts(update, name):
    model = hosts.host(name).train()
    expected = grads(model, name)
    graft(model, range(1, 4), 3, update=update)
    hosts.randomise(model.recurrence)
    found = grads(model, name, num_steps=1)
    assert all(torch.equal(found[key], grad) for key, grad in expected.items())
    assert not any(found[key].any() for key in found.keys() - expected.keys())


@each_decoder
@each_update
def test_the_cache_of_one_step_is_the_hosts(update, name):
    model = hosts.host(name)
    layers = hosts.cache_of(model(hosts.tokens())).layers
    graft(model, range(1, 4), 3, update=update)
    hosts.randomise(model.recurrence)
    cached = hosts.cache_of(model(hosts.tokens(), num_steps=1)).layers
    assert len(cached) == len(layers)
    for ours, theirs in zip(cached, layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)


@each_host
def test_before_training_a_gated_graft_is_its_host_bit_for_bit_at_every_depth_and_bias(name):
    model, inputs = hosts.host(name), hosts.inputs(name)
    expected = hosts.outcome(model(**inputs))
    for update, bias in itertools.product((corrected, rd.gated), (0.0, 4.0, -1.5)):
        graft(model, range(1, 4), 3, update=partial(update, bias=bias))
        for num_steps in (1, 2, 4):
            assert torch.equal(hosts.outcome(model(**inputs, num_steps=num_steps)), expected)
        ungraft(model)


@each_decoder
def test_before_training_a_gated_graft_decodes_as_its_host_under_every_policy(name):
    model, prompt = hosts.host(name), hosts.padded()
    settings = {"max_new_tokens": 3, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(**prompt, **settings)
    graft(model, range(1, 4), 3)
    for kv in POLICIES:
        model.recurrence.kv = kv
        found = model.generate(**prompt, **settings)
        assert torch.equal(found.sequences, expected.sequences)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found.logits, expected.logits, strict=True))


@given(
    name=st.sampled_from(list(hosts.DECODERS)),
    update=st.sampled_from([corrected, rd.gated]),
    bias=st.floats(-8, 8),
    kv=st.sampled_from([*POLICIES, rd.KeepCyclic(3)]),
    depths=st.lists(st.integers(1, 5), min_size=3, max_size=3),
)
def test_before_training_a_gated_graft_is_its_host_at_any_depth_bias_and_policy(name, update, bias, kv, depths):
    """Read whole and through a cache, token by token, each call at another depth."""
    model, text = hosts.host(name), hosts.tokens()
    expected = model(text, use_cache=False).logits
    graft(model, range(1, 4), depths[0], update=partial(update, bias=bias), kv=kv)
    assert torch.equal(model(text, use_cache=False).logits, expected)
    ungraft(model)
    alone = read(model, text, [{}] * 3)
    graft(model, range(1, 4), 2, update=partial(update, bias=bias), kv=kv)
    found = read(model, text, [{"num_steps": num_steps} for num_steps in depths])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, alone, strict=True))


@torch.no_grad()
def read(model, text, calls):
    """The logits of a text's pieces through one cache, each with settings of its own."""
    cache, found = {}, []
    for piece, settings in zip(text.split([7, 1, 1], dim=1), calls, strict=True):
        out = model(piece, use_cache=True, **cache, **settings)
        cache = {CACHE: hosts.cache_of(out)}
        found.append(out.logits)
    return found


@each_host
def test_ungraft_gives_the_host_back(name):
    model = hosts.host(name)
    before, config, kind = copy.deepcopy(model), model.config.to_dict(), type(model)
    kinds = [type(part) for part in model.modules()]
    expected = hosts.outcome(model(**hosts.inputs(name)))
    graft(model, range(1, 4), 3, drop=(0,))
    assert is_graft(model)
    assert isinstance(model, kind)
    assert model.config.recurrence["core"] == [1, 4]
    assert ungraft(model) is model
    assert not is_graft(model)
    assert type(model) is kind
    assert [type(part) for part in model.modules()] == kinds
    assert model.config.to_dict() == config
    assert all(torch.equal(x, model.state_dict()[key]) for key, x in before.state_dict().items())
    assert vars(model).keys() == vars(before).keys()
    assert torch.equal(hosts.outcome(model(**hosts.inputs(name))), expected)


@each_host
def test_the_hosts_names_stay_and_the_new_ones_are_the_recurrences(name):
    model = hosts.host(name)
    before = {key: x.data_ptr() for key, x in model.state_dict(keep_vars=True).items()}
    graft(model, range(1, 4), 3)
    after = {key: x.data_ptr() for key, x in model.state_dict(keep_vars=True).items()}
    assert after.items() >= before.items()
    assert all(key.startswith("recurrence.core.update.") for key in after.keys() - before.keys())


@each_decoder
def test_every_run_of_a_layer_has_hidden_states_and_attentions_of_its_own(name):
    model, tokens = hosts.host(name, attn_implementation="eager"), hosts.tokens()
    wanted = {"output_hidden_states": True, "output_attentions": True}
    host = model(tokens, **wanted)
    graft(model, range(1, 4), 3)
    one, three = model(tokens, **wanted, num_steps=1), model(tokens, **wanted)
    if len(three.hidden_states) == 6:  # the host collects what it sees itself, which is the anchor within the core
        assert name in ("bloom", "falcon", "gptj")
        return
    assert (len(three.hidden_states), len(three.attentions)) == (1 + 2 + 3 * 3, 2 + 3 * 3)
    assert all(torch.equal(x, y) for x, y in zip(one.hidden_states, host.hidden_states, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(one.attentions, host.attentions, strict=True))


def test_a_host_that_scales_by_its_layers_number_is_met_exactly():
    model = hosts.host("gpt2", scale_attn_by_inverse_layer_idx=True)
    expected = model(hosts.tokens()).logits
    graft(model, range(1, 4), 3)
    assert torch.equal(model(hosts.tokens()).logits, expected)


def test_a_bfloat16_host_gets_a_bfloat16_recurrence_and_is_met_exactly():
    model = hosts.host("llama").bfloat16()
    expected = model(hosts.tokens()).logits
    graft(model, range(1, 4), 3)
    assert {p.dtype for p in model.recurrence.parameters()} == {torch.bfloat16}
    assert torch.equal(model(hosts.tokens()).logits, expected)


def test_on_the_meta_device_a_graft_stays_there():
    model = graft(hosts.host("llama").to("meta"), range(1, 4), 3)
    assert all(p.is_meta for p in model.parameters())
    assert model(hosts.tokens().to("meta")).logits.shape == (2, 9, hosts.VOCAB)


def test_a_copy_has_a_loop_of_its_own():
    model = hosts.grafted("llama")
    twin = copy.deepcopy(model)
    expected = model(hosts.tokens()).logits
    assert torch.equal(twin(hosts.tokens()).logits, expected)
    hosts.randomise(twin.recurrence)
    assert torch.equal(model(hosts.tokens()).logits, expected)
    assert not torch.equal(twin(hosts.tokens()).logits, expected)


def test_a_copy_takes_nothing_along_of_a_layer_that_was_called_by_itself():
    model, state = hosts.grafted("llama"), torch.randn(2, 9, 32, requires_grad=True) * 2
    calls = []
    hook = model.model.layers[1].register_forward_pre_hook(lambda *call: calls.append(call), with_kwargs=True)
    model(hosts.tokens())
    hook.remove()
    given = calls[0][2]
    model.model.layers[1](state, **given | {"past_key_values": None})
    assert copy.deepcopy(model).recurrence._forward.anchor is None


def test_a_graft_goes_through_pickle(tmp_path):
    model = hosts.grafted("llama", drop=(0,))
    torch.save(model, tmp_path / "model.pt")
    twin = torch.load(tmp_path / "model.pt", weights_only=False)
    assert type(twin) is type(model)
    assert torch.equal(twin(hosts.tokens()).logits, model(hosts.tokens()).logits)


def test_plain_looping_replaces_the_state_by_what_the_blocks_say():
    model, tokens = hosts.host("llama"), hosts.tokens()
    layers = list(model.model.layers)
    graft(model, range(1, 4), 2, update=rd.plain)
    looped = model(tokens).logits
    ungraft(model)
    model.model.layers = torch.nn.ModuleList([layers[0], *layers[1:4], *layers[1:4], layers[4]])
    model.config.num_hidden_layers = 8
    model.config.layer_types = None
    torch.testing.assert_close(looped, model(tokens, use_cache=False).logits)


def test_dropped_layers_are_left_out():
    model, tokens = hosts.host("llama"), hosts.tokens()
    layers = list(model.model.layers)
    graft(model, range(3, 5), 1, drop=(0, 2))
    shorter = model(tokens).logits
    ungraft(model)
    model.model.layers = torch.nn.ModuleList([layers[1], *layers[3:]])
    model.config.num_hidden_layers = 3
    assert torch.equal(shorter, model(tokens, use_cache=False).logits)


def test_a_start_that_is_the_anchor_alone_reads_no_state():
    inject = rd.ConcatProjection(8)
    rd.Injection.start_at_anchor(rd.KeepState())  # nothing to start there
    inject.start_at_anchor()
    anchor, state = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    assert torch.equal(inject(state, inject.begin(anchor, rd.Call(2)), 1), anchor)


def test_outliers_of_the_state_do_not_rule_what_the_correction_learns():
    """A hidden state with one feature a thousand times as large: each feature's gradient is of the same size."""
    torch.manual_seed(0)
    anchor = torch.randn(2, 5, 8)
    anchor[..., 3] *= 1000
    sizes = []
    for update in (corrected(8), rd.gated(8, state_noise=0.0)):
        update.inject.start_at_anchor()
        seen = update.inject(anchor, update.inject.begin(anchor, rd.Call(2)), 1)
        assert torch.equal(seen, anchor)
        seen.backward(torch.ones_like(seen))
        sizes.append(update.inject.state.weight.grad.abs().max())
    assert sizes[0] < 2 * 5 * 8**0.5 + 1e-3 < sizes[1]  # no normalised feature is above the root of the width


@each_update
def test_a_shallower_run_of_a_graft_is_a_prefix(update):
    model, states = hosts.grafted("llama", update=update), []
    step = model.recurrence.core.step

    def noting(state, at, index, kv=None):
        states.append(step(state, at, index, kv))
        return states[-1]

    model.recurrence.core.step = noting
    model(hosts.tokens(), num_steps=4)
    deep = states[:]
    states.clear()
    model(hosts.tokens(), num_steps=2)
    assert len(deep) == 4
    assert all(torch.equal(shallow.h, deeper.h) for shallow, deeper in zip(states, deep[:2], strict=True))
