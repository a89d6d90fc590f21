"""Recursion over a host's layers: its limits are the host and plain tying, and each step keeps its layers' places."""

import copy

import pytest
import torch
from hosts import DECODERS, cache_of, host, inputs, outcome, padded, randomise, tokens
from torch.testing import assert_close
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

import recurrent_depth as rd
from recurrent_depth.hf import is_graft, recurse, ungraft

CORE = range(1, 5)
SAME = {"atol": 2e-4, "rtol": 1e-4}
FULL = 64  # above the rank of every matrix of the hosts
LINEAR = [name for name in DECODERS if name != "qwen3_moe"]
GREEDY = {"max_new_tokens": 5, "do_sample": False}


def moved(name: str, **changes):
    """A host whose norms and biases matter as well."""
    made = host(name, **changes)
    with torch.no_grad():
        for weight in made.parameters():
            weight += 0.05 * torch.randn_like(weight)
    return made


# The limit of full rank: the host


@pytest.mark.parametrize("name", [*LINEAR, "bert", "vit"])
def test_at_full_rank_it_is_the_host(name):
    model = moved(name)
    recursive = recurse(copy.deepcopy(model), CORE, 2, rank=FULL)
    with torch.no_grad():
        assert_close(outcome(recursive(**inputs(name))), outcome(model(**inputs(name))), **SAME)


@pytest.mark.parametrize("start", [rd.average_start, rd.stepwise_start, rd.lower_start])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 6])
def test_from_every_start_and_over_the_whole_model(start, num_steps):
    model = moved("llama", num_hidden_layers=6)
    recursive = recurse(copy.deepcopy(model), num_steps=num_steps, rank=FULL, start=start)
    assert_close(recursive(tokens()).logits, model(tokens()).logits, **SAME)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gemma3", "mistral", "bloom"])
def test_at_full_rank_it_generates_what_the_host_does(name):
    model, prompt = moved(name), padded()
    recursive = recurse(copy.deepcopy(model), CORE, 2, rank=FULL)
    for how in ({}, {"use_cache": False}, {"num_beams": 3}, {"cache_implementation": "static"}):
        expected = model.generate(**prompt, **GREEDY | how)
        assert torch.equal(recursive.generate(**prompt, **GREEDY | how), expected)


# The limit of no correction: tying


def test_at_rank_zero_the_layers_are_tied():
    model = moved("llama")
    recursive = recurse(copy.deepcopy(model), CORE, 2, rank=0, vectors=False, start=rd.lower_start)
    tied = copy.deepcopy(model)
    for layer in (3, 4):
        tied.model.layers[layer].load_state_dict(model.model.layers[layer - 2].state_dict())
    assert_close(recursive(tokens()).logits, tied(tokens()).logits)
    assert not any(name.startswith("recurrence") for name in recursive.state_dict())


def test_the_higher_the_rank_the_nearer_to_the_host():
    model = moved("llama")
    expected = model(tokens()).logits
    ranks = [4, 28, FULL]
    found = [recurse(copy.deepcopy(model), CORE, 2, rank=rank)(tokens()).logits for rank in ranks]
    distances = [torch.dist(logits, expected).item() for logits in found]
    assert distances == sorted(distances, reverse=True)


def test_the_source_shares_norms_and_biases():
    model = moved("llama")
    recursive = recurse(copy.deepcopy(model), CORE, 2, rank=FULL, vectors=False)
    assert (recursive(tokens()).logits - model(tokens()).logits).abs().max() > 1e-3
    for weight in model.model.layers.named_parameters():
        if weight[1].ndim == 1:
            torch.nn.init.ones_(weight[1])
    recursive = recurse(copy.deepcopy(model), CORE, 2, rank=FULL, vectors=False)
    assert_close(recursive(tokens()).logits, model(tokens()).logits, **SAME)


# Names, weights, gradients


def test_the_tied_layers_keep_the_first_names_and_the_others_are_gone():
    model = moved("llama")
    names, optimised = list(model.state_dict()), dict(model.named_parameters())
    recursive = recurse(model, CORE, 2, rank=4)
    assert recursive is model
    gone = ("model.layers.3.", "model.layers.4.")
    kept = [name for name in recursive.state_dict() if not name.startswith("recurrence.")]
    assert kept == [name for name in names if not name.startswith(gone)]
    new = [name for name in recursive.state_dict() if name.startswith("recurrence.")]
    assert "recurrence.core.stack.corrections.0_self_attn_q_proj.A" in new
    assert "recurrence.core.stack.corrections.1_input_layernorm_weight.offset" in new
    for name, weight in recursive.named_parameters():
        assert name.startswith("recurrence.") or weight is optimised[name]
    assert len(recursive.model.layers) == 5


def test_gradients_reach_every_weight_and_checkpointing_changes_none():
    gradients = []
    for checkpointing in (False, True):
        model = recurse(moved("llama"), CORE, 2, rank=4).train()
        if checkpointing:
            model.recurrence.gradient_checkpointing = True  # what transformers sets
        model(tokens(), labels=tokens(), use_cache=False).loss.backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    assert all(gradient is not None and gradient.norm() > 0 for gradient in gradients[0].values())
    assert_close(gradients[1], gradients[0])


def test_a_copy_shares_nothing():
    model = recurse(moved("llama"), CORE, 2, rank=4)
    other = copy.deepcopy(model)
    randomise(other)
    assert not torch.equal(other(tokens()).logits, model(tokens()).logits)
    randomise(model)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(tokens()).logits, model(tokens()).logits)


# Cache and depth


@pytest.mark.parametrize("num_steps", [1, 2])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_cached_is_uncached_at_every_depth(name, num_steps):
    model, prompt = recurse(moved(name), CORE, 2, rank=4), padded()
    expected = model.generate(**prompt, **GREEDY, use_cache=False, num_steps=num_steps)
    assert torch.equal(model.generate(**prompt, **GREEDY, num_steps=num_steps), expected)


@pytest.mark.parametrize("kind", [lambda config: DynamicCache(), lambda config: DynamicCache(config=config)])
def test_a_cache_has_the_hosts_layers_at_every_depth(kind):
    model, x = recurse(moved("llama"), CORE, 2, rank=4).eval(), tokens()
    for num_steps in (1, 2):
        cache = kind(model.config)
        cache = cache_of(model(x, use_cache=True, num_steps=num_steps, **{cache_name(model): cache}))
        assert len(cache) == 5
        assert [cache.get_seq_length(layer) for layer in range(5)] == [9] * 5


def test_deeper_than_before_it_finds_what_the_last_step_wrote():
    model, x = recurse(moved("llama"), CORE, 2, rank=4).eval(), tokens()
    cache = cache_of(model(x, use_cache=True, num_steps=1))
    for layer in (1, 2):
        assert torch.equal(cache.layers[layer].keys, cache.layers[layer + 2].keys)
    assert model(x[:, :1], num_steps=2, **{cache_name(model): cache}).logits.isfinite().all()


def test_a_static_cache_holds_what_a_growing_one_does():
    model, x = recurse(moved("llama"), CORE, 2, rank=4).eval(), tokens()
    growing, fixed = DynamicCache(), StaticCache(config=model.config, max_cache_len=12)
    for num_steps, part in ((1, x[:, :5]), (2, x[:, 5:6]), (1, x[:, 6:])):
        found = [model(part, num_steps=num_steps, **{cache_name(model): cache}).logits for cache in (growing, fixed)]
        assert_close(*found)


def cache_name(model) -> str:
    """What this version of transformers calls the cache in a forward."""
    output = model(tokens(), use_cache=True)
    return "cache" if "cache" in output else "past_key_values"


# Bad input


def of_layers(num: int):
    return host("llama", num_hidden_layers=num).config


def read_by_another(num: int = 5, rows: int = 2, dtype: torch.dtype = torch.float32, cache=None):
    """A cache that a model of so many layers has written."""
    other = host("llama", num_hidden_layers=num).to(dtype)
    return cache_of(other(tokens(rows), **{cache_name(other): cache or DynamicCache()}))


def half_written():
    cache = read_by_another()
    cache.update(*torch.randn(2, 2, 2, 1, 8), 0)
    return cache


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: DynamicCache(config=of_layers(2)), "has 2 layers, but this model goes with 5: it belongs to another"),
        (lambda: StaticCache(config=of_layers(2), max_cache_len=16), r"has 2 layers.* Use DynamicCache\(\)"),
        (lambda: DynamicCache(config=of_layers(9)), "has 9 layers, but this model goes with 5"),
        (lambda: read_by_another(8), "has 8 layers, but this model goes with 5"),
        (lambda: read_by_another(2), "2 of the core's 4 layers of the cache hold tokens, but all or none must"),
        (half_written, r"hold \[10, 9, 9, 9\] tokens, but must hold as many each: a forward failed halfway"),
        (lambda: read_by_another(rows=3), "holds 3 rows of torch.float32, but the model makes 2"),
        (lambda: read_by_another(rows=3, cache=StaticCache(config=of_layers(5), max_cache_len=20)), "holds 3 rows"),
        (lambda: read_by_another(dtype=torch.bfloat16), "2 rows of torch.bfloat16, but the model makes 2 of torch.fl"),
        (lambda: EncoderDecoderCache(DynamicCache(), DynamicCache()), "DynamicCache and StaticCache without offl"),
    ],
)
def test_a_cache_that_cannot_be_right_is_refused(make, message):
    model = recurse(host("llama"), range(4), 2, rank=4)
    with pytest.raises(ValueError, match=message):
        model(tokens(), **{cache_name(model): make()})


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: recurse(host("llama"), CORE, 3, rank=4), "num_steps is 3, but must divide"),
        (lambda: recurse(host("llama"), CORE, 0, rank=4), "num_steps"),
        (lambda: recurse(host("llama"), range(3, 9), 2, rank=4), "the model has 5 layers"),
        (lambda: recurse(host("llama"), CORE, 2, rank=-1), "rank"),
        (lambda: recurse(host("gemma2"), range(1, 4), 3, rank=4), "they differ in self_attn"),
        (lambda: recurse(host("qwen3_moe"), CORE, 2, rank=4), "that no correction per step can reach: mlp.experts"),
        (
            lambda: recurse(host("gpt2", scale_attn_by_inverse_layer_idx=True), CORE, 2, rank=4),
            "scale_attn_by_inverse_layer_idx",
        ),
        (lambda: recurse(recurse(host("llama"), CORE, 2, rank=4), CORE, 2, rank=4), "is a graft already"),
        (
            lambda: recurse(host("llama"), CORE, 2, rank=4)(tokens(), num_steps=5),
            "step 3 has no correction.*num_steps=2",
        ),
        (lambda: ungraft(recurse(host("llama"), CORE, 2, rank=4)), "are gone"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_refusal_leaves_the_host_as_it_was():
    model = host("gemma2")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with pytest.raises(ValueError, match="differ"):
        recurse(model, range(1, 4), 3, rank=4)
    assert not is_graft(model)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
