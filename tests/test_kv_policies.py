"""Every KV step policy against the slow written reference, and the laws that hold for all of them."""

from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from battery import NO_PREFIX, every_method_but, lively, tiny
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reading import (
    BUILDS,
    POLICIES,
    Drawn,
    Script,
    attention,
    every_build,
    every_policy,
    read,
    read_slowly,
    scripts,
)
from strategies import Recipe, depths, few, layouts, loops, recipes
from torch import Tensor
from torch.testing import assert_close

import recurrent_depth as rd

double = st.just(torch.float64)
any_build = st.sampled_from(sorted(BUILDS))
more = settings(few, max_examples=4 * few.max_examples)

RAGGED = Drawn(
    tokens=torch.arange(24).reshape(3, 8) % 23,
    padding=[0, 2, 4],
    cuts={3, 4, 6},
    shares=[[1 / 3, 0.0, 0.0], [0.0, 2 / 3, 0.0], [1.0, 1.0, 1 / 3], [0.0, 1 / 3, 1.0]],
)
"""Of four steps each row takes another number in each chunk: fewer than before, and more than any before."""


def assert_rows(found: Tensor, script: Script, alone: Callable[[Script, int], Tensor]) -> None:
    """At its real tokens each row is what `alone` says of it, and padding leaves no number that is none."""
    assert found.isfinite().all()
    for row, real in enumerate(script.mask):
        expected = alone(script.alone(row), row)[0]
        assert_close(found[row, real], expected, atol=1e-9 * expected.abs().max().item(), rtol=1e-9)


@every_policy
@more
@given(recipes(layouts, double), any_build, scripts(), st.booleans(), st.sampled_from([None, 8, 11]))
@example(Recipe(rd.Layout(1, 2, 4, 1), (16, 4), torch.float64, 0), "grt-llama", RAGGED, False, None)
@example(Recipe(rd.Layout(1, 2, 4, 1), (16, 4), torch.float64, 0), "naive-gpt2", RAGGED, True, None)
def test_reading_in_chunks_is_what_the_reference_says(case, recipe, build, drawn, differentiable, max_tokens):
    model = recipe.model(BUILDS[build])
    script, policy = drawn.script(model), case.make(model)
    found = read(model, script, rd.DepthCache(policy, max_tokens=max_tokens), differentiable)
    assert_rows(found, script, lambda alone, row: read_slowly(model, alone, case.write(policy)))


@every_policy
@few
@given(recipes(layouts, double), any_build, scripts())
def test_a_row_of_a_padded_batch_is_the_row_alone(case, recipe, build, drawn):
    model = recipe.model(BUILDS[build])
    script, policy = drawn.script(model), case.make(model)
    found = read(model, script, rd.DepthCache(policy))
    assert_rows(found, script, lambda alone, row: read(model, alone, rd.DepthCache(policy)))


@every_method_but(NO_PREFIX)
@few
@given(recipes(layouts, double), scripts())
def test_keeping_all_is_the_forward_without_a_cache(build, recipe, drawn):
    model = recipe.model(build)
    script = drawn.script(model)
    script = script._replace(num_steps=[script.num_steps[0]] * len(script.ends))
    steps = script.num_steps[0]
    found = read(model, script, rd.DepthCache())
    expected = model(script.tokens, steps, mask=script.mask)
    assert_close(found[script.mask], expected[script.mask], atol=1e-9 * expected.abs().max().item(), rtol=1e-9)
    assert_rows(found, script, lambda alone, row: model(alone.tokens, steps[row]))


@every_policy
@few
@given(recipes(layouts, double), any_build, scripts(padded=False))
def test_a_mask_of_ones_is_no_mask(case, recipe, build, drawn):
    model = recipe.model(BUILDS[build])
    script, policy = drawn.script(model), case.make(model)
    found = read(model, script, rd.DepthCache(policy))
    assert_close(found, read(model, script._replace(mask=None), rd.DepthCache(policy)), atol=1e-9, rtol=1e-9)
    assert_close(found, read(model, script._replace(mask=script.mask.long()), rd.DepthCache(policy)), rtol=0, atol=0)


@few
@given(recipes(layouts, double), any_build, scripts())
def test_a_mask_may_be_left_out_where_all_new_tokens_are_real(recipe, build, drawn):
    model = recipe.model(BUILDS[build])
    script, cache, last = drawn.script(model), rd.DepthCache(), torch.randint(23, (len(drawn.padding), 3))
    read(model, script, cache)
    real = torch.ones_like(last).bool()
    found = [rd.extend(model, x, cache) for x in (last[:, :2], last[:, 2:])]
    cache.crop(script.ends[-1])
    expected = rd.extend(model, last, cache, mask=torch.cat([script.mask, real], dim=1))
    assert_close(torch.cat(found, dim=1), expected, atol=1e-9 * expected.abs().max().item(), rtol=1e-9)
    cache.crop(script.ends[-1])
    assert_close(rd.extend(model, last, cache), expected, rtol=0, atol=0)


@every_policy
@few
@given(recipes(layouts, double), any_build, scripts())
def test_at_one_step_all_policies_agree(case, recipe, build, drawn):
    model = recipe.model(BUILDS[build])
    script = drawn.script(model)
    script = script._replace(num_steps=[[1] * len(script.tokens)] * len(script.ends))
    found = read(model, script, rd.DepthCache(case.make(model)))
    assert_close(found, read(model, script, rd.DepthCache(rd.KeepAll())), rtol=0, atol=0)


def test_policies_differ_behind_the_first_chunk_when_there_is_more_than_one_step():
    # Otherwise the laws above would compare one policy with itself.
    model = lively(tiny(layout=rd.Layout(1, 2, 4, 1))).double().eval()
    script = Script(torch.randint(23, (1, 5)), None, [3, 5], [[4], [4]])
    found = [read(model, script, rd.DepthCache(case.make(model))) for case in POLICIES.values()]
    for one, other in combinations(found, 2):
        assert_close(one[:, :3], other[:, :3], rtol=0, atol=0)
        assert (one - other)[:, 3:].abs().max() > 1e-3


@every_policy
@few
@given(recipes(layouts, double), any_build, scripts())
def test_length_counts_tokens_and_bytes_count_copies(case, recipe, build, drawn):
    model = recipe.model(BUILDS[build])
    script, inside = drawn.script(model), attention(model)
    cache = rd.DepthCache(case.make(model), max_tokens=8)
    numbers = 2 * len(script.tokens) * inside.num_kv_heads * inside.head_size * 8
    for num_chunks, end in enumerate(script.ends, start=1):
        part = script._replace(ends=script.ends[:num_chunks], num_steps=script.num_steps[:num_chunks])
        cache.reset()
        read(model, part, cache)
        copies = case.copies(max(max(steps) for steps in part.num_steps))
        assert (cache.length, cache.num_copies) == (end, copies)
        prelude, core, _, coda = model.layout
        assert cache.num_bytes == (prelude + core * copies + coda) * numbers * torch.float64.itemsize


@few
@given(recipes(loops, st.sampled_from([torch.float32, torch.bfloat16])), any_build, scripts())
def test_the_mean_takes_one_part_in_as_many_as_there_are_steps(recipe, build, drawn):
    model = recipe._replace(layout=recipe.layout._replace(prelude=0, coda=0)).model(BUILDS[build])
    script = drawn.script(model)._replace(num_steps=[[model.num_steps] * len(drawn.padding)] * (len(drawn.cuts) + 1))
    full, mean = rd.DepthCache(rd.KeepAll()), rd.DepthCache(rd.KeepMean())
    read(model, script, full)
    read(model, script, mean)
    assert mean.num_bytes * model.num_steps == full.num_bytes > 0


def stored(cache: rd.DepthCache, copy: int) -> Tensor:
    """All keys and values that the core's blocks hold in a copy, of the tokens seen."""
    slots = [slot for key, slot in cache.slots.items() if (key.part, key.copy) == ("core", copy)]
    return torch.stack([buffer[:, :, : cache.length] for slot in slots for buffer in (slot.keys, slot.values)])


@every_build
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@few
@given(recipes(loops), scripts(padded=False))
def test_the_mean_is_rounded_once(build, dtype, recipe, drawn):
    model = recipe._replace(dtype=dtype).model(build)
    full, mean = rd.DepthCache(rd.KeepAll()), rd.DepthCache(rd.KeepMean())
    steps = depths(drawn.shares[0], model)
    for cache in (full, mean):
        read(model, Script(drawn.tokens, None, [drawn.tokens.shape[1]], [steps]), cache)
    found = stored(mean, 0)
    assert found.dtype == dtype
    for row, num_steps in enumerate(steps):
        exact = torch.stack([stored(full, copy)[:, row].double() for copy in range(num_steps)]).mean(0)
        # In double precision rounded once, but for the few that float32 puts on the other side of a tie.
        assert (found[:, row] == exact.to(dtype)).float().mean() > 0.99
        assert_close(found[:, row].double(), exact, rtol=torch.finfo(dtype).eps / 2, atol=1e-5)
