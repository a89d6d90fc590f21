"""Where accelerate puts a native model: whole on one device, and nowhere else."""

import pytest
import torch
from accelerate import cpu_offload, dispatch_model, infer_auto_device_map
from looped import DESCRIPTIONS, made, some_tokens

from recurrent_depth.hf import RecurrentDepthForCausalLM, RecurrentDepthModel

PARTS = ("transformer.embed", "transformer.prelude", "transformer.coda", "transformer.norm", "transformer.head", "kv")
SPLIT = {f"model.{part}": "cpu" for part in PARTS} | {"model.transformer.core": "disk"}


def num_bytes(model: torch.nn.Module) -> int:
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())


@pytest.mark.parametrize("name", DESCRIPTIONS)
@pytest.mark.parametrize("share", [0.4, 0.9, 1.5])
def test_an_inferred_map_keeps_a_model_whole(name, share):
    model = made(name)
    memory = {"cpu": int(share * num_bytes(model)), "disk": 10 * num_bytes(model)}
    found = infer_auto_device_map(model, max_memory=memory, no_split_module_classes=model._no_split_modules)
    assert set(found) <= {"", "model"}


@pytest.mark.parametrize("kind", [RecurrentDepthForCausalLM, RecurrentDepthModel])
@pytest.mark.parametrize("device_map", [{"": "cpu"}, "cpu", "auto"], ids=str)
def test_a_model_is_loaded_onto_one_device(kind, device_map, tmp_path):
    made().save_pretrained(tmp_path)
    tokens = some_tokens()
    loaded = kind.from_pretrained(tmp_path, device_map=device_map)
    assert torch.equal(loaded(tokens)[0], kind.from_pretrained(tmp_path)(tokens)[0])
    assert {weight.device.type for weight in loaded.parameters()} == {"cpu"}


@pytest.mark.parametrize("device_map, said", [({"": "disk"}, "on the disk"), (SPLIT, "on cpu and the disk")])
def test_a_model_that_lies_on_the_disk_is_refused(device_map, said, tmp_path):
    made().save_pretrained(tmp_path / "model")
    places = {"device_map": device_map, "offload_folder": str(tmp_path / "offload")}
    model = RecurrentDepthForCausalLM.from_pretrained(tmp_path / "model", **places)
    with pytest.raises(ValueError, match=said):
        model(some_tokens())


def test_a_model_that_is_spread_after_it_was_made_is_refused(tmp_path):
    with pytest.raises(ValueError, match="the disk"):
        dispatch_model(made(), {"model": "disk"}, main_device="cpu", offload_dir=tmp_path)(some_tokens())
    with pytest.raises(ValueError, match="the disk"):
        cpu_offload(made(), torch.device("cpu"))(some_tokens())


def test_a_model_on_the_meta_device_has_shapes_as_ever():
    model = made().to("meta")
    assert model(some_tokens().to("meta")).logits.shape == (2, 7, 40)
