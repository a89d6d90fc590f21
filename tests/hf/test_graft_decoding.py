"""Decoding with grafts: cached equals uncached, for every architecture and way to decode."""

import hosts
import pytest
import torch
from transformers import DynamicCache, GenerationConfig, StaticCache

import recurrent_depth as rd
from recurrent_depth.hf.versions import CACHE

each_decoder = pytest.mark.parametrize("name", hosts.DECODERS)


def decode(model, **settings):
    wanted = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    return model.generate(**hosts.padded(), **wanted | settings)


def assert_same(found, expected):
    assert torch.equal(found.sequences, expected.sequences)
    for ours, theirs in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


@each_decoder
def test_cached_decoding_of_padded_rows_equals_uncached(name):
    model = hosts.grafted(name)
    for settings in ({}, {"num_steps": 2}, {"num_beams": 2}):
        assert_same(decode(model, **settings), decode(model, use_cache=False, **settings))
    assert_same(decode(model, cache_implementation="static", disable_compile=True), decode(model))


@each_decoder
def test_dropped_layers_keep_count_in_every_cache(name):
    model = hosts.grafted(name, drop=(0,))
    expected = decode(model, use_cache=False)
    assert_same(decode(model), expected)
    assert_same(decode(model, cache_implementation="static", disable_compile=True), expected)


@each_decoder
def test_padding_changes_nothing(name):
    model, batch = hosts.grafted(name), hosts.padded()
    positions = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    takes = {} if name == "bloom" else {"position_ids": positions}  # bloom counts in its mask
    padded = model(**batch, **takes).logits[1, -4:]
    torch.testing.assert_close(padded, model(batch["input_ids"][1:, -4:]).logits[0], atol=2e-5, rtol=1e-4)


def test_a_prompt_read_in_chunks_is_read_alike():
    model, tokens = hosts.grafted("gemma3"), hosts.tokens(length=11)
    expected, cache = model(tokens).logits, DynamicCache(config=model.config)
    parts = [model(part, **{CACHE: cache}).logits for part in tokens.split([6, 3, 2], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "make",
    [
        lambda config: DynamicCache(),
        lambda config: DynamicCache(config=config),
        lambda config: StaticCache(config=config, max_cache_len=32),
    ],
    ids=["growing", "configured", "static"],
)
def test_a_cache_that_the_user_made_serves(make):
    model = hosts.grafted("llama")
    assert_same(decode(model, **{CACHE: make(model.config)}), decode(model))


def test_a_row_is_not_changed_by_its_neighbours():
    model, tokens = hosts.grafted("llama"), hosts.tokens()
    settings = {"max_new_tokens": 5, "do_sample": False}
    both = model.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)
    alone = model.generate(tokens[1:], attention_mask=torch.ones_like(tokens[1:]), **settings)
    assert torch.equal(both[1:], alone)


@pytest.mark.parametrize("kv", [rd.KeepAll(), rd.KeepMean()], ids=lambda kv: type(kv).__name__)
def test_assisted_decoding_is_greedy_decoding(kv):
    model, tokens = hosts.grafted("llama", kv=kv), hosts.tokens(rows=1)
    settings = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    expected = model.generate(tokens, **settings)
    assert torch.equal(model.generate(tokens, **settings, assistant_model=hosts.host("llama")), expected)
    assert torch.equal(model.generate(tokens, **settings, prompt_lookup_num_tokens=2), expected)


def test_sampling_draws_alike_with_and_without_a_cache():
    model = hosts.grafted("llama")
    settings = {"do_sample": True, "top_k": 5}
    torch.manual_seed(3)
    found = decode(model, **settings)
    torch.manual_seed(3)
    assert_same(found, decode(model, use_cache=False, **settings))


def test_the_depth_of_a_call_ends_with_it():
    model, tokens = hosts.grafted("llama"), hosts.tokens()
    deep, shallow = model(tokens).logits, model(tokens, num_steps=1).logits
    with pytest.raises(ValueError, match="specify exactly one"):
        model(num_steps=1)
    assert torch.equal(model(tokens).logits, deep)
    with model.recurrence.at_depth(1):
        assert torch.equal(model(tokens).logits, shallow)
        assert torch.equal(model(tokens, num_steps=3).logits, deep)
        assert torch.equal(model(tokens).logits, shallow)
    model.recurrence.num_steps = 1
    assert torch.equal(model(tokens).logits, shallow)


def test_a_generation_config_may_say_the_depth_and_a_call_another():
    model = hosts.grafted("llama")
    by_depth = {num_steps: decode(model, num_steps=num_steps) for num_steps in (1, 2)}
    assert not torch.equal(by_depth[1].logits[0], by_depth[2].logits[0])
    model.generation_config.num_steps = 1
    assert_same(decode(model), by_depth[1])
    assert_same(decode(model, num_steps=2), by_depth[2])
    assert_same(decode(model, generation_config=GenerationConfig(num_steps=2)), by_depth[2])


def test_a_deeper_call_reads_a_shallower_past():
    model, tokens = hosts.grafted("llama"), hosts.tokens(length=10)
    cache = DynamicCache(config=model.config)
    model(tokens[:, :6], num_steps=1, **{CACHE: cache})
    out = model(tokens[:, 6:], num_steps=3, **{CACHE: cache})
    assert out.logits.isfinite().all()
    assert {layer.get_seq_length() for layer in cache.layers} == {10}
