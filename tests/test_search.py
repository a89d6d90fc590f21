"""The layout search against brute force, against built models, and against the paper's own layouts."""

import itertools
import re
import time
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

import recurrent_depth as rd
from recurrent_depth import accounting, presets
from recurrent_depth.accounting import PAPER, executed_blocks, flops, num_parameters
from recurrent_depth.depth import Layout
from recurrent_depth.search import search_layouts

few = settings(max_examples=8)
matches = st.sampled_from([flops, executed_blocks, num_parameters, partial(flops, counting=PAPER)])
sizes = {"dim": 32, "num_heads": 4, "vocab_size": 60, "context_length": 24}


def meta(build, *arguments, **keywords):
    with torch.device("meta"):
        return build(*arguments, **keywords)


def dense(num_blocks, form=rd.GPT2Form):
    return meta(rd.dense, num_blocks, form=form, **sizes)


# What is found


@few
@given(st.integers(3, 7), matches, st.floats(0, 0.3), st.integers(2, 4), st.integers(0, 1), st.integers(0, 1))
def test_exactly_the_layouts_within_the_tolerance_are_found(blocks, match, within, max_steps, prelude, coda):
    model = dense(blocks)
    found = search_layouts(model, match, within, max_steps, min_prelude=prelude, min_coda=coda)
    parts = range(prelude, 8), range(1, 8), range(2, max_steps + 1), range(coda, 8)
    layouts = [Layout(*layout) for layout in itertools.product(*parts) if Layout(*layout).stored <= 8]
    excess = {layout: match(meta(rd.grt, layout, **sizes)) / match(model) - 1 for layout in sample(layouts, found)}
    assert {layout for layout in excess if abs(excess[layout]) <= within} == {*found.layouts} & {*excess}


def sample(layouts, found):
    """Some of all layouts: building each would take too long. All that were found are among them as far as they go."""
    return {*layouts[::23], *found.layouts[::5]}


@pytest.mark.parametrize("form", [rd.GPT2Form, partial(rd.LlamaForm, num_kv_heads=2, tied=False)])
@pytest.mark.parametrize("update", [rd.gated, rd.plain])
def test_what_is_said_of_a_layout_is_true_of_the_model_built(form, update):
    model = dense(6, form)
    found = search_layouts(model, partial(flops, tokens=16), 0.2, update=update, tokens=16)
    assert len(found) > 5
    for cost in itertools.islice(found, 5):
        built = meta(rd.grt, cost.layout, form=form, update=update, **sizes)
        assert cost.num_parameters == num_parameters(built)
        assert cost.flops == flops(built, 16)
        assert cost.compute == flops(built, 16) / flops(model, 16)
        assert cost.parameters_ratio == num_parameters(built) / num_parameters(model)
        assert cost.overhead == accounting.flops_breakdown(built, 16).overhead
        sampler = rd.UniformDepth(cost.layout.num_steps)
        training = accounting.training_flops(built, sampler, 16) / accounting.training_flops(
            model, rd.FixedDepth(1), 16
        )
        assert cost.training == pytest.approx(training, rel=1e-12)


@given(st.integers(3, 9), matches, st.floats(0.01, 0.2))
def test_the_closest_come_first_and_none_twice(blocks, match, within):
    model = dense(blocks)
    found = search_layouts(model, match, within, max_steps=5)
    distances = [abs(match(of) / match(model) - 1) for of in found.found]
    assert distances == sorted(distances)
    assert all(distance <= within for distance in distances)
    assert len({*found.layouts}) == len(found)
    assert all(min(layout) >= 1 and layout.num_steps <= 5 for layout in found.layouts)


@given(st.integers(3, 9), st.floats(0.01, 0.1), st.floats(0.1, 0.2))
def test_a_wider_tolerance_finds_all_that_a_narrower_one_does(blocks, narrow, wide):
    model = dense(blocks)
    found = [{*search_layouts(model, within=within).layouts} for within in (narrow, wide)]
    assert found[0] <= found[1]


def test_without_a_bound_the_steps_go_as_far_as_the_match_allows():
    found = search_layouts(dense(12), executed_blocks, within=0)
    assert Layout(1, 1, 10, 1) in found.layouts
    assert all(layout.executed == 12 for layout in found.layouts)
    assert max(layout.num_steps for layout in found.layouts) == 10


# The paper's own layouts


@pytest.mark.parametrize(
    "preset, match, max_steps, layout",
    [
        (presets.gpt2_small, executed_blocks, None, Layout(1, 1, 10, 1)),
        (presets.gpt2_medium, executed_blocks, 12, Layout(2, 5, 4, 2)),
        (presets.gpt2_large, executed_blocks, 6, Layout(1, 5, 6, 5)),
        (presets.gpt2_medium, flops, 12, Layout(2, 5, 4, 2)),
        (presets.gpt2_large, flops, 6, Layout(1, 5, 6, 5)),
        (presets.gpt2_large, partial(flops, counting=PAPER), 6, Layout(1, 5, 6, 5)),
        (presets.gpt2_medium, num_parameters, 4, Layout(2, 20, 4, 2)),
        (presets.gpt2_large, num_parameters, 6, Layout(3, 30, 6, 3)),
    ],
    ids=lambda part: "paper" if isinstance(part, partial) else getattr(part, "__name__", str(part)),
)
def test_the_papers_own_layouts_are_found(preset, match, max_steps, layout):
    least = {"min_prelude": layout.prelude, "min_coda": layout.coda}  # for speed, under the tests' type checks
    found = search_layouts(meta(preset), match, within=0.07, max_steps=max_steps, **least)
    assert layout in found.layouts


def test_with_the_defaults_too():
    found = search_layouts(dense=meta(presets.gpt2_medium), match=accounting.flops, within=0.07, max_steps=12)
    assert Layout(2, 5, 4, 2) in found.layouts


def test_the_small_layout_is_no_equal_in_flops_and_the_first_in_executed_blocks():
    small = meta(presets.gpt2_small)
    assert Layout(1, 1, 10, 1) not in search_layouts(small, flops).layouts
    first = next(iter(search_layouts(small, executed_blocks)))
    assert first.layout == Layout(1, 1, 10, 1)
    assert (first.compute, first.training) == pytest.approx((1.13, 0.80), rel=0.01)
    paper = next(iter(search_layouts(small, executed_blocks, counting=PAPER)))
    assert paper.compute == pytest.approx(1.28, rel=0.01)
    assert paper.overhead == pytest.approx(paper.compute - 1)


def test_a_search_builds_no_candidate_and_is_quick(monkeypatch):
    medium = meta(presets.gpt2_medium)
    monkeypatch.setattr(rd.RecurrentTransformer, "__init__", None)
    start = time.process_time()
    assert "1+5×4+2" in str(search_layouts(medium))
    assert time.process_time() - start < 10  # 0.1 s without the tests' type checks


# The table


def test_the_table_shows_every_cost_of_the_dense_model_and_of_the_closest_layouts():
    found = search_layouts(meta(presets.gpt2_medium), executed_blocks, within=0, max_steps=4)
    header, _, first, *rows = found.table(num_rows=7).splitlines()
    for column in ("layout", "stored", "executed", "parameters", "FLOPs", "overhead", "training"):
        assert column in header
    assert first.split()[:3] == ["dense", "24", "24"]
    assert len(rows) == 7 + 3
    assert len({len(row) for row in (header, first, *rows[:7])}) == 1
    (row,) = (line for line in str(found).splitlines() if line.startswith("2+5×4+2"))
    assert " ".join(row.split()) == "2+5×4+2 3 9 24 171.1 M 0.48 × 857.1 G 1.04 × 3.6% 0.75 ×"
    assert "1,024 tokens, head included" in str(found)
    assert repr(found) == str(found)


def test_splits_of_the_same_blocks_share_a_row_that_counts_them():
    found = search_layouts(dense(8), executed_blocks, within=0, max_steps=2)
    splits = [layout for layout in found.layouts if layout.core == 1]
    assert splits[0] == Layout(3, 1, 2, 3)
    assert len(splits) == 5
    assert "3+1×2+3           5" in str(found)


def test_a_table_of_nothing_says_so():
    found = search_layouts(dense(1), executed_blocks, within=0)
    assert (len(found), found.layouts, list(found)) == (0, (), [])
    assert "nothing within 0% of the dense model. Try a larger `within`" in str(found)
    assert "nothing within 0.5%" in str(search_layouts(dense(1), executed_blocks, within=0.005))
    assert "nothing within 7%" in str(search_layouts(dense(1), executed_blocks))


def test_small_models_keep_their_digits():
    rows = str(search_layouts(dense(6), executed_blocks, within=0)).splitlines()[2:]
    assert "76.8 k" in rows[0]
    assert "4.1 M" in rows[0]
    assert not any(re.search(r"\b0\.0 [kMG]", row) for row in rows)


@pytest.mark.parametrize("num_rows", [0, -1, 2.5, None, True])
def test_a_table_has_a_row_or_more(num_rows):
    found = search_layouts(dense(6), executed_blocks)
    with pytest.raises((ValueError, TypeCheckError), match="num_rows"):
        found.table(num_rows)


def test_no_sequence_is_longer_than_the_positions_learned():
    model = dense(6)
    assert flops(model, 24) == flops(model)
    for count in (partial(flops, model), partial(search_layouts, model, executed_blocks)):
        with pytest.raises(ValueError, match="tokens is 25, but must be at most 24"):
            count(tokens=25)
    assert flops(dense(6, rd.LlamaForm), 5000) > 0


# Bad input


def test_matching_parameters_needs_a_bound_on_the_steps():
    with pytest.raises(ValueError, match="max_steps is None, but must be given"):
        search_layouts(dense(6), num_parameters)


def test_only_a_dense_model_is_matched():
    for layout in (Layout(1, 1, 3, 1), Layout(1, 1, 1, 1)):
        with pytest.raises(ValueError, match="must be one without recurrence"):
            search_layouts(meta(rd.grt, layout, **sizes))
    assert len(search_layouts(meta(rd.naive, Layout(2, 3, 1, 2), **sizes))) == len(search_layouts(dense(7)))


def test_a_length_is_needed_where_no_positions_are_learned():
    model = dense(6, rd.LlamaForm)
    for arguments in ((flops,), (executed_blocks,)):
        with pytest.raises(ValueError, match="tokens is None"):
            search_layouts(model, *arguments)
    assert len(search_layouts(model, executed_blocks, tokens=100)) > 0


@pytest.mark.parametrize(
    "name, values",
    [
        ("within", [-0.1, 1.0, "0.1", float("nan")]),
        ("max_steps", [0, 1, -3, 2.5, "4", True]),
        ("min_prelude", [-1, 0.5, "1", None, True]),
        ("min_coda", [-1, 0.5, "1", None, True]),
        ("tokens", [0, -1, 1.5, "8", True]),
        ("match", ["flops", 3, None]),
        ("dense", ["gpt2", None, 12]),
    ],
)
def test_bad_arguments_are_named(name, values):
    for value in values:
        with pytest.raises(Exception, match=name) as error:
            search_layouts(**{"dense": dense(4), name: value})
        assert isinstance(error.value, ValueError | TypeCheckError)
