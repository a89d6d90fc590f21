"""What a graft refuses, and that a refusal leaves the host as it was."""

import copy

import hosts
import jaxtyping
import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, PromptTuningConfig, TaskType, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel

import recurrent_depth as rd
from recurrent_depth.hf import graft, recurse, retrofit, ungraft


def routed(dim):
    return rd.RoutedUpdate(rd.plain(dim), rd.expert_choice(dim, 3), rd.Interpolate())


REFUSED = {
    "behind the end": ({"core": range(3, 6)}, r"core is range\(3, 6\), but the model has 5 layers, 0 to 4"),
    "before the start": ({"core": range(-1, 2)}, "5 layers, 0 to 4"),
    "empty": ({"core": range(2, 2)}, "empty"),
    "reversed": ({"core": range(3, 1)}, "empty"),
    "backwards": ({"core": [3, 2, 1]}, "in a row"),
    "with a gap": ({"core": [1, 3]}, "in a row"),
    "no layers": ({"core": 3}, "range or a list"),
    "no numbers": ({"core": ["1"]}, "whole number"),
    "overlapping": ({"drop": (1,)}, "overlaps with core"),
    "dropped twice": ({"drop": (0, 0)}, "once each"),
    "dropped beyond": ({"drop": (7,)}, "0 to 4"),
    "no steps": ({"num_steps": 0}, "num_steps is 0"),
    "half a step": ({"num_steps": 1.5}, "num_steps is 1.5"),
    "a made update": ({"update": rd.gated(32)}, "GatedDepthUpdate"),
    "an update of another kind": ({"update": lambda dim: nn.Linear(dim, dim)}, "DepthUpdate"),
    "a router": ({"update": routed}, "picks tokens"),
    "a policy's class": ({"kv": rd.KeepMean}, "give an instance"),
    "a path to nowhere": ({"layers": "model.blocks"}, r"'model.layers' \(5 LlamaDecoderLayer\)"),
    "a path to something else": ({"layers": "model.norm"}, "nn.ModuleList"),
    "a foreign list": ({"layers": nn.ModuleList([nn.Linear(2, 2)])}, "nn.ModuleList of LlamaForCausalLM"),
    "a width": ({"dim": 0}, "dim is 0"),
}


@pytest.fixture(autouse=True)
def without_type_checks(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as a user runs it


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_leaves_the_host_as_it_was(case):
    settings, message = REFUSED[case]
    model = hosts.host("llama")
    config, before, kinds = model.config.to_dict(), vars(model).keys(), [type(part) for part in model.modules()]
    with pytest.raises(ValueError, match=message):
        graft(model, **{"core": range(1, 3), "num_steps": 2} | settings)
    assert model.config.to_dict() == config
    assert vars(model).keys() == before
    assert [type(part) for part in model.modules()] == kinds


def test_an_unknown_argument_is_refused():
    with pytest.raises(TypeError, match="depth"):
        graft(hosts.host("llama"), range(1, 3), 2, depth=3)


def test_a_graft_is_not_grafted_again():
    model = hosts.grafted("llama")
    with pytest.raises(ValueError, match="ungraft"):
        graft(model, range(1, 3), 2)
    with pytest.raises(ValueError, match="ungraft"):
        graft(model.model.layers, range(1, 3), 2)
    with pytest.raises(ValueError, match="ungraft"):
        graft(nn.Sequential(model), range(1, 3), 2)
    graft(ungraft(model), range(1, 3), 2)


def test_what_is_no_graft_is_not_taken_out():
    with pytest.raises(ValueError, match="no graft"):
        ungraft(hosts.host("llama"))
    with pytest.raises(ValueError, match="model is"):
        graft("gpt2", range(1, 3), 2)


class Twins(nn.Module):
    """Two lists that might be meant."""

    def __init__(self):
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.second = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))


def test_layers_that_cannot_be_told_are_asked_for():
    with pytest.raises(ValueError, match=r"'first' \(3 Linear\), 'second' \(3 Linear\).*layers="):
        graft(Twins(), [1], 2)
    with pytest.raises(ValueError, match=r"There is no nn\.ModuleList"):
        graft(nn.Linear(4, 4), [1], 2)
    graft(Twins(), [1], 2, layers="second", dim=4)


class Deep(nn.Module):
    """A model with a depth of its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.LayerNorm(4) for _ in range(3))

    def forward(self, x, num_steps=1):
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_model_that_takes_steps_already_is_refused_and_left_as_it_was():
    model = Deep()
    with pytest.raises(ValueError, match="Deep takes num_steps of its own"):
        graft(model, [1], 2)
    assert {type(layer) for layer in model.layers} == {nn.LayerNorm}


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "gemma3", "phi", "olmo2"])
def test_a_depth_given_to_a_part_of_the_graft_is_refused_and_not_passed_over(name):
    model, tokens = hosts.grafted(name), hosts.tokens()
    with pytest.raises(ValueError, match="at_depth"):
        model.base_model(tokens, num_steps=2)
    with model.recurrence.at_depth(2):
        found = model.base_model(tokens).last_hidden_state
    expected = model(tokens, num_steps=2, output_hidden_states=True).hidden_states[-1]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "bert", "vit"])
@pytest.mark.parametrize("mistaken", ["num_step", "n_steps", "steps", "numsteps", "num_stepss", "max_steps"])
def test_a_depth_under_a_name_that_is_none_is_refused_and_not_passed_over(name, mistaken):
    model = hosts.grafted(name)
    with pytest.raises(ValueError, match=f"{mistaken} is no argument of this graft; is num_steps meant"):
        model(**hosts.inputs(name), **{mistaken: 1})
    with pytest.raises((ValueError, TypeError), match=mistaken):
        model.base_model(**hosts.inputs(name), **{mistaken: 1})


def test_what_else_a_host_takes_is_passed_on():
    model, tokens = hosts.grafted("llama"), hosts.tokens()
    expected = model(tokens, labels=tokens).loss
    found = model(tokens, labels=tokens, num_items_in_batch=2 * 8, logits_to_keep=0, whatever=1).loss
    torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="num_step"):
        model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=2, num_step=2)


SPEECH = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "layerdrop": 0.0}
SPEECH |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
HANDING_ON = {
    "T5": (transformers.T5ForConditionalGeneration, transformers.T5Config, {}, "encoder.block"),
    "T5's decoder": (transformers.T5ForConditionalGeneration, transformers.T5Config, {}, "decoder.block"),
    "T5's encoder": (transformers.T5EncoderModel, transformers.T5Config, {}, None),
    "WavLM": (transformers.WavLMModel, transformers.WavLMConfig, SPEECH, None),
}


@pytest.mark.parametrize("case", HANDING_ON)
@pytest.mark.parametrize("way", [graft, retrofit])
def test_layers_that_hand_on_a_position_bias_are_refused_and_left_as_they_were(case, way):
    host, config, settings, layers = HANDING_ON[case]
    sizes = {"hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4, "intermediate_size": 48}
    if config is transformers.T5Config:
        sizes = {"vocab_size": hosts.VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 5, "num_heads": 4}
    model = host(config(**sizes | settings)).eval()
    kinds = [type(part) for part in model.modules()]
    with pytest.raises(ValueError, match=r"makes a position bias \(compute_bias\) and hands it to the layers behind"):
        way(model, range(1, 4), 2, layers=layers)
    assert [type(part) for part in model.modules()] == kinds


def test_position_biases_that_no_layer_hands_on_are_no_matter():
    config = transformers.UMT5Config(vocab_size=hosts.VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=5, num_heads=4)
    model, tokens = transformers.UMT5EncoderModel(config).eval(), hosts.tokens()
    expected = model(tokens).last_hidden_state
    assert torch.equal(graft(model, range(1, 4), 2)(tokens).last_hidden_state, expected)


def test_either_part_of_an_encoder_decoder_loops_the_decoder_without_a_cache():
    sizes = {"d_model": 32, "encoder_layers": 5, "decoder_layers": 5, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": hosts.VOCAB}
    model, tokens = transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes)).eval(), hosts.tokens()
    with pytest.raises(ValueError, match=r"'model.encoder.layers' \(5 BartEncoderLayer\).*layers="):
        graft(model, range(1, 4), 2)
    expected = model(tokens, decoder_input_ids=tokens).logits
    graft(model, range(1, 4), 2, layers="model.encoder.layers")
    assert torch.equal(model(tokens, decoder_input_ids=tokens).logits, expected)
    hosts.randomise(model.recurrence)
    assert not torch.allclose(model(tokens, decoder_input_ids=tokens).logits, expected, atol=1e-3)
    ungraft(model)
    graft(model, range(1, 4), 2, layers="model.decoder.layers")
    with pytest.raises(ValueError, match="EncoderDecoderCache"):
        model(tokens, decoder_input_ids=tokens)
    assert torch.equal(model(tokens, decoder_input_ids=tokens, use_cache=False).logits, expected)


def test_data_parallel_replicas_are_refused():
    model = hosts.grafted("llama")  # what nn.DataParallel does on more than one device
    with pytest.raises(RuntimeError, match="DistributedDataParallel"):
        [part._replicate_for_data_parallel() for part in model.modules()]


LORA = LoraConfig(r=2, target_modules=["q_proj"])
PROMPT = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=2)
ADAPTED = {
    "whole": lambda: get_peft_model(hosts.host("llama"), LORA),
    "its tuner": lambda: get_peft_model(hosts.host("llama"), LORA).base_model,
    "its host": lambda: get_peft_model(hosts.host("llama"), LORA).get_base_model(),
    "a prompt": lambda: get_peft_model(hosts.host("llama"), PROMPT),
}
WAYS = [graft, retrofit, lambda model, core, num_steps: recurse(model, core, num_steps, rank=2)]


@pytest.mark.parametrize("make", ADAPTED.values(), ids=ADAPTED)
@pytest.mark.parametrize("way", WAYS, ids=["graft", "retrofit", "recurse"])
def test_an_adapted_model_is_refused_and_left_as_it_was(make, way):
    model = make()
    before = [type(part) for part in model.modules()]
    with pytest.raises(ValueError, match=r"get_peft_model\(model, ...\); or merge them first"):
        way(model, range(1, 3), 2)
    assert [type(part) for part in model.modules()] == before


def test_a_merged_or_later_adapted_one_is_not_refused():
    merged = get_peft_model(hosts.host("llama"), LORA).merge_and_unload()
    assert isinstance(get_peft_model(graft(merged, range(1, 3), 2), LORA), PeftModel)


@pytest.fixture
def single_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "wrap", [torch.compile, nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel, fully_shard]
)
def test_a_wrapped_model_is_refused_since_the_wrapper_would_keep_to_the_host(wrap, single_process):
    with pytest.raises(ValueError, match=r"wraps a model.*Graft the model itself first"):
        graft(wrap(hosts.host("llama")), range(1, 3), 2, dim=32)


@pytest.mark.parametrize("num_steps", [0, -1, 1.5, "2", [1, 2], True])
def test_depths_that_are_none_are_refused_and_change_nothing(num_steps):
    model, tokens = hosts.grafted("llama"), hosts.tokens()
    expected = model(tokens).logits
    with pytest.raises(ValueError, match=r"num_steps|one depth for all rows"):
        model(tokens, num_steps=num_steps)
    with pytest.raises(ValueError, match=r"num_steps|one depth for all rows"):
        model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=2, num_steps=num_steps)
    assert torch.equal(model(tokens).logits, expected)


def test_a_host_that_leaves_layers_out_at_random_is_refused_when_it_does():
    model = hosts.host("opt", layerdrop=0.6)
    graft(model, range(1, 4), 2).train()

    def train():
        for _ in range(20):
            model(hosts.tokens())

    with pytest.raises(ValueError, match="layerdrop"):
        train()
    assert model.eval()(hosts.tokens()).logits.isfinite().all()


def test_a_cache_of_another_model_is_refused():
    from transformers import DynamicCache

    from recurrent_depth.hf.versions import CACHE

    model, other = hosts.grafted("llama"), copy.deepcopy(hosts.host("llama").config)
    other.num_hidden_layers = 2
    with pytest.raises(ValueError, match="cache"):
        model(hosts.tokens(), **{CACHE: DynamicCache(config=other)})
