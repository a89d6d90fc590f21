"""Caches that cannot be right are refused, with what to use."""

import pytest
import torch
from reading import Script
from slot_reading import host_config, read_hf, slots_of, tiny_model
from transformers import DynamicCache, EncoderDecoderCache, LlamaConfig, StaticCache
from transformers.cache_utils import Cache, LinearAttentionLayer

import recurrent_depth as rd
from recurrent_depth.hf.cache import StepSlots
from recurrent_depth.hf.cache_views import model_views

PROMPT = Script(torch.arange(5)[None], None, [5], [[3]])


def filled(policy: rd.KVStepPolicy | None = None) -> DynamicCache:
    cache = DynamicCache()
    read_hf(tiny_model(), PROMPT, cache, policy or rd.KeepAll())
    return cache


def opened(cache: Cache, policy: rd.KVStepPolicy | None = None) -> StepSlots:
    return slots_of(tiny_model(), cache, policy or rd.KeepAll(), 3)


@pytest.mark.parametrize("layers", [1, 3, 5, 7])
@pytest.mark.parametrize("kind", [DynamicCache, lambda config: StaticCache(config=config, max_cache_len=8)])
def test_a_list_of_layers_that_does_not_fit_the_model(kind, layers):
    with pytest.raises(ValueError, match=f"has {layers} layers, but this model goes with 4, and 2 more for each"):
        opened(kind(config=LlamaConfig(num_hidden_layers=layers)))


@pytest.mark.parametrize("layers", [4, 6, 8, 10, 16])
@pytest.mark.parametrize("policy", [rd.KeepAll(), rd.KeepMean()])
def test_a_list_of_layers_that_fits_is_made_as_long_as_needed(layers, policy):
    model, cache = tiny_model(), DynamicCache(config=LlamaConfig(num_hidden_layers=layers))
    found = read_hf(model, PROMPT, cache, policy)
    assert torch.equal(found, read_hf(model, PROMPT, DynamicCache(), policy))
    assert len(cache) == 4 + 2 * (policy.num_copies(3) - 1)


def test_a_cache_that_was_filled_under_another_policy():
    with pytest.raises(
        ValueError, match=r"holds 3 copies .* but KeepMean stores 1: it was filled under another policy"
    ):
        opened(filled(), rd.KeepMean())
    with pytest.raises(ValueError, match=r"holds 3 copies .* but KeepCyclic stores 2"):
        opened(filled(), rd.KeepCyclic(2))


def test_a_cache_for_encoders_and_decoders():
    with pytest.raises(ValueError, match="DynamicCache and StaticCache without offloading, got EncoderDecoderCache"):
        opened(EncoderDecoderCache(DynamicCache(), DynamicCache()))


def test_a_cache_that_is_moved_to_and_fro():
    cache = DynamicCache()
    cache.offloading = True
    with pytest.raises(ValueError, match="DynamicCache and StaticCache without offloading"):
        opened(cache)


def test_a_layer_that_is_no_attention():
    cache = DynamicCache(config=host_config(tiny_model()))
    cache.layers[2] = LinearAttentionLayer()
    with pytest.raises(ValueError, match="has a LinearAttentionLayer for a block of the loop, which goes with Dynamic"):
        read_hf(tiny_model(), PROMPT, cache, rd.KeepAll())


def test_a_cache_in_which_a_forward_failed():
    cache = filled()
    slots = opened(cache)
    slots.view(0).update(*torch.randn(2, 1, 2, 1, 4).double(), 1)
    with pytest.raises(ValueError, match=r"hold \[6, 5, 5, 5, 5, 5\] tokens, .*: a forward failed halfway"):
        opened(cache)


@pytest.mark.parametrize("copies", [1, 3])
def test_a_cache_that_holds_tokens_for_a_part_of_the_core(copies):
    cache = filled(rd.KeepMean() if copies == 1 else rd.KeepAll())
    cache.layers[2] = type(cache.layers[2])()
    with pytest.raises(ValueError, match="1 of the core's 2 layers of the cache hold tokens, but all or none must"):
        opened(cache)


def test_another_batch_or_dtype():
    with pytest.raises(ValueError, match=r"holds 1 rows of torch.float64, but the model makes 2 of torch.float64"):
        opened(filled()).view(0).update(*torch.randn(2, 2, 2, 1, 4).double(), 1)
    with pytest.raises(ValueError, match=r"holds 1 rows of torch.float64, but the model makes 1 of torch.float32"):
        opened(filled()).view(0).update(*torch.randn(2, 1, 2, 1, 4), 1)


def test_a_step_beyond_those_that_were_announced():
    with pytest.raises(ValueError, match="step 4 was asked for, but this forward was to take 3 at most"):
        opened(DynamicCache()).view(3)


def test_rows_of_their_own_depth():
    model = tiny_model()
    views = model_views(opened(DynamicCache()))
    with pytest.raises(ValueError, match=r"all rows take the same steps.*rd.DepthCache"):
        model(torch.arange(6).reshape(2, 3), [1, 3], positions=torch.arange(3)[None], kv=views)


def test_a_forward_that_took_no_step_leaves_nothing_to_close():
    cache = DynamicCache()
    opened(cache).close()
    assert cache.get_seq_length() == 0
