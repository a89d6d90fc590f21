"""A run that is killed goes on as if nothing had been: its losses and weights equal the unbroken run's, bit by bit."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from processes import kill, run_train, start, train, wait_until

NUM_KILLS = 20


@pytest.fixture(scope="module")
def command_line(text: Path) -> list[str]:
    """A tiny GRT with noise and sampled depth, saved every third step, so that a kill often meets a save."""
    model = "--model grt --layout 1 1 3 1 --dim 16 --num-heads 2 --context-length 16"
    recipe = "--batch-size 2 --accumulation 2 --steps 150 --warmup 10 --save-every 3 --eval-every 10"
    return [*model.split(), *recipe.split(), "--data", str(text)]


@pytest.fixture(scope="module")
def unbroken(command_line: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("unbroken")
    code, said = run_train([*command_line, "--out", str(folder)], folder / "said")
    assert code == 0, said
    return folder / "grt"


def log(folder: Path) -> list[dict]:
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in record.items() if name != "seconds"} for record in records]


def weights(folder: Path) -> bytes:
    return (max(folder.glob("checkpoint-*")) / "model.safetensors").read_bytes()


def num_records(folder: Path) -> int:
    path = folder / "log.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def has_changed(folder: Path, before: int) -> bool:
    return num_records(folder) != before


def has_grown_to(folder: Path, wanted: int) -> bool:
    return num_records(folder) >= wanted


def is_saving(folder: Path) -> bool:
    return any(folder.glob(".checkpoint-*.tmp"))


def test_a_run_killed_twenty_times_equals_the_unbroken_one(command_line, unbroken: Path, tmp_path: Path) -> None:
    folder, said, choose, kills, kills_while_saving = tmp_path / "grt", tmp_path / "said", random.Random(0), 0, 0
    while kills < NUM_KILLS:
        before = num_records(folder)
        process = start(train, *command_line, "--out", str(tmp_path), out=said)
        assert wait_until(process, has_changed, folder, before), said.read_text()
        wanted = num_records(folder) + choose.randrange(4)
        assert wait_until(process, has_grown_to, folder, wanted), "the run ended before it could be killed"
        if kills % 4 < 3:
            assert wait_until(process, is_saving, folder)
        time.sleep(choose.uniform(0, 0.002 if kills % 4 < 3 else 0.05))
        kills += kill(process)
        kills_while_saving += is_saving(folder)
    assert kills_while_saving >= NUM_KILLS // 2
    code, told = run_train([*command_line, "--out", str(tmp_path)], said)
    assert code == 0, told
    assert log(folder) == log(unbroken)
    assert weights(folder) == weights(unbroken)
    assert not is_saving(folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_saves_at_once_and_says_how_to_go_on(command_line, unbroken: Path, tmp_path: Path, number: int) -> None:
    folder, said = tmp_path / "grt", tmp_path / "said"
    rarely = [*command_line, "--save-every", "1000", "--out", str(tmp_path)]
    process = start(train, *rarely, out=said)
    assert wait_until(process, has_grown_to, folder, 31)
    os.kill(process.pid or 0, number)
    process.join()
    assert process.exitcode == 128 + number
    assert "To go on: python examples/train.py --model grt" in said.read_text()
    [checkpoint] = folder.glob("checkpoint-*")
    stopped = log(folder)
    assert stopped[-1]["step"] == int(checkpoint.name.removeprefix("checkpoint-"))
    code, told = run_train(rarely, said)
    assert code == 0, told
    assert f"goes on after step {stopped[-1]['step']}" in told
    assert log(folder) == log(unbroken)
    assert weights(folder) == weights(unbroken)
