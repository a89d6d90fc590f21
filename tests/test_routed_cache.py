"""Routers with a cache: a token that skips a step leaves nothing there, and later tokens must not see that nothing."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import decoding_reference as reference
import numpy as np
import pytest
import torch
from battery import gradients
from decoding_reference import KV
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reading import Drawn, Script, attention, grouped, read, scripts, uneven_blend
from strategies import Recipe, few, loops, recipes
from torch import Tensor
from torch.testing import assert_close
from transcription_parts import Array, arrays

import recurrent_depth as rd
from recurrent_depth.compiled_decoding import decode


class Routing(NamedTuple):
    """Which tokens take a step: those whose state, in a direction of the step, is above a bar; None is no routing."""

    bars: list[float | None]

    def chosen(self, h: Tensor, direction: Tensor, step: int) -> Tensor:
        bar = self.bars[step % len(self.bars)]
        return h @ direction.roll(3 * step) > (float("-inf") if bar is None else bar)


class RoutedByContent(rd.DepthUpdate):
    """The tokens that are picked take a step of the update that is wrapped. Whether one is lies in its state alone."""

    def __init__(self, inner: rd.DepthUpdate, routing: Routing, dim: int):
        super().__init__()
        self.inner, self.routing = inner, routing
        self.register_buffer("direction", torch.randn(dim))

    def begin(self, anchor, call):
        return self.inner.begin(anchor, call)

    def forward(self, state, blocks, step):
        if self.routing.bars[step % len(self.routing.bars)] is None:
            return self.inner(state, blocks, step)
        pick = ragged(self.routing.chosen(state.h, self.direction, step))
        h, write, context = rd.map_tensors(pick.gather, (state.h, state.write, state.context))
        after = self.inner(state._replace(h=h, write=write, context=context), blocks.picked(pick), step)
        h, write = rd.map_tensors(pick.scatter, (state.h, state.write), (after.h, after.write))
        return state._replace(h=h, write=write)

    def read(self, state):
        return self.inner.read(state)

    def cost(self, num_steps):
        return self.inner.cost(num_steps)


def ragged(chosen: Tensor) -> rd.Pick:
    """Picks as wide as the widest row, which may be 0; padding names tokens that are not picked."""
    counts = chosen.sum(1, keepdim=True)
    width = int(counts.max())
    valid = torch.arange(width)[None] < counts
    index = chosen.logical_not().long().argsort(dim=1, stable=True)[:, :width]
    return rd.Pick(index, None if valid.all() else valid)


def build(routing: Routing, form=rd.GPT2Form) -> Callable[..., rd.RecurrentTransformer]:
    def update(dim: int) -> rd.DepthUpdate:
        return RoutedByContent(rd.gated(dim, bias=0.0), routing, dim)

    return partial(rd.grt, form=form, update=update)


# The reference


class Taken(NamedTuple):
    """What a past token left in a block: of each step that it took key and value, and how many steps its row took."""

    steps: dict[int, KV]
    depth: int


Found = Callable[[Taken, int], KV | None]
"""What a token at some step finds of a past one; None is nothing."""


def found_of_all(taken: Taken, step: int) -> KV | None:
    return taken.steps.get(min(step, taken.depth - 1))


def found_of_first(taken: Taken, step: int) -> KV | None:
    return taken.steps[min(taken.steps)] if taken.steps else None


def found_of_last(taken: Taken, step: int) -> KV | None:
    return taken.steps[max(taken.steps)] if taken.steps else None


def found_of_mean(taken: Taken, step: int) -> KV | None:
    parts = zip(*taken.steps.values(), strict=True)
    return KV(*(sum(part) / len(taken.steps) for part in parts)) if taken.steps else None


def found_in_turn(period: int) -> Found:
    def found(taken: Taken, step: int) -> KV | None:
        copy = step % period if step % period < taken.depth else (taken.depth - 1) % period
        same = [at for at in taken.steps if at % period == copy]
        return taken.steps[max(same)] if same else None

    return found


class Case(NamedTuple):
    """A policy, and how the reference writes it."""

    policy: rd.KVStepPolicy
    found: Found


POLICIES = {
    "all": Case(rd.KeepAll(), found_of_all),
    "first": Case(rd.KeepFirst(), found_of_first),
    "last": Case(rd.KeepLast(), found_of_last),
    "mean": Case(rd.KeepMean(), found_of_mean),
    "two-in-turn": Case(rd.KeepCyclic(2), found_in_turn(2)),
    "three-in-turn": Case(rd.KeepCyclic(3), found_in_turn(3)),
}
every_policy = pytest.mark.parametrize("case", POLICIES.values(), ids=POLICIES)


class RoutedRow(reference.Row):
    """One text, read token by token: at each step of the loop only the chosen tokens of a chunk run the blocks."""

    def __init__(self, model: rd.RecurrentTransformer, found: Found):
        prelude, core, _, coda = model.layout
        sizes = reference.Sizes(prelude, core, coda, attention(model).num_heads, attention(model).num_kv_heads)
        weights = {name.replace("update.inner", "update"): w for name, w in arrays(model.state_dict()).items()}
        super().__init__(weights, sizes, reference.keep_all)
        self.bars, self.found = model.core.update.routing.bars, found
        self.left: dict[tuple[str, int], Taken] = {}

    def read(self, tokens: list[int], num_steps: int) -> list[Array]:
        hs = [self.embed(token, self.length + i) for i, token in enumerate(tokens)]
        for i in range(self.sizes.num_prelude):
            hs = self.block(f"prelude.blocks.{i}.", hs, reference.keep_all, 0, 0)
        anchors = hs
        for step in range(num_steps):
            hs = self.routed_step(hs, anchors, step, num_steps)
        for i in range(self.sizes.num_coda):
            hs = self.block(f"coda.blocks.{i}.", hs, reference.keep_all, 0, 0)
        self.length += len(tokens)
        return [self.w["embed.token.weight"] @ self.norm("norm.", h) for h in hs]

    def routed_step(self, hs: list[Array], anchors: list[Array], step: int, depth: int) -> list[Array]:
        direction, bar = np.roll(self.w["core.update.direction"], 3 * step), self.bars[step % len(self.bars)]
        hs, picked = list(hs), [i for i, h in enumerate(hs) if bar is None or h @ direction > bar]
        candidates = self.inject([hs[i] for i in picked], [anchors[i] for i in picked])
        for layer in range(self.sizes.num_core):
            name = f"core.stack.blocks.{layer}."
            for i in range(len(hs)):
                self.left.setdefault((name, self.length + i), Taken({}, depth))
            candidates = self.routed_block(name, candidates, [self.length + i for i in picked], step)
        written = self.write([hs[i] for i in picked], candidates, [anchors[i] for i in picked])
        for i, h in zip(picked, written, strict=True):
            hs[i] = h
        return hs

    def routed_block(self, name: str, xs: list[Array], positions: list[int], step: int) -> list[Array]:
        past = [self.found(self.left[name, position], step) for position in range(self.length)]
        seen, out = [kv for kv in past if kv is not None], []
        for position, x in zip(positions, xs, strict=True):
            query, kv = self.project(name, self.norm(name + "around_attention.norm.", x), position)
            self.left[name, position].steps[step] = kv
            seen.append(kv)
            x = x + self.w[name + "attention.out.weight"] @ reference.attend(query, seen)
            out.append(x + self.mlp(name + "mlp.", self.norm(name + "around_mlp.norm.", x)))
        return out


def read_slowly(model: rd.RecurrentTransformer, script: Script, found: Found) -> Tensor:
    """The logits of a script of one row, by the reference."""
    row, logits = RoutedRow(model, found), []
    for start, end, steps in script.chunks:
        logits += row.read(script.tokens[0, start:end].tolist(), steps[0])
    return torch.from_numpy(np.stack(logits))


# What is drawn

bars = st.sampled_from([0.0, 0.0, 0.5, None, float("-inf"), float("inf")])
routings = st.builds(Routing, st.lists(bars, min_size=1, max_size=4))
models = recipes(loops, st.just(torch.float64))
forms = st.sampled_from([rd.GPT2Form, grouped])
more = settings(few, max_examples=2 * few.max_examples)

RECIPE = Recipe(rd.Layout(1, 2, 4, 1), (16, 4), torch.float64, 0)
ROUTING = Routing([None, 0.0, 0.0, 0.0])
SHALLOW_THEN_DEEP = Drawn(torch.arange(24).reshape(3, 8) % 23, [0, 1, 3], {3, 5, 6}, [[1 / 3] * 3, [2 / 3] * 3] * 2)
DEEP_THEN_SHALLOW = SHALLOW_THEN_DEEP._replace(shares=[[1.0, 0.0, 2 / 3], [0.0] * 3, [1.0] * 3, [1 / 3, 1.0, 0.0]])


def assert_rows(found: Tensor, script: Script, alone: Callable[[Script, int], Tensor]) -> None:
    assert found.isfinite().all()
    for row, real in enumerate(script.mask):
        expected = alone(script.alone(row), row)
        assert_close(found[row, real], expected, atol=1e-9 * expected.abs().max().item(), rtol=1e-9)


@pytest.mark.parametrize("max_tokens", [None, 8])
@more
@given(models, forms, routings, scripts(), st.booleans())
@example(RECIPE, grouped, ROUTING, DEEP_THEN_SHALLOW, False)
@example(RECIPE, grouped, ROUTING, DEEP_THEN_SHALLOW, True)
def test_keeping_all_is_the_parallel_pass_for_any_chunks_padding_and_depths(
    max_tokens, recipe, form, routing, drawn, differentiable
):
    model = recipe.model(build(routing, form))
    script = drawn.script(model)
    script = script._replace(num_steps=[script.num_steps[0]] * len(script.ends))
    found = read(model, script, rd.DepthCache(max_tokens=max_tokens), differentiable)
    expected = model(script.tokens, script.num_steps[0], mask=script.mask)
    size = expected[script.mask].abs().max().item()
    assert_close(found[script.mask], expected[script.mask], atol=1e-9 * size, rtol=1e-9)
    assert_rows(found, script, lambda alone, row: model(alone.tokens, alone.num_steps[0][0])[0])


@few
@given(models, forms, routings, scripts())
@example(RECIPE, grouped, ROUTING, DEEP_THEN_SHALLOW)
def test_a_token_that_sees_the_whole_buffer_under_a_mask_sees_what_it_should(recipe, form, routing, drawn):
    # As compiled decoding does it: with a cache of fixed capacity, token by token behind a prompt.
    model = recipe.model(build(routing, form))
    script = drawn.script(model)
    ends = list(range(script.ends[0], script.tokens.shape[1] + 1))
    script = script._replace(ends=ends, num_steps=[[model.num_steps] * len(drawn.padding)] * len(ends))
    model.decode = decode
    found = read(model, script, rd.DepthCache(max_tokens=10))
    assert_rows(found, script, lambda alone, row: model(alone.tokens)[0])


@every_policy
@more
@given(models, forms, routings, scripts(), st.booleans())
@example(RECIPE, rd.GPT2Form, ROUTING, SHALLOW_THEN_DEEP, False)
@example(RECIPE, grouped, ROUTING, DEEP_THEN_SHALLOW, False)
@example(RECIPE, grouped, ROUTING, DEEP_THEN_SHALLOW, True)
def test_reading_in_chunks_is_what_the_reference_says(case, recipe, form, routing, drawn, differentiable):
    model = recipe.model(build(routing, form))
    script = drawn.script(model)
    found = read(model, script, rd.DepthCache(case.policy), differentiable)
    assert_rows(found, script, lambda alone, row: read_slowly(model, alone, case.found))


def routed_model(routing: Routing = ROUTING, form=grouped) -> rd.RecurrentTransformer:
    return RECIPE.model(build(routing, form)).requires_grad_(False)


def some_tokens(batch: int = 3) -> Tensor:
    return torch.randint(23, (batch, 8))


def chosen_at(model: rd.RecurrentTransformer, x: Tensor) -> list[Tensor]:
    """Which tokens take each step of a whole forward."""
    update, states = model.core.update, model.trajectory(x, every_step=True).states
    anchor = model.prelude(model.embed(x, torch.arange(8)[None]), rd.At(torch.arange(8)[None]))
    hs = [anchor, *(state.h for state in states[:-1])]
    return [update.routing.chosen(h, update.direction, step) for step, h in enumerate(hs)]


def test_the_rule_of_these_tests_picks_some_and_leaves_some():
    # Otherwise nothing here would be routed.
    whole, *routed = chosen_at(routed_model(), some_tokens())
    assert whole.all()
    for chosen in routed:
        assert 0.1 < chosen.float().mean() < 0.9
        assert len(set(chosen.sum(1).tolist())) > 1


@torch.no_grad()
def test_each_copy_knows_which_tokens_took_its_steps():
    model, x, cache, turns = routed_model(), some_tokens(), rd.DepthCache(), rd.DepthCache(rd.KeepCyclic(2))
    chosen = chosen_at(model, x)
    for new in x.split([5, 2, 1], dim=1):
        rd.extend(model, new, cache)
    rd.extend(model, x, turns)
    for step, expected in enumerate(chosen):
        assert torch.equal(cache.valid[step][:, 0, :8, 0], expected)
    for copy in (0, 1):
        assert torch.equal(turns.valid[copy][:, 0, :8, 0], chosen[copy] | chosen[copy + 2])


@every_policy
@torch.no_grad()
def test_what_stands_where_a_token_skipped_a_step_is_never_looked_at(case):
    model, x = routed_model(Routing([1.5])), some_tokens()
    caches = [rd.DepthCache(case.policy) for _ in range(2)]
    for cache in caches:
        rd.extend(model, x[:, :6], cache)
    num_holes = 0
    for key, slot in caches[0].slots.items():
        if key.part == "core":
            holes = caches[0].valid[key.copy][:, 0, :6, 0].logical_not()
            num_holes += int(holes.sum())
            for buffer in slot.both:
                buffer[:, :, :6].transpose(1, 2)[holes] = 100.0
    assert num_holes > 0
    found, expected = (rd.extend(model, x[:, 6:], cache) for cache in caches)
    assert torch.equal(found, expected)


@every_policy
@torch.no_grad()
def test_the_holes_are_cropped_chosen_and_repeated_with_the_rows(case):
    model, x, new, rows = routed_model(), some_tokens(), some_tokens(4)[:, :3], torch.tensor([2, 0, 2, 1])
    cache, fresh = rd.DepthCache(case.policy), rd.DepthCache(case.policy)
    rd.extend(model, x, cache)
    cache.crop(5)
    cache.repeat(2)
    cache.select(2 * rows + 1)
    rd.extend(model, x[rows, :5], fresh)
    for part in new.split([2, 1], dim=1):
        assert_close(rd.extend(model, part, cache), rd.extend(model, part, fresh), rtol=1e-9, atol=1e-9)


class BrokenError(Exception):
    """What a block raises in the middle of a forward."""


@pytest.mark.parametrize("before", [0, 4])
@pytest.mark.parametrize("differentiable", [False, True], ids=["decoding", "with-gradients"])
@every_policy
def test_a_forward_that_fails_leaves_no_holes(case, differentiable, before):
    model, x = routed_model(Routing([None, None, 0.0, 0.0])), some_tokens()
    caches = [rd.DepthCache(case.policy) for _ in range(2)]
    with torch.no_grad():
        for cache in caches if before else ():
            rd.extend(model, x[:, :before], cache, 2)

    def fail(module, inputs, out):
        raise BrokenError

    hook = model.norm.register_forward_hook(fail)
    with pytest.raises(BrokenError), torch.set_grad_enabled(differentiable):
        rd.extend(model, x[:, -3:], caches[0])
    hook.remove()
    with torch.no_grad():
        for end in (before + 2, before + 4):
            found, expected = (rd.extend(model, x[:, end - 2 : end], cache) for cache in caches)
            assert_close(found, expected)


@every_policy
@torch.no_grad()
def test_a_model_that_picks_nobody_decodes_too(case):
    # Picks are 0 wide, and no step ever writes: what is left is the prelude and the coda.
    model, x, cache = routed_model(Routing([float("inf")])), some_tokens(), rd.DepthCache(case.policy)
    found = torch.cat([rd.extend(model, new, cache) for new in x.split([4, 1, 3], dim=1)], dim=1)
    at = rd.At(torch.arange(8)[None])
    assert_close(found, model(x))
    assert_close(found, model.readout(model.prelude(model.embed(x, at.positions), at), at))


@few
@given(models, forms, routings, st.sampled_from([[8], [5, 3], [4, 1, 3]]))
def test_gradients_through_a_routed_cache_are_those_of_the_parallel_pass(recipe, form, routing, sizes):
    model, x = recipe.model(build(routing, form)), some_tokens()
    model(x).square().sum().backward()
    expected, cache = gradients(model), rd.DepthCache()
    found = [rd.extend(model, new, cache) for new in x.split(sizes, dim=1)]
    torch.cat(found, dim=1).square().sum().backward()
    for name, gradient in gradients(model).items():
        size = max(1.0, expected[name].abs().max().item())
        assert_close(gradient, expected[name], rtol=1e-7, atol=1e-9 * size)


@torch.no_grad()
def test_a_blend_is_refused_where_tokens_are_picked():
    model = routed_model()
    with pytest.raises(ValueError, match="goes with no update that picks tokens"):
        rd.extend(model, some_tokens(), rd.DepthCache(uneven_blend(model)))
