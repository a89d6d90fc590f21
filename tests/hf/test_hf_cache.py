"""Keys and values in a transformers cache: the same as in our own, under every policy."""

import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reading import BUILDS, POLICIES, Script, every_policy, read, read_slowly, scripts
from slot_reading import KINDS, every_kind, num_bytes, read_hf, same_depth, slots_of, tiny_model
from strategies import few, layouts, recipes
from torch.testing import assert_close
from transformers import DynamicCache

import recurrent_depth as rd
from recurrent_depth.hf.cache import StepSlots

double = st.just(torch.float64)
any_build = st.sampled_from(sorted(BUILDS))
any_kind = st.sampled_from(sorted(KINDS))


@every_policy
@few
@given(recipes(layouts, double), any_build, scripts(), any_kind, st.booleans())
def test_reading_in_chunks_is_what_it_is_with_our_own_cache(case, recipe, build, drawn, kind, differentiable):
    model = recipe.model(BUILDS[build])
    script, policy = same_depth(drawn.script(model)), case.make(model)
    found = read_hf(model, script, KINDS[kind](model), policy, differentiable)
    expected = read(model, script, rd.DepthCache(policy), differentiable)
    assert_close(found[script.mask], expected[script.mask], atol=1e-9, rtol=1e-9)


@every_policy
@every_kind
def test_a_row_is_what_the_reference_says(case, kind):
    model = tiny_model()
    script = Script(torch.arange(7)[None], None, [3, 4, 6, 7], [[2], [4], [1], [3]])
    policy = case.make(model)
    found = read_hf(model, script, KINDS[kind](model), policy)
    assert_close(found, read_slowly(model, script, case.write(policy)), atol=1e-9, rtol=1e-9)


@every_policy
@every_kind
def test_gradients_flow_through_the_cache(case, kind):
    model = tiny_model()
    script = Script(torch.arange(7)[None], None, [3, 5, 7], [[2], [3], [2]])
    if kind == "static":  # as without a loop: transformers' own writes in place what a chunk before was read from
        script = Script(script.tokens, None, [7], [[3]])
    grads, policy = [], case.make(model)
    for cached in (
        lambda: read_hf(model, script, KINDS[kind](model), policy, differentiable=True),
        lambda: read(model, script, rd.DepthCache(policy), differentiable=True),
    ):
        model.zero_grad()
        cached().square().sum().backward()
        grads.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    assert len(grads[0]) == len(grads[1]) > 0
    for found, expected in zip(*grads, strict=True):
        assert_close(found, expected, atol=1e-9, rtol=1e-9)


@every_policy
@every_kind
def test_bytes_are_the_accountants(case, kind):
    model = tiny_model()
    cache, policy = KINDS[kind](model), case.make(model)
    read_hf(model, Script(torch.arange(9)[None], None, [4, 9], [[3], [4]]), cache, policy)
    capacity = 12 if kind == "static" else 9
    expected = rd.accounting.cache_bytes(model, capacity, 4, batch=1, dtype=torch.float64, kv=policy)
    assert num_bytes(cache) == expected


@every_policy
@every_kind
def test_the_length_is_that_of_the_tokens_seen_and_stays_so_during_a_forward(case, kind):
    model, cache = tiny_model(), KINDS[kind](tiny_model())
    policy, seen = case.make(model), []
    assert cache.get_seq_length() == 0

    def observe(slots, step):
        seen.append(int(slots.view(step).get_seq_length(1)))

    for number, tokens, steps in ((0, 5, 3), (1, 1, 4), (2, 2, 1)):
        slots = slots_of(model, cache, policy, steps)
        assert int(slots.length) == [0, 5, 6][number]
        for step in range(steps):
            for block in range(model.layout.core):
                new = torch.randn(2, 2, tokens, 4), torch.randn(2, 2, tokens, 4)
                slots.view(step).update(*new, model.layout.prelude + block)
                observe(slots, step)
        slots.close()
        core = cache.layers[model.layout.prelude]
        assert int(core.get_seq_length()) == [5, 6, 8][number]
    assert seen == [0] * 6 + [5] * 8 + [6] * 2


@pytest.mark.parametrize("name", ["all", "mean", "two-in-turn"])
def test_layers_are_where_transformers_own_looped_models_have_them(name):
    model, cache = tiny_model(), DynamicCache()
    policy = POLICIES[name].make(model)
    read_hf(model, Script(torch.arange(5)[None], None, [5], [[4]]), cache, policy)
    layout = model.layout
    assert len(cache) == layout.prelude + layout.core * policy.num_copies(4) + layout.coda
    assert {layer.get_seq_length() for layer in cache.layers} == {5}
    own = rd.DepthCache(policy)
    with torch.no_grad():
        rd.extend(model, torch.arange(5)[None], own, 4)
    for key, slot in own.slots.items():
        first = {"prelude": 0, "core": layout.prelude, "coda": layout.prelude + layout.core}[key.part]
        behind = layout.prelude + layout.core + layout.coda + (key.copy - 1) * layout.core
        index = key.layer + (first if key.copy == 0 else behind)
        assert_close(cache.layers[index].keys, slot.keys[:, :, :5])
        assert_close(cache.layers[index].values, slot.values[:, :, :5])


@every_policy
@every_kind
def test_rows_may_be_repeated_and_reordered(case, kind):
    model, cache = tiny_model(), KINDS[kind](tiny_model())
    policy, tokens = case.make(model), torch.randint(23, (3, 8))
    read_hf(model, Script(tokens[:, :5], None, [3, 5], [[3] * 3, [2] * 3]), cache, policy)
    rows = torch.tensor([2, 0, 0])
    cache.reorder_cache(rows)
    found = read_hf(model, Script(tokens[rows, 5:], None, [3], [[4] * 3]), cache, policy, start=5)
    whole = Script(tokens[rows], None, [3, 5, 8], [[3] * 3, [2] * 3, [4] * 3])
    expected = read(model, whole, rd.DepthCache(policy))[:, 5:]
    assert_close(found, expected, atol=1e-9, rtol=1e-9)


@every_policy
def test_a_dynamic_cache_may_be_cropped_repeated_and_selected(case):
    model, cache, policy = tiny_model(), DynamicCache(), case.make(tiny_model())
    tokens = torch.randint(23, (2, 8))
    read_hf(model, Script(tokens, None, [5, 8], [[3] * 2, [2] * 2]), cache, policy)
    cache.crop(-3)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([1, 2]))
    found = read_hf(model, Script(tokens[:, 5:], None, [3], [[4] * 2]), cache, policy, start=5)
    expected = read(model, Script(tokens, None, [5, 8], [[3] * 2, [4] * 2]), rd.DepthCache(policy))[:, 5:]
    assert_close(found, expected, atol=1e-9, rtol=1e-9)


def test_a_mean_is_taken_in_float32_and_rounded_once():
    cache = DynamicCache()
    slots = StepSlots(cache, first=0, num_core=1, num_layers=1, policy=rd.KeepMean(), num_steps=5)
    new = torch.randn(5, 2, 1, 2, 3, 4).bfloat16()
    for step in range(5):
        slots.view(step).update(*new[step], 0)
    slots.close()
    assert cache.layers[0].keys.dtype == torch.bfloat16
    mean = new[0].float()
    for step in range(1, 5):
        mean += (new[step].float() - mean) * (1 / (step + 1))
    assert_close(cache.layers[0].keys, mean[0].bfloat16(), rtol=0, atol=0)
    assert_close(cache.layers[0].values, mean[1].bfloat16(), rtol=0, atol=0)


@every_policy
def test_a_forward_keeps_no_second_copy_of_the_past(case):
    """While blocks run, the tokens seen are in memory once, and no longer where they were before."""
    model, cache, policy = tiny_model(), DynamicCache(), case.make(tiny_model())
    read_hf(model, Script(torch.arange(9)[None], None, [9], [[4]]), cache, policy)
    olds = [weakref.ref(layer.keys) for layer in cache.layers[1:3] + cache.layers[4:]]
    slots = slots_of(model, cache, policy, 4)
    for step in range(4):
        for layer in (1, 2):
            slots.view(step).update(*torch.randn(2, 1, 2, 1, 4).double(), layer)
    slots.close()
    assert [old() for old in olds] == [None] * len(olds)
