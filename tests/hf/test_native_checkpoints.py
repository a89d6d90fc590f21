"""Between the training example's checkpoints and `save_pretrained`: nothing is lost on the way."""

import sys
from pathlib import Path

import pytest
import torch

import recurrent_depth as rd
from recurrent_depth.hf import RecurrentDepthForCausalLM, from_checkpoint, to_checkpoint
from recurrent_depth.hf.convert import main
from recurrent_depth.hf.example_words import config_of as described
from recurrent_depth.training import parameter_groups, read_checkpoint, save_checkpoint

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from models import build

SIZES = {"dim": 16, "num_heads": 2, "vocab_size": 40, "context_length": 64, "init_std": 0.06}
GATE = {"bias": 0.5, "state_noise": 0.1, "gate_noise": 0.0}
DESCRIPTIONS = {
    "grt": {"builder": "grt", "layout": [1, 2, 3, 1], "update": GATE, "form": "llama", **SIZES},
    "dense": {"builder": "dense", "num_blocks": 3, "form": "gpt2", **SIZES},
    "naive": {"builder": "naive", "layout": [0, 2, 2, 0], "form": "gpt2", **SIZES},
}
every_description = pytest.mark.parametrize("description", DESCRIPTIONS.values(), ids=DESCRIPTIONS)


def checkpoint(folder: Path, description: dict, **config) -> Path:
    model = build(description)
    optimizer = torch.optim.AdamW(parameter_groups(model))
    config = {"model": description, "data": {"kind": "bytes"}, **config}
    return save_checkpoint(folder, 7, model=model, optimizer=optimizer, config=config)


@every_description
def test_a_checkpoint_becomes_a_folder_and_a_checkpoint_again(description, tmp_path, capsys):
    before = checkpoint(tmp_path / "run", description)
    main([str(tmp_path / "run"), str(tmp_path / "folder")])
    main([str(tmp_path / "folder"), str(tmp_path / "back")])
    after = Path(capsys.readouterr().out.split()[-1])
    assert after == tmp_path / "back" / before.name
    assert (after / "model.safetensors").read_bytes() == (before / "model.safetensors").read_bytes()
    assert read_checkpoint(after)[1:] == read_checkpoint(before)[1:]


@every_description
def test_the_model_computes_the_same(description, tmp_path):
    model = from_checkpoint(checkpoint(tmp_path, description))
    native, tokens = build(description).eval(), torch.randint(40, (2, 9))
    native.load_state_dict(model.native.state_dict())
    assert torch.equal(model(tokens).logits, native(tokens))
    assert model.config.training["step"] == 7


@every_description
def test_a_model_that_comes_from_nowhere_is_described_as_the_example_would(description, tmp_path):
    config = described(description)
    model = RecurrentDepthForCausalLM(config)
    found = read_checkpoint(to_checkpoint(model, tmp_path))
    assert found.config == {"model": description}
    assert found.step == 0


@pytest.mark.parametrize("name", ["gpt2_small", "grt_medium"])
def test_a_preset_is_described_by_its_sizes(name):
    with torch.device("meta"):
        model, preset = described({"builder": "preset", "name": name}).build(), getattr(rd.presets, name)()
    assert {n: x.shape for n, x in model.state_dict().items()} == {n: x.shape for n, x in preset.state_dict().items()}
    assert model.layout == preset.layout


@pytest.mark.parametrize(
    "changed", [{"builder": "huginn"}, {"update": "halted"}, {"form": {"name": "LlamaForm", "num_kv_heads": 1}}]
)
def test_a_model_that_the_example_has_no_words_for(changed, tmp_path):
    config = described(DESCRIPTIONS["grt"])
    config.update = None
    for name, value in changed.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match="no words"):
        to_checkpoint(RecurrentDepthForCausalLM(config), tmp_path)


def test_a_folder_without_a_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="no checkpoint"):
        from_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="describes no model"):
        described({"builder": "grt"})
