"""The decoding memory in closed form: against published figures, the cache's own count, and live tensors."""

import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from strategies import dtypes, few, layouts

import recurrent_depth as rd
from recurrent_depth import accounting, presets

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from live_bytes import LiveBytes

GIB = 2**30
FORMS = {
    "gpt2": rd.GPT2Form,
    "gpt2-biases": partial(rd.GPT2Form, bias=True),
    "llama": rd.LlamaForm,
    "llama-gqa": partial(rd.LlamaForm, num_kv_heads=1),
    "llama-untied": partial(rd.LlamaForm, tied=False, arrangement=rd.BranchSandwich),
    "llama-narrow": partial(rd.LlamaForm, hidden=32, arrangement=rd.ResidualSandwich),
}
POLICIES = {
    "all": lambda layout: rd.KeepAll(),
    "first": lambda layout: rd.KeepFirst(),
    "last": lambda layout: rd.KeepLast(),
    "mean": lambda layout: rd.KeepMean(),
    "cyclic": lambda layout: rd.KeepCyclic(2),
    "blend": lambda layout: rd.KeepBlend(num_layers=layout.core, num_steps=4, num_kv_heads=1, head_size=8),
}
forms, policies = st.sampled_from(list(FORMS)), st.sampled_from(list(POLICIES))


def model_of(layout, form="gpt2", dtype=torch.float32, dim=16, num_heads=2, update=rd.gated, **sizes):
    sizes = {"vocab_size": 7, "context_length": 512, **sizes}
    model = rd.grt(layout, dim=dim, num_heads=num_heads, form=FORMS[form], update=update, **sizes)
    return model.to(dtype).eval()


def on_meta(build):
    with torch.device("meta"):
        return build()


def filled(model, kv, num_tokens, batch, num_steps=None, max_tokens=None):
    """A cache that has read a text."""
    cache = rd.DepthCache(kv, max_tokens=max_tokens)
    with torch.no_grad():
        rd.extend(model, torch.zeros(batch, num_tokens, dtype=torch.long), cache, num_steps, logits_to_keep=1)
    return cache


# Published figures: weights of all parameters, embeddings included, and the cache's keys and values, in bfloat16


def published(preset, kv=rd.KeepAll(), **call):
    return accounting.decode_memory(on_meta(preset), 1024, kv=kv, **call)


def test_the_published_decode_memory_of_the_medium_models():
    dense = published(presets.gpt2_medium, batch=32).stored
    full = published(presets.grt_medium, batch=32).stored
    mean = published(presets.grt_medium, rd.KeepMean(), batch=32).stored
    assert dense / GIB == pytest.approx(3.66, abs=0.005)
    assert full / dense == pytest.approx(0.91, abs=0.005)
    assert mean / dense == pytest.approx(0.39, abs=0.005)
    assert mean / GIB == pytest.approx(1.44, abs=0.005)


def test_the_published_parts_of_the_large_models():
    dense, grt = published(presets.gpt2_large, batch=4), published(presets.grt_large, batch=4)
    assert dense.cache / 1e6 == pytest.approx(755, abs=0.5)
    assert dense.weights / 1e6 == pytest.approx(1548, abs=1)  # ours have no biases
    assert grt.weights / 1e6 == pytest.approx(580, abs=0.5)


def test_the_dense_cache_is_keys_and_values_of_every_block():
    assert accounting.cache_bytes(on_meta(presets.gpt2_medium), batch=32) == 24 * 2 * 1024 * 1024 * 32 * 2


# Weights and cache are exact


@few
@given(layouts, forms, dtypes)
def test_weights_are_the_bytes_of_the_parameters(layout, form, dtype):
    model = model_of(layout, form, dtype)
    assert accounting.weight_bytes(model, dtype) == sum(p.nbytes for p in model.parameters())


@given(layouts, forms, policies, dtypes, st.integers(1, 3), st.integers(1, 9), st.integers(0, 5), st.data())
def test_the_cache_is_what_it_says_of_itself(layout, form, policy, dtype, batch, num_tokens, spare, data):
    model, kv = model_of(layout, form, dtype), POLICIES[policy](layout).to(dtype)
    if policy == "blend":
        form, model = "llama-gqa", model_of(layout, "llama-gqa", dtype)
    num_steps = data.draw(st.none() | st.integers(1, layout.num_steps))
    capacity = num_tokens + spare
    cache = filled(model, kv, num_tokens, batch, num_steps, max_tokens=capacity)
    predict = partial(accounting.cache_bytes, tokens=capacity, num_steps=num_steps, batch=batch, dtype=dtype, kv=kv)
    assert predict(model) == predict(accounting.outline(model)) == cache.num_bytes


def test_a_cache_that_grows_is_counted_at_its_capacity():
    model = model_of(rd.Layout(1, 2, 3, 1))
    cache = filled(model, rd.KeepAll(), num_tokens=70, batch=2)
    assert cache.capacity > 70
    assert accounting.cache_bytes(model, cache.capacity, batch=2, dtype=torch.float32) == cache.num_bytes


@given(layouts, forms, st.integers(1, 4))
def test_one_copy_takes_a_step_of_the_full_cache(layout, form, batch):
    of = accounting.outline(model_of(layout._replace(prelude=0, coda=0), form))
    full = accounting.cache_bytes(of, batch=batch, tokens=8)
    for kv in (rd.KeepMean(), rd.KeepFirst(), rd.KeepLast()):
        assert layout.num_steps * accounting.cache_bytes(of, batch=batch, tokens=8, kv=kv) == full


# Activations, against all tensors that are alive


def measured(model, tokens, cache):
    with torch.no_grad(), LiveBytes() as live:
        rd.extend(model, tokens, cache, logits_to_keep=1)
    return live.peak


class Peaks(NamedTuple):
    """What is predicted beside the weights, and what was alive: bytes of activations."""

    predicted: accounting.DecodeMemory
    prefill: int
    decoding: int


def peaks(model, dtype, kv, batch, prompt, spare=1):
    """Reads a prompt into a cache with some spare room, and decodes a token."""
    capacity = prompt + spare
    tokens, cache = torch.zeros(batch, capacity, dtype=torch.long), rd.DepthCache(kv, max_tokens=capacity)
    predicted = accounting.decode_memory(model, capacity, batch=batch, prompt=prompt, dtype=dtype, kv=kv)
    prefill = measured(model, tokens[:, :prompt], cache) - predicted.cache
    decoding = measured(model, tokens[:, prompt : prompt + 1], cache)
    assert cache.num_bytes == predicted.cache
    return Peaks(predicted, prefill, decoding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("policy", ["all", "first", "mean"])
@pytest.mark.parametrize("form", ["gpt2", "llama"])
@pytest.mark.parametrize(
    "layout, update", [((1, 1, 4, 1), rd.gated), ((2, 2, 3, 1), rd.gated), ((0, 4, 1, 0), rd.plain)]
)
def test_activations_are_what_is_alive(layout, update, form, policy, dtype):
    layout = rd.Layout(*layout)
    model = model_of(layout, form, dtype, dim=256, num_heads=4, update=update, vocab_size=2000)
    predicted, prefill, decoding = peaks(model, dtype, POLICIES[policy](layout), batch=1, prompt=192)
    assert predicted.prefill == pytest.approx(prefill, rel=0.01)
    assert predicted.decoding == pytest.approx(decoding, rel=0.03)


@few
@given(layouts, forms, policies, st.integers(1, 3), st.integers(1, 16), st.data())
def test_activations_of_any_layout_are_not_above_the_prediction_and_seldom_far_below(
    layout, form, policy, batch, spare, data
):
    # Above: rows share their rotary tables, which count for each; and in the second of two steps little is aside yet.
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    update = data.draw(st.sampled_from([rd.gated, rd.plain]))
    policy = "mean" if policy == "blend" else policy
    model = model_of(layout, form, dtype, dim=192, num_heads=3, update=update)
    predicted, prefill, decoding = peaks(model, dtype, POLICIES[policy](layout), batch, 128, spare)
    assert 0.99 * prefill <= predicted.prefill <= 1.2 * prefill
    assert 0.94 * decoding <= predicted.decoding <= 1.25 * decoding  # positions are not counted, some bytes a token


def test_a_large_vocabulary_is_in_the_activations():
    model = model_of(rd.Layout(0, 1, 2, 0), dim=64, vocab_size=20_000)
    predicted, prefill, decoding = peaks(model, torch.float32, rd.KeepAll(), batch=2, prompt=4)
    assert predicted.prefill == pytest.approx(prefill, rel=0.01)
    assert predicted.decoding == pytest.approx(decoding, rel=0.01)


def test_a_block_of_ones_own_counts_its_input_and_twice_its_widest_layer():
    layers = torch.nn.Sequential(torch.nn.Linear(64, 640), torch.nn.GELU(), torch.nn.Linear(640, 64))
    model = model_of(rd.Layout(1, 1, 3, 1), dim=64)
    model.core = rd.RecurrentCore([rd.PlainBlock(layers)], rd.gated(64)).eval()
    with torch.no_grad(), LiveBytes() as live:
        model(torch.zeros(2, 128, dtype=torch.long))
    memory = accounting.decode_memory(model, 128, batch=2, dtype=torch.float32)
    coda = 2 * 128 * accounting.outline(model).coda.cached * 4  # had no room yet when the loop was at its peak
    assert memory.prefill + coda == pytest.approx(live.peak, rel=0.05)


@given(layouts, forms, policies, st.integers(1, 40), st.integers(1, 40))
def test_activations_and_cache_grow_with_rows_and_prompt(layout, form, policy, prompt, spare):
    of, kv = accounting.outline(model_of(layout, form)), POLICIES[policy](layout)
    call = {"tokens": prompt + spare, "kv": kv}
    one, two = (accounting.decode_memory(of, batch=n, prompt=prompt, **call) for n in (1, 2))
    assert two == one._replace(cache=2 * one.cache, prefill=2 * one.prefill, decoding=2 * one.decoding)
    longer = accounting.decode_memory(of, batch=1, prompt=prompt + spare, **call)
    assert longer.prefill > one.prefill
    assert longer.total >= one.total == one.weights + one.cache + max(one.prefill, one.decoding)


def test_a_model_on_the_meta_device_has_the_same_memory():
    build = partial(model_of, rd.Layout(1, 2, 3, 1), "llama")
    models = build(), on_meta(build), accounting.outline(on_meta(build))
    assert len({accounting.decode_memory(model, 32, batch=2, kv=rd.KeepMean()) for model in models}) == 1


def test_memory_prints_its_parts_and_the_peak():
    text = str(accounting.DecodeMemory(weights=2 * GIB, cache=3 * GIB, prefill=GIB // 4, decoding=2**20))
    assert text == "5.25 GiB: weights 2.00 GiB, cache 3.00 GiB, prefill 256.0 MiB, decoding 1.0 MiB"


# Bad input


@pytest.mark.parametrize("value", [0, -1, 1.5, "3", True])
@pytest.mark.parametrize("name", ["tokens", "num_steps", "batch", "prompt"])
def test_numbers_must_be_whole_and_at_least_one(name, value):
    of = accounting.outline(model_of(rd.Layout(1, 1, 2, 1)))
    call = {"tokens": 8, "batch": 1, name: value}
    for count in (accounting.decode_memory, *[accounting.cache_bytes] * (name != "prompt")):
        with pytest.raises(Exception, match=name) as error:
            count(of, **call)
        assert is_refusal(error.value)


def test_a_prompt_beyond_the_cache_is_refused():
    with pytest.raises(ValueError, match="prompt is 9, but must be at most 8"):
        accounting.decode_memory(model_of(rd.Layout(1, 1, 2, 1)), 8, batch=1, prompt=9)


def test_where_no_positions_are_learned_the_capacity_must_be_given():
    model = model_of(rd.Layout(1, 1, 2, 1), "llama")
    for count in (accounting.cache_bytes, accounting.decode_memory):
        with pytest.raises(ValueError, match="tokens is None"):
            count(model, batch=1)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64, "bfloat16", None])
def test_a_dtype_is_a_floating_one(dtype):
    of = accounting.outline(model_of(rd.Layout(1, 1, 2, 1)))
    for count in (accounting.weight_bytes, partial(accounting.cache_bytes, batch=1, tokens=8)):
        with pytest.raises(Exception, match="dtype") as error:
            count(of, dtype=dtype)
        assert is_refusal(error.value)


@pytest.mark.parametrize("kv", ["mean", rd.KeepMean])
def test_a_policy_is_an_object(kv):
    with pytest.raises(Exception, match="kv") as error:
        accounting.cache_bytes(model_of(rd.Layout(1, 1, 2, 1)), 8, batch=1, kv=kv)
    assert is_refusal(error.value)


def is_refusal(error):
    return isinstance(error, ValueError | TypeCheckError)
