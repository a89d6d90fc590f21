"""Folders of grafts that were edited or damaged, or are not what their caller believes: `load_graft` names it."""

import json
from functools import partial

import pytest
import torch
import transformers
from hosts import host, randomise, tokens

import recurrent_depth as rd
from recurrent_depth.hf import corrected, graft, load_graft, recurse

MAKERS = {
    "gated": lambda: graft(host("llama"), range(1, 3), 2),
    "sealed": lambda: graft(host("llama"), range(1, 3), 2, drop=[3], kv=rd.KeepCyclic(2)),
    "recursive": lambda: recurse(host("llama"), range(1, 5), 2, rank=2),
}


def saved(folder, name: str = "gated", **how):
    model = MAKERS[name]()
    randomise(model.recurrence, std=0.1)
    model.save_pretrained(folder, **how)
    return model


def rewrite(folder, **changes):
    """Changes of the configuration."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit(folder, **changes):
    """Changes of the settings; `...` takes one out."""
    changed = json.loads((folder / "config.json").read_text())["recurrence"] | changes
    rewrite(folder, recurrence={key: value for key, value in changed.items() if value is not ...})


# Settings

REFUSED = {
    "core is a number": ("gated", {"core": 2}, r"recurrence\.core is 2, but must be the first layer of the core"),
    "core is null": ("gated", {"core": None}, r"recurrence\.core is null, but must be"),
    "core is a slice": ("gated", {"core": "2:4"}, r'recurrence\.core is "2:4", but must be'),
    "core is empty": ("gated", {"core": [2, 2]}, r"recurrence\.core is \[2, 2\], but must be"),
    "core of halves": ("gated", {"core": [1.0, 3]}, r"recurrence\.core is \[1\.0, 3\], but must be"),
    "no core": ("gated", {"core": ...}, r"recurrence\.core is missing, and must be the first layer"),
    "no num_steps": ("gated", {"num_steps": ...}, r"recurrence\.num_steps is missing, and must be a whole number"),
    "no host_first": ("gated", {"host_first": ...}, r"recurrence\.host_first is missing, and must be true or false"),
    "no steps": ("gated", {"num_steps": 0}, r"recurrence\.num_steps is 0, but must be a whole number of at least 1"),
    "steps are a switch": ("gated", {"num_steps": True}, r"recurrence\.num_steps is true, but must be a whole"),
    "host_first is a word": ("gated", {"host_first": "no"}, r'recurrence\.host_first is "no", but must be true or'),
    "kv is a word": ("gated", {"kv": "KeepMean"}, r'recurrence\.kv is "KeepMean", but must be a name and arguments'),
    "kv is null": ("gated", {"kv": None}, r"recurrence\.kv is null, but must be a name and arguments"),
    "kv by name alone": ("gated", {"kv": {"name": "KeepMean"}}, r"recurrence\.kv is .*, but must be a name and arg"),
    "update within": (
        "gated",
        {"update": {"name": "halted", "arguments": {"inner": {"arguments": {}}}}},
        r"recurrence\.update is .*, but must be a name and arguments",
    ),
    "drop is a number": ("sealed", {"drop": 3}, r"recurrence\.drop is 3, but must be a list of layers"),
    "dim is a word": ("gated", {"dim": "32"}, r'recurrence\.dim is "32", but must be a whole number'),
    "layers is a list": ("gated", {"layers": [1]}, r"recurrence\.layers is \[1\], but must be the path"),
    "sealed is empty": ("sealed", {"sealed": {}}, r"recurrence\.sealed is \{\}, but must be what save_pretrained"),
    "a typo": ("gated", {"num_step": 4}, r"recurrence\.num_step is not known .*is num_steps meant\?"),
    "something else": ("gated", {"colour": 4}, r"recurrence\.colour is not known .*known are core, num_steps"),
    "tied does not divide": ("recursive", {"tied": 3}, r"recurrence\.tied is 3, but must be a divisor of the 4"),
    "too many steps": ("recursive", {"num_steps": 3}, r"recurrence\.num_steps is 3, but must be at most 2"),
    "rank below zero": ("recursive", {"rank": -1}, r"recurrence\.rank is -1, but must be a whole number of at least 0"),
    "no vectors": ("recursive", {"vectors": ...}, r"recurrence\.vectors is missing, and must be true or false"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_edited_settings_are_refused_by_file_field_and_value(case, tmp_path):
    name, changes, said = REFUSED[case]
    saved(tmp_path, name)
    edit(tmp_path, **changes)
    with pytest.raises(ValueError, match=rf"config\.json: {said}"):
        load_graft(tmp_path)


WRONG = {
    "core behind the end": ({"core": [3, 9]}, "the model has 5 layers, 0 to 4"),
    "another width": ({"dim": 16}, r"recurrence\.core\.update.* is \(.*\) in .*, but \(.*\) in the loop"),
    "another update": ({"update": {"name": "plain", "arguments": {}}}, "are unknown"),
    "no such argument": (
        {"update": {"name": "gated", "arguments": {"bia": 1}}},
        r"update=gated\(bia=1\): got an unexpected keyword argument 'bia'",
    ),
    "a policy without its number": ({"kv": {"name": "KeepCyclic", "arguments": {}}}, r"kv=KeepCyclic\(\): .*missing"),
    "no policy": ({"kv": {"name": "gated", "arguments": {}}}, "kv"),
    "another list": ({"layers": "model.blocks"}, "layers is 'model.blocks', but LlamaForCausalLM has no such part"),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_do_not_fit_the_folder_are_refused(case, tmp_path):
    changes, said = WRONG[case]
    saved(tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(ValueError, match=said):
        load_graft(tmp_path)


@pytest.mark.parametrize("settings", [{}, None, [], [1], "gated", 3])
def test_settings_that_are_none_are_refused(settings, tmp_path):
    saved(tmp_path)
    rewrite(tmp_path, recurrence=settings)
    with pytest.raises(ValueError, match=r"config\.json: recurrence"):
        load_graft(tmp_path)


@pytest.mark.parametrize("architectures", [None, [], ["LlamaForCausalLM", "LlamaModel"], "LlamaForCausalLM", [1], {}])
def test_architectures_that_are_not_one_are_refused_unless_the_class_is_given(architectures, tmp_path):
    saved(tmp_path)
    rewrite(tmp_path, architectures=architectures)
    with pytest.raises(ValueError, match=r"config\.json: architectures is .*model_class"):
        load_graft(tmp_path)
    if architectures is None:
        load_graft(tmp_path, model_class=transformers.LlamaForCausalLM)


@pytest.mark.parametrize("name", ["LlamaConfig", "OursForCausalLM", "models", ""])
def test_an_architecture_that_is_no_model_is_refused(name, tmp_path):
    saved(tmp_path)
    rewrite(tmp_path, architectures=[name])
    with pytest.raises(ValueError, match=f"transformers has no {name}: give model_class"):
        load_graft(tmp_path)


# Files


@pytest.mark.parametrize("content", [b"", b"{", b'{"recurrence": ', b"\xff\xfe\x00\x01", b"[1]", b"null", b'"x"'])
def test_a_damaged_configuration_is_refused_by_its_name(content, tmp_path):
    saved(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json(: the whole file is| is damaged)"):
        load_graft(tmp_path)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_damaged_weights_are_refused_by_the_files_name(share, name, tmp_path):
    saved(tmp_path, name)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged or was not written to its end"):
        load_graft(tmp_path)


def test_missing_weights_are_refused_by_the_files_name(tmp_path):
    saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds no weights: there is neither model\.safetensors nor"):
        load_graft(tmp_path)


@pytest.mark.parametrize("index", [b"", b"[]", b"{}", b'{"weight_map": 3}', b'{"weight_map": {"x": 3}}'])
def test_missing_shards_and_damaged_indices_are_refused_by_their_names(index, tmp_path):
    saved(tmp_path, max_shard_size="20KB")
    next(tmp_path.glob("model-*.safetensors")).unlink()
    with pytest.raises(ValueError, match=r"model-.*\.safetensors is missing"):
        load_graft(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json( is damaged|: )"):
        load_graft(tmp_path)


@pytest.mark.parametrize("name", ["nowhere", "HuggingFaceTB/SmolLM2-135M"])
def test_what_is_no_folder_is_told_from_a_name_of_a_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"There is no folder {name}.*snapshot_download"):
        load_graft(name)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("how", [{}, {"max_shard_size": "20KB"}])
def test_a_variant_is_loaded_by_its_name(how, name, tmp_path):
    model = saved(tmp_path, name, variant="fp16", **how)
    found = load_graft(tmp_path, variant="fp16")
    assert torch.equal(found(tokens()).logits, model(tokens()).logits)
    with pytest.raises(ValueError, match=r"There are model\.fp16.*variant="):
        load_graft(tmp_path)


@pytest.mark.parametrize("update", [corrected, rd.gated, rd.halted])
def test_a_folder_that_the_plain_host_wrote_has_lost_its_loop(update, tmp_path):
    graft(host("llama"), range(1, 3), 2, update=update).save_pretrained(tmp_path / "graft")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "graft")
    plain.save_pretrained(tmp_path / "host")
    with pytest.raises(ValueError, match=r"All weights of the loop are missing.*the host's own class saved it"):
        load_graft(tmp_path / "host")


# What the caller gives


@pytest.mark.parametrize(
    "given",
    [rd.gated, partial(corrected, bias=1.0), rd.plain, lambda dim: rd.gated(dim), partial(rd.damped, share=0.1)],
)
def test_another_update_than_the_saved_one_is_refused_by_both_names(given, tmp_path):
    saved(tmp_path)
    with pytest.raises(ValueError, match=r"update is .*, but the graft was made with .*corrected\(\)"):
        load_graft(tmp_path, update=given)


@pytest.mark.parametrize("update", [corrected, rd.gated, partial(rd.gated, bias=-1.0), partial(rd.damped, share=0.3)])
def test_the_saved_update_may_be_given(update, tmp_path):
    model = graft(host("llama"), range(1, 3), 2, update=update)
    model.save_pretrained(tmp_path)
    assert torch.equal(load_graft(tmp_path, update=update)(tokens()).logits, model(tokens()).logits)


@pytest.mark.parametrize("given", [{"update": rd.gated}, {"kv": rd.KeepAll()}])
def test_a_recursive_model_takes_neither_update_nor_policy(given, tmp_path):
    saved(tmp_path, "recursive")
    with pytest.raises(ValueError, match="made by recurse, which takes none"):
        load_graft(tmp_path, **given)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("num_steps", [1, 2, rd.Depth(2, grad_steps=1)])
def test_the_depth_may_be_given(num_steps, name, tmp_path):
    model = saved(tmp_path, name)
    found = load_graft(tmp_path, num_steps=num_steps)
    assert found.recurrence.num_steps == num_steps
    assert torch.equal(found(tokens()).logits, model(tokens(), num_steps=num_steps).logits)


@pytest.mark.parametrize("num_steps", [0, -1, True, rd.Depth(2, rows=(1, 2))])
def test_a_depth_that_is_none_is_refused(num_steps, tmp_path):
    saved(tmp_path)
    with pytest.raises(ValueError, match=r"num_steps|one depth for all rows"):
        load_graft(tmp_path, num_steps=num_steps)


def test_a_depth_beyond_the_layers_and_a_depth_under_another_name_are_refused(tmp_path):
    saved(tmp_path, "recursive")
    with pytest.raises(ValueError, match="num_steps is 3, but this model has layers for 2 steps"):
        load_graft(tmp_path, num_steps=3)
    with pytest.raises(ValueError, match="num_step is no argument of this graft; is num_steps meant"):
        load_graft(tmp_path, num_step=2)
