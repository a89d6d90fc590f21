"""Sliding windows, static buffers and compilation: where keys stand, in every kind of transformers cache."""

import pytest
import torch
from reading import POLICIES, every_policy
from slot_reading import tiny_model
from torch.testing import assert_close
from transformers import DynamicCache, MistralConfig, StaticCache

import recurrent_depth as rd
from recurrent_depth.hf.cache import StepSlots

WINDOW, ROOM = 4, 20
SLIDING = MistralConfig(num_hidden_layers=3, sliding_window=WINDOW)
MIXED = MistralConfig(num_hidden_layers=3, sliding_window=WINDOW)
MIXED.layer_types = ["full_attention", "sliding_attention", "full_attention"]
FULL = MistralConfig(num_hidden_layers=3, sliding_window=None)

CACHES = {
    "dynamic-sliding": lambda: DynamicCache(config=SLIDING),
    "dynamic-mixed": lambda: DynamicCache(config=MIXED),
    "static": lambda: StaticCache(config=FULL, max_cache_len=ROOM),
    "static-sliding": lambda: StaticCache(config=SLIDING, max_cache_len=ROOM),
    "static-mixed": lambda: StaticCache(config=MIXED, max_cache_len=ROOM),
}
FORWARDS = {
    "token-by-token": [(1, 2)] * 3 + [(1, 4)] * 3 + [(1, 1)] * 3,
    "prompt-first": [(6, 3), (1, 3), (1, 4), (1, 2), (3, 4), (1, 1), (2, 3)],
    "chunks": [(2, 2), (2, 4), (3, 3), (1, 4), (1, 4), (5, 2), (1, 4)],
    "deeper-when-full": [(4, 1), (1, 2), (1, 3), (1, 4)],
}


def steps_of(cache, policy, num_steps):
    return StepSlots(cache, first=1, num_core=2, num_layers=3, policy=policy, num_steps=num_steps)


@every_policy
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("forwards", FORWARDS.values(), ids=FORWARDS)
def test_a_key_stands_where_the_mask_says(case, kind, forwards):
    """Read beside a cache that keeps everything: what a window gives of it are the newest tokens, each in its place."""
    policy = case.make(tiny_model())
    cache, whole, seen = CACHES[kind](), DynamicCache(), 0
    for tokens, num_steps in forwards:
        slots, wide = (steps_of(c, policy, num_steps) for c in (cache, whole))
        for step in range(num_steps):
            for layer in (1, 2):
                new = torch.randn(2, 2, 2, tokens, 4).double()
                view = slots.view(step)
                length, offset = view.get_mask_sizes(tokens, layer)
                found = view.update(*new, layer)
                expected = wide.view(step).update(*new, layer)
                real = min(length, seen + tokens - offset)
                assert offset <= max(0, seen - WINDOW + 1)
                assert offset + real == seen + tokens
                for x, y in zip(found, expected, strict=True):
                    assert x.shape[2] == length
                    assert_close(x[:, :, :real], y[:, :, offset:])
        slots.close()
        wide.close()
        seen += tokens
        assert {int(layer.get_seq_length()) for layer in cache.layers[1:]} == {seen}


@every_policy
@pytest.mark.parametrize("kind", ["dynamic-sliding", "static-mixed"])
def test_added_layers_are_of_the_kind_of_their_block(case, kind):
    policy, cache = case.make(tiny_model()), CACHES[kind]()
    kinds = [type(layer) for layer in cache.layers]
    slots = steps_of(cache, policy, 4)
    for step in range(4):
        for layer in (1, 2):
            slots.view(step).update(*torch.randn(2, 2, 2, 3, 4), layer)
    slots.close()
    assert [type(layer) for layer in cache.layers] == kinds + kinds[1:] * (policy.num_copies(4) - 1)
    assert {vars(layer).get("sliding_window", WINDOW) for layer in cache.layers} == {WINDOW}


@pytest.mark.compile
@pytest.mark.parametrize("name", ["all", "mean", "two-in-turn", "blend"])
@pytest.mark.parametrize("kind", ["static", "static-mixed"])
def test_a_forward_with_a_static_cache_compiles_to_one_graph(name, kind):
    policy = POLICIES[name].make(tiny_model())

    def forward(cache, new):
        slots = steps_of(cache, policy, 3)
        shown = []
        for step in range(3):
            for block in range(2):
                keys, values = slots.view(step).update(*new[step, block], block + 1)
                shown.append(keys.sum() + values.sum())
        slots.close()
        return torch.stack(shown)

    torch.compiler.reset()
    compiled = torch.compile(forward, fullgraph=True, backend="eager")
    caches = CACHES[kind](), CACHES[kind]()
    with torch.no_grad():
        for tokens in (3, 1, 1, 1):
            new = torch.randn(3, 2, 2, 2, 2, tokens, 4)
            assert_close(compiled(caches[0], new), forward(caches[1], new))


def test_a_static_cache_that_was_made_ready_is_used_as_it_is():
    cache = StaticCache(config=MistralConfig(num_hidden_layers=7, sliding_window=None), max_cache_len=ROOM)
    cache.early_initialization(batch_size=2, num_heads=2, head_dim=4, dtype=torch.float32, device=torch.device("cpu"))
    buffers = [layer.keys for layer in cache.layers]
    slots = StepSlots(cache, first=1, num_core=2, num_layers=3, policy=rd.KeepAll(), num_steps=2)
    for step in range(2):
        for layer in (1, 2):
            slots.view(step).update(*torch.randn(2, 2, 2, 3, 4), layer)
    slots.close()
    assert [layer.keys for layer in cache.layers] == buffers
    assert [int(layer.cumulative_length) for layer in cache.layers[1:]] == [3] * 6
    assert_close(cache.layers[5].keys, cache.layers[3].keys)
