"""A run of the training example that leaves for transformers and comes back: it writes text there, trains on here."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from processes import run_train
from program_text import TEXT
from transformers import AutoTokenizer, pipeline

# isort: split
from journal import read_journal
from tokens import BytePairs

from recurrent_depth.hf import from_checkpoint, to_checkpoint
from recurrent_depth.hf.convert import main
from recurrent_depth.training import load_checkpoint, parameter_groups, read_checkpoint, save_checkpoint

MODEL = "--model grt --layout 0 1 3 1 --dim 16 --num-heads 2 --context-length 16 --gate-bias -1"
RECIPE = "--lr 3e-3 --batch-size 2 --steps 6 --warmup 2 --save-every 3 --eval-every 3 --bpe 270 --gate-lr-scale 10"
SAID = "é\n\n  wörld \x00 日本 don't ."


@pytest.fixture(scope="module")
def run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, with its checkpoints after 3 and 6 steps."""
    folder = tmp_path_factory.mktemp("run")
    code, said = run_train([*command_line(text), "--out", str(folder)], folder / "said")
    assert code == 0, said
    return folder


def command_line(text: Path) -> list[str]:
    return [*MODEL.split(), *RECIPE.split(), "--data", str(text)]


def converted(source: Path, target: Path) -> Path:
    main([str(source), str(target)])
    return target


def test_a_run_that_went_through_transformers_trains_on_as_scheduled(run: Path, text: Path, tmp_path: Path) -> None:
    before = run / "grt" / "checkpoint-000003"
    converted(converted(before, tmp_path / "folder"), tmp_path / "again" / "grt")
    after = tmp_path / "again" / "grt" / "checkpoint-000003"
    assert (after / "state.json").read_bytes() == (before / "state.json").read_bytes()
    assert (after / "model.safetensors").read_bytes() == (before / "model.safetensors").read_bytes()
    code, said = run_train([*command_line(text), "--out", str(tmp_path / "again")], tmp_path / "said")
    assert code == 0, said
    assert "goes on after step 3 with weights alone: the optimizer's moments start anew" in said
    rates = [
        {record["step"]: record["lr"] for record in read_journal(folder / "grt" / "log.jsonl") if "lr" in record}
        for folder in (run, tmp_path / "again")
    ]
    assert rates[1] == {step: rates[0][step] for step in (4, 5, 6)}
    weights = [of_model(folder / "grt" / "checkpoint-000006") for folder in (run, tmp_path / "again")]
    assert all(not torch.equal(trained, of_model(before)[name]) for name, trained in weights[1].items())


def of_model(path: Path) -> dict[str, torch.Tensor]:
    return dict(from_checkpoint(path).native.named_parameters())


def test_a_run_that_was_not_stopped_tells_of_no_new_moments(run: Path, text: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "grt" / "checkpoint-000006")
    code, said = run_train([*command_line(text), "--out", str(tmp_path / "copy")], tmp_path / "said")
    assert code == 0, said
    assert "goes on after step 3\n" in said


def test_each_process_of_a_run_begins_with_its_own_random_numbers(run: Path, tmp_path: Path) -> None:
    model = from_checkpoint(run / "grt")
    model.config.training["config"]["num_processes"] = 2
    before, path = torch.get_rng_state(), to_checkpoint(model, tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    optimizer = torch.optim.AdamW(parameter_groups(model.native, scales={"core.update.gate": 10.0}, lr=1.0))
    draws = []
    for rank in (0, 1):
        load_checkpoint(path, model=model.native, optimizer=optimizer, rank=rank)
        draws.append(torch.rand(()))
    torch.manual_seed(2)
    assert draws[1] == torch.rand(())
    assert draws[0] != draws[1]


def test_a_checkpoint_of_no_run_leaves_an_optimizer_its_settings(run: Path, tmp_path: Path) -> None:
    model = from_checkpoint(run / "grt")
    model.config.training = None
    optimizer = torch.optim.AdamW(parameter_groups(model.native), lr=0.25)
    load_checkpoint(to_checkpoint(model, tmp_path), model=model.native, optimizer=optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_a_converted_run_writes_in_a_pipeline(run: Path, tmp_path: Path) -> None:
    folder = converted(run / "grt", tmp_path / "folder")
    write = pipeline("text-generation", model=str(folder))
    [said] = write("def f7(x)", max_new_tokens=8, do_sample=False)
    assert said["generated_text"].startswith("def f7(x)")
    tokenizer, example = AutoTokenizer.from_pretrained(folder), BytePairs.load(run / "tokenizer.json")
    for some in (TEXT[:300], SAID):
        assert tokenizer(some)["input_ids"] == example.encode("", some.encode()).tolist()
        assert tokenizer.decode(tokenizer(some)["input_ids"]) == some
    assert tokenizer.eos_token_id == write.model.generation_config.eos_token_id == example.end
    assert write.model.config.pad_token_id is None


def test_a_run_on_bytes_writes_in_a_pipeline(run: Path, tmp_path: Path) -> None:
    folder = converted(of_kind("bytes", run, tmp_path), tmp_path / "folder")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer(SAID)["input_ids"] == list(SAID.encode())
    assert tokenizer.decode(list(SAID.encode())) == SAID
    assert tokenizer.eos_token_id is None
    write = pipeline("text-generation", model=str(folder))
    [said] = write("def f7(x)", max_new_tokens=8, do_sample=False)
    assert said["generated_text"].startswith("def f7(x)")


@pytest.mark.parametrize("kind", ["ids", "pairs"])
def test_a_run_whose_tokenizer_nobody_knows_is_converted_without(kind, run: Path, tmp_path: Path, capsys) -> None:
    folder = converted(of_kind(kind, run, tmp_path), tmp_path / "folder")
    assert "has no tokenizer" in capsys.readouterr().err
    assert not (folder / "tokenizer.json").exists()
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] is None


def of_kind(kind: str, run: Path, tmp_path: Path) -> Path:
    """A checkpoint whose run was on tokens of another kind, without a tokenizer beside it."""
    found = read_checkpoint(run / "grt" / "checkpoint-000006")
    model = from_checkpoint(found.path).native
    optimizer = torch.optim.AdamW(parameter_groups(model))
    config = {**found.config, "data": {**found.config["data"], "kind": kind}}
    return save_checkpoint(tmp_path / "other" / "grt", 6, model=model, optimizer=optimizer, config=config)
