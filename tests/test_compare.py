"""The comparison: what is counted, what a kill costs, what may be claimed, and what partial results show."""

import json
import math
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import EXAMPLES, kill, start, wait_until
from program_text import TEXT

# isort: split
import compare
from comparison import running, statistics, tables
from comparison.collecting import Row, Table, collect
from comparison.language import COMPARISON as LANGUAGE
from comparison.panel import panel
from comparison.parts import Full, Run
from comparison.planning import best_rate, find_run, known_runs, missing_runs, trials
from comparison.puzzles import IGNORED, Automaton, PointerChasing
from comparison.running import DivergedError, Running
from comparison.verifying import verify
from comparison.working import progress
from tiny_cells import COMPARISON

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


def run_compare(*command_line: str) -> None:
    """`python examples/compare.py ...`."""
    torch.set_num_threads(1)
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = ["examples/compare.py", *command_line]
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
    with pytest.raises(ValueError, match="method.build is grt"):
        Running(changed, GRT, out).finish()


def test_a_run_that_diverges_has_a_result_and_is_not_chosen(tiny, out, monkeypatch):
    comparison, _ = tiny
    for run in (Run("grt", rate, 0, 1) for rate in comparison.protocol.rates):
        with monkeypatch.context() as patch:
            if run.rate == 2e-3:
                patch.setattr(Running, "take_step", diverges)
            Running(comparison, run, out).finish()
    assert best_rate(comparison, out, "grt") == 1e-3
    assert collect(comparison, out).rows["grt"].trials == {1e-3: pytest.approx(8, abs=8), 2e-3: math.inf}


def diverges(self, factor):
    raise DivergedError("loss nan at step 1")


def test_a_run_that_goes_on_further_down_the_plan_waits_for_its_turn(finished, out):
    comparison, folder = finished
    plan = (Full("every", 0, 1), Full("dense", 0, 1), Full("dense", 0), Full("every", 0))
    names = [f"{name}-lr{best_rate(comparison, folder, name):g}-seed0" for name in ("every", "dense")]
    for run in [run for name in ("dense", "grt") for run in trials(comparison, name)]:
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


# Concluding


def result(last, first=None, flops=1.0):
    parts = {"last_parts": last, "first_parts": first or last, "part_bytes": [100] * len(last)}
    exits = [float(np.mean(first or last)), float(np.mean(last))]
    return {"measured": {"exits": exits, **parts}, "training": {"flops": flops}}


def test_a_difference_is_claimed_above_two_standard_errors_of_seeds_and_text():
    some, others = [result([1.0, 1.1]), result([1.2, 1.3])], [result([1.4, 1.5])]
    spread = statistics.pooled_spread([some, others]) or 0.0
    assert spread == pytest.approx(np.std([1.05, 1.25], ddof=1))
    found = statistics.difference(some, others, spread)
    assert found.value == pytest.approx(-0.3)
    assert found.error == pytest.approx(spread * math.sqrt(1 / 2 + 1 / 1))  # paired, the text adds nothing here
    assert not found.claimed
    assert statistics.Estimate(-0.3, 0.149).claimed
    assert not statistics.difference(some, others, None).claimed
    uneven = statistics.difference([result([1.0, 1.2])], [result([1.0, 1.0])], 0.0)
    assert uneven.error == pytest.approx(np.std([0.0, 0.2], ddof=1) / math.sqrt(2))


def test_losses_at_equal_flops_lie_between_budgets():
    budgets = [[result([2.0], flops=1e6)], [result([1.0], flops=1e8)]]
    assert statistics.at_equal_flops(budgets, 1e7) == pytest.approx(math.sqrt(2))
    assert statistics.at_equal_flops(budgets, 1e9) is None
    assert statistics.at_equal_flops(budgets[:1], 1e6) is None


# Reporting


def test_what_is_not_done_shows_as_open(tiny, out):
    comparison, _ = tiny
    table = collect(comparison, out)
    assert progress(comparison, out, 1) == "0 of 85 steps done"  # 6 trials of 5, of which 3 go on; 5 full runs of 11
    assert tables.methods_table(comparison, table).count(tables.OPEN) > 20
    Running(comparison, Run("dense", 1e-3, 0, 1), out).finish()
    assert "| dense | " in tables.trials_table(comparison, collect(comparison, out))
    text = comparison.publish(comparison, out, out / "published")
    assert text.count("open") > 20
    assert {path.name for path in (out / "published").glob("*.*")} >= {"tables.md", "results.json", "exits.png"}


@pytest.mark.parametrize("losses, shown", [([2.0, 1.0, 3.0], "**1.0000** |"), ([2.0, 1.5, 1.0], "**1.0000** (edge) |")])
def test_the_best_rate_is_marked_and_said_to_lie_at_an_edge(tiny, losses, shown):
    comparison, _ = tiny
    trials = dict(zip((1e-3, 2e-3, 4e-3), losses, strict=True))
    row = Row("grt", "GRT", 1, min(trials, key=lambda rate: trials[rate]), [], [], trials)
    assert shown in tables.trials_table(comparison, Table({"grt": row}, [], []))


def test_headroom_is_counted_in_spreads_and_shares_of_it(tiny):
    comparison, _ = tiny
    losses = {"dense": [1.0, 1.2], "blocks": [2.0, 2.2], "grt": [1.4, 1.2]}
    groups = {name: [result([value]) for value in values] for name, values in losses.items()}
    rows = {name: Row(name, name, 2, 1e-3, [[], group], [0, 0], {}) for name, group in groups.items()}
    table = Table(rows, [None, statistics.pooled_spread(list(groups.values()))], [None, 0.1])
    spread = np.std([1.0, 1.2], ddof=1)
    assert f"| headroom over spread | open | {1 / spread:.1f} × |" in tables.headroom_table(comparison, table)
    assert tables.baseline_table(comparison, table).splitlines()[-1].endswith("| open | 80% |")


def test_the_tables_of_finished_cells_have_nothing_open(finished, tmp_path):
    comparison, folder = finished
    text = comparison.publish(comparison, folder, tmp_path)
    assert ", 0.0 core-hours left" in progress(comparison, folder, 1)
    assert "open" not in text
    assert "2 of 2 seeds" in text
    for title in ("Headroom", "Less dense", "Differences", "Depth gain", "By exit", "Learning rates"):
        assert f"## {title}" in text
    assert json.loads((tmp_path / "results.json").read_text())["methods"]["grt"]["rate"] in (1e-3, 2e-3)


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


# The second panel


def test_pointers_are_followed():
    puzzle = PointerChasing(num_nodes=5, max_hops=4, num_questions=3)
    tokens, targets = puzzle.make(np.random.default_rng(0), np.array([[1, 3, 4], [2, 2, 1]]))
    assert tokens.shape == targets.shape == (2, puzzle.sizes()[1])
    for row, answers in zip(tokens.tolist(), targets.tolist(), strict=True):
        leads_to = dict(zip(row[0:10:2], row[1:10:2], strict=True))
        for place in range(10, 16, 2):
            node = row[place + 1]
            for _ in range(row[place] - 5 + 1):
                node = leads_to[node]
            assert answers[place] == IGNORED
            assert answers[place + 1] == node


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
    assert "open" in comparison.publish(comparison, tmp_path, tmp_path / "published")
    with pytest.raises(ValueError, match="reads no text"):
        comparison.data.reading(tmp_path)


def test_the_methods_of_the_comparison_are_of_nearly_equal_flops():
    with torch.device("meta"):
        flops = {
            name: accounting.flops(LANGUAGE.methods[name].make(LANGUAGE.sizes()), 128)
            for name in ("dense-12", "naive", "grt")
        }
    assert flops["naive"] == flops["dense-12"]
    assert flops["grt"] == pytest.approx(flops["dense-12"], rel=0.05)
