"""Grafts in folders: bit for bit the same by our loader, the host or an error by transformers' own; PEFT, Trainer."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from hosts import DECODERS, VOCAB, host, inputs, outcome, padded, randomise, tokens
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open

import recurrent_depth as rd
from recurrent_depth.hf import anchor_start, graft, load_graft, recurse, retrofit

GREEDY = {"max_new_tokens": 4, "do_sample": False}


def damped(model):
    return graft(model, range(1, 3), 3, update=partial(rd.damped, share=0.3), kv=rd.KeepFirst())


def blended(model):
    heads = getattr(model.config, "num_key_value_heads", None) or 4
    policy = rd.KeepBlend(num_layers=2, num_steps=3, num_kv_heads=heads, head_size=8)
    return graft(model, range(1, 3), 3, update=partial(rd.gated, bias=-1.0), kv=policy)


def halved(model):
    return graft(model, range(1, 3), 2, update=partial(rd.halted, inner=rd.plain), kv=rd.KeepCyclic(2))


def skipping(model):
    return retrofit(model, range(3, 5), 2, drop=[1, 2], host_first=True)


HOST_ALONE = {
    "replacing": lambda model: graft(model, range(1, 3), 2, update=rd.plain),
    "gated": lambda model: graft(model, range(1, 3), 2),
    "damped": damped,
    "blended": blended,
    "halted": halved,
    "adapter behind the first step": skipping,
}
SEALED = {
    "dropped": lambda model: graft(model, range(1, 3), 2, drop=[3]),
    "retrofit": lambda model: retrofit(model, range(3, 5), 2, drop=[1, 2], start=anchor_start),
    "host first off": lambda model: graft(model, range(1, 3), 2, host_first=False),
    "recursive": lambda model: recurse(model, range(1, 5), 2, rank=4),
}
ALL = HOST_ALONE | SEALED
every_graft = pytest.mark.parametrize("make", ALL.values(), ids=ALL)


def trained(make, name: str = "llama", **changes):
    """A graft whose loop has other weights than it starts with."""
    model = make(host(name, **changes)).eval()
    randomise(model.recurrence, std=0.1)
    return model


def assert_same(found, model, name: str = "llama") -> None:
    assert type(found) is type(model)
    ours, theirs = found.state_dict(), model.state_dict()
    assert list(ours) == list(theirs)
    for key, weight in theirs.items():
        assert ours[key].dtype == weight.dtype
        assert torch.equal(ours[key], weight), key
    assert not found.training
    beside = {"_name_or_path", "transformers_version"}
    told = [{key: value for key, value in one.config.to_dict().items() if key not in beside} for one in (found, model)]
    assert told[0] == told[1]
    with torch.no_grad():
        for num_steps in (1, 2, None):
            asked = {} if num_steps is None else {"num_steps": num_steps}
            logits = outcome(model(**inputs(name), **asked))
            assert torch.equal(outcome(found(**inputs(name), **asked)), logits)


# Our loader


@every_graft
def test_it_is_bit_for_bit_what_was_saved(make, tmp_path):
    model = trained(make)
    model.save_pretrained(tmp_path)
    found = load_graft(tmp_path)
    assert_same(found, model)
    assert torch.equal(found.generate(**padded(), **GREEDY), model.generate(**padded(), **GREEDY))


@pytest.mark.parametrize("make", [HOST_ALONE["gated"], SEALED["retrofit"], SEALED["recursive"]])
@pytest.mark.parametrize("name", ["gpt2", "qwen3", "gemma3", "bloom", "bert", "vit"])
def test_on_hosts_of_other_families(make, name, tmp_path):
    model = trained(make, name)
    model.save_pretrained(tmp_path)
    found = load_graft(tmp_path)
    assert list(found.state_dict()) == list(model.state_dict())
    assert all(torch.equal(weight, model.state_dict()[key]) for key, weight in found.state_dict().items())
    with torch.no_grad():
        assert torch.equal(outcome(found(**inputs(name))), outcome(model(**inputs(name))))


@every_graft
@pytest.mark.parametrize("tied", [False, True])
def test_in_half_precision_in_shards_and_with_a_tied_head(make, tied, tmp_path):
    model = trained(make, tie_word_embeddings=tied)
    for weight in model.parameters():  # not the buffers of rotary positions, which transformers keeps in float32
        weight.data = weight.data.bfloat16()
    model.generation_config.max_new_tokens = 7
    model.recurrence.num_steps = 1
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    found = load_graft(tmp_path)
    assert_same(found, model)
    assert found.generation_config.max_new_tokens == 7
    assert found.recurrence.num_steps == 1
    assert (found.lm_head.weight is found.model.embed_tokens.weight) == tied


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])  # the older name is taken by transformers too
@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16"])
@pytest.mark.parametrize("make", [ALL["gated"], ALL["recursive"]])
def test_another_dtype_is_the_callers_choice(make, dtype, name, tmp_path):
    trained(make).save_pretrained(tmp_path)
    found = load_graft(tmp_path, **{name: dtype})
    assert {weight.dtype for weight in found.state_dict().values()} == {torch.bfloat16}
    assert found(tokens()).logits.isfinite().all()


@pytest.mark.parametrize("asked", [{"dtype": "auto"}, {"dtype": None}, {"torch_dtype": "auto"}])
@pytest.mark.parametrize("make", [ALL["blended"], ALL["recursive"]])
def test_no_dtype_in_particular_is_the_one_of_each_weight(make, asked, tmp_path):
    model = trained(make)
    for name, weight in model.named_parameters():
        if "kv" not in name:  # a loop need not have one dtype alone
            weight.data = weight.data.bfloat16()
    model.save_pretrained(tmp_path)
    assert_same(load_graft(tmp_path, **asked), model)


@every_graft
def test_placed_on_a_device_by_a_map(make, tmp_path):
    model = trained(make)
    model.save_pretrained(tmp_path)
    found = load_graft(tmp_path, device_map={"": "cpu"})
    assert_same(found, model)
    assert torch.equal(found.generate(**padded(), **GREEDY), model.generate(**padded(), **GREEDY))


def test_loading_leaves_the_global_rng_alone(tmp_path):
    trained(ALL["gated"]).save_pretrained(tmp_path)
    before = torch.get_rng_state()
    load_graft(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


@every_graft
def test_names_are_the_hosts_own_and_the_rest_lies_under_recurrence(make, tmp_path):
    model = trained(make)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    own = {name for name in names if not name.startswith("recurrence.")}
    assert own <= set(host("llama").state_dict())
    assert names == set(model.state_dict())
    json.loads((tmp_path / "config.json").read_text())


@every_graft
def test_saved_again_it_is_the_same_folder(make, tmp_path):
    trained(make).save_pretrained(tmp_path / "first")
    load_graft(tmp_path / "first").save_pretrained(tmp_path / "second")
    for file in (tmp_path / "first").iterdir():
        assert (tmp_path / "second" / file.name).read_bytes() == file.read_bytes(), file.name


# transformers' own loader


@pytest.mark.parametrize("make", HOST_ALONE.values(), ids=HOST_ALONE)
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "gemma2"])
def test_where_one_step_is_the_host_plain_loading_gives_the_host(make, name, tmp_path):
    model = trained(make, name)
    model.save_pretrained(tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(plain) is type(host(name))
    assert torch.equal(plain(tokens()).logits, model(tokens(), num_steps=1).logits)
    assert not torch.allclose(plain(tokens()).logits, model(tokens()).logits, atol=1e-3)


@pytest.mark.parametrize("make", SEALED.values(), ids=SEALED)
@pytest.mark.parametrize("name", [*DECODERS, "bert"])
def test_where_it_is_not_plain_loading_raises_and_says_what_to_use(make, name, tmp_path):
    if name == "qwen3_moe" and make is SEALED["recursive"]:
        make = partial(recurse, core=range(1, 5), num_steps=2, rank=0)
    model = make(host(name))
    model.save_pretrained(tmp_path)
    auto = transformers.AutoModel if name == "bert" else transformers.AutoModelForCausalLM
    for loader in (auto, getattr(transformers, type(model).__name__)):
        with pytest.raises(Exception, match="load_graft"):
            loader.from_pretrained(tmp_path)


# Own functions


class Halving(rd.DepthUpdate):
    """Half a step."""

    def __init__(self, scale):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([scale]))

    def begin(self, anchor, call):
        return rd.initial_state(anchor)

    def forward(self, state, blocks, step):
        return state._replace(h=state.h + self.scale * (blocks(state.h) - state.h))

    def read(self, state):
        return state.h

    def cost(self, num_steps):
        return rd.UpdateCost()


def halving(dim: int, scale: object = 0.5) -> rd.DepthUpdate:
    return Halving(0.5)


class KeepOwn(rd.KeepLast):
    """A policy of one's own."""


@pytest.mark.parametrize("given", [halving, partial(halving, scale=object()), lambda dim: Halving(0.5)])
def test_an_update_of_ones_own_is_asked_for(given, tmp_path):
    model = trained(lambda model: graft(model, range(1, 3), 2, update=given))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="not of this library: give update"):
        load_graft(tmp_path)
    found = load_graft(tmp_path, update=given)
    assert torch.equal(found(tokens()).logits, model(tokens()).logits)


def test_a_policy_of_ones_own_is_asked_for(tmp_path):
    model = trained(lambda model: graft(model, range(1, 3), 2, kv=KeepOwn()))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="not of this library: give kv"):
        load_graft(tmp_path)
    found = load_graft(tmp_path, kv=KeepOwn())
    assert torch.equal(found.generate(**padded(), **GREEDY), model.generate(**padded(), **GREEDY))


# Bad input


def test_what_is_no_graft_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"there is no config\.json"):
        load_graft(tmp_path)
    host("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="without a grafted loop"):
        load_graft(tmp_path)


def test_a_host_that_was_loaded_plainly_and_saved_lacks_the_loop(tmp_path):
    trained(ALL["gated"]).save_pretrained(tmp_path / "graft")
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "graft").save_pretrained(tmp_path / "host")
    with pytest.raises(ValueError, match="are missing"):
        load_graft(tmp_path / "host")


def test_an_unknown_class_and_an_early_upload_are_refused(tmp_path):
    model = trained(SEALED["recursive"])
    with pytest.raises(ValueError, match="upload that"):
        model.save_pretrained(tmp_path, push_to_hub=True)
    model.save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | {"architectures": ["OursForCausalLM"]}))
    with pytest.raises(ValueError, match="transformers has no OursForCausalLM: give model_class"):
        load_graft(tmp_path)
    assert load_graft(tmp_path, model_class=transformers.LlamaForCausalLM) is not None


def test_a_default_depth_with_fewer_gradients_is_saved_as_its_number_of_steps(tmp_path):
    model = trained(ALL["gated"])
    model.recurrence.num_steps = rd.Depth(3, grad_steps=1)
    model.save_pretrained(tmp_path)
    assert load_graft(tmp_path).recurrence.num_steps == 3


def test_a_process_that_is_not_the_main_one_writes_no_configuration(tmp_path):
    model = trained(SEALED["recursive"])
    (tmp_path / "config.json").write_text("half a fi")  # which the main process is just writing
    model.save_pretrained(tmp_path, is_main_process=False)
    assert (tmp_path / "config.json").read_text() == "half a fi"


@pytest.mark.parametrize("name", ["hf.retrofit:renamed", "gone:adapted", "hf.saving:Path"])
def test_an_update_that_this_version_has_not_is_asked_for(name, tmp_path):
    trained(ALL["gated"]).save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    said["recurrence"]["update"] = {"name": f"recurrent_depth.{name}", "arguments": {}}
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match="this version has not: give update"):
        load_graft(tmp_path)


# PEFT, Trainer, accelerate


@every_graft
def test_an_adapter_on_a_graft_saves_and_loads(make, tmp_path):
    model = trained(make)
    model.save_pretrained(tmp_path / "graft")
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    adapted.eval().save_pretrained(tmp_path / "adapter")
    expected = adapted(input_ids=tokens()).logits
    base = load_graft(tmp_path / "graft")
    before = base(tokens()).logits
    found = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert torch.equal(found(input_ids=tokens()).logits, expected)
    assert not torch.equal(expected, before)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        row = torch.randint(2, VOCAB, (6,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row}


def trainer(model, folder: Path, max_steps: int) -> transformers.Trainer:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=max_steps,
        save_steps=2,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    return transformers.Trainer(model=model, args=arguments, train_dataset=Rows())


@pytest.mark.parametrize("make", [ALL["gated"], ALL["retrofit"], ALL["recursive"]])
def test_checkpoints_of_trainer_load_and_resume(make, tmp_path):
    whole = make(host("llama"))
    trainer(whole, tmp_path / "whole", 4).train()
    found = load_graft(tmp_path / "whole" / "checkpoint-4")
    assert all(torch.equal(weight, whole.state_dict()[name]) for name, weight in found.state_dict().items())
    resumed = make(host("llama"))
    trainer(resumed, tmp_path / "whole", 4).train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert all(torch.equal(weight, whole.state_dict()[name]) for name, weight in resumed.state_dict().items())


@pytest.mark.parametrize("make", [ALL["gated"], ALL["retrofit"], ALL["recursive"]])
def test_states_of_accelerate_round_trip(make, tmp_path):
    from accelerate import Accelerator

    model, accelerator = trained(make, tie_word_embeddings=True), Accelerator(cpu=True)
    expected = model(tokens()).logits
    accelerator.prepare(model)
    accelerator.save_state(tmp_path)
    randomise(model, std=0.1)
    assert not torch.equal(model(tokens()).logits, expected)
    accelerator.load_state(tmp_path)
    assert torch.equal(model(tokens()).logits, expected)
