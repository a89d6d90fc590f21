"""Grafts generate under every policy: greedily, in beams, padded, with static caches, and assisted."""

import pytest
import torch
from hosts import VOCAB, cache_of, host, padded, randomise, tokens
from torch import Tensor
from torch.testing import assert_close
from transformers import PreTrainedConfig, PreTrainedModel, StaticCache

import recurrent_depth as rd
from recurrent_depth.hf.grafting import graft
from recurrent_depth.hf.versions import CACHE

POLICIES = {
    "all": lambda model: rd.KeepAll(),
    "first": lambda model: rd.KeepFirst(),
    "last": lambda model: rd.KeepLast(),
    "mean": lambda model: rd.KeepMean(),
    "two-in-turn": lambda model: rd.KeepCyclic(2),
    "blend": lambda model: blend(model.config),
}
every_policy = pytest.mark.parametrize("policy", POLICIES)
every_host = pytest.mark.parametrize("name", ["llama", "gemma2"])
"""One kind of layer, and two."""

SETTINGS = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}


def blend(config: PreTrainedConfig) -> rd.KeepBlend:
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    policy = rd.KeepBlend(num_layers=3, num_steps=4, num_kv_heads=heads, head_size=8)
    torch.nn.init.normal_(policy.keys)
    torch.nn.init.normal_(policy.values)
    return policy.requires_grad_(False)


def grafted(name: str, policy: str) -> PreTrainedModel:
    model = host(name)
    graft(model, range(1, 4), 3, kv=POLICIES[policy](model))
    randomise(model.recurrence.core)
    model.generation_config.eos_token_id = None  # llama's would be 2
    return model.eval()


@torch.no_grad()
def alone(model: PreTrainedModel, row: Tensor, prompt: int) -> Tensor:
    """The log-probabilities of a text's tokens behind the prompt, fed one by one."""
    cache, said = None, []
    for begin, end in [(0, prompt), *((at, at + 1) for at in range(prompt, len(row) - 1))]:
        out = model(row[None, begin:end], use_cache=True, **({} if cache is None else {CACHE: cache}))
        cache = cache_of(out)
        said.append(out.logits[0, -1].log_softmax(-1))
    return torch.stack(said)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2"])
@every_policy
def test_greedy_tokens_are_those_of_single_steps(name, policy):
    model = grafted(name, policy)
    text = model.generate(tokens(), **SETTINGS)
    for row in text:
        assert torch.equal(alone(model, row, 9).argmax(-1), row[9:])
    if policy == "all":
        assert torch.equal(text, model.generate(tokens(), use_cache=False, **SETTINGS))


@every_host
@every_policy
def test_beams_score_what_their_texts_score_alone(name, policy):
    model = grafted(name, policy)
    beams = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.0}
    out = model.generate(tokens(), **SETTINGS, **beams, return_dict_in_generate=True, output_scores=True)
    for row, score in zip(out.sequences, out.sequences_scores, strict=True):
        expected = alone(model, row, 9).gather(1, row[9:, None]).sum()
        assert_close(score, expected, atol=1e-4, rtol=1e-4)


@every_host
@every_policy
def test_a_row_that_is_padded_on_the_left_is_the_row_alone(name, policy):
    model, rows = grafted(name, policy), padded()
    text = model.generate(**rows, **SETTINGS)
    for row, ids, mask in zip(text, rows["input_ids"], rows["attention_mask"], strict=True):
        expected = model.generate(ids[mask.bool()][None], **SETTINGS)[0]
        assert torch.equal(row[-5:], expected[-5:])


@every_host
@every_policy
def test_a_static_cache_says_what_a_dynamic_one_says(name, policy):
    model, rows = grafted(name, policy), padded()
    expected = model.generate(**rows, **SETTINGS)
    assert torch.equal(model.generate(**rows, **SETTINGS, cache_implementation="static"), expected)


@pytest.mark.parametrize("steps", [2, 4])
@every_policy
def test_depth_may_change_from_call_to_call(policy, steps):
    """A chat: the second turn goes on with the cache of the first, at another depth."""
    model = grafted("llama", policy)
    first = model.generate(tokens(), **SETTINGS, return_dict_in_generate=True)
    again = torch.cat([first.sequences, tokens(length=3)], dim=1)
    rest = {"attention_mask": torch.ones_like(again), "num_steps": steps, CACHE: cache_of(first)}
    made = model.generate(again, **SETTINGS, **rest)
    expected, cache = [], {}
    chunks = [(0, 9, 3), *((at, at + 1, 3) for at in range(9, 13)), (13, 17, steps)]
    with torch.no_grad():
        for begin, end, depth in [*chunks, *((at, at + 1, steps) for at in range(17, 21))]:
            out = model(made[:, begin:end], num_steps=depth, **cache)
            cache = {CACHE: cache_of(out)}
            expected.append(out.logits[:, -1].argmax(-1))
    assert torch.equal(torch.stack(expected[-5:], dim=1), made[:, -5:])


@every_host
@pytest.mark.parametrize("draft", ["assistant", "prompt"])
def test_assisted_decoding_is_greedy_decoding(name, draft):
    model = grafted(name, "all")
    model.generation_config.eos_token_id = VOCAB  # never written; the oldest transformers wants one here
    text = tokens(rows=1)
    draft = {"assistant_model": host("llama")} if draft == "assistant" else {"prompt_lookup_num_tokens": 2}
    expected = model.generate(text, **SETTINGS)
    assert torch.equal(model.generate(text, **SETTINGS, **draft), expected)


@every_policy
def test_a_graft_may_draft_for_itself_at_fewer_steps(policy):
    """Whatever a policy stores, a rejected token leaves nothing behind."""
    model = grafted("llama", policy)
    cache = None
    with torch.no_grad():
        cache = cache_of(model(tokens()[:, :5], use_cache=True))
        expected = model(tokens()[:, 5:6], **{CACHE: cache}).logits
        cache.crop(-1)
        model(tokens()[:, 6:9], **{CACHE: cache}, num_steps=2)
        cache.crop(-3)
        found = model(tokens()[:, 5:6], **{CACHE: cache}).logits
    assert_close(found, expected)


@every_policy
def test_a_static_cache_of_the_hosts_size(policy):
    model = grafted("llama", policy)
    cache = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        found = [model(tokens()[:, a:b], **{CACHE: cache}).logits for a, b in ((0, 6), (6, 9))]
        dynamic = cache_of(model(tokens()[:, :6], use_cache=True))
        assert_close(found[1], model(tokens()[:, 6:], **{CACHE: dynamic}).logits)
