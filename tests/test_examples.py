"""The examples as a user runs them: what they print and leave behind, every option, and what bad input gets."""

import json
import math
import os
import shutil
import socket
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from processes import run_train, start, train
from program_text import TEXT

# isort: split
import sample as sampling
import train as training_script
from arguments import PAPER_RECIPE, Arguments, parse
from data import held_out_windows
from evaluation import evaluate
from journal import Journal, read_journal
from models import BUILDERS, build, describe, sampler
from plan import plan
from report import as_text
from tokens import Bytes

import recurrent_depth as rd

MODEL = "--layout 0 1 3 1 --dim 16 --num-heads 2 --context-length 16 --gate-bias -1"
RECIPE = "--lr 3e-3 --batch-size 2 --steps 6 --warmup 2 --save-every 3 --eval-every 3"
TINY = [*MODEL.split(), *RECIPE.split()]


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished run of all three builders, and what it said."""
    folder = tmp_path_factory.mktemp("finished")
    models = ["--model", "grt", "dense", "naive"]
    code, said = run_train([*TINY, *models, "--data", str(text), "--out", str(folder)], folder / "said")
    assert code == 0, said
    return folder, said


@pytest.fixture
def copy(finished, tmp_path: Path) -> Path:
    """A copy of that run which a test may spoil."""
    return Path(shutil.copytree(finished[0], tmp_path / "copy"))


def again(folder: Path, text: Path, *changes: str) -> tuple[int | None, str]:
    """Runs the finished run's command once more, with changes."""
    models = ["--model", "grt", "dense", "naive"]
    (folder / "said").unlink(missing_ok=True)
    return run_train([*TINY, *models, "--data", str(text), "--out", str(folder), *changes], folder / "said")


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_journal(folder / "log.jsonl") if "loss" in record]


def test_every_figure_is_printed_and_kept(finished) -> None:
    folder, said = finished
    metrics = json.loads((folder / "metrics.json").read_text())
    assert as_text(metrics) in said
    assert list(metrics["models"]) == ["grt", "dense", "naive"]
    assert [len(model["loss_by_depth"]) for model in metrics["models"].values()] == [3, 1, 2]
    grt = metrics["models"]["grt"]
    assert grt["validation_loss"] == grt["loss_by_depth"][-1]
    assert grt["depth_gain"] == grt["loss_by_depth"][0] - grt["loss_by_depth"][-1]
    assert len(grt["gates"]) == 3
    assert metrics["models"]["dense"]["gates"] is None
    for number in (*grt["loss_by_depth"], *grt["gates"], metrics["trigram_loss"], grt["depth_gain"]):
        assert f"{number:.4f}" in said
    for model in metrics["models"].values():
        assert f"{model['parameters']:,}" in said
    assert metrics["sample"]["text"].startswith("def ")
    for path in ("plot.png", "metrics.json", "grt/checkpoint-000006", "dense/checkpoint-000006"):
        assert str(folder / path) in said
        assert (folder / path).exists()
    assert "mean gate" in said


def test_the_plot_is_a_picture(finished) -> None:
    content = (finished[0] / "plot.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", content[16:24])
    assert width > 1000
    assert height > 500


def test_reported_losses_are_those_of_the_checkpoint(finished, text: Path) -> None:
    folder, _ = finished
    [job, *_] = plan(parse([*TINY, "--data", str(text), "--out", str(folder)]), num_processes=1)
    model, _ = sampling.load_model(folder / "grt")
    windows = held_out_windows(job.corpus, 16, 512)
    with torch.no_grad():
        expected = [rd.next_token_loss(model(windows, depth), windows).item() for depth in (1, 2, 3)]
    assert json.loads((folder / "metrics.json").read_text())["models"]["grt"]["loss_by_depth"] == pytest.approx(
        expected
    )


def test_looking_changes_neither_mode_nor_random_numbers() -> None:
    model = rd.grt(rd.Layout(1, 1, 3, 1), dim=16, num_heads=2, vocab_size=256, context_length=16)
    before, windows = torch.get_rng_state(), torch.randint(256, (5, 16), generator=torch.Generator().manual_seed(0))
    one, two = (evaluate(model, windows, [1, 3], batch_size=size) for size in (2, 5))
    assert one.losses == pytest.approx(two.losses)
    assert one.gates == pytest.approx(two.gates)
    assert one.gates[0] == pytest.approx(torch.sigmoid(torch.tensor(4.0)).item(), abs=0.01)
    assert model.training
    assert torch.get_rng_state().equal(before)


def test_a_finished_run_reports_again_and_trains_no_more(copy: Path, text: Path) -> None:
    log = (copy / "grt" / "log.jsonl").read_bytes()
    code, said = again(copy, text, "--save-every", "100", "--tensorboard")
    assert code == 0, said
    assert "This run is finished" in said
    assert as_text(json.loads((copy / "metrics.json").read_text())) in said
    assert (copy / "grt" / "log.jsonl").read_bytes() == log


def test_a_finished_run_without_its_figures_measures_again(copy: Path, text: Path) -> None:
    before = json.loads((copy / "metrics.json").read_text())
    (copy / "metrics.json").unlink()
    (copy / "plot.png").unlink()
    code, said = again(copy, text)
    assert code == 0, said
    assert "trained to the end before" in said
    assert json.loads((copy / "metrics.json").read_text()) == before
    assert (copy / "plot.png").exists()


@pytest.mark.parametrize(
    "changes, named",
    [
        (["--lr", "0.1"], "recipe.lr is 0.003 there and 0.1 here"),
        (["--bf16", "--warmup", "3"], "recipe.bf16 is False there and True here, recipe.warmup is 2 there and 3 here"),
        (["--steps", "9"], "was begun with 6, and the learning rate of each step depends on it: a run cannot be ext"),
        (["--layout", "0", "1", "5", "1"], "model.layout is [0, 1, 3, 1] there and [0, 1, 5, 1] here"),
        (["--gate-bias", "4"], "model.update.bias is -1.0 there and 4.0 here"),
        (["--depth", "fixed"], "depth.depth is uniform there and fixed here"),
    ],
)
def test_going_on_with_other_arguments_is_refused(copy: Path, text: Path, changes, named: str) -> None:
    code, said = again(copy, text, *changes)
    assert code == 1
    assert named in said
    assert "Traceback" not in said


def test_going_on_with_other_text_is_refused(copy: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text(TEXT.replace("return", "yield"))
    code, said = again(copy, other)
    assert code == 1
    assert "data.checksum is" in said


def test_a_damaged_checkpoint_is_passed_over_and_two_are_refused(copy: Path, text: Path) -> None:
    expected = losses(copy / "grt")
    (copy / "grt" / "checkpoint-000006" / "model.safetensors").write_bytes(b"")
    code, said = again(copy, text)
    assert code == 0, said
    assert "checkpoint-000006 is damaged: model.safetensors holds 0 bytes" in said
    assert "goes on after step 3" in said
    assert losses(copy / "grt") == expected
    for path in (copy / "grt").glob("checkpoint-*/manifest.json"):
        path.unlink()
    code, said = again(copy, text)
    assert code == 1
    assert "No good checkpoint is left" in said


@pytest.mark.parametrize(
    "options",
    [
        ["--bf16"],
        ["--gate-lr-scale", "10", "--model", "grt", "dense"],
        ["--depth", "poisson", "--grad-steps", "2"],
        ["--depth", "poisson", "--mean-steps", "1.5"],
        ["--depth", "fixed", "--grad-steps", "1"],
        ["--tensorboard"],
        ["--bpe", "270"],
        ["--form", "gpt2"],
    ],
    ids=" ".join,
)
def test_options_train(text: Path, tmp_path: Path, options: list[str]) -> None:
    line = [*TINY, "--model", "grt", *options, "--data", str(text), "--out", str(tmp_path)]
    code, said = run_train(line, tmp_path / "said")
    assert code == 0, said
    found = losses(tmp_path / "grt")
    assert len(found) == 6
    assert all(map(math.isfinite, found))
    assert any((tmp_path / "grt").glob("tensorboard/*")) == ("--tensorboard" in options)
    assert "nats per token" in said if "--bpe" in options else "nats per byte" in said


def test_checkpointing_changes_nothing_and_accumulation_hardly(text: Path, tmp_path: Path) -> None:
    quiet = [*TINY, "--model", "grt", "--state-noise", "0", "--gate-noise", "0", "--data", str(text)]
    found = {}
    for name, options in {
        "plain": [],
        "checkpointing": ["--checkpointing"],
        "accumulated": ["--batch-size", "1", "--accumulation", "2"],
    }.items():
        code, said = run_train([*quiet, *options, "--out", str(tmp_path / name)], tmp_path / f"{name}.said")
        assert code == 0, said
        found[name] = losses(tmp_path / name / "grt")
    assert found["checkpointing"] == found["plain"]
    assert found["accumulated"] == pytest.approx(found["plain"], abs=1e-4)


def test_depth_is_drawn_once_per_step_from_the_sampler(finished) -> None:
    records = [record for record in read_journal(finished[0] / "grt" / "log.jsonl") if "loss" in record]
    assert [record["num_steps"] for record in records] == [
        rd.UniformDepth(3, seed=0)(step).num_steps for step in range(6)
    ]


def test_token_ids_train_and_cannot_be_written_out(tmp_path: Path) -> None:
    np.random.default_rng(0).integers(0, 40, 2000).astype(np.uint16).tofile(tmp_path / "ids.bin")
    line = [*TINY, "--model", "grt", "--data", str(tmp_path / "ids.bin"), "--vocab-size", "40", "--out", str(tmp_path)]
    code, said = run_train(line, tmp_path / "said")
    assert code == 0, said
    assert "nats per token" in said
    with pytest.raises(ValueError, match="ids alone"):
        sampling.main(sampling.Arguments(run=tmp_path / "grt"))


def train_as(rank: int, processes: int, port: int, *command_line: str) -> None:
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    os.environ.update(places, RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(processes))
    train(*command_line)


def run_two(command_line: list[str], out: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [start(train_as, rank, 2, port, *command_line, out=out / f"said-{rank}") for rank in range(2)]
    for rank, process in enumerate(ranks):
        process.join()
        assert process.exitcode == 0, (out / f"said-{rank}").read_text()


def test_two_processes_train_as_one_and_resume(text: Path, tmp_path: Path) -> None:
    quiet = [*TINY, "--model", "grt", "--state-noise", "0", "--gate-noise", "0", "--data", str(text)]
    code, said = run_train([*quiet, "--batch-size", "4", "--out", str(tmp_path / "one")], tmp_path / "said")
    assert code == 0, said
    run_two([*quiet, "--out", str(tmp_path / "two")], tmp_path)
    assert losses(tmp_path / "two" / "grt") == pytest.approx(losses(tmp_path / "one" / "grt"), abs=1e-4)
    noisy = [*TINY, "--model", "grt", "--data", str(text), "--out", str(tmp_path / "noisy")]
    run_two(noisy, tmp_path)
    expected = losses(tmp_path / "noisy" / "grt")
    shutil.rmtree(tmp_path / "noisy" / "grt" / "checkpoint-000006")
    run_two(noisy, tmp_path)
    assert losses(tmp_path / "noisy" / "grt") == expected


@pytest.mark.parametrize(
    "seen, said",
    [
        ({"num_processes": 1, "distributed_type": "NO"}, "2 processes were started, but each sees 1"),
        ({"num_processes": 2, "distributed_type": "FSDP"}, "FSDP shards them"),
    ],
)
def test_processes_that_cannot_train_together_are_refused(monkeypatch: pytest.MonkeyPatch, seen, said: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(training_script, "Accelerator", lambda **_: SimpleNamespace(**seen))
    with pytest.raises(ValueError, match=said):
        training_script.start_accelerator(bf16=False)


@pytest.mark.parametrize(
    "line, said",
    [
        (["--data", "/nowhere"], "no such file or folder"),
        (["--data", "/nowhere.bin", "--vocab-size", "9"], "no such file, or it is empty"),
        (["--data", "/nowhere.bin"], "vocab_size is missing"),
        (["--data", "/nowhere.npy", "--vocab-size", "9", "--bpe", "300"], "holds token ids already"),
        (["--vocab-size", "300"], "vocab_size is 300"),
        (["--bpe", "300", "--gpt2-files", "x"], "two tokenizers"),
        (["--bpe", "12"], "bpe is 12"),
        (["--gpt2-files", "/nowhere"], "encoder.json"),
        (["--model", "grt", "grt"], "each once"),
        (["--model"], "at least one model"),
        (["--layout", "1", "0", "4", "1"], "core is 0"),
        (["--layout", "1", "1", "0", "1"], "num_steps is 0"),
        (["--dim", "15"], "15"),
        (["--num-heads", "0"], "0"),
        (["--model", "naive", "--layout", "1", "1", "4", "2"], "no multiple"),
        (["--context-length", "100000"], "one window takes 100,000"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_impossible_plans_are_refused(text: Path, tmp_path: Path, line: list[str], said: str) -> None:
    data = [] if "--data" in line else ["--data", str(text)]
    with pytest.raises(ValueError, match=said):
        plan(parse([*data, *line, "--out", str(tmp_path)]), num_processes=1)


@pytest.mark.parametrize(
    "line, said",
    [
        (["--steps", "0"], "steps is 0, but must be above 0"),
        (["--batch-size", "-1"], "batch_size is -1"),
        (["--lr", "nan"], "lr is nan"),
        (["--save-every", "0"], "save_every is 0"),
        (["--mean-steps", "4"], "mean_steps is 4.0"),
        (["--depth", "poisson", "--mean-steps", "0"], "mean_steps is 0.0, but must be above 0"),
        (["--depth", "poisson", "--mean-steps", "inf"], "mean_steps is inf"),
        (["--grad-steps", "0"], "grad_steps is 0, but must be above 0"),
        (["--steps", "10", "--warmup", "11"], "warmup is 11, but must be from 0 to steps, 10"),
        (["--warmup", "-1"], "warmup is -1"),
        (["--floor", "1.5"], "floor is 1.5"),
        (["--floor", "nan"], "floor is nan"),
        (["--weight-decay", "-0.1"], "weight_decay is -0.1"),
        (["--weight-decay", "inf"], "weight_decay is inf, but must be finite"),
        (["--context-length", "1"], "context_length is 1, but must be above 1"),
        (["--gate-bias", "nan"], "gate_bias is nan, but must be finite"),
        (["--lr", "inf"], "lr is inf, but must be finite"),
        (["--preset", "grt_small", "--dim", "64"], "dim cannot be given with --preset grt_small"),
        (["--presett", "grt_small"], "presett"),
        (["--model", "transformer"], "transformer"),
        (["--steps", "1.5"], "1.5"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_impossible_arguments_are_refused(capsys: pytest.CaptureFixture[str], line: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as end:
        parse(line)
    assert end.value.code == 2
    told = capsys.readouterr()
    assert said in " ".join((told.out + told.err).replace("│", " ").split())


@pytest.mark.parametrize(
    "line, expected",
    [
        ([], 20),
        (["--steps", "10"], 1),
        (["--steps", "3"], 0),
        (["--steps", "10", "--warmup", "7"], 7),
        (["--preset", "grt_small"], 2_000),
        (["--preset", "grt_small", "--steps", "100"], 10),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_warm_up_is_a_share_of_the_steps_unless_given(
    text: Path, tmp_path: Path, line: list[str], expected: int
) -> None:
    arguments = parse([*line, "--data", str(text), "--out", str(tmp_path)])
    assert arguments.warmup_steps == expected
    if arguments.preset == "cpu":
        assert plan(arguments, num_processes=1)[0].config["recipe"]["warmup"] == expected


def ends_in_one_line(line: list[str], said: Path, expected: str) -> None:
    code, told = run_train(line, said)
    assert code == 1
    assert "Traceback" not in told
    assert [told_line for told_line in told.splitlines() if told_line][-1].startswith(f"error: {expected}"), told


@pytest.mark.parametrize("within", ["file", "file/folder", "/proc/nowhere"])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_said(
    text: Path, tmp_path: Path, within: str
) -> None:
    (tmp_path / "file").touch()
    line = [*TINY, "--data", str(text), "--out", str(tmp_path / within)]
    ends_in_one_line(line, tmp_path / "said", f"out is {tmp_path / within}, but nothing can be written there")
    assert (tmp_path / "said").read_text().count("\n") == 1


def test_a_model_whose_folder_is_a_file_is_refused_plainly(text: Path, tmp_path: Path) -> None:
    (tmp_path / "dense").touch()
    line = [*TINY, "--model", "dense", "--data", str(text), "--out", str(tmp_path)]
    ends_in_one_line(line, tmp_path / "said", "[Errno")


@pytest.mark.parametrize(
    "options, said",
    [
        (["--lr", "3e38", "--warmup", "0"], "The loss is nan at step 2: start anew in another folder"),
        (["--init-std", "1e30"], "The norm of the gradient is nan at step 1"),
    ],
    ids=["loss", "gradient"],
)
def test_a_run_that_is_not_finite_ends_in_one_line(text: Path, tmp_path: Path, options: list[str], said: str) -> None:
    line = [*TINY, "--model", "dense", *options, "--data", str(text), "--out", str(tmp_path)]
    ends_in_one_line(line, tmp_path / "said", said)
    assert not list(tmp_path.glob("dense/checkpoint-*"))


def test_presets_take_the_paper_s_recipe(tmp_path: Path) -> None:
    arguments = parse(["--preset", "grt_small", "--lr", "1e-3", "--data", str(tmp_path / "ids.bin")])
    assert arguments.recipe.__class__(**{**vars(arguments.recipe), "lr": 6e-4}) == PAPER_RECIPE
    assert PAPER_RECIPE.batch_size * PAPER_RECIPE.accumulation * rd.presets.CONTEXT_LENGTH == 491_520
    np.arange(30_000, dtype=np.uint16).tofile(tmp_path / "ids.bin")
    [job] = plan(arguments, num_processes=1)
    assert job.config["model"] == {"builder": "preset", "name": "grt_small"}
    assert job.windows.shape == (1, 1024)
    np.full(30_000, 50_304, dtype=np.uint16).tofile(tmp_path / "ids.bin")
    with pytest.raises(ValueError, match="token id 50304, but the vocabulary ends at 50303"):
        plan(arguments, num_processes=1)


def test_compared_models_execute_equally_many_blocks() -> None:
    arguments = Arguments().model
    with torch.device("meta"):
        layouts = [build(describe(name, arguments, 256)).layout for name in ("grt", "dense", "naive")]
    assert len({layout.executed for layout in layouts}) == 1
    assert layouts[0].stored == layouts[2].stored
    assert set(BUILDERS) == {"grt", "dense", "naive", "preset"}


def test_each_sampler_is_the_one_asked_for() -> None:
    loop = rd.naive(rd.Layout(0, 1, 4, 0), dim=8, num_heads=2, vocab_size=9, context_length=8)
    one = rd.dense(2, dim=8, num_heads=2, vocab_size=9, context_length=8)
    assert sampler(loop, parse([]).depth, 7) == rd.UniformDepth(4, seed=7)
    assert sampler(one, parse([]).depth, 7) == rd.FixedDepth(1)
    assert sampler(loop, parse(["--depth", "fixed"]).depth, 7) == rd.FixedDepth(4)
    poisson = sampler(loop, parse(["--depth", "poisson", "--grad-steps", "2"]).depth, 7)
    assert poisson == rd.PoissonLogNormalDepth(mean=3, grad_steps=2, seed=7)
    assert poisson.expected().num_steps == 4


def test_a_log_forgets_what_comes_again_and_a_torn_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path, step=0)
    for step in range(1, 6):
        journal.write({"step": step, "loss": 1 / step})
    journal.close()
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    assert [record["step"] for record in read_journal(tmp_path / "log.jsonl")] == [1, 2, 3, 4, 5]
    journal = Journal(tmp_path, step=3)
    journal.write({"step": 4, "loss": 0.5})
    journal.close()
    assert [record["loss"] for record in read_journal(tmp_path / "log.jsonl")] == [1, 1 / 2, 1 / 3, 0.5]


def write(folder: Path, capfd: pytest.CaptureFixture[str], **options) -> str:
    sampling.main(sampling.Arguments(run=folder, max_new_tokens=20, **options))
    return capfd.readouterr().out


def test_sampled_text_starts_with_the_prompt_and_follows_the_seed(finished, capfd) -> None:
    folder = finished[0] / "grt"
    one, same, other = (write(folder, capfd, seed=seed, prompt="x = ") for seed in (1, 1, 2))
    assert one == same != other
    assert one.startswith("x = ")


def test_text_of_every_depth_comes_from_that_depth(finished, capfd) -> None:
    folder = finished[0] / "grt"
    model, _ = sampling.load_model(folder)
    for depth in (1, 2, 3, None):
        tokens = list(b"def ")
        for _ in range(20):
            tokens.append(int(model(torch.tensor([tokens]), depth)[0, -1].argmax()))
        expected = bytes(tokens).decode(errors="replace")
        for options in ({"temperature": 0.0}, {"temperature": 1.0, "top_k": 1}):
            assert write(folder, capfd, num_steps=depth, **options) == expected + "\n"


def test_a_bpe_writes_whole_characters(text: Path, tmp_path: Path, capfd) -> None:
    line = [*TINY, "--model", "dense", "--bpe", "270", "--data", str(text), "--out", str(tmp_path)]
    code, said = run_train(line, tmp_path / "said")
    assert code == 0, said
    assert write(tmp_path / "dense", capfd, prompt="é = ").startswith("é = ")


@pytest.mark.parametrize(
    "options, said",
    [
        ({"prompt": ""}, "prompt is empty"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"exit_below": -1.0}, "below is -1.0"),
        ({"num_steps": 0}, "num_steps is 0"),
    ],
)
def test_impossible_samples_are_refused(finished, options, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        sampling.main(sampling.Arguments(run=finished[0] / "grt", **options))


@pytest.mark.filterwarnings("error")
def test_errors_and_warnings_come_before_the_prompt(finished, capfd) -> None:
    for num_steps, kind in ((0, ValueError), (9, UserWarning)):
        with pytest.raises(kind):
            sampling.main(sampling.Arguments(run=finished[0] / "grt", num_steps=num_steps))
        sys.stdout.flush()
        assert capfd.readouterr().out == ""


def test_a_folder_without_checkpoints_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no checkpoint: name a model's folder"):
        sampling.main(sampling.Arguments(run=tmp_path))
    assert Bytes().decode([104, 105]) == b"hi"
