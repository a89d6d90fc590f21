"""The comparison: what is counted, what a kill costs, what may be claimed, and what partial results show."""

import json
import math
import os
import re
import shutil
import signal
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import EXAMPLES, kill, start, wait_until
from program_text import TEXT
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

# isort: split
import compare
from comparison import figures, planning, running, statistics, tables, working
from comparison.checking import check, check_methods, check_steps
from comparison.collecting import Row, Table, collect
from comparison.describing import described, differences, settings
from comparison.language import COMPARISON as LANGUAGE
from comparison.loading import load_cells
from comparison.locking import BusyError, is_held, only_one
from comparison.panel import panel
from comparison.parts import Full, Method, Run, Trials, cost, full_depth
from comparison.planning import best_rate, find_run, known_runs, missing_runs, read_result, score, trials
from comparison.published import read_run, run_files
from comparison.puzzles import IGNORED, Automaton, PointerChasing, PuzzleData
from comparison.restoring import published_files, restore
from comparison.running import DivergedError, Running
from comparison.stopping import StoppedError, stop_request
from comparison.text import TextData
from comparison.verifying import verify
from comparison.working import progress, work
from journal import read_journal
from tiny_cells import COMPARISON, GATED

import recurrent_depth as rd
from recurrent_depth import accounting

GRT = Run("grt", 1e-3, 0, 2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The tiny comparison on a text of its own, and where that text lies ready."""
    folder = tmp_path_factory.mktemp("compare")
    (folder / "text.py").write_text(TEXT)
    comparison = COMPARISON._replace(data=COMPARISON.data.reading(folder / "text.py"))
    comparison.data.open(folder / "text")
    return comparison, folder


@pytest.fixture
def out(tiny, tmp_path) -> Path:
    (tmp_path / "text").symlink_to(tiny[1] / "text")
    return tmp_path


@pytest.fixture(scope="module")
def finished(tiny):
    """All cells, trained one after the other."""
    comparison, folder = tiny
    while True:
        missing = [run for run in known_runs(comparison, folder) if not running_done(comparison, folder, run)]
        if not missing:
            return comparison, folder
        Running(comparison, missing[0], folder).finish()


def running_done(comparison, folder, run):
    return running.result_path(folder / run.name, comparison.protocol.budgets[run.num_budgets - 1]).exists()


def outcome(folder: Path, run: Run) -> list[dict]:
    """All that a run leaves, but the time it took."""
    results = [json.loads(path.read_text()) for path in sorted((folder / run.name).glob("result-*.json"))]
    for result in results:
        result["training"].pop("seconds")
    return results


def weights(folder: Path, run: Run) -> bytes:
    files = (folder / run.name).glob("cooldown-10/checkpoint-000010/*.safetensors")
    return b"".join(path.read_bytes() for path in sorted(files))


# Going on


@pytest.mark.parametrize("at", [0, 4, 5, 10])  # of 4 steps of trunk, 1 of cooldown, 4 of trunk, 2 of cooldown
def test_a_run_broken_anywhere_ends_as_the_unbroken_one(finished, out, monkeypatch, at):
    comparison, folder = finished
    run = Run("grt", best_rate(comparison, folder, "grt"), 1, 2)
    monkeypatch.setattr(running, "SAVE_EVERY", 3)
    with monkeypatch.context() as patch:
        patch.setattr(Running, "take_step", breaking(at))
        with pytest.raises(KeyboardInterrupt):
            Running(comparison, run, out).finish()
    Running(comparison, run, out).finish()
    assert outcome(out, run) == outcome(folder, run)
    assert weights(out, run) == weights(folder, run) != b""


def breaking(at: int):
    take_step, numbers = Running.take_step, iter(range(100))

    def breaks(self, factor):
        if next(numbers) == at:
            raise KeyboardInterrupt
        return take_step(self, factor)

    return breaks


def test_a_trial_goes_on_as_the_full_run(finished, out):
    comparison, folder = finished
    run = Run("grt", best_rate(comparison, folder, "grt"), 1, 2)
    Running(comparison, run._replace(num_budgets=1), out).finish()
    assert len(outcome(out, run)) == 1
    Running(comparison, run, out).finish()
    assert weights(out, run) == weights(folder, run)


def run_compare(*command_line: str, script: str = "examples/compare.py") -> None:
    """`python examples/compare.py ...`."""
    torch.set_num_threads(1)
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [script, *command_line]
    import tyro

    sys.exit(compare.main(tyro.cli(compare.Arguments)))


def test_a_killed_process_loses_nothing(tiny, out, tmp_path):
    _, folder = tiny
    line = ["--cells", "tiny_cells", "--text", str(folder / "text.py"), "--out", str(out), "--nice", "0"]
    line += ["--only", "grt-lr0.001-seed0", "--budgets", "2"]
    process = start(run_compare, *line, out=tmp_path / "said")
    log = out / "grt-lr0.001-seed0" / "trunk" / "log.jsonl"
    assert wait_until(process, lambda: log.exists() and log.read_text().count("\n") > 2)
    kill(process)
    again = start(run_compare, *line, out=tmp_path / "said")
    again.join()
    assert again.exitcode == 0, (tmp_path / "said").read_text()
    assert len(outcome(out, GRT)) == 2


def test_another_method_under_the_same_name_is_refused(tiny, out):
    comparison, _ = tiny
    Running(comparison, GRT._replace(num_budgets=1), out).finish()
    changed = comparison._replace(methods={**comparison.methods, "grt": comparison.methods["dense"]})
    with pytest.raises(ValueError, match=r"method\.build is grt"):
        Running(changed, GRT, out).finish()


@pytest.mark.parametrize("budgets", [(5, 7, 10), (7, 10)])
def test_a_budget_that_the_trunk_has_passed_is_refused(tiny, out, budgets):
    comparison, _ = tiny
    Running(comparison, GRT, out).finish()
    more = comparison._replace(protocol=comparison.protocol._replace(budgets=budgets))
    with pytest.raises(ValueError, match=r"trunk is already at step 8, but step 5 is asked for.*delete .*grt-lr0"):
        Running(more, GRT._replace(num_budgets=3), out).finish()
    assert not (out / GRT.name / "result-7.json").exists()


def test_a_result_that_was_deleted_is_measured_again_from_its_cooldown_alone(tiny, out):
    comparison, _ = tiny
    Running(comparison, GRT, out).finish()
    before = outcome(out, GRT)
    (out / GRT.name / "result-5.json").unlink()
    Running(comparison, GRT, out).finish()
    assert outcome(out, GRT) == before
    (out / GRT.name / "result-5.json").unlink()
    shutil.rmtree(out / GRT.name / "cooldown-5")
    with pytest.raises(ValueError, match="already at step 8, but step 4"):
        Running(comparison, GRT, out).finish()


@pytest.mark.parametrize(
    "changed",
    [
        {"budgets": ()},
        {"budgets": (10, 5)},
        {"budgets": (5, 5)},
        {"budgets": (5.0, 10.0)},
        {"budgets": (1, 10)},
        {"cooldown": 0.0},
        {"cooldown": 1.0},
        {"cooldown": math.nan},
        {"warmup": 0},
        {"warmup": 5},  # the cooldown of 5 steps begins after the fourth
        {"rates": ()},
        {"rates": (1e-3, 1e-3)},
        {"rates": (-1e-3,)},
        {"weight_decay": -1.0},
        {"clip": 0.0},
        {"clip": "1"},
        {"cooldown": "0.2"},
        {"rates": ("a",)},
    ],
)
def test_an_impossible_protocol_is_refused(tiny, tmp_path, changed):
    comparison, _ = tiny
    [name] = changed
    with pytest.raises(ValueError, match=rf"{name} (is|are) "):
        Running(comparison._replace(protocol=comparison.protocol._replace(**changed)), GRT, tmp_path)


def test_names_of_no_method_are_refused():
    for changed in ({"floor": "gone"}, {"plan": (Full("gone", 0),)}, {"pairs": (("grt", "gone"),)}):
        with pytest.raises(ValueError, match="names 'gone', but the methods are dense"):
            check(COMPARISON._replace(**changed))
    with pytest.raises(ValueError, match="num_budgets of grt is 3, but there are 2"):
        check(COMPARISON._replace(plan=(Full("grt", 0, 3),)))
    with pytest.raises(ValueError, match="seed of grt is -1, but must be a whole number of at least 0"):
        check(COMPARISON._replace(plan=(Full("grt", -1),)))


NUMBERS = {
    TextData: {"vocab_size": 257, "length": 2, "num_rows": 1, "most_held_out": 1},
    partial(PuzzleData, Automaton()): {"num_rows": 1, "num_tested": 1, "stretch": 1},
    PointerChasing: {"max_hops": 1, "num_questions": 1, "num_nodes": 5},  # with the four steps that may be asked for
    Automaton: {"max_hops": 1, "num_cells": 1},
}


@pytest.mark.parametrize("make, name, least", [(of, *each) for of, least in NUMBERS.items() for each in least.items()])
def test_data_takes_the_least_that_makes_sense_and_names_what_is_less(make, name, least):
    make(**{name: least})
    for wrong in (least - 1, least + 0.5, None):
        with pytest.raises(ValueError, match=f"^{name} is {wrong}, but must be a whole number of at least {least}"):
            make(**{name: wrong})


def test_what_loops_is_set_beside_its_blocks_run_once():
    for name in ("naive", "naive-full-depth", "grt", "grt-full-depth", "grt-one-step"):
        assert (name, LANGUAGE.floor) in LANGUAGE.pairs


def test_a_baseline_that_is_the_floor_leaves_no_headroom_and_is_refused():
    with pytest.raises(ValueError, match="baseline and floor are both 'dense'"):
        check(COMPARISON._replace(floor="dense"))


def routed(*capacities: float) -> Method:
    return Method("MoR", partial(rd.mor, GATED, router=partial(rd.expert_choice, capacities=capacities)), full_depth)


def every_step(model: rd.RecurrentTransformer) -> nn.Module:
    return rd.WithObjective(model, rd.every_step_loss, every_step=True)


GRT_METHOD = COMPARISON.methods["grt"]
EDITS = {
    "layout": (GRT_METHOD, GRT_METHOD._replace(build=partial(rd.grt, rd.Layout(1, 1, 4, 1)))),
    "weights": (GRT_METHOD, GRT_METHOD._replace(build=partial(rd.grt, GATED, update=partial(rd.gated, bias=1.0)))),
    "settings": (routed(1.0, 0.5, 0.25), routed(1.0, 0.5, 0.5)),
    "sampler": (GRT_METHOD, GRT_METHOD._replace(sampler=full_depth)),
    "init_std": (GRT_METHOD, GRT_METHOD._replace(init_std=0.05)),
    "objective": (GRT_METHOD, GRT_METHOD._replace(objective=every_step)),
    "cost": (GRT_METHOD, GRT_METHOD._replace(cost=partial(cost, every_step=True))),
}


@pytest.mark.parametrize("key", EDITS)
def test_an_edited_method_is_refused_by_its_run_and_its_result(tiny, out, key):
    comparison, _ = tiny
    before, after = (comparison._replace(methods={**comparison.methods, "grt": method}) for method in EDITS[key])
    Running(before, GRT._replace(num_budgets=1), out).finish()
    assert read_result(before, out, GRT, 5) is not None
    for read in (lambda: Running(after, GRT, out).finish(), lambda: read_result(after, out, GRT, 5)):
        with pytest.raises(ValueError, match=rf"{GRT.name}.* method\.{key} is .*Give another --out, or delete"):
            read()


def test_a_result_of_another_protocol_is_refused(tiny, out):
    comparison, _ = tiny
    Running(comparison, GRT._replace(num_budgets=1), out).finish()
    other = comparison._replace(protocol=comparison.protocol._replace(weight_decay=0.2))
    with pytest.raises(ValueError, match=r"protocol\.weight_decay is 0\.1 there and 0\.2 here"):
        read_result(other, out, GRT, 5)


def test_what_was_trained_before_methods_were_described_goes_on(finished, out, monkeypatch):
    comparison, folder = finished
    run = Run("grt", best_rate(comparison, folder, "grt"), 1, 2)
    with monkeypatch.context() as patch:
        settings = running.settings
        bare = lambda *given: {key: value for key, value in settings(*given).items() if key != "method"}  # noqa: E731
        patch.setattr(running, "settings", bare)
        Running(comparison, run._replace(num_budgets=1), out).finish()
    old = read_result(comparison, out, run, 5)
    assert old is not None
    assert "method" not in old["config"]
    Running(comparison, run, out).finish()
    assert weights(out, run) == weights(folder, run) != b""


def test_parts_are_described_alike_in_every_process():
    form = partial(rd.GPT2Form, arrangement=rd.BranchSandwich)
    assert described(partial(rd.naive, GATED, form=form)) == described(partial(rd.naive, GATED, form=form))
    told = described(partial(rd.grt, GATED, update=partial(rd.gated, bias=1.0)))
    assert told == "grt(Layout(prelude=1, core=1, num_steps=3, coda=1), update=gated(bias=1.0))"
    assert " at 0x" not in described([object(), nn.GELU(), lambda: None, {"of": object()}])


@pytest.mark.parametrize("call", [2, 4])  # in the trunk before there is a checkpoint, and in the cooldown
def test_what_diverged_leaves_nothing_to_the_next_budget(tiny, out, tmp_path, monkeypatch, call):
    comparison, _ = tiny
    Running(comparison, GRT, out).finish()
    whole, calls, take_step = outcome(out, GRT), iter(range(100)), Running.take_step
    shutil.rmtree(out / GRT.name)

    def breaks(self, factor):
        hook = self.trained.register_forward_hook(lambda module, given, loss: loss * math.nan)
        if next(calls) != call:
            hook.remove()
        return take_step(self, factor)

    monkeypatch.setattr(Running, "take_step", breaks)
    Running(comparison, GRT, out).finish()
    broken = read_result(comparison, out, GRT, 5)
    assert broken is not None
    assert broken["diverged"].endswith(f"at step {call + 1}")
    [longer] = [result for result in whole if result["budget"] == 10]
    again = json.loads((out / GRT.name / "result-10.json").read_text())
    assert again["measured"] == longer["measured"]


def test_a_loss_that_is_no_number_when_measured_is_a_run_that_diverged(tiny, out, monkeypatch):
    comparison, _ = tiny
    monkeypatch.setattr(type(comparison.data), "score", lambda *_: math.nan)
    Running(comparison, GRT._replace(num_budgets=1), out).finish()
    found = read_result(comparison, out, GRT, 5)
    assert found is not None
    assert found["diverged"] == "held-out loss nan"
    assert score(comparison, {"measured": {"exits": [math.nan]}}) == math.inf


def test_a_log_with_a_hole_is_refused(tiny, out):
    comparison, _ = tiny
    Running(comparison, GRT, out).finish()
    log = out / GRT.name / "trunk" / "log.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines) + '{"step": 9, "lo')
    assert len(read_journal(log)) == 8
    log.write_text("".join([*lines[:2], lines[2][:9] + "\n", *lines[3:]]))
    with pytest.raises(ValueError, match=r"trunk/log\.jsonl is damaged: line 3 of 8"):
        read_journal(log)
    log.write_text("".join(lines[:2] + lines[3:]))
    (out / GRT.name / "result-10.json").unlink()
    with pytest.raises(ValueError, match=r"trunk/log\.jsonl must tell of steps 1 to 8, each once, but tells of 7"):
        Running(comparison, GRT, out).finish()


# Stopping


def test_a_run_that_is_asked_to_stop_saves_and_goes_on(finished, out):
    comparison, folder = finished
    run = Run("grt", best_rate(comparison, folder, "grt"), 1, 2)
    answers = iter([False, False, True])
    with pytest.raises(StoppedError, match="nothing is lost"):
        Running(comparison, run, out, lambda: next(answers)).finish()
    assert [path.name for path in (out / run.name / "trunk").glob("checkpoint-*")] == ["checkpoint-000003"]
    Running(comparison, run, out).finish()
    assert weights(out, run) == weights(folder, run)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_asks_to_stop_and_afterwards_does_what_it_did(number):
    found = signal.signal(number, signal.SIG_DFL)  # tests that run behind `nohup` begin with some of them ignored
    try:
        with stop_request() as stop:
            assert not stop()
            os.kill(os.getpid(), number)
            assert stop()
        assert signal.getsignal(number) == signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN)
        with stop_request() as stop:
            os.kill(os.getpid(), number)
            assert not stop()
    finally:
        signal.signal(number, found)


def test_a_run_whose_parent_is_gone_is_asked_to_stop():
    with stop_request(parent=os.getppid()) as stop:
        assert not stop()
    with stop_request(parent=os.getpid()) as stop:  # which nobody is the child of
        assert stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_runs_end_with_the_process_that_began_them(tiny, out, tmp_path, monkeypatch, number):
    cells = "from tiny_cells import COMPARISON\nLONG = COMPARISON.protocol._replace(budgets=(100_000, 200_000))\n"
    (tmp_path / "long_cells.py").write_text(f"{cells}COMPARISON = COMPARISON._replace(protocol=LONG)\n")
    line = ["--cells", "long_cells", "--text", str(tiny[1] / "text.py"), "--out", str(out), "--nice", "0"]
    process = start(run_cells, str(tmp_path), *line, out=tmp_path / "said")
    run = out / "dense-lr0.001-seed0"
    log = run / "trunk" / "log.jsonl"
    assert wait_until(process, lambda: log.exists() and log.read_text().count("\n") > 2), (
        tmp_path / "said"
    ).read_text()
    os.kill(process.pid, number)
    process.join()
    assert number == signal.SIGKILL or not is_held(run)
    deadline = time.monotonic() + 60
    while is_held(run):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    saved = max(path.name for path in (run / "trunk").glob("checkpoint-*"))
    assert saved == f"checkpoint-{len(read_journal(log)):06d}"
    if number == signal.SIGTERM:
        assert "nothing is lost" in (tmp_path / "said").read_text()


def run_cells(folder: str, *command_line: str) -> None:
    """`compare.py` with a folder of cells that its own processes see too."""
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ["PYTHONPATH"]])
    sys.path.insert(0, folder)
    run_compare(*command_line)


class FakeWorker:
    """Trains in this process, or is told that another process does."""

    comparison = COMPARISON

    def __init__(self, run, out, command):
        self.run = run
        try:
            Running(self.comparison, run, out).finish()
            self._code = 0
        except BusyError:
            self._code = working.BUSY

    def code(self):
        return self._code

    def end(self):
        pass


def test_a_run_that_another_process_trains_is_waited_for_and_not_lost(tiny, out, monkeypatch):
    comparison, _ = tiny
    comparison = comparison._replace(plan=comparison.plan[:1])
    monkeypatch.setattr(FakeWorker, "comparison", comparison)
    monkeypatch.setattr(working, "Worker", FakeWorker)
    monkeypatch.setattr(working, "POLL_SECONDS", 0.01)
    held, other = trials(comparison, out, "dense")
    said, lock = [], only_one(out / held.name)
    lock.__enter__()

    def say(message):
        said.append(message)
        assert len(said) < 20
        if message == f"{other.name}: done":
            lock.__exit__(None, None, None)

    assert work(comparison, out, [], jobs=1, say=say) == []
    assert f"{held.name}: another process trains it; waits" in said
    assert said.index(f"{other.name}: done") < said.index(f"{held.name}: done")
    assert missing_runs(comparison, out) == []


def test_a_run_that_another_process_was_faster_to_begin_has_not_failed(tiny, out, monkeypatch):
    comparison, _ = tiny
    monkeypatch.setattr(FakeWorker, "comparison", comparison)
    monkeypatch.setattr(working, "Worker", FakeWorker)
    monkeypatch.setattr(working, "is_held", lambda folder: False)
    crew = working.Crew(comparison._replace(plan=comparison.plan[:1]), out, [], lambda message: None)
    with only_one(out / "dense-lr0.001-seed0"):
        crew.hire(1)
        crew.dismiss()
    assert crew.failed == []
    assert crew.hire(2)
    crew.dismiss()
    assert not crew.hire(2)
    assert crew.failed == []


LAST = [("print('early'); print('no memory'); exit(3)", "no memory"), ("exit(3)", "nothing, and its exit code is 3")]


@pytest.mark.parametrize("code, told", LAST)
def test_what_a_run_that_failed_said_last_is_told(tiny, out, code, told):
    path = out / GRT.name / "output.txt"
    path.parent.mkdir()
    path.write_text("of an earlier try\n")
    said = []
    crew, worker = working.Crew(tiny[0], out, [], said.append), working.Worker(GRT, out, ["-c", code])
    worker.end()
    crew._workers.append(worker)
    crew.dismiss()
    assert said == [f"{GRT.name}: failed, {path} ends with: {told}"]
    assert crew.failed == [GRT]


def test_a_run_that_was_broken_off_is_said_to_go_on(tiny, out, monkeypatch):
    comparison, _ = tiny
    comparison = comparison._replace(plan=comparison.plan[:1])
    saved, killed = trials(comparison, out, "dense")
    with pytest.raises(StoppedError):
        Running(comparison, saved, out, lambda: True).finish()
    with monkeypatch.context() as patch:
        patch.setattr(Running, "take_step", breaking(2))
        with pytest.raises(KeyboardInterrupt):
            Running(comparison, killed, out).finish()
    monkeypatch.setattr(working, "Worker", lambda run, out, command: None)
    said = []
    working.Crew(comparison, out, [], said.append).hire(2)
    assert said == [f"{saved.name}: goes on", f"{killed.name}: begins again, since nothing was saved"]
    shutil.rmtree(out / saved.name)
    working.Crew(comparison, out, [], said.append).hire(1)
    assert said[2:] == [f"{saved.name}: begins"]


def test_a_run_that_diverges_has_a_result_and_is_not_chosen(tiny, out, monkeypatch):
    comparison, _ = tiny
    for run in (Run("grt", rate, 0, 1) for rate in comparison.protocol.rates):
        with monkeypatch.context() as patch:
            if run.rate == 2e-3:
                patch.setattr(Running, "take_step", diverges)
            Running(comparison, run, out).finish()
    assert best_rate(comparison, out, "grt") == 1e-3
    assert collect(comparison, out).rows["grt"].trials == {1e-3: pytest.approx(8, abs=8), 2e-3: math.inf}


@given(data=st.data(), num_rates=st.integers(1, 7))
def test_the_rates_tried_are_those_from_the_middle_to_beyond_the_best(tiny, data, num_rates):
    comparison, _ = tiny
    rates = [1e-3 * 2**number for number in range(num_rates)]
    best = data.draw(st.integers(0, num_rates - 1))
    losses = {rate: abs(number - best) for number, rate in enumerate(rates)}
    shuffled = tuple(data.draw(st.permutations(rates)))
    comparison = comparison._replace(protocol=comparison.protocol._replace(rates=shuffled))
    done: dict[float, float] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "trial_score", lambda comparison, out, run: done.get(run.rate))
        while best_rate(comparison, Path(), "grt") is None:
            done |= {run.rate: losses[run.rate] for run in trials(comparison, Path(), "grt")}
        assert best_rate(comparison, Path(), "grt") == rates[best]
    middle = (num_rates - 1) // 2
    assert sorted(done) == rates[max(0, min(middle, best - 1)) : max(middle + 1, best + 1) + 1]


def diverges(self, factor):
    raise DivergedError("loss nan at step 1")


def test_a_run_that_goes_on_further_down_the_plan_waits_for_its_turn(finished, out):
    comparison, folder = finished
    plan = (Full("every", 0, 1), Full("dense", 0, 1), Full("dense", 0), Full("every", 0))
    names = [f"{name}-lr{best_rate(comparison, folder, name):g}-seed0" for name in ("every", "dense")]
    for run in [run for name in ("dense", "grt") for run in trials(comparison, folder, name)]:
        shutil.copytree(folder / run.name, out / run.name)
    (out / names[1] / "result-10.json").unlink()
    comparison = comparison._replace(plan=plan)
    assert [(run.name, run.num_budgets) for run in missing_runs(comparison, out)] == [(names[0], 1), (names[1], 2)]
    shutil.copytree(folder / names[0], out / names[0])
    (out / names[0] / "result-10.json").unlink()
    assert [(run.name, run.num_budgets) for run in missing_runs(comparison, out)] == [(names[1], 2), (names[0], 2)]
    assert find_run(comparison, out, names[0]).num_budgets == 2
    row = collect(comparison, out).rows["every"]
    assert (row.num_seeds, [len(group) for group in row.budgets]) == (1, [1, 0])


# Counting


@pytest.mark.parametrize("name", ["dense", "grt", "every"])
def test_training_flops_are_those_of_the_depths_drawn(finished, name):
    comparison, folder = finished
    method, rows, length = comparison.methods[name], 2, 16
    rate = best_rate(comparison, folder, name)
    by_budget = {result["budget"]: result for result in outcome(folder, Run(name, rate, 0, 2))}
    model = method.make(comparison.sizes())
    sampler = method.sampler(model, 0)
    depths = [sampler(step).num_steps for step in range(10)]
    per_step = [3 * accounting.flops(model, length, depth) for depth in depths]
    if name == "every":
        head = 2 * model.embed.token.weight.numel() * length
        per_step = [3 * (accounting.flops(model, length, depth) - head) + 4 * depth * head for depth in depths]
    assert by_budget[10]["training"]["flops"] == rows * sum(per_step)
    assert by_budget[5]["training"]["flops"] == rows * sum(per_step[:5])
    assert by_budget[10]["tokens"] == 10 * rows * length


def test_every_held_out_token_is_predicted_once(finished):
    comparison, folder = finished
    data = comparison.data
    data.most_held_out, most = 1 << 30, data.most_held_out
    windows = data._windows()
    data.most_held_out = most
    joined = torch.cat([windows[0, :1], windows[:, 1:].flatten()])
    assert joined.tolist() == data.opened["held_out"][: len(joined)].tolist()
    text = data.opened["token_bytes"][data.opened["held_out"]].sum()
    assert text == sum(len(part) for part in held_out_text(folder))


def held_out_text(folder):
    from data import text

    return [content for _, content in text(folder / "text.py").held_out]


DEVIATIONS = {
    "huginn": (1.0, 1.004),  # a truncated run saves the gradient of the state that its last steps start from
    "loopformer": (0.998, 1.0),
    "mor": (0.999, 1.0),  # the losses of routers are not counted
    "mod": (0.999, 1.0),
    "mor-isoflops": (0.998, 1.0),
    "mod-isoflops": (0.999, 1.0),
}


@pytest.mark.parametrize("name", LANGUAGE.methods)
def test_a_training_step_costs_what_is_executed(name):
    method, rows, length = LANGUAGE.methods[name], 2, 128
    torch.manual_seed(0)
    with torch.device("meta"):
        model = method.make(LANGUAGE.sizes())
        trained = method.objective(model)
        tokens = torch.zeros(rows, length, dtype=torch.long)
    depth = method.sampler(model, 0)(3)
    if depth.rows is not None:
        few, many = min(depth.rows), max(depth.rows)
        assert few < many
        depth, model.num_steps = rd.Depth(many, depth.grad_steps, (few, many)), many
    with FlopCounterMode(display=False) as counter:
        trained(tokens, depth).backward()
    at_least, at_most = DEVIATIONS.get(name, (1.0, 1.0))
    ratio = rows * method.cost(model, depth, length) / counter.get_total_flops()
    assert at_least <= ratio <= at_most


# Concluding


def result(last, first=None, flops=1.0, seed=0):
    parts = {"last_parts": last, "first_parts": first or last, "part_bytes": [100] * len(last)}
    exits = [float(np.mean(first or last)), float(np.mean(last))]
    return {"seed": seed, "measured": {"exits": exits, **parts}, "training": {"flops": flops}}


def test_a_difference_is_claimed_above_two_standard_errors_of_seeds_and_text():
    some = [result([1.0, 1.1], seed=0), result([1.2, 1.3], seed=1)]
    others = [result([1.4, 1.5], seed=1)]
    spread = statistics.Spread(0.2, freedom=100)
    found = statistics.difference(some, others, spread)
    assert found.value == pytest.approx(-0.2)  # at the seed that both have
    assert found.error == pytest.approx(0.2 * math.sqrt(2))  # paired, the text adds nothing here
    assert not found.claimed
    assert statistics.difference(some[:1], others, spread).error is None
    assert statistics.Estimate(-0.3, 0.149).claimed
    assert not statistics.difference(some, others, None).claimed
    uneven = statistics.difference([result([1.0, 1.2])], [result([1.0, 1.0])], statistics.Spread(0.0, 1))
    assert uneven.error == pytest.approx(np.std([0.0, 0.2], ddof=1) / math.sqrt(2))


@pytest.mark.parametrize("num_methods, num_seeds", [(2, 2), (2, 3), (4, 2), (6, 3)])
def test_where_methods_are_alike_five_claims_in_a_hundred_are_wrong_and_no_more(num_methods, num_seeds):
    """However few seeds the spread is found with."""
    draw, claims, times = np.random.default_rng(1).normal, 0, 1000
    for _ in range(times):
        of_seed = draw(size=num_seeds)
        groups = [[result([draw() + of_seed[at]] * 2, seed=at) for at in range(num_seeds)] for _ in range(num_methods)]
        claims += statistics.difference(*groups[:2], statistics.own_spread(groups)).claimed
    assert claims / times == pytest.approx(0.05, abs=0.021)  # three standard errors


def test_degrees_of_freedom_are_those_of_what_is_most_uncertain():
    some, others = [result([1.0, 1.2, 1.1])], [result([1.0, 1.0, 1.0])]
    by_text, by_seeds = (statistics.difference(some, others, statistics.Spread(size, 7)) for size in (1e-9, 10.0))
    assert by_text.freedom == pytest.approx(2)
    assert by_seeds.freedom == pytest.approx(7, rel=1e-3)
    assert statistics.errors_needed(1) == pytest.approx(12.706, abs=1e-3)  # of any table of Student's t
    assert statistics.errors_needed(math.inf) == 2


def test_what_a_seed_does_to_all_methods_is_no_part_of_the_spread():
    method, seed = [1.0, 1.5, 2.0], [0.0, 0.3, -0.2]
    exact = [[result([m + s], seed=at) for at, s in enumerate(seed)] for m in method]
    assert statistics.own_spread(exact) == (pytest.approx(0, abs=1e-12), 4)
    pooled = statistics.pooled_spread(exact)
    assert pooled is not None
    assert pooled.value > 0.2
    two = [[result([0.0], seed=0), result([0.1], seed=1)], [result([1.0], seed=0), result([1.3], seed=1)]]
    differences = [1.0, 1.2]  # of the two methods, seed by seed: their variance is twice that of a loss
    assert statistics.own_spread([*two, exact[0][:1]]) == (pytest.approx(np.std(differences, ddof=1) / math.sqrt(2)), 1)
    assert statistics.own_spread(two[:1]) is None
    assert statistics.own_spread([]) is None


@pytest.mark.parametrize("of", [statistics.own_spread, statistics.pooled_spread])
def test_noise_of_a_known_size_is_found(of):
    draw = np.random.default_rng(0).normal
    groups = [[result([draw(method, 0.1)], seed=seed) for seed in range(20)] for method in range(30)]
    assert of(groups).value == pytest.approx(0.1, rel=0.1)


def test_losses_at_equal_flops_lie_between_budgets():
    budgets = [[result([2.0, 4.0], flops=1e6), result([3.0, 3.0], flops=1e6, seed=1)], [result([1.0, 1.0], flops=1e8)]]
    (between,) = statistics.at_equal_flops(budgets, 1e7)  # of the seed that has both
    assert between["seed"] == 0
    assert between["measured"]["last_parts"] == pytest.approx([math.sqrt(2), 2])
    assert statistics.loss(between) == pytest.approx(math.sqrt(3))
    assert statistics.at_equal_flops(budgets, 1e9) == []
    assert len(statistics.at_equal_flops(budgets[:1], 1e6)) == 2


@pytest.mark.parametrize("num_seeds", [2, 3])
def test_where_methods_are_alike_at_equal_flops_few_claims_are_wrong(num_seeds):
    """The methods may have learned from the same batches or not: what a seed does to all of them is in the error."""
    draw, claims, times = np.random.default_rng(2).normal, 0, 1000
    for _ in range(times):
        losses = [[10 + draw() for _ in range(num_seeds)] for _ in range(3)]
        budgets = [[result([loss] * 2, flops=1.0, seed=seed) for seed, loss in enumerate(each)] for each in losses]
        rows = {str(name): Row(str(name), "", num_seeds, 1e-3, [each], [0], {}) for name, each in enumerate(budgets)}
        found = Table(rows, [None], [{}]).at_equal_flops("0", "1")
        assert found is not None
        claims += found.claimed
    assert 0.02 < claims / times <= 0.071  # three standard errors above one in twenty


# Reporting


def test_what_is_not_done_shows_as_open(tiny, out):
    comparison, _ = tiny
    table = collect(comparison, out)
    assert progress(comparison, out, 1) == "0 of 96 steps done"  # 6 trials of 5, of which 3 go on; 6 full runs of 11
    assert tables.methods_table(comparison, table).count(tables.OPEN) > 20
    Running(comparison, Run("dense", 1e-3, 0, 1), out).finish()
    assert "| dense | " in tables.trials_table(comparison, collect(comparison, out))
    text = comparison.publish(comparison, out, out / "published")
    assert text.count("open") > 20
    assert {path.name for path in (out / "published").glob("*.*")} >= {"tables.md", "results.json", "exits.png"}


def test_diverged_seeds_stand_in_the_tables(finished, tmp_path):
    comparison, folder = finished
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    rate = best_rate(comparison, folder, "grt")
    diverge(tmp_path, Run("grt", rate, 1, 2), 10)
    table = collect(comparison, tmp_path)
    [survivor] = table.rows["grt"].budgets[1]
    line = find_line(tables.methods_table(comparison, table), "GRT")
    assert f"| {statistics.loss(survivor):.4f} (1 of 2, 1 diverged) |" in line
    for shown in (tables.pairs_table, tables.depth_table, tables.exits_table, tables.baseline_table):
        assert "(1 diverged, left out)" in shown(comparison, table)
    assert "diverged" not in find_line(tables.baseline_table(comparison, table), "every exit")
    diverge(tmp_path, Run("grt", rate, 0, 2), 10)
    table = collect(comparison, tmp_path)
    assert find_line(tables.methods_table(comparison, table), "GRT").endswith("| diverged |")
    assert find_line(tables.pairs_table(comparison, table), "GRT less dense").endswith("| open |")
    (tmp_path / f"grt-lr{rate:g}-seed0" / "result-10.json").unlink()
    line = find_line(tables.methods_table(comparison, collect(comparison, tmp_path)), "GRT")
    assert line.endswith("| open (0 of 2, 1 diverged) |")
    assert "1 diverged" in comparison.publish(comparison, tmp_path, tmp_path / "published")


def test_headroom_says_what_it_leaves_out(finished, tmp_path):
    comparison, folder = finished
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    run = Run("dense", best_rate(comparison, folder, "dense"), 1, 2)
    shutil.copytree(folder / run._replace(seed=0).name, tmp_path / run.name, dirs_exist_ok=True)
    for path in (tmp_path / run.name).glob("result-*.json"):
        content = json.loads(path.read_text())
        content["config"].pop("method")
        path.write_text(json.dumps(content))
    diverge(tmp_path, run, 10)
    table = collect(comparison, tmp_path)
    assert find_line(tables.headroom_table(comparison, table), "headroom").endswith("(1 diverged, left out) |")
    assert find_line(tables.baseline_table(comparison, table), "GRT").endswith("% (1 diverged, left out) |")


def diverge(folder: Path, run: Run, budget: int) -> None:
    path = running.result_path(folder / run.name, budget)
    kept = {key: value for key, value in json.loads(path.read_text()).items() if key not in ("measured", "training")}
    path.write_text(json.dumps({**kept, "diverged": "loss nan"}))


def find_line(table: str, start: str) -> str:
    return next(line for line in table.splitlines() if line.startswith(f"| {start} |"))


def test_a_trial_whose_loss_is_no_number_is_not_chosen(finished, tmp_path):
    comparison, folder = finished
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for run in trials(comparison, tmp_path, "grt")[:1]:
        path = running.result_path(tmp_path / run.name, 5)
        content = json.loads(path.read_text())
        content["measured"]["exits"][-1] = math.nan
        path.write_text(json.dumps(content))
    assert best_rate(comparison, tmp_path, "grt") == 2e-3
    assert collect(comparison, tmp_path).rows["grt"].trials[1e-3] == math.inf


def test_diverged_seeds_of_a_puzzle_are_counted(tmp_path):
    comparison = panel(PointerChasing(num_nodes=4, max_hops=2, num_questions=2))
    comparison = comparison._replace(protocol=comparison.protocol._replace(budgets=(2,), warmup=1, rates=(3e-3,)))
    Running(comparison, Run("grt", 3e-3, 0, 1), tmp_path).finish()
    shutil.copytree(tmp_path / "grt-lr0.003-seed0", tmp_path / "grt-lr0.003-seed1")
    path = tmp_path / "grt-lr0.003-seed1" / "result-2.json"
    content = json.loads(path.read_text())
    content["config"].pop("method")
    path.write_text(json.dumps(content))
    diverge(tmp_path, Run("grt", 3e-3, 1, 1), 2)
    assert "| 1 of 2, 1 diverged | 0." in comparison.publish(comparison, tmp_path, tmp_path / "published")
    diverge(tmp_path, Run("grt", 3e-3, 0, 1), 2)
    assert "| 0 of 2, 2 diverged | diverged |" in comparison.publish(comparison, tmp_path, tmp_path / "published")


@pytest.mark.parametrize("losses, shown", [([2.0, 1.0, 3.0], "**1.0000** |"), ([2.0, 1.5, 1.0], "**1.0000** (edge) |")])
def test_the_best_rate_is_marked_and_said_to_lie_at_an_edge(tiny, losses, shown):
    comparison, _ = tiny
    trials = dict(zip((1e-3, 2e-3, 4e-3), losses, strict=True))
    comparison = comparison._replace(protocol=comparison.protocol._replace(rates=tuple(trials)))
    row = Row("grt", "GRT", 1, min(trials, key=lambda rate: trials[rate]), [], [], trials)
    assert shown in tables.trials_table(comparison, Table({"grt": row}, [], []))


def test_headroom_is_counted_in_spreads_and_shares_of_it(tiny):
    comparison, _ = tiny
    losses = {"dense": [1.0, 1.2], "blocks": [2.0, 2.2], "grt": [1.4, 1.2]}
    groups = {name: [result([v], seed=seed) for seed, v in enumerate(values)] for name, values in losses.items()}
    rows = {name: Row(name, name, 2, 1e-3, [[], group], [0, 0], {}) for name, group in groups.items()}
    spread = statistics.own_spread(list(groups.values()))
    table = Table(rows, [None, spread], [{}, {}])
    assert spread is not None
    shown = tables.headroom_table(comparison, table)
    assert f"| headroom over spread | open | {1 / spread.value:.1f} × |" in shown
    assert f"{spread.value:.4f} (2 degrees of freedom) |" in shown
    assert tables.baseline_table(comparison, table).splitlines()[-1].endswith("| open | 80% |")


def test_models_that_do_not_loop_say_nothing_about_depth_gains(finished):
    comparison, folder = finished
    table = collect(comparison, folder)
    of_grt = statistics.pooled_spread([table.rows["grt"].budgets[1]], statistics.gain)
    assert table.gain_spreads[1] == {"grt": of_grt, "every": None}
    assert of_grt is not None
    assert of_grt.value > 0
    assert table.depth_gain("dense", 1) is None


def test_depth_gains_are_judged_by_methods_that_draw_their_depths_alike(finished, out):
    comparison, folder = finished
    shutil.copytree(folder, out, dirs_exist_ok=True, symlinks=True, ignore=shutil.ignore_patterns("text"))
    alone = collect(comparison, out).depth_gain("grt", 1)
    run = Run("every", best_rate(comparison, out, "grt"), 0, 2)  # always at full depth: its first exit ends anywhere
    more = comparison._replace(plan=(*comparison.plan, Full("every", 1)))
    path = out / run._replace(seed=1).name / "result-10.json"
    path.parent.mkdir()
    far = json.loads((out / run.name / "result-10.json").read_text())
    far["measured"]["exits"][0] += 5
    far = {**far, "seed": 1, "config": {**far["config"], **settings(more, run._replace(seed=1))}}
    path.write_text(json.dumps(far))
    table = collect(more, out)
    assert table.depth_gain("grt", 1) == alone
    wide = table.depth_gain("every", 1)
    assert wide is not None
    assert wide.error is not None
    assert wide.error > 1


def test_the_tables_of_finished_cells_have_nothing_open(finished, tmp_path):
    comparison, folder = finished
    text = comparison.publish(comparison, folder, tmp_path)
    assert progress(comparison, folder, 1) == "81 of 81 steps done, nothing is left"
    assert "open" not in text
    assert "(2 of 2) |" in text
    for title in ("Headroom", "Less dense", "Differences", "Depth gain", "By exit", "Learning rates"):
        assert f"## {title}" in text
    written = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    assert written["methods"]["grt"]["rate"] in (1e-3, 2e-3)
    spread = collect(comparison, folder).spreads[1]
    assert spread is not None
    assert written["spreads"][1] == spread._asdict()


def test_what_has_one_seed_is_published_as_json_that_others_read_too(finished, out):
    comparison, folder = finished
    for path in (each for each in folder.glob("*-seed0") if each.is_dir()):
        shutil.copytree(path, out / path.name)
    comparison.publish(comparison, out, out / "published")
    written = json.loads((out / "published" / "results.json").read_text(), parse_constant=pytest.fail)
    found = written["differences"]["grt less dense"][1]
    assert (found["error"], found["freedom"], found["diverged"]) == (None, None, 0)


# Verifying


def test_a_published_cell_is_verified_and_a_changed_one_is_not(finished, tmp_path):
    comparison, folder = finished
    comparison.publish(comparison, folder, tmp_path)
    path = tmp_path / "cells" / f"grt-lr{best_rate(comparison, folder, 'grt'):g}-seed1.json"
    said = []
    assert verify(comparison, path, folder, tolerance=1e-4, say=said.append) == 0
    cell = json.loads(path.read_text())
    changed = {**cell, "first_losses": [*cell["first_losses"][:-1], cell["first_losses"][-1] + 0.01]}
    path.write_text(json.dumps(changed))
    assert verify(comparison, path, folder, tolerance=1e-4, say=said.append) == 1
    assert "within" in said[0]
    assert "more than" in said[1]
    cell["budgets"][0]["config"]["data"]["checksum"] = "0"
    path.write_text(json.dumps(cell))
    with pytest.raises(ValueError, match="checksum"):
        verify(comparison, path, folder, tolerance=1e-4, say=said.append)


def test_a_published_cell_of_another_method_is_told_to_be(finished, tmp_path):
    comparison, folder = finished
    comparison.publish(comparison, folder, tmp_path)
    name = f"grt-lr{best_rate(comparison, folder, 'grt'):g}-seed1"
    edited = GRT_METHOD._replace(build=partial(rd.grt, GATED, update=partial(rd.gated, bias=-4.0)))
    changed = comparison._replace(methods={**comparison.methods, "grt": edited})
    said, path = [], tmp_path / "cells" / f"{name}.json"
    assert verify(changed, path, folder, tolerance=1e-4, say=said.append) == 1
    assert re.match(rf"{name}: .*another method .*: method\.build is grt\(.* there and .*bias=-4\.0\)\) here", said[0])
    assert "more than" in said[1]
    cell = json.loads(path.read_text())
    cell["budgets"][0]["config"]["method"]["settings"] = "of another version"
    path.write_text(json.dumps(cell))
    assert verify(comparison, path, folder, tolerance=1e-4, say=said.append) == 0
    assert "method.settings is of another version there" in said[2]
    cell["budgets"][0]["config"].pop("method")  # as of what was trained before methods were described
    path.write_text(json.dumps(cell))
    assert verify(comparison, path, folder, tolerance=1e-4, say=said.append) == 0
    assert len(said) == 5


def without(*names: str):
    return lambda cell: {key: value for key, value in cell.items() if key not in names}


def of_run(**changed):
    return lambda cell: {**cell, "run": {**cell["run"], **changed}}


def of_result(**changed):
    def edited(cell: dict) -> dict:
        [first, *further] = cell["budgets"]
        kept = {key: value for key, value in {**first, **changed}.items() if value is not None}
        return {**cell, "budgets": [kept, *further]}

    return edited


DAMAGE = {
    "a list": lambda cell: [1, 2],
    "a number": lambda cell: 3,
    "no run": without("run"),
    "no budgets": without("budgets"),
    "empty budgets": lambda cell: {**cell, "budgets": []},
    "an empty budget": lambda cell: {**cell, "budgets": [{}]},
    "no configuration": of_result(config=None),
    "no budget": of_result(budget=None),
    "a budget in words": of_result(budget="../5"),
    "a result of another seed": of_result(seed=7),
    "a result of another method": of_result(method="dense"),
    "no sums": of_result(training=None),
    "sums in words": of_result(training={"flops": "many", "seconds": 1.0}),
    "no measurement": of_result(measured=None),
    "no parameters": of_result(parameters=None),
    "no losses": without("first_losses"),
    "losses as words": lambda cell: {**cell, "first_losses": ["a"] * 4},
    "losses that are none": lambda cell: {**cell, "first_losses": [math.nan] * 4},
    "a list as method": of_run(method=[]),
    "a further key": of_run(extra=1),
    "a rate in words": of_run(rate="fast"),
    "a seed in words": of_run(seed="0"),
    "a run that is a list": lambda cell: {**cell, "run": [1]},
}


@pytest.fixture(scope="module")
def published(finished, tmp_path_factory) -> Path:
    """What the finished cells publish; not to be changed."""
    folder = tmp_path_factory.mktemp("published")
    finished[0].publish(finished[0], finished[1], folder)
    return folder


@pytest.fixture
def cell_file(published, tmp_path) -> Path:
    """A copy of one published cell."""
    path = max((published / "cells").glob("grt-*-seed1.json"))
    (tmp_path / "published" / "cells").mkdir(parents=True)
    return Path(shutil.copy(path, tmp_path / "published" / "cells" / path.name))


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_cell_that_is_damaged_is_refused_by_name(finished, cell_file, out, kind):
    comparison, folder = finished
    cell_file.write_text(json.dumps(DAMAGE[kind](json.loads(cell_file.read_text()))))
    with pytest.raises(ValueError, match=rf"verify is .*{cell_file.name}, but that is no published cell"):
        verify(comparison, cell_file, folder, tolerance=1e-4, say=print)
    with pytest.raises(ValueError, match=rf"restore is .*published, in it cells/{cell_file.name}, but"):
        restore(comparison, cell_file.parents[1], out)
    assert list(out.glob("*-seed*")) == []


NOT_TO_VERIFY = [
    ({"first_losses": []}, "holds 0 first_losses, not 1 to 4"),
    ({"first_losses": [3.0] * 500}, "holds 500 first_losses, not 1 to 4"),
]


@pytest.mark.parametrize("changed, told", NOT_TO_VERIFY)
def test_a_cell_that_leaves_nothing_to_verify_is_refused(finished, cell_file, changed, told):
    comparison, folder = finished
    cell_file.write_text(json.dumps({**json.loads(cell_file.read_text()), **changed}))
    with pytest.raises(ValueError, match=rf"verify is .*{cell_file.name}, but it {told}"):
        verify(comparison, cell_file, folder, tolerance=1e-4, say=print)


def test_a_cell_of_a_method_that_is_not_compared_is_refused(finished, cell_file):
    comparison, folder = finished
    fewer = {name: method for name, method in comparison.methods.items() if name != "grt"}
    with pytest.raises(
        ValueError, match=rf"verify is .*{cell_file.name}, but its method is grt, which is none of dense"
    ):
        verify(comparison._replace(methods=fewer), cell_file, folder, tolerance=1e-4, say=print)


def test_a_cell_whose_training_diverges_here_is_told(finished, tmp_path, monkeypatch):
    comparison, folder = finished
    comparison.publish(comparison, folder, tmp_path)
    [path, *_] = (tmp_path / "cells").glob("grt-*.json")
    monkeypatch.setattr(Running, "take_step", diverges)
    with pytest.raises(ValueError, match=r"verify is .*\.json, but here its training diverges: loss nan at step 1"):
        verify(comparison, path, folder, tolerance=1e-4, say=print)


# Restoring


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names_missing(comparison, out) -> list[str]:
    return [run.name for run in missing_runs(comparison, out)]


def test_what_is_restored_is_published_as_it_was_and_nothing_is_left(finished, published, tmp_path, out):
    comparison, _ = finished
    assert restore(comparison, published, out) == f"15 results taken from {published}"
    assert progress(comparison, out, 1) == "0 of 0 steps done, nothing is left"
    assert names_missing(comparison, out) == []
    comparison.publish(comparison, out, tmp_path / "again")
    assert everything(tmp_path / "again") == everything(published)


def test_a_run_whose_longest_budget_was_not_published_begins_anew_and_adds_it(finished, tmp_path, out):
    comparison, folder = finished
    shorter = comparison._replace(protocol=comparison.protocol._replace(budgets=(5,)))
    shorter.publish(shorter, folder, tmp_path / "short")
    restore(comparison, tmp_path / "short", out)
    run = Run("grt", best_rate(comparison, folder, "grt"), 1, 2)
    assert run.name in names_missing(comparison, out)
    assert progress(comparison, out, 1) == "0 of 60 steps done"  # 6 runs of a trunk of 8 and a cooldown of 2
    before = (out / run.name / "result-5.json").read_bytes()  # with the time that it took there
    Running(comparison, run, out).finish()
    assert (out / run.name / "result-5.json").read_bytes() == before
    assert not (out / run.name / "cooldown-5").exists()
    assert outcome(out, run)[0] == outcome(folder, run)[0]
    assert progress(comparison, out, 1).startswith("10 of 60 steps done")


def test_what_is_there_stays_and_what_the_plan_lacks_is_left(finished, published, out):
    comparison, folder = finished
    names = ("dense", "blocks")
    fewer = comparison._replace(
        plan=tuple(cell for cell in comparison.plan if cell.method in names),
        pairs=(),
        protocol=comparison.protocol._replace(budgets=(5, 12)),
    )
    run = Run("dense", best_rate(comparison, folder, "dense"), 1, 2)
    (out / run.name).mkdir()
    (out / run.name / "result-5.json").write_text("ours")
    said = restore(fewer, published, out)
    assert said == (
        f"4 results taken from {published}; 1 stay as they are here; 10 are of methods or budgets that the plan lacks"
    )
    assert (out / run.name / "result-5.json").read_text() == "ours"
    assert {path.name.split("-")[0] for path in out.glob("*-seed*")} == set(names)
    assert list(out.glob("*/result-10.json")) == []


def of_config(key: str, value: object):
    return lambda cell: of_result(config={**cell["budgets"][0]["config"], key: value})(cell)


def of_measured(**changed):
    return lambda cell: of_result(measured={**cell["budgets"][0]["measured"], **changed})(cell)


OTHERS = {
    "sizes is": of_config("sizes", [8, 1]),
    "sizes is not told": of_config("sizes", None),
    "data is not told": of_config("data", {}),
    "protocol.clip is": of_config("protocol", {"clip": 2.0}),
    "data.checksum is": of_config("data", {"checksum": "0"}),
    "method.build is another there and ": of_config("method", {"build": "another"}),
    "method.weights is": of_config("method", {"weights": "0"}),
    "run is other": of_config("run", "other"),
    "the measurement at budget 5 does not fit: its losses are no numbers": of_measured(exits=["low"]),
    "the measurement at budget 5 does not fit: it is of other held-out windows": of_measured(part_bytes=[1, 2]),
}


@pytest.mark.parametrize("told", OTHERS)
def test_nothing_is_restored_where_a_cell_is_of_another_run(finished, cell_file, out, told):
    cell_file.write_text(json.dumps(OTHERS[told](json.loads(cell_file.read_text()))))
    said = rf"of 1 cells there 1 are of other runs than here\. Of {cell_file.stem} {told}"
    with pytest.raises(ValueError, match=rf"restore is .*published, but {said}"):
        restore(finished[0], cell_file.parents[1], out)
    assert list(out.glob("*-seed*")) == []


def test_a_cell_under_another_name_is_refused(finished, cell_file, out):
    shutil.copy(cell_file, cell_file.with_name("a-copy.json"))
    with pytest.raises(ValueError, match=rf"but cells/a-copy.json there holds the run {cell_file.stem}"):
        restore(finished[0], cell_file.parents[1], out)


def test_accuracies_that_are_none_do_not_fit_a_puzzle():
    data = PuzzleData(PointerChasing(num_nodes=5, max_hops=2, num_questions=3))
    assert data.misfit({"accuracy": [[0.5, 0.25], [1, 0.5]], "full": 1}) == ""
    for accuracy, full in (([], 1), ([[0.5]], 1), ([["a", "b"]], 1), ([[0.5, 0.25]], 2), ([[0.5, 0.25]], "1"), (3, 1)):
        assert data.misfit({"accuracy": accuracy, "full": full})


@pytest.mark.parametrize("cells", ["language", "chasing", "automaton"])
def test_all_that_is_published_can_be_restored(cells):
    comparison = load_cells(f"comparison.{cells}")
    folder = EXAMPLES.parent / "docs" / "results" / {"language": "comparison"}.get(cells, cells)
    for path in published_files(folder):
        run = read_run(f"restore is {folder}", path)
        expected = json.loads(json.dumps(settings(comparison, run.run)))
        for result in run.results:
            assert differences(result["config"], expected, *expected) == ""


def test_results_are_not_published_over_more_of_them(finished, published, tmp_path, out):
    comparison, folder = finished
    shutil.copytree(published, tmp_path / "all")
    before = everything(tmp_path / "all")
    shutil.copytree(folder, out, dirs_exist_ok=True, symlinks=True, ignore=shutil.ignore_patterns("text", "result-10*"))
    with pytest.raises(
        ValueError, match=r"publish is .*all, but 6 cells there have results that are not here, such as"
    ):
        comparison.publish(comparison, out, tmp_path / "all")
    assert everything(tmp_path / "all") == before
    restore(comparison, tmp_path / "all", out)
    comparison.publish(comparison, out, tmp_path / "all")


def test_one_command_restores_and_trains_what_is_missing(finished, published, tmp_path, out):
    comparison, folder = finished
    shutil.copytree(published, tmp_path / "published")
    lacking = f"grt-lr{best_rate(comparison, folder, 'grt'):g}-seed1"
    (tmp_path / "published" / "cells" / f"{lacking}.json").unlink()
    line = ["--cells", "tiny_cells", "--text", str(folder / "text.py"), "--out", str(out), "--nice", "0"]
    process = start(run_compare, *line, "--restore", str(tmp_path / "published"), out=tmp_path / "said")
    process.join()
    assert process.exitcode == 0, (tmp_path / "said").read_text()
    assert names_missing(comparison, out) == []
    assert [path.parents[1].name for path in out.glob("*/trunk/log.jsonl")] == [lacking]
    assert (tmp_path / "said").read_text().count("taken from") == 1  # not by the process of the run too


def test_a_folder_without_cells_is_refused(finished, tmp_path, out):
    with pytest.raises(ValueError, match=r"restore is .*, but there is no published cell in .*cells"):
        restore(finished[0], tmp_path, out)


def test_a_trial_that_the_choice_of_a_rate_did_not_need_is_published_too(finished, tmp_path, out):
    comparison, folder = finished
    more = comparison._replace(protocol=comparison.protocol._replace(rates=(1e-3, 2e-3, 4e-3, 8e-3)))
    shutil.copytree(folder, out, dirs_exist_ok=True, symlinks=True, ignore=shutil.ignore_patterns("text"))
    extra = Run("dense", 8e-3, 0, 1)
    assert extra not in trials(more, out, "dense")
    Running(more, extra, out).finish()
    assert f"cells/{extra.name}.json" in run_files(more, out)


# Plots


def test_looks_of_methods_do_not_repeat():
    looks = [tuple(figures.look(number).values()) for number in range(60)]
    assert len(set(looks)) == 60
    assert all(one[0] != other[0] for one, other in pairwise(looks))
    assert len({tuple(figures.mark(number).values()) for number in range(40)}) == 40


def cell(seed: int, tokens: float, exits: list[float], parameters: int = 1000) -> dict:
    told = result(exits[-1:], exits[:1], flops=tokens, seed=seed)
    return {**told, "tokens": tokens, "parameters": parameters, "measured": {**told["measured"], "exits": exits}}


@pytest.fixture
def uneven(tiny) -> Table:
    """Methods that have come to different budgets, and have different numbers of seeds."""
    comparison, _ = tiny
    short, long = (budget * comparison.data.batch_tokens() for budget in comparison.protocol.budgets)
    budgets = {
        "dense": [[cell(0, short, [2.0]), cell(1, short, [2.1])], [cell(0, long, [1.5])]],
        "blocks": [[cell(0, short, [2.2]), cell(1, short, [2.4])], []],
        "grt": [[], [cell(0, long, [1.9, 1.8, 1.7])]],
        "every": [[cell(0, short, [2.5, 2.4, 2.3]), cell(1, short, [2.4, 2.3, 2.2])], []],
    }
    rows = {name: Row(name, COMPARISON.methods[name].label, 2, 1e-3, of, [0, 0], {}) for name, of in budgets.items()}
    spreads = [statistics.own_spread([row.budgets[number] for row in rows.values()]) for number in (0, 1)]
    return Table(rows, spreads, [dict.fromkeys(rows)] * 2)


def legend(axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_exits_of_one_budget_share_a_panel_of_their_own_with_variants_beside(tiny, uneven):
    figure = figures.drawn(tiny[0], uneven)["exits"]
    panels = {axes.get_title(): sorted(float(line.get_ydata()[-1]) for line in axes.lines) for axes in figure.axes}
    assert panels == {  # the mean over seeds; dense and blocks, the measures, stand in both
        "methods, 0.00016 M tokens": pytest.approx([2.05, 2.3]),
        "variants, 0.00016 M tokens": pytest.approx([2.05, 2.25, 2.3]),
        "methods, 0.00032 M tokens": pytest.approx([1.5, 1.7]),
        "variants, 0.00032 M tokens": pytest.approx([1.5]),
    }
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [row.label for row in uneven.rows.values()]
    for axes in figure.axes:
        assert all(tick == round(tick) for tick in axes.get_xticks())


def test_a_loss_far_above_the_others_is_named_and_does_not_squeeze_them(tiny, uneven):
    far = uneven.rows["every"]._replace(budgets=[[cell(0, 160, [9.0, 9.0, 9.5]), cell(1, 160, [9.0, 9.0, 9.5])], []])
    drawn = figures.drawn(tiny[0], uneven._replace(rows={**uneven.rows, "every": far}))
    for name in ("training-flops", "parameters"):
        [axes] = drawn[name].axes
        assert 2.3 < axes.get_ylim()[1] < 3
        assert [note.get_text() for note in axes.texts] == ["every exit: 9.50 \u2191"]
    [axes] = drawn["ablations"].axes
    assert axes.get_xlim()[1] < 1
    assert [note.get_text() for note in axes.texts] == ["7.45 \u2192"]
    assert not any(axes.texts for axes in figures.drawn(tiny[0], uneven)["training-flops"].axes)


def test_every_budget_is_drawn_against_parameters_in_a_colour_of_its_own(tiny, uneven):
    [axes] = figures.drawn(tiny[0], uneven)["parameters"].axes
    found = {(line.get_color(), round(float(line.get_ydata()[0]), 3)) for line in axes.lines}
    short, long = figures.COLORS[:2]
    assert found == {(short, 2.05), (short, 2.3), (short, 2.25), (long, 1.5), (long, 1.7)}
    assert legend(axes)[2:] == [row.label for row in uneven.rows.values()]


def test_a_difference_of_one_seed_looks_unlike_one_with_an_error(tiny, uneven):
    [axes] = figures.drawn(tiny[0], uneven)["ablations"].axes
    points = [line for line in axes.lines if line.get_marker() == "o"]
    assert [line.get_fillstyle() for line in points] == ["full", "none", "full"]
    assert [float(line.get_xdata()[0]) for line in points] == pytest.approx([2.3 - 2.05, 1.7 - 1.5, 2.25 - 2.05])
    assert len(axes.containers) == 2  # bars of error
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["blocks, run once", "GRT", "every exit"]
    assert "open: one seed, no error known" in legend(axes)
    assert axes.get_legend().get_bbox_to_anchor().x0 == axes.bbox.x1  # beside the axes, where it covers nothing
    open_baseline = {**uneven.rows, "dense": uneven.rows["dense"]._replace(budgets=[[], []])}
    [axes] = figures.drawn(tiny[0], uneven._replace(rows=open_baseline))["ablations"].axes
    assert len(axes.get_yticks()) == 0  # nothing to compare with


def test_tables_say_which_budget_a_number_is_of(tiny, uneven):
    comparison, _ = tiny
    assert "| 0.00032 M: +0.2000 (one seed) |" in find_line(tables.baseline_table(comparison, uneven), "GRT")
    lines = tables.exits_table(comparison, uneven).splitlines()[2:]
    assert [line.split(" | ")[:2] for line in lines] == [
        ["| GRT", "0.00032 M tokens"],
        ["| every exit", "0.00016 M tokens"],
    ]


@pytest.mark.parametrize("fails_at", [(tables, "trials_table"), (figures, "_differences")])
def test_nothing_is_written_unless_all_can_be_made(finished, tmp_path, monkeypatch, fails_at):
    comparison, folder = finished
    monkeypatch.setattr(*fails_at, fails)
    with pytest.raises(RuntimeError):
        comparison.publish(comparison, folder, tmp_path / "published")
    assert not (tmp_path / "published").exists()


def test_shares_of_no_headroom_are_none(tiny, uneven):
    comparison, _ = tiny
    same = {**uneven.rows, "blocks": uneven.rows["dense"]._replace(name="blocks")}
    assert "no headroom" in find_line(tables.baseline_table(comparison, uneven._replace(rows=same)), "every exit")


# A file of cells


@pytest.fixture
def page(tmp_path, monkeypatch) -> Path:
    """The files of cells that the documentation shows; this one stands alone."""
    code = re.findall(r"^```py\n(.*?)^```", (EXAMPLES.parent / "docs" / "comparison.md").read_text(), re.M | re.S)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, lines in zip(("mine.py", "beside.py"), code, strict=True):
        (tmp_path / name).write_text(lines)
    return tmp_path / "mine.py"


def test_the_cells_of_the_page_are_trained_published_and_verified(tiny, page, out, capsys):
    asked = arguments(cells=str(page), text=tiny[1] / "text.py", out=out / "runs")
    comparison = compare.load(asked)
    comparison.data.open(asked.out / "text")
    while missing := missing_runs(comparison, asked.out):
        Running(comparison, missing[0], asked.out).finish()
    assert compare.main(asked._replace(publish=out / "mine")) == 0
    assert "| GRT, bias 0 less GRT |" in capsys.readouterr().out
    assert compare.main(asked._replace(verify=out / "mine" / "cells" / "grt-lr0.003-seed0.json")) == 0


def test_of_a_method_beside_the_published_ones_all_others_are_published(page):
    comparison = load_cells(str(page.with_name("beside.py")))
    check(comparison)
    check_methods(comparison)
    published = EXAMPLES.parent / "docs" / "results" / "comparison" / "cells"
    runs = [read_run("restore", path) for path in published.glob("*.json")]
    done = {(run.run.method, run.run.seed, len(run.results)) for run in runs}
    others = [cell for cell in comparison.plan if cell.method != "mine"]
    assert {(cell.method, cell.seed, len(comparison.protocol.budgets)) for cell in others} <= done


def test_a_file_of_cells_and_what_lies_beside_it_are_found_by_path_from_any_folder(tiny, out, tmp_path):
    (tmp_path / "beside.py").write_text("from tiny_cells import COMPARISON\nPLAN = COMPARISON.plan[:2]\n")
    (tmp_path / "data.py").write_text("1 / 0  # not what our own modules import under this name\n")
    rates = "protocol=COMPARISON.protocol._replace(rates=(1e-3,))"
    few = f"COMPARISON = COMPARISON._replace(plan=PLAN, pairs=(), {rates})\n"
    (tmp_path / "mine.py").write_text(f"from beside import COMPARISON, PLAN\n{few}")
    line = ["--cells", "mine.py", "--text", str(tiny[1] / "text.py"), "--out", ".", "--nice", "0", "--jobs", "2"]
    process = start(run_from, str(tmp_path), *line, out=tmp_path / "said")
    process.join()
    assert process.exitcode == 0, (tmp_path / "said").read_text()
    assert {path.parent.name for path in out.glob("*/result-5.json")} == {"dense-lr0.001-seed0", "blocks-lr0.001-seed0"}


def run_from(folder: str, *command_line: str) -> None:
    """`compare.py` called in another folder than that of the repository."""
    os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, os.environ["PYTHONPATH"].split(os.pathsep)))
    sys.path[:] = map(os.path.abspath, sys.path)
    script = EXAMPLES / "compare.py"
    os.chdir(folder)
    run_compare(*command_line, script=str(script))


# Asking


def arguments(**given) -> compare.Arguments:
    return compare.Arguments(**{"out": Path("nowhere"), "cells": "tiny_cells", "nice": 0, **given})


REFUSED = [
    ({"jobs": 0}, "jobs is 0"),
    ({"jobs": -1, "status": True}, "jobs is -1"),
    ({"budgets": 1}, "budgets is 1, but goes with --only"),
    ({"budgets": 0, "only": "grt"}, "budgets is 0"),
    ({"budgets": 7, "only": "grt-lr0.001-seed0"}, "budgets is 7, but there are 2"),
    ({"tolerance": math.nan}, "tolerance is nan"),
    ({"tolerance": -1.0}, "tolerance is -1"),
    ({"text": Path("no/such/folder"), "status": True}, "text is no/such/folder"),
    ({"out": Path(__file__), "status": True}, "out is .*that is a file; it must be a folder"),
    ({"out": Path(__file__) / "runs"}, "out is .*runs, but .*test_compare.py is a file; it must be a folder"),
    ({"out": Path("/proc/x")}, "out is /proc/x, but no folder can be made there"),
    ({"publish": Path(__file__)}, "publish is .*that is a file; it must be a folder"),
    ({"publish": Path(__file__) / "a" / "b"}, "publish is .*test_compare.py is a file; it must be a folder"),
    ({"only": "grt"}, "only is grt, but the runs that can be begun are grt-lr0.001-seed0, grt-lr0.002-seed0, "),
    ({"restore": Path("here")}, "restore is here, but there is no published cell in here/cells: give a folder"),
    ({"restore": Path("here"), "verify": Path("x")}, "restore is here, but goes without --verify"),
    ({"publish": Path("here")}, "out is nowhere, but no run has a result"),
    ({"cells": "no/such/cells.py"}, "cells is no/such/cells.py, but there is no such file"),
    ({"cells": "no.such.module"}, "a module that can be imported, such as comparison.language .*No module named"),
    ({"cells": "comparison.parts"}, "cells is comparison.parts, but that module has no COMPARISON"),
]


@pytest.mark.parametrize("given, told", REFUSED)
def test_what_cannot_be_meant_is_refused(tmp_path, monkeypatch, given, told):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=told):
        compare.main(arguments(**given))


def test_a_folder_that_cannot_be_made_is_told_by_its_argument(finished):
    comparison, folder = finished
    with pytest.raises(ValueError, match="publish is /proc/x, but no folder can be made there"):
        comparison.publish(comparison, folder, Path("/proc/x"))


@pytest.mark.parametrize("as_path", [False, True])
def test_cells_that_fail_are_told(tmp_path, monkeypatch, as_path):
    path = tmp_path / "failing_cells.py"
    path.write_text("\n1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"cells is .*failing_cells.*ZeroDivisionError") as told:
        compare.main(arguments(cells=str(path) if as_path else path.stem))
    assert ("line 2 fails" in str(told.value)) == as_path


def fails(*_, **__):
    raise RuntimeError("never")


BROKEN = {
    "build": [
        (lambda **sizes: rd.dense(3, **{**sizes, "dim": 15}), "ValueError: .*15"),
        (rd.dense(2, dim=16, num_heads=2, vocab_size=9, context_length=4), "TypeError: "),
    ],
    "objective": [(fails, "RuntimeError: never")],
    "sampler": [(fails, "RuntimeError: never"), (lambda model, seed: fails, "RuntimeError: never")],
    "cost": [(fails, "RuntimeError: never")],
}


@pytest.mark.parametrize("part, given, told", [(part, *each) for part, several in BROKEN.items() for each in several])
def test_a_method_that_cannot_be_built_is_refused_before_any_run(part, given, told):
    check_methods(COMPARISON)
    broken = COMPARISON.methods["every"]._replace(**{part: given})
    with pytest.raises(ValueError, match=rf"^{part} of method 'every' fails: .*{told}"):
        check_methods(COMPARISON._replace(methods={**COMPARISON.methods, "every": broken}))


def exits_of_one_text(model, tokens, num_steps):
    yield model(tokens[:1], 1)


FAILS_IN_A_STEP = {
    "without every_step": ({"objective": partial(rd.WithObjective, objective=rd.every_step_loss)}, "every_step=True"),
    "rows": ({"sampler": lambda model, seed: rd.PoissonDepthPerRow(2.0, 7, None)}, "rows|batch"),
    "no loss": ({"objective": lambda model: lambda tokens, depth: model(tokens)}, "must give a loss, .* got shape"),
    "exits": ({"exits": exits_of_one_text}, r"must give logits \(2, 16, 300\) after each step, got shape \(1, 16"),
}


@pytest.mark.parametrize("changed, told", FAILS_IN_A_STEP.values(), ids=FAILS_IN_A_STEP)
def test_a_method_that_fails_in_a_step_is_refused_before_any_run(tiny, out, changed, told):
    comparison, _ = tiny
    comparison.data.open(out / "text")
    check_steps(comparison, comparison.methods)
    broken = comparison.methods["every"]._replace(**changed)
    [part] = changed if "sampler" not in changed else ["objective"]
    with pytest.raises(ValueError, match=f"^{part} of method 'every' .*(?:{told})"):
        check_steps(comparison._replace(methods={**comparison.methods, "every": broken}), ["grt", "every"])


@pytest.mark.parametrize(
    "changed, told",
    [
        ({"methods": {"dense": partial(rd.dense, 3)}}, "method 'dense' is .*must be a Method"),
        ({"methods": {**COMPARISON.methods, "a/b": GRT_METHOD}}, "method 'a/b' names files too"),
        ({"plan": ("grt",)}, r"plan holds 'grt', but must be of Trials\(name\) and Full\(name, seed\)"),
        ({"pairs": (("grt", "dense", "blocks"),)}, r"pairs holds \('grt', 'dense', 'blocks'\), but each must be"),
    ],
)
def test_what_is_no_method_cell_or_pair_is_refused(changed, told):
    with pytest.raises(ValueError, match=told):
        check(COMPARISON._replace(**changed))


@pytest.mark.parametrize("asked", [{}, {"status": True}, {"only": GRT.name}, {"verify": Path("cell.json")}])
def test_every_way_to_call_checks_the_methods_first(tmp_path, monkeypatch, asked):
    odd = COMPARISON._replace(dim=15)
    monkeypatch.setattr(compare, "load_cells", lambda name: odd)
    with pytest.raises(ValueError, match="build of method 'dense' fails: ValueError"):
        compare.main(arguments(out=tmp_path / "out", **asked))
    assert not (tmp_path / "out").exists()


def test_the_check_of_methods_leaves_the_random_numbers_alone():
    before = torch.get_rng_state()
    check_methods(COMPARISON)
    assert torch.equal(before, torch.get_rng_state())


def test_a_plan_that_cannot_be_carried_out_is_refused(tmp_path):
    check_methods(LANGUAGE)
    with pytest.raises(ValueError, match=r"plan names 'every', but has no Trials\('grt'\)"):
        compare.require_trials(COMPARISON._replace(plan=(Full("every", 0),)), tmp_path)
    with pytest.raises(ValueError, match="floor names 'blocks', but the plan does not train it"):
        check_methods(COMPARISON._replace(plan=(Trials("dense"), Full("dense", 0))))


def test_messages_are_enough_and_a_held_run_has_a_code_of_its_own(tiny, out, capsys):
    assert compare.told_plainly(arguments(jobs=0)) == 1
    assert capsys.readouterr().err == "error: jobs is 0, but must be at least 1.\n"
    asked = arguments(out=out, text=tiny[1] / "text.py", only=GRT.name)
    with only_one(out / GRT.name):
        assert compare.told_plainly(asked) == working.BUSY
    assert "is being trained by another process" in capsys.readouterr().err


def test_a_text_is_the_same_by_any_path(tiny, tmp_path, monkeypatch):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "text.py").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    data = [COMPARISON.data.reading(path) for path in (Path("texts"), tmp_path / "texts", Path("texts/../texts"))]
    assert len({json.dumps(one.open(tmp_path / "text")) for one in data}) == 1
    about = tmp_path / "text" / "text.json"
    assert json.loads(about.read_text())["asked"]["source"] == str(tmp_path / "texts")  # from any working folder
    about.write_text(about.read_text().replace(str(tmp_path / "texts"), "texts"))  # as it was written before
    data[1].open(tmp_path / "text")
    with pytest.raises(ValueError, match="give another --out"):
        COMPARISON.data.open(tmp_path / "text")
    (tmp_path / "texts" / "text.py").write_text("")
    with pytest.raises(ValueError, match=r"text is .*texts, but"):
        data[0].open(tmp_path / "elsewhere")


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"asked"', "3"])
def test_damaged_files_are_named(tiny, tmp_path, damage):
    comparison, folder = tiny
    shutil.copytree(folder / "text", tmp_path / "text")
    Running(comparison, GRT._replace(num_budgets=1), tmp_path).finish()
    path = tmp_path / GRT.name / "result-5.json"
    path.write_text(damage)
    with pytest.raises(ValueError, match=r"result-5\.json is damaged .*Delete it"):
        compare.main(arguments(out=tmp_path, text=folder / "text.py", status=True))
    (tmp_path / "text" / "text.json").write_text(damage)
    with pytest.raises(ValueError, match=r"text\.json is damaged .*Delete it"):
        comparison.data.open(tmp_path / "text")


@pytest.mark.parametrize("damage", [None, b"", b"abc"])
def test_damaged_tokens_are_named(tiny, tmp_path, damage):
    comparison, folder = tiny
    shutil.copytree(folder / "text", tmp_path / "text")
    path = tmp_path / "text" / "train.npy"
    path.unlink() if damage is None else path.write_bytes(damage)
    with pytest.raises(ValueError, match=r"train\.npy is damaged or gone .*Delete .*text\.json"):
        comparison.data.open(tmp_path / "text")


# Measuring


def test_the_share_of_tokens_that_took_each_step_is_measured(tiny):
    comparison, _ = tiny
    grt, mor = (method.make(comparison.sizes()).eval() for method in (GRT_METHOD, routed(1.0, 0.5, 0.25)))
    with torch.no_grad():
        assert comparison.data.measure(GRT_METHOD, grt)["stepped"] == [1.0, 1.0, 1.0]
        found = comparison.data.measure(routed(1.0, 0.5, 0.25), mor)["stepped"]
        states = mor.trajectory(comparison.data._windows()[:32], every_step=True).states
    picked = [float(state.carry.router.double().mean()) for state in states]
    assert found == pytest.approx(picked, abs=1e-6)
    assert found[0] == 1.0 > found[2]


# The second panel


@given(nodes=st.integers(3, 7), data=st.data(), seed=st.integers(0, 2**20))
def test_pointers_are_followed(nodes, data, seed):
    most = data.draw(st.integers(1, nodes - 1))
    puzzle = PointerChasing(nodes, most, num_questions=4)
    hops = np.random.default_rng(seed).integers(1, most + 1, size=(3, 4))
    tokens, targets = puzzle.make(np.random.default_rng(seed), hops)
    assert tokens.shape == targets.shape == (3, puzzle.sizes()[1])
    assert tokens.max() < puzzle.sizes()[0]
    for row, answers, asked in zip(tokens.tolist(), targets.tolist(), hops.tolist(), strict=True):
        leads_to = dict(divmod(arrow, nodes) for arrow in row[:nodes])
        assert sorted(leads_to) == sorted(leads_to.values()) == list(range(nodes))
        assert answers[:nodes] == [IGNORED] * nodes
        for question, answer, times in zip(row[nodes:], answers[nodes:], asked, strict=True):
            kind, begun = divmod(question, nodes)
            assert kind - nodes + 1 == times
            node = begun
            for _ in range(times):
                node = leads_to[node]
                assert node != begun
            assert answer == node


def test_questions_take_one_step_more_after_each_stretch():
    data = PuzzleData(PointerChasing(num_nodes=5, max_hops=3, num_questions=40), stretch=10)
    most = [(data.batch(step, 0)[0].max() // 5 - 5 + 1).item() for step in range(40)]
    assert most == [1] * 10 + [2] * 10 + [3] * 20


def test_cells_take_as_many_steps_as_asked():
    puzzle = Automaton(num_cells=7, max_hops=3)
    tokens, targets = puzzle.make(np.random.default_rng(0), np.array([[1], [3]]))
    for row, later in zip(tokens.tolist(), targets.tolist(), strict=True):
        cells = row[1:]
        for _ in range(row[0] - 2 + 1):
            known = [0, 0, *cells]
            cells = [known[i] ^ (known[i + 1] | known[i + 2]) for i in range(7)]
        assert later == [IGNORED, *cells]


def test_a_puzzle_is_trained_and_measured_at_every_depth(tmp_path):
    comparison = panel(PointerChasing(num_nodes=4, max_hops=2, num_questions=2))
    comparison = comparison._replace(protocol=comparison.protocol._replace(budgets=(2, 4), warmup=1))
    Running(comparison, Run("grt", 3e-3, 0, 1), tmp_path).finish()
    [found] = outcome(tmp_path, Run("grt", 3e-3, 0, 1))
    assert np.array(found["measured"]["accuracy"]).shape == (16, 2)
    published = comparison.publish(comparison, tmp_path, tmp_path / "published")
    assert "| GRT, bias 0 | 2 steps | 0 of 2 | open | open |" in published  # its rate is not known yet
    with pytest.raises(ValueError, match="reads no text"):
        comparison.data.reading(tmp_path)


def test_a_puzzle_is_told_for_each_budget(tmp_path):
    comparison = panel(PointerChasing(num_nodes=4, max_hops=2, num_questions=2))
    comparison = comparison._replace(protocol=comparison.protocol._replace(budgets=(2, 4, 6), warmup=1, rates=(3e-3,)))
    Running(comparison, Run("grt", 3e-3, 0, 2), tmp_path).finish()
    published = comparison.publish(comparison, tmp_path, tmp_path / "published").splitlines()
    results = outcome(tmp_path, Run("grt", 3e-3, 0, 2))
    for budget, found in zip((2, 4), results, strict=True):
        accuracy = " | ".join(f"{value:.3f}" for value in found["measured"]["accuracy"][7])
        assert f"| GRT, bias 0 | {budget} steps | 1 of 2 | {accuracy} |" in published
    assert "| GRT, bias 0 | 6 steps | 0 of 2 | open | open |" in published


def test_a_puzzle_refuses_an_objective_of_its_own(tmp_path):
    comparison = panel(PointerChasing(num_nodes=4, max_hops=2, num_questions=2))
    changed = comparison._replace(methods={**comparison.methods, "grt": LANGUAGE.methods["grt-every-exit"]})
    with pytest.raises(
        ValueError, match="objective of GRT, a loss at every exit is one of its own, but pointer chasing"
    ):
        Running(changed, Run("grt", 3e-3, 0, 1), tmp_path)


@pytest.mark.parametrize("name", LANGUAGE.methods)
def test_tokens_are_scaled_on_their_way_into_every_method_but_those_that_say_so(name):
    sizes = LANGUAGE.sizes()._replace(dim=16, vocab_size=9, context_length=8)
    model, tokens = LANGUAGE.methods[name].make(sizes), torch.arange(8)[None]
    heard, stored = model.embed(tokens, torch.arange(8)[None]), model.embed.token.weight
    scales = {table.scale for table in model.embed.modules() if isinstance(table, rd.ScaledTable)}
    assert len(scales) == (0 if name.endswith("-unscaled") else 1)
    if name in ("dense-12", "grt", "naive"):
        assert scales == {4.0}
        torch.testing.assert_close(heard[0], 4 * (stored[:8] + model.embed.position.weight))


def test_learned_exits_have_the_width_of_the_model():
    ouro = LANGUAGE.methods["ouro"]
    model = ouro.make(LANGUAGE.sizes()._replace(dim=16, vocab_size=9, context_length=8))
    assert float(ouro.objective(model)(torch.zeros(1, 8, dtype=torch.long), rd.Depth(2)).isfinite())


def test_the_methods_of_the_comparison_are_of_nearly_equal_flops():
    with torch.device("meta"):
        flops = {
            name: accounting.flops(LANGUAGE.methods[name].make(LANGUAGE.sizes()), 128)
            for name in ("dense-12", "naive", "grt", "mor-isoflops", "mod-isoflops")
        }
    assert flops["naive"] == flops["dense-12"]
    for name, executed in flops.items():
        assert executed == pytest.approx(flops["dense-12"], rel=0.05), name


@pytest.mark.parametrize("name", [name for name in LANGUAGE.methods if name.endswith("isoparams")])
def test_what_is_compared_at_equal_parameters_has_as_many(name):
    with torch.device("meta"):
        made = {each: LANGUAGE.methods[each].make(LANGUAGE.sizes()) for each in (name, "dense-12")}
    count = {each: accounting.num_parameters(model) for each, model in made.items()}
    assert count[name] == pytest.approx(count["dense-12"], rel=0.05)
