"""What a native model refuses, and how it says so."""

import pytest
import torch
from looped import config_of, made, some_tokens
from transformers import DynamicCache, StaticCache

import recurrent_depth as rd
from recurrent_depth.hf import RecurrentDepthConfig, RecurrentDepthForCausalLM, SampleDepth
from recurrent_depth.hf.versions import CACHE

pytestmark = pytest.mark.usefixtures("as_a_user_runs_it")


@pytest.mark.parametrize(
    "given, said",
    [
        ({"builder": "gpt"}, "no builder 'gpt'"),
        ({"layout": [1, 0, 3, 1]}, "core is 0"),
        ({"layout": [1, 1, 2.5, 1]}, "num_steps is 2.5"),
        ({"num_hidden_layers": 4}, "follows from layout and kv"),
        ({"layout": [1, 1, 4]}, "must be four numbers"),
        ({"layout": "1+1x4+1"}, "must be four numbers"),
        ({"layout": None}, "must be four numbers"),
        ({"dim": "32"}, "hidden_size is '32'"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"dim": 16, "hidden_size": 32}, "one setting"),
        ({"tie_word_embeddings": False}, "belongs to the form"),
        ({"num_key_value_heads": 1}, "belongs to the form"),
        ({"kv": rd.KeepMean()}, "names the policy"),
        ({"update": {"bias": 0.0}}, "names nothing"),
        ({"num_steps": 4}, "third number of layout"),
        ({"num_step": 4}, "is num_steps meant"),
        ({"layouts": [1, 1, 2, 1]}, "is layout meant"),
        ({"form_": "GPT2Form"}, "is form meant"),
        ({"builder": "rrt", "rank": 2}, "rank is an argument of 'rrt'"),
        ({"update": "gate"}, "no part 'gate'"),
        ({"update": rd.gated}, "nothing that JSON holds"),
        ({"form": {"name": "LlamaForm", "arrangement": "Norm"}}, "no part 'Norm'"),
        ({"kv": "KeepSome"}, "no KV policy 'KeepSome'"),
        ({"kv": {"name": "KeepCyclic"}}, "'KeepCyclic' does not take"),
        ({"kv": {"name": "KeepCyclic", "num": 0}}, "num is 0"),
    ],
)
def test_a_configuration_that_says_nothing_of_use(given, said):
    with pytest.raises(ValueError, match=said):
        config_of(**given)


def test_a_configuration_keeps_what_it_does_not_know():
    config = config_of(written_by="somebody", num_labels=3)
    again = RecurrentDepthConfig.from_dict(config.to_dict())
    assert (again.written_by, again.num_labels) == ("somebody", 3)


@pytest.mark.parametrize(
    "given, said",
    [
        ({"num_heads": 3}, "divisible"),
        ({"builder_arguments": {"rank": 2}}, "'grt' does not take"),
        ({"update": {"name": "gated", "biass": 1.0}}, "'grt' does not take"),
        ({"builder": "rrt"}, "'rrt' does not take"),
        ({"builder": "dense"}, "core blocks alone"),
        ({"builder": "albert"}, "one block"),
        ({"form": {"name": "LlamaForm", "num_kv_heads": 3}}, "num_kv_heads"),
    ],
)
def test_sizes_and_arguments_that_a_builder_refuses(given, said):
    config = config_of(**given)
    with pytest.raises(ValueError, match=said):
        RecurrentDepthForCausalLM(config)


@pytest.mark.parametrize(
    "given, said",
    [
        ({"num_steps": 0}, "num_steps is 0"),
        ({"num_steps": True}, "num_steps is True"),
        ({"num_steps": "2"}, "num_steps is '2'"),
        ({"num_steps": [1, 2, 3]}, "3 depths"),
        ({"num_steps": [1, 2]}, "rd.DepthCache"),
        ({"steps": 2}, "takes no steps"),
        ({"inputs_embeds": torch.zeros(2, 7, 16)}, "input_ids must be given"),
        ({"output_attentions": True}, "takes no output_attentions"),
        ({"attention_mask": torch.ones(2, 3)}, "mask"),
        ({"attention_mask": torch.ones(2, 5, 5)}, "attention_mask"),
        ({"position_ids": torch.zeros(2, 3, dtype=torch.long)}, "positions must be"),
        ({"position_ids": torch.full((1, 7), 70)}, "learned positions"),
    ],
)
def test_a_forward_says_what_it_cannot_do(given, said):
    with pytest.raises(ValueError, match=said):
        made()(some_tokens(), **given)


def test_a_forward_without_tokens():
    with pytest.raises(ValueError, match="input_ids must be given"):
        made()()
    with pytest.raises(ValueError, match="vocabulary"):
        made()(torch.tensor([[40]]))


def test_generate_says_what_it_cannot_do():
    model, tokens = made(), some_tokens()
    with pytest.raises(ValueError, match="num_step"):
        model.generate(tokens, num_step=1, max_new_tokens=1, pad_token_id=0)
    with pytest.raises(ValueError, match="num_steps is 0"):
        model.generate(tokens, num_steps=0, max_new_tokens=1, pad_token_id=0)
    with pytest.raises(ValueError, match="learned positions"):
        model.generate(tokens, max_new_tokens=60, pad_token_id=0, do_sample=False)


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_a_cache_of_another_model(kind):
    tokens, other = some_tokens(), made(layout=[2, 2, 3, 1])
    cache = kind(config=other.config, **({"max_cache_len": 20} if kind is StaticCache else {}))
    other(tokens, **{CACHE: cache})
    with pytest.raises(ValueError, match="cache"):
        made()(tokens[:, :1], **{CACHE: cache})


def test_more_steps_than_there_are_corrections_for():
    with (
        pytest.raises(ValueError, match=r"step 4 has no correction.*at most num_steps=3"),
        pytest.warns(UserWarning, match="deeper than trained"),
    ):
        made("rrt")(some_tokens(), num_steps=6)


def test_a_vocabulary_that_cannot_grow():
    with pytest.raises(ValueError, match="one size"):
        made("ple").resize_token_embeddings(50)


def test_an_old_argument_has_its_old_meaning():
    model, tokens = made(), some_tokens()
    cache = DynamicCache(config=model.config)
    for name in ("past_key_values", "cache"):
        model(tokens[:, :2], **{name: cache})
    assert cache.get_seq_length() == 4


def test_a_preset_layout_must_be_four_numbers():
    with pytest.raises((TypeError, ValueError)):
        RecurrentDepthConfig(layout=[1, 2])


def test_a_depth_for_each_step_needs_a_sampler_and_a_loop():
    with pytest.raises(ValueError, match="no loop"):
        SampleDepth(rd.UniformDepth(3)).on_train_begin(None, None, None, model=torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="sampler"):
        SampleDepth(3)
