"""The native model as a model of transformers: it computes the same, and nothing of it is lost on the way."""

import copy
import json
from inspect import isclass, isfunction, signature

import pytest
import torch
from looped import DESCRIPTIONS, PICKING, config_of, made, some_tokens
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import recurrent_depth as rd
from recurrent_depth.hf import RecurrentDepthConfig, RecurrentDepthForCausalLM, RecurrentDepthModel
from recurrent_depth.hf.parts import BUILDERS, PARTS
from recurrent_depth.hf.versions import CACHE

every_builder = pytest.mark.parametrize("name", DESCRIPTIONS)


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and x.dtype == y.dtype and torch.equal(x, y) for (a, x), (b, y) in pairs)


def test_every_builder_is_among_those_that_are_tested():
    assert {config_of(name).builder for name in DESCRIPTIONS} == set(BUILDERS)


def test_every_update_of_the_library_has_a_name():
    found = {name for name in rd.__all__ if makes_an_update(getattr(rd, name))}
    assert found == {"damped", "gated", "halted", "plain", "step_encoded"}
    assert found <= set(PARTS)


def makes_an_update(value: object) -> bool:
    made = signature(value).return_annotation if isfunction(value) else None
    return isclass(made) and issubclass(made, rd.DepthUpdate)


@pytest.mark.parametrize("builder", [{}, {"builder": "rrt", "builder_arguments": {"rank": 2}}, {"builder": "mor"}])
def test_a_damped_loop_is_named_in_a_configuration(builder, tmp_path):
    model, tokens = made(**builder, update={"name": "damped", "share": 0.25}), some_tokens()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {part.share for part in loaded.modules() if isinstance(part, rd.DampedUpdate)} == {0.25}
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)


@every_builder
def test_it_computes_what_the_native_model_computes(name):
    model, tokens = made(name), some_tokens()
    with torch.no_grad():
        for num_steps in (None, 1, 2) if config_of(name).layout[2] > 1 else (None,):
            assert torch.equal(model(tokens, num_steps=num_steps).logits, model.native(tokens, num_steps))


@every_builder
def test_a_fresh_model_starts_as_its_builder_starts_it(name):
    config = config_of(name)
    torch.manual_seed(3)
    native = config.build()
    after = torch.rand(())
    torch.manual_seed(3)
    model = RecurrentDepthForCausalLM(config)
    assert same(native, model.native)
    assert torch.rand(()) == after


@every_builder
def test_a_saved_model_is_loaded_bit_for_bit(name, tmp_path):
    model, tokens = made(name), some_tokens()
    model.save_pretrained(tmp_path)
    loaded, base = AutoModelForCausalLM.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)
    assert type(loaded) is RecurrentDepthForCausalLM
    assert type(base) is RecurrentDepthModel
    assert same(model, loaded)
    assert same(model.model, base)
    torch.testing.assert_close(model(tokens).logits, loaded(tokens).logits)  # memory may be aligned otherwise
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == loaded.config.to_dict()


@every_builder
def test_each_tensor_is_stored_once(name, tmp_path):
    model = made(name)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    storages = {parameter.data_ptr(): parameter for parameter in model.state_dict().values()}
    assert sum(tensor.numel() for tensor in stored.values()) == sum(x.numel() for x in storages.values())
    assert sum(parameter.numel() for parameter in model.parameters()) == model.num_parameters()


@every_builder
def test_missing_weights_start_as_the_builder_starts_them_and_others_are_kept(name, tmp_path):
    model = made(name)
    special = starts_of(RecurrentDepthForCausalLM(model.config))
    state = {key: tensor for key, tensor in model.state_dict().items() if ".core.update." not in key}
    model.save_pretrained(tmp_path, state_dict=state)
    loaded = RecurrentDepthForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(tensor, loaded.state_dict()[key]) for key, tensor in state.items())
    assert all(torch.isfinite(tensor).all() for tensor in loaded.state_dict().values())
    for key, tensor in starts_of(loaded).items():
        assert torch.equal(tensor, special[key]), key


@every_builder
def test_a_model_from_the_meta_device_starts_as_any_other(name):
    with torch.device("meta"):
        model = RecurrentDepthForCausalLM(config_of(name))
    model.to_empty(device="cpu").init_weights()
    torch.manual_seed(0)
    expected = starts_of(RecurrentDepthForCausalLM(config_of(name)))
    assert starts_of(model).keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in starts_of(model).items())
    assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())


def starts_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights of the update that do not start at random."""
    update = {key: x for key, x in model.state_dict().items() if ".core.update." in key}
    return {key: x for key, x in update.items() if x.ndim < 2 or not torch.std(x) or torch.equal(x, torch.eye(len(x)))}


@pytest.mark.parametrize("bias", [4.0, 0.0, -1.0])
def test_the_gate_starts_and_stays_where_the_configuration_says(bias, tmp_path):
    update = {"name": "gated", "bias": bias}
    fresh = RecurrentDepthForCausalLM(config_of(update=update))
    of = lambda model: model.native.core.update.gate.write.bias  # noqa: E731
    assert (of(fresh) == bias).all()
    fresh.init_weights()
    assert (of(fresh) == bias).all()
    nn.init.normal_(of(fresh))
    fresh.save_pretrained(tmp_path / "whole")
    assert torch.equal(of(RecurrentDepthForCausalLM.from_pretrained(tmp_path / "whole")), of(fresh))
    without = {key: x for key, x in fresh.state_dict().items() if ".gate." not in key}
    fresh.save_pretrained(tmp_path / "without", state_dict=without)
    assert (of(RecurrentDepthForCausalLM.from_pretrained(tmp_path / "without")) == bias).all()


def test_the_papers_bias_is_the_default():
    assert (RecurrentDepthForCausalLM(config_of()).native.core.update.gate.write.bias == 4).all()


def test_huginns_missing_weights_are_drawn_as_huginns(tmp_path):
    model = made("huginn", dim=64)
    model.save_pretrained(tmp_path, state_dict={"model.transformer.norm.weight": model.native.norm.weight})
    weight = RecurrentDepthForCausalLM.from_pretrained(tmp_path).native.prelude.blocks[0].attention.qkv.weight
    std = (2 / (5 * 64)) ** 0.5
    assert weight.std().item() == pytest.approx(std, rel=0.05)
    assert weight.abs().max() <= 3 * std


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_is_loaded_in_half_precision(dtype, tmp_path):
    made().save_pretrained(tmp_path)
    model = RecurrentDepthForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model(some_tokens()).logits.dtype == dtype


def test_hidden_states_are_embedding_blocks_steps_blocks_and_what_the_head_reads():
    model, tokens = made(), some_tokens()
    native, out = model.native, model(tokens, output_hidden_states=True, num_steps=2)
    prelude, _, _, coda = native.layout
    assert len(out.hidden_states) == prelude + 2 + coda + 2
    positions = torch.arange(tokens.shape[1])[None]
    assert torch.equal(out.hidden_states[0], native.embed(tokens, positions))
    states = native.trajectory(tokens, 2, every_step=True).states
    assert all(torch.equal(a, b.h) for a, b in zip(out.hidden_states[1 + prelude :], states, strict=False))
    assert torch.equal(native.norm(out.hidden_states[-2]), out.hidden_states[-1])
    assert torch.equal(native.head(out.hidden_states[-1], native.embed.token.weight), out.logits)
    assert torch.equal(model.model(tokens, num_steps=2).last_hidden_state, out.hidden_states[-1])
    assert model(tokens).hidden_states is None


@every_builder
def test_there_are_as_many_hidden_states_as_documented(name):
    model = made(name)
    prelude, _, num_steps, coda = model.native.layout
    assert len(model(some_tokens(), output_hidden_states=True).hidden_states) == prelude + num_steps + coda + 2
    model.config.output_hidden_states = True
    assert len(model(some_tokens()).hidden_states) == prelude + num_steps + coda + 2


def test_states_and_gates_of_each_step_come_on_request():
    model, tokens = made(), some_tokens()
    out, states = model(tokens, output_steps=True), model.native.trajectory(tokens, every_step=True).states
    assert [torch.equal(a, b.h) for a, b in zip(out.step_states, states, strict=True)] == [True] * 3
    assert [torch.equal(a, 1 - b.write) for a, b in zip(out.gates, states, strict=True)] == [True] * 3
    assert model(tokens).step_states is None


def test_a_forward_leaves_no_hook_behind():
    model = made()
    with pytest.raises(ValueError, match="tokens"):
        model(torch.full((1, 3), 99), output_hidden_states=True)
    model(some_tokens(), output_hidden_states=True)
    assert not any(module._forward_hooks for module in model.native.embed.modules())


@pytest.mark.parametrize(
    "kv, num_layers",
    [("KeepAll", 8), ("KeepMean", 4), ({"name": "KeepCyclic", "num": 2}, 6), ({"name": "KeepCyclic", "num": 9}, 8)],
)
def test_num_hidden_layers_is_what_a_cache_holds(kv, num_layers):
    model = made(kv=kv)
    assert model.config.num_hidden_layers == num_layers
    assert len(model(some_tokens(), use_cache=True)[CACHE].layers) == num_layers


def test_a_blends_weights_are_saved_with_the_model(tmp_path):
    kv = {"name": "KeepBlend", "num_layers": 2, "num_steps": 3, "num_kv_heads": 2, "head_size": 8}
    model = made(kv=kv)
    nn.init.normal_(model.model.kv.keys)
    model.save_pretrained(tmp_path)
    assert torch.equal(RecurrentDepthForCausalLM.from_pretrained(tmp_path).model.kv.keys, model.model.kv.keys)
    native = model.native.state_dict().items()
    model.save_pretrained(tmp_path, state_dict={f"model.transformer.{name}": x for name, x in native})
    assert not RecurrentDepthForCausalLM.from_pretrained(tmp_path).model.kv.keys.any()


def test_a_tuple_is_given_on_request():
    model, tokens = made(), some_tokens()
    assert torch.equal(model(tokens, return_dict=False, use_cache=False)[0], model(tokens).logits)


def test_logits_of_the_last_tokens_alone():
    model, tokens = made(), some_tokens()
    logits = model(tokens).logits
    assert torch.equal(model(tokens, logits_to_keep=2).logits, logits[:, -2:])
    assert torch.equal(model(tokens, logits_to_keep=torch.tensor([1, 4])).logits, logits[:, [1, 4]])


@pytest.mark.parametrize("name", ["grt", "grt-llama", "huginn", "albert"])
def test_the_vocabulary_can_grow(name, tmp_path):
    model, tokens = made(name), some_tokens()
    before = model(tokens).logits
    model.resize_token_embeddings(48, mean_resizing=False)
    torch.testing.assert_close(model(tokens).logits[..., :40], before)
    model(torch.full((1, 2), 47))
    model.save_pretrained(tmp_path)
    assert same(model, RecurrentDepthForCausalLM.from_pretrained(tmp_path))


def test_a_copy_is_a_model_of_its_own():
    model, tokens = made(attn_implementation="eager"), some_tokens()
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("sdpa")
    assert model.config._attn_implementation == "eager"
    assert twin.native.core.stack.blocks[0].attention.attend.config is twin.config
    torch.testing.assert_close(twin(tokens).logits, model(tokens).logits)


def test_the_configuration_says_what_others_read(tmp_path):
    config = config_of("grt-llama")
    config.save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    assert said["model_type"] == "recurrent_depth"
    assert said["layout"] == [1, 2, 3, 1]
    assert (config.num_key_value_heads, config.head_dim, config.tie_word_embeddings) == (1, 8, False)
    assert config_of().tie_word_embeddings


def test_a_router_is_seen():
    assert [name for name in DESCRIPTIONS if made(name).model.is_routed] == list(PICKING)


def test_the_native_model_can_be_used_as_ever():
    model, tokens = made(), some_tokens()
    written = rd.generate(model.native, tokens, max_new_tokens=3)
    assert written.shape == (2, 10)
    assert rd.accounting.num_parameters(model.native) == model.num_parameters()


def test_arguments_of_a_preset_are_words_of_a_configuration():
    config = RecurrentDepthConfig()
    with torch.device("meta"):
        model, preset = config.build(), rd.presets.grt_small()
    assert {n: x.shape for n, x in model.state_dict().items()} == {n: x.shape for n, x in preset.state_dict().items()}
