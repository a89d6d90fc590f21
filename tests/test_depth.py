"""Laws of layouts, depths and depth samplers."""

import importlib.util
import math
import pickle
import random
import subprocess
import sys
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from recurrent_depth import curriculum, depth
from recurrent_depth.curriculum import RampedDepth, linear_ramp, retrofit_curriculum, sqrt_ramp
from recurrent_depth.depth import Depth, Layout, as_depth
from recurrent_depth.sampling import ExpectedDepth, FixedDepth, PoissonLogNormalDepth, UniformDepth

REFUSED = (ValueError, TypeCheckError)  # the latter only where the tests' hook checks types first
NO_WHOLE_NUMBERS = [0, -1, 2.5, 2.0, "2", True, None, math.nan, Fraction(1, 2), torch.tensor(2)]

small = st.integers(1, 12)
seeds = st.integers(-(2**40), 2**40)
draws = st.integers(0, 10**9)
samplers = st.one_of(
    st.builds(FixedDepth, small, st.none() | small),
    st.builds(UniformDepth, small, seeds, st.none() | small),
    st.builds(PoissonLogNormalDepth, st.floats(0.1, 30), st.none() | small, seeds, st.floats(0, 1)),
    st.builds(RampedDepth, st.just(partial(UniformDepth, seed=3)), small, st.integers(1, 1000), st.just(sqrt_ramp)),
)


# Layouts


@given(prelude=st.integers(0, 40), core=small, num_steps=small, coda=st.integers(0, 40))
def test_a_layout_is_a_tuple_that_counts_its_blocks(prelude, core, num_steps, coda):
    layout = Layout(prelude, core, num_steps, coda)
    assert layout == (prelude, core, num_steps, coda) == tuple(layout)
    assert str(layout) == f"{prelude}+{core}×{num_steps}+{coda}"
    assert layout.executed - layout.stored == core * (num_steps - 1)
    assert layout._replace(num_steps=1).executed == layout.stored
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert type(layout._replace(coda=0)) is Layout


def test_a_layout_prints_as_the_paper_writes_it():
    layout = Layout(2, 5, 4, 2)
    assert (str(layout), layout.stored, layout.executed) == ("2+5×4+2", 9, 24)
    assert repr(layout) == "Layout(prelude=2, core=5, num_steps=4, coda=2)"


@pytest.mark.parametrize("part", Layout._fields)
@pytest.mark.parametrize("value", NO_WHOLE_NUMBERS)
def test_a_layout_refuses_bad_parts(part, value):
    if part in ("prelude", "coda") and value == 0 and value is not False:
        return
    parts = {"prelude": 1, "core": 2, "num_steps": 3, "coda": 1}
    with pytest.raises(REFUSED, match=part):
        Layout(**parts | {part: value})
    with pytest.raises(REFUSED, match=part):
        Layout(**parts)._replace(**{part: value})


@pytest.fixture(scope="module")
def unchecked():
    """`depth.py` as users get it, without the type-checking hook of the tests."""
    spec = importlib.util.spec_from_file_location("unchecked_depth", Path(depth.__file__))
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("value", NO_WHOLE_NUMBERS)
def test_without_the_hook_bad_parts_are_value_errors_with_the_value_and_the_bound(unchecked, value):
    with pytest.raises(ValueError, match=r"core is .* whole number of at least 1") as error:
        unchecked.Layout(1, value, 4, 1)
    assert repr(value) in str(error.value)


def test_a_missing_or_misspelt_part_is_an_error():
    for bad in ({}, {"num_step": 3}, {"prelude": 1, "core": 1, "coda": 1}):
        with pytest.raises(TypeError):
            Layout(**bad)


# Depths


@given(small)
def test_a_number_is_a_depth(num_steps):
    assert as_depth(num_steps) == Depth(num_steps, None, None)
    assert as_depth(as_depth(num_steps)) == as_depth(num_steps)


@given(st.lists(small, min_size=1, max_size=6), st.none() | small)
def test_rows_are_a_depth_of_their_maximum(rows, grad_steps):
    read = as_depth(rows, batch=len(rows))
    assert read == as_depth(tuple(rows)) == Depth(max(rows), None, tuple(rows))
    assert as_depth(read._replace(grad_steps=grad_steps), batch=len(rows)).grad_steps == grad_steps


@pytest.mark.parametrize(
    "value", [*NO_WHOLE_NUMBERS, "", "3", b"\x01", [], (), {1: 2}, {3}, Layout(1, 1, 4, 1), object()]
)
def test_everything_else_is_no_depth(value):
    with pytest.raises(ValueError, match="num_steps") as error:
        as_depth(value)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("sampler", [UniformDepth(4), partial(Depth, 3)], ids=["sampler", "function"])
def test_a_sampler_in_place_of_its_draw_is_told_to_be_called(sampler):
    with pytest.raises(ValueError, match=r"but must be .*: a sampler is called for its depth, sampler\(draw\)"):
        as_depth(sampler)


@pytest.mark.parametrize("depths", [torch.tensor(2), torch.tensor([1, 2])], ids=["one", "of rows"])
def test_a_tensor_of_depths_is_told_to_be_a_list(depths):
    with pytest.raises(ValueError, match=r"num_steps is tensor.*: of a tensor or an array give \.tolist\(\)"):
        as_depth(depths)
    as_depth(depths.tolist())


@pytest.mark.parametrize("value", NO_WHOLE_NUMBERS)
def test_every_row_must_be_a_whole_number_of_steps(value):
    with pytest.raises(ValueError, match=r"num_steps\[1\] is .* at least 1"):
        as_depth([3, value])


def test_rows_must_be_as_many_as_the_batch():
    with pytest.raises(ValueError, match=r"2 depths.*3 rows of the batch"):
        as_depth([1, 2], batch=3)
    with pytest.raises(ValueError, match="rows holds 2 depths"):
        as_depth(Depth(2, rows=(1, 2)), batch=1)


@pytest.mark.parametrize(
    "bad, message",
    [
        (Depth(0), "num_steps is 0"),
        (Depth(4, 0), "grad_steps is 0"),
        (Depth(4, -1), "grad_steps is -1"),
        (Depth(4, rows=(4, 0)), r"rows\[1\] is 0"),
        (Depth(4, rows=()), "rows holds 0 depths"),
        (Depth(4, rows=(1, 3)), "num_steps is 4, but must be the largest of rows, 3"),
    ],
)
def test_a_depth_that_contradicts_itself_is_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        as_depth(bad)


@pytest.mark.parametrize("value", [2.5, "2", True])
def test_without_the_hook_bad_parts_of_a_depth_are_value_errors(unchecked, value):
    for bad in (unchecked.Depth(value), unchecked.Depth(4, value), unchecked.Depth(4, None, value)):
        with pytest.raises(ValueError, match=r"is .* but must be"):
            unchecked.as_depth(bad)


# Samplers


@given(samplers, st.lists(draws, min_size=1, max_size=5))
def test_a_draw_depends_on_nothing_but_seed_and_number(sampler, numbers):
    forwards = [sampler(draw) for draw in numbers]
    again = pickle.loads(pickle.dumps(sampler))
    assert [again(draw) for draw in reversed(numbers)] == forwards[::-1]


@given(samplers, draws)
def test_a_draw_is_a_depth(sampler, draw):
    drawn = sampler(draw)
    assert as_depth(drawn) == drawn
    assert drawn.grad_steps is None or drawn.grad_steps <= drawn.num_steps


@given(samplers, draws)
def test_a_draw_leaves_the_global_generators_alone(sampler, draw):
    before = random.getstate(), torch.get_rng_state()
    sampler(draw)
    sampler.expected(draw)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_another_process_draws_the_same():
    code = "from recurrent_depth.sampling import *; print([tuple(s(t)) for s in {} for t in range(20)])"
    made = [UniformDepth(12, seed=5), PoissonLogNormalDepth(8.0, grad_steps=4, seed=5)]
    path = {"PYTHONPATH": str(Path(depth.__file__).parents[1])}
    out = subprocess.run(
        [sys.executable, "-c", code.format(made)], capture_output=True, text=True, check=True, env=path
    )
    assert out.stdout.strip() == str([tuple(sampler(draw)) for sampler in made for draw in range(20)])


@pytest.mark.parametrize(
    "sampler",
    [
        FixedDepth(4),
        FixedDepth(4, 3),
        FixedDepth(3, 9),
        UniformDepth(10),
        UniformDepth(10, seed=1, grad_steps=4),
        UniformDepth(3, grad_steps=9),
        PoissonLogNormalDepth(32.0, grad_steps=8),
        PoissonLogNormalDepth(3.0, grad_steps=4, sigma=1.0),
        PoissonLogNormalDepth(0.5, grad_steps=None, sigma=0.0),
        RampedDepth(partial(PoissonLogNormalDepth, grad_steps=3), 9, 1),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_draws_average_what_is_expected(sampler):
    drawn = [sampler(draw) for draw in range(1, 8001)]
    for field in ExpectedDepth._fields:
        counts = torch.tensor([getattr(d, field) or d.num_steps for d in drawn], dtype=torch.float64)
        error = (counts.mean() - getattr(sampler.expected(1), field)).abs()
        assert error <= 4 * counts.std() / len(drawn) ** 0.5 + 1e-12


@pytest.mark.parametrize("sigma", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("mean", [0.3, 4.0, 32.0])
def test_the_heavy_tail_averages_mean_plus_one_and_its_quadrature_is_exact(mean, sigma):
    sampler = PoissonLogNormalDepth(mean, grad_steps=None, sigma=sigma)
    assert sampler.expected() == (mean + 1, mean + 1)
    if sigma < 2:  # with few tails cut, so many learned steps are all steps
        assert PoissonLogNormalDepth(mean, 1500, sigma=sigma).expected().grad_steps == pytest.approx(mean + 1, rel=1e-6)
    if sigma == 0:  # a plain Poisson number has a closed form
        assert PoissonLogNormalDepth(mean, 2, sigma=0.0).expected().grad_steps == pytest.approx(2 - math.exp(-mean))


def test_the_uniform_sampler_reaches_every_depth_equally_often():
    counts = torch.bincount(torch.tensor([UniformDepth(6, seed=2)(draw).num_steps for draw in range(6000)]))
    assert counts[0] == 0
    assert len(counts) == 7
    assert (counts[1:] - 1000).abs().max() < 150


@given(seeds, draws)
def test_neighbouring_draws_and_seeds_differ(seed, draw):
    here = [UniformDepth(10**9, seed)(draw + i).num_steps for i in range(3)]
    there = [UniformDepth(10**9, seed + 1)(draw + i).num_steps for i in range(3)]
    assert len({*here, *there}) == 6


@pytest.mark.parametrize(
    "make, argument",
    [
        (lambda v: FixedDepth(v), "num_steps"),
        (lambda v: FixedDepth(3, v if v is not None else 0), "grad_steps"),
        (lambda v: UniformDepth(v), "max_steps"),
        (lambda v: UniformDepth(3, grad_steps=v if v is not None else 0), "grad_steps"),
        (lambda v: PoissonLogNormalDepth(8.0, v if v is not None else 0), "grad_steps"),
        (lambda v: RampedDepth(UniformDepth, v, 10), "max_depth"),
        (lambda v: RampedDepth(UniformDepth, 10, v), "num_draws"),
    ],
)
@pytest.mark.parametrize("value", NO_WHOLE_NUMBERS)
def test_samplers_refuse_bad_numbers_of_steps(make, argument, value):
    with pytest.raises(REFUSED, match=argument):
        make(value)


@pytest.mark.parametrize("seed", [0.5, "0", True, None])
def test_samplers_refuse_bad_seeds(seed):
    for make in (partial(UniformDepth, 4), partial(PoissonLogNormalDepth, 4.0, 2)):
        with pytest.raises(REFUSED, match="seed"):
            make(seed=seed)


@pytest.mark.parametrize("mean", [0.0, -1.0, math.inf, math.nan, "8", True, None])
def test_the_heavy_tail_refuses_a_bad_mean(mean):
    with pytest.raises(REFUSED, match="mean"):
        PoissonLogNormalDepth(mean, 4)


@pytest.mark.parametrize("sigma", [-0.1, 2.1, math.nan, "0.5", True, None])
def test_the_heavy_tail_refuses_a_bad_sigma(sigma):
    with pytest.raises(REFUSED, match="sigma"):
        PoissonLogNormalDepth(8.0, 4, sigma=sigma)


@given(samplers)
def test_samplers_refuse_bad_draws(sampler):
    for bad in (-1, 0.5, "1", True, None):
        with pytest.raises(REFUSED, match="draw"):
            sampler(bad)
        with pytest.raises(REFUSED, match="draw"):
            sampler.expected(bad)


# Curricula


@given(st.sampled_from([linear_ramp, sqrt_ramp]), st.integers(1, 40), st.integers(1, 200))
def test_a_ramp_climbs_from_one_to_its_maximum_and_stays(ramp, max_depth, num_draws):
    sampler = RampedDepth(FixedDepth, max_depth, num_draws, ramp)
    depths = [sampler(draw).num_steps for draw in range(num_draws + 3)]
    assert depths[0] == 1
    assert depths == sorted(depths)
    assert depths[num_draws:] == [max_depth] * 3
    assert sampler(10**9).num_steps == max_depth


@given(st.integers(1, 300), st.integers(1, 300))
def test_a_linear_ramp_rounds_up_exactly(max_depth, num_draws):
    sampler = RampedDepth(FixedDepth, max_depth, num_draws)
    for draw in range(1, num_draws + 1):
        assert sampler(draw).num_steps == math.ceil(Fraction(max_depth * draw, num_draws))


@given(st.integers(0, 100))
def test_a_ramp_draws_what_its_sampler_would(draw):
    make = partial(PoissonLogNormalDepth, grad_steps=3, seed=7)
    sampler = RampedDepth(make, max_depth=9, num_draws=50)
    mean = max(1, math.ceil(Fraction(9 * min(draw, 50), 50)))
    assert sampler(draw) == make(mean)(draw)
    assert sampler.expected(draw).num_steps == mean + 1


@pytest.mark.parametrize(
    "make",
    [UniformDepth(8), FixedDepth(8), int, lambda num_steps: Depth(num_steps)],
    ids=["uniform", "fixed", "int", "depth"],
)
def test_a_curriculum_refuses_what_makes_no_sampler(make):
    with pytest.raises(ValueError, match="must make a sampler of a whole number"):
        RampedDepth(make, max_depth=8, num_draws=10)


@pytest.mark.parametrize("share", [1.5, -0.1, math.nan, math.inf])
def test_a_ramp_gives_a_share_of_the_depth(share):
    with pytest.raises(ValueError, match=r"must be from 0 to 1, the share of max_depth"):
        RampedDepth(FixedDepth, 8, 10, ramp=lambda progress: share)
    halfway = RampedDepth(FixedDepth, 8, 10, ramp=lambda progress: share if progress == 0.5 else progress)
    with pytest.raises(ValueError, match=r"ramp\(0.5\) is "):
        halfway(5)


def test_a_ramp_that_rounds_a_little_above_one_keeps_to_the_maximum():
    assert RampedDepth(FixedDepth, 8, 10, ramp=lambda progress: progress * (1 + 1e-10))(10).num_steps == 8


def test_the_ramps_are_those_of_their_names():
    assert linear_ramp(0.75) == 0.75
    assert sqrt_ramp(0.75) == 0.5
    assert curriculum.RampedDepth(FixedDepth, 8, 4, sqrt_ramp)(3).num_steps == 4


@pytest.mark.parametrize("ramp", [linear_ramp, sqrt_ramp])
def test_the_retrofit_curriculum_ramps_the_mean_and_differentiates_no_more_steps_than_that(ramp):
    sampler = retrofit_curriculum(16, 100, grad_steps=8, ramp=ramp)
    for draw in range(0, 200, 7):
        mean = max(1, math.ceil(round(16 * ramp(min(1.0, draw / 100)), 9)))
        assert sampler(draw) == PoissonLogNormalDepth(mean, grad_steps=min(8, mean))(draw)
        assert sampler.expected(draw).num_steps == mean + 1
    assert sampler(0).grad_steps == 1
    assert sampler.expected(0).grad_steps == 1
    assert pickle.loads(pickle.dumps(sampler))(50) == sampler(50)


@pytest.mark.parametrize("name", ["max_mean", "num_draws", "grad_steps"])
def test_the_retrofit_curriculum_refuses_what_is_no_count(name):
    with pytest.raises(ValueError, match=f"{name} is 0"):
        retrofit_curriculum(**{"max_mean": 8, "num_draws": 10, name: 0})
