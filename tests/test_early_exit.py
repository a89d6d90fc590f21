"""Rows that leave the loop early: when they do, what they say, what later tokens find of them, and what is saved."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from battery import blocks_of, lively, tiny
from hypothesis import given
from hypothesis import strategies as st
from reading import BUILDS, Script, every_policy, read_slowly
from strategies import VOCAB_SIZE, Recipe, few, loops, recipes, tokens
from torch import Tensor, nn
from torch.distributions import Categorical, kl_divergence
from torch.testing import assert_close
from user_parts import Momentum, Remembering

import recurrent_depth as rd

LAYOUT = rd.Layout(1, 1, 4, 1)
double = st.just(torch.float64)
any_build = st.sampled_from(sorted(BUILDS))
pytestmark = pytest.mark.filterwarnings("ignore:exit is .*, but this model")  # every rule is asked of every build here


# Every rule, and its condition as its documentation has it


class Seen(NamedTuple):
    """What one token went through: after each step its state, the share written, and its logits."""

    h: list[Tensor]
    write: list[Tensor]
    logits: list[Tensor]


def steps_up(rule: rd.ExitAfter, seen: Seen) -> list[bool]:
    return [steps >= rule.num_steps for steps in range(1, len(seen.h) + 1)]


def gate_closed(rule: rd.GateClosed, seen: Seen) -> list[bool]:
    return [bool(write < rule.below) for write in seen.write]


def latent_converged(rule: rd.LatentConverged, seen: Seen) -> list[bool]:
    return [False, *(bool((b - a).norm() / b.norm() < rule.below) for a, b in pairwise(seen.h))]


def kl_converged(rule: rd.KLConverged, seen: Seen) -> list[bool]:
    said = [Categorical(logits=logits) for logits in seen.logits]
    return [False, *(bool(kl_divergence(a, b) < rule.below) for a, b in pairwise(said))]


def argmax_stable(rule: rd.ArgmaxStable, seen: Seen) -> list[bool]:
    best = [int(logits.argmax()) for logits in seen.logits]
    return [i >= rule.times and len(set(best[i - rule.times : i + 1])) == 1 for i in range(len(best))]


def learned_exit(rule: rd.LearnedExit, seen: Seen) -> list[bool]:
    stay, reached = 1.0, []
    for h in seen.h:
        stay *= 1 - float((rule.linear.weight[0] @ h + rule.bias).sigmoid())
        reached.append(1 - stay >= rule.quantile)
    return reached


def at_least(rule: rd.AtLeast, seen: Seen) -> list[bool]:
    return [steps >= rule.num_steps and now for steps, now in enumerate(argmax_stable(rule.rule, seen), start=1)]


class Case(NamedTuple):
    """A rule, made of a number from 0 to 1 for models of a width; when it lets go; and whether it reads logits."""

    make: Callable[[float, int], rd.ExitRule]
    lets_go: Callable[[rd.ExitRule, Seen], list[bool]]
    reads: bool


def learned(share: float, dim: int) -> rd.LearnedExit:
    return lively(rd.LearnedExit(dim, quantile=0.05 + 0.9 * share, bias=-1.0)).double().requires_grad_(False)


RULES = {
    "after": Case(lambda share, dim: rd.ExitAfter(1 + round(3 * share)), steps_up, reads=False),
    "gate": Case(lambda share, dim: rd.GateClosed(0.35 + 0.2 * share), gate_closed, reads=False),
    "latent": Case(lambda share, dim: rd.LatentConverged(0.2 + 0.5 * share), latent_converged, reads=False),
    "kl": Case(lambda share, dim: rd.KLConverged(10 ** (1.5 * share - 1.8)), kl_converged, reads=True),
    "argmax": Case(lambda share, dim: rd.ArgmaxStable(1 + round(share)), argmax_stable, reads=True),
    "learned": Case(learned, learned_exit, reads=False),
    "at-least": Case(lambda share, dim: rd.AtLeast(2 + round(share), rd.ArgmaxStable(1)), at_least, reads=True),
}
every_rule = pytest.mark.parametrize("case", RULES.values(), ids=RULES)
any_rule = st.sampled_from(sorted(RULES))


# Texts in which rows leave


class Text(NamedTuple):
    """A text padded on the left: the first so many tokens are read at full depth, the rest one by one under a rule."""

    tokens: Tensor
    padding: list[int]
    num_first: int
    share: float

    @property
    def mask(self) -> Tensor:
        return torch.arange(self.tokens.shape[1])[None] >= torch.tensor(self.padding)[:, None]

    def alone(self, row: int) -> "Text":
        padding = self.padding[row]
        return Text(self.tokens[row : row + 1, padding:], [0], self.num_first - padding, self.share)


@st.composite
def texts(draw, batch=st.integers(1, 3), num_last=st.integers(1, 3)) -> Text:
    last = draw(num_last)
    x = draw(tokens(batch, st.integers(1 + last, 4 + last)))
    first = x.shape[1] - last
    padding = draw(st.lists(st.integers(0, first - 1), min_size=len(x), max_size=len(x)))
    return Text(x, padding, first, draw(st.floats(0, 1)))


def read_leaving(model, text: Text, cache: rd.DepthCache, rule: rd.ExitRule) -> tuple[Tensor, list[list[int]]]:
    """The logits of all tokens; and of each token read under the rule how many steps each row took."""
    mask, depths = text.mask, []
    with torch.no_grad():
        first = text.num_first
        logits = [rd.extend(model, text.tokens[:, :first], cache, mask=mask[:, :first])]
        for i in range(first, text.tokens.shape[1]):
            left = rd.extend_until(model, text.tokens[:, i : i + 1], cache, rule, mask=mask[:, : i + 1])
            logits.append(left.logits[:, None])
            depths.append(left.num_steps.tolist())
    return torch.cat(logits, dim=1), depths


def some_model(build=rd.grt, layout: rd.Layout = LAYOUT, **changes) -> rd.RecurrentTransformer:
    torch.manual_seed(3)
    return lively(tiny(build, layout, **changes)).double().eval()


def some_tokens(batch: int, num_tokens: int) -> Tensor:
    return torch.randint(VOCAB_SIZE, (batch, num_tokens), generator=torch.Generator().manual_seed(4))


def some_text(batch: int = 12, num_first: int = 3, num_last: int = 3, share: float = 0.5) -> Text:
    x = some_tokens(batch, num_first + num_last)
    return Text(x, [row % num_first for row in range(batch)], num_first, share)


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert_close(found, expected, atol=1e-9 * expected.abs().max().item(), rtol=1e-9)


def assert_same(found: rd.DepthCache, expected: rd.DepthCache, exactly: bool = True) -> None:
    """Both caches hold the same tokens, in the same copies."""
    assert (found.length, found.batch, found.slots.keys()) == (expected.length, expected.batch, expected.slots.keys())
    for key, slot in found.slots.items():
        for one, other in zip(slot.both, expected.slots[key].both, strict=True):
            one, other = one[:, :, : found.length], other[:, :, : found.length]
            assert one.equal(other) if exactly else torch.allclose(one, other, atol=1e-10)


@contextmanager
def counted(module: nn.Module) -> Iterator[list[int]]:
    """The rows times tokens of each call of a module."""
    seen: list[int] = []
    handle = module.register_forward_hook(lambda module, inputs, out: seen.append(out.shape[0] * out.shape[1]))
    yield seen
    handle.remove()


# When rows leave


@torch.no_grad()
def newest_token(model: rd.RecurrentTransformer, text: Tensor) -> Seen:
    """What the last token of one row goes through, by a forward without a cache; the others leave after all steps."""
    whole = model.trajectory(text, every_step=True)
    end = whole.states[-1]
    mixed = [end._replace(h=torch.cat([end.h[:, :-1], one.h[:, -1:]], dim=1)) for one in whole.states]
    logits = [whole.readout(state)[0, -1] for state in mixed]
    return Seen([one.h[0, -1] for one in whole.states], [one.write[0, -1] for one in whole.states], logits)


@every_rule
@few
@given(recipes(loops, double), any_build, texts(num_last=st.just(1)))
def test_a_row_leaves_at_the_first_step_that_its_rule_asks_for(case, recipe, build, text):
    model = recipe.model(BUILDS[build])
    rule = case.make(text.share, recipe.width[0])
    found, (depths,) = read_leaving(model, text, rd.DepthCache(), rule)
    for row, depth in enumerate(depths):
        alone = text.alone(row).tokens
        seen = newest_token(model, alone)
        assert depth == next((i for i, now in enumerate(case.lets_go(rule, seen), start=1) if now), model.num_steps)
        assert_near(found[row, -1], seen.logits[depth - 1])
        if model.layout.coda == 0:  # whose blocks would look at earlier tokens, which took all steps
            assert_near(found[row, -1], model(alone, num_steps=depth)[0, -1])


@pytest.mark.parametrize("name", RULES)
def test_rows_of_one_batch_leave_at_different_steps(name):
    # Otherwise the laws of rows that leave would be about few of them.
    model, depths = some_model(dim=16), set()
    for share in (0.1, 0.5, 0.9):
        _, taken = read_leaving(model, some_text(), rd.DepthCache(), RULES[name].make(share, 16))
        depths |= {row for step in taken for row in step}
    assert len(depths) >= (2 if name == "argmax" else 3)


@every_policy
@few
@given(recipes(loops, double), any_build, any_rule, texts())
def test_a_row_leaves_and_speaks_as_it_does_alone(case, recipe, build, rule, text):
    model = recipe.model(BUILDS[build])
    policy, rule = case.make(model), RULES[rule].make(text.share, recipe.width[0])
    found, depths = read_leaving(model, text, rd.DepthCache(policy), rule)
    assert found.isfinite().all()
    for row, padding in enumerate(text.padding):
        alone, taken = read_leaving(model, text.alone(row), rd.DepthCache(policy), rule)
        assert [steps[row] for steps in depths] == [steps[0] for steps in taken]
        assert_near(found[row, padding:], alone[0])


def test_blocks_that_remember_and_updates_that_carry_lose_nothing_when_rows_leave():
    model = some_model(layout=rd.Layout(1, 1, 4, 0))
    model.core = rd.RecurrentCore([Remembering(16), *blocks_of(model.core)], Momentum()).double().eval()
    text = some_text(num_last=1)
    found, (depths,) = read_leaving(model, text, rd.DepthCache(), rd.LatentConverged(0.6))
    assert len(set(depths)) > 1
    for row, depth in enumerate(depths):
        assert_near(found[row, -1], model(text.alone(row).tokens, depth)[0, -1])


class Told(rd.DepthUpdate):
    """Another update, whose steps say to have written these shares."""

    def __init__(self, update: rd.DepthUpdate, shares: list[float]):
        super().__init__()
        self.update, self.shares = update, shares

    def begin(self, anchor, call):
        return self.update.begin(anchor, call)

    def forward(self, state, blocks, step):
        return self.update(state, blocks, step)._replace(write=torch.full_like(state.write, self.shares[step]))

    def read(self, state):
        return self.update.read(state)

    def cost(self, num_steps):
        return self.update.cost(num_steps)


def test_the_gate_rule_goes_by_what_the_update_says_to_have_written():
    model, x = some_model(layout=rd.Layout(1, 1, 4, 0)), some_tokens(2, 3)
    wanted = model(x, 3)[:, -1]
    model.core.update = Told(model.core.update, [0.9, 0.31, 0.29, 0.8])
    left = rd.extend_until(model, x[:, -1:], filled(model, x[:, :-1]), rd.GateClosed(0.3))
    assert left.num_steps.tolist() == [3, 3]
    assert_near(left.logits, wanted)


# What later tokens find


def filled(model, x: Tensor, policy: rd.KVStepPolicy | None = None, num_steps=None, max_tokens=None) -> rd.DepthCache:
    """A cache that holds these tokens; at full depth, if no other is asked for."""
    cache = rd.DepthCache(policy, max_tokens=max_tokens)
    with torch.no_grad():
        rd.extend(model, x, cache, num_steps)
    return cache


@every_policy
@few
@given(recipes(loops, double), any_build, any_rule, texts())
def test_what_left_early_is_found_as_the_reference_says(case, recipe, build, rule, text):
    model = recipe.model(BUILDS[build])
    policy, rule = case.make(model), RULES[rule].make(text.share, recipe.width[0])
    found, depths = read_leaving(model, text, rd.DepthCache(policy), rule)
    ends = list(range(text.num_first, text.tokens.shape[1] + 1))
    script = Script(text.tokens, text.mask, ends, [[model.num_steps] * len(found), *depths])
    for row, padding in enumerate(text.padding):
        assert_near(found[row, padding:], read_slowly(model, script.alone(row), case.write(policy))[0])


@every_policy
@pytest.mark.parametrize("build", ["grt-llama", "naive-gpt2"])
def test_a_token_that_left_after_one_step_is_there_for_the_next_at_every_step(case, build):
    # Five tokens at full depth, the sixth leaves after its first step, the seventh takes them all.
    model = Recipe(rd.Layout(1, 2, 3, 1), (16, 4), torch.float64, 5).model(BUILDS[build])
    x, policy = some_tokens(1, 7), case.make(model)
    cache = filled(model, x[:, :5], policy)
    sizes, copies = [cache.length], cache.num_copies
    with torch.no_grad():
        sixth = rd.extend_until(model, x[:, 5:6], cache, rd.ExitAfter(1))
        sizes.append(cache.length)
        seventh = rd.extend(model, x[:, 6:], cache)
    expected = read_slowly(model, Script(x, None, [5, 6, 7], [[3], [1], [3]]), case.write(policy))[0]
    assert_near(torch.cat([sixth.logits, seventh[:, 0]]), expected[5:])
    assert (sixth.num_steps.tolist(), [*sizes, cache.length], cache.num_copies) == ([1], [5, 6, 7], copies)


@every_policy
@few
@given(recipes(loops, double), any_build, any_rule, texts(num_last=st.just(1)))
def test_leaving_is_the_forward_at_the_depths_that_the_rule_chose(case, recipe, build, rule, text):
    model, (x, last) = recipe.model(BUILDS[build]), (text.tokens[:, :-1], text.tokens[:, -1:])
    policy, rule = case.make(model), RULES[rule].make(text.share, recipe.width[0])
    caches = [filled(model, x, policy) for _ in range(2)]
    with torch.no_grad():
        left = rd.extend_until(model, last, caches[0], rule)
        expected = rd.extend(model, last, caches[1], left.num_steps.tolist())
    assert_near(left.logits, expected[:, 0])
    assert_same(*caches, exactly=False)


class Onlooker(rd.ExitRule):
    """Reads the logits after each step, twice, and lets nobody go."""

    def hazard(self, carry, state, readout, step):
        assert readout(state).equal(readout(state))
        return carry, torch.zeros_like(state.write)


@every_policy
@pytest.mark.parametrize("rule", [Onlooker(), rd.KLConverged(1e-300)], ids=["twice", "kl"])
@pytest.mark.parametrize("max_tokens", [None, 8])
def test_looks_at_exits_write_nothing(case, rule, max_tokens):
    model, x = some_model(), some_tokens(3, 6)
    policy = case.make(model)
    caches = [filled(model, x[:, :4], policy, max_tokens=max_tokens) for _ in range(2)]
    with torch.no_grad():
        for last in (x[:, 4:5], x[:, 5:]):
            left = rd.extend_until(model, last, caches[0], rule)
            assert left.num_steps.tolist() == [4] * 3
            assert left.logits.equal(rd.extend(model, last, caches[1])[:, 0])
            assert_same(*caches)


@every_rule
def test_gradients_flow_through_a_forward_that_rows_leave(case):
    model, x = some_model(), some_tokens(6, 4)
    rule = case.make(0.5, 16)
    with torch.no_grad():
        left = rd.extend_until(model, x[:, 3:], filled(model, x[:, :3], rd.KeepMean()), rule)
    cache = rd.DepthCache(rd.KeepMean())
    rd.extend(model, x[:, :3], cache)
    joined = rd.extend_until(model, x[:, 3:], cache, rule)
    assert joined.num_steps.equal(left.num_steps)
    assert_near(joined.logits.detach(), left.logits)
    joined.logits.square().sum().backward()
    gradient = model.embed.token.weight.grad
    assert gradient.isfinite().all()
    assert gradient[x[:, :3].unique()].any(dim=1).all()


# An exit after so many steps is a run of so many


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("build", BUILDS)
def test_an_exit_after_some_steps_is_a_run_of_so_many(build, dtype):
    model, x = some_model(BUILDS[build]).to(dtype), some_tokens(2, 4)
    for steps in range(1, 5):
        caches = [filled(model, x[:, :3], num_steps=steps) for _ in range(2)]
        with torch.no_grad():
            left = rd.extend_until(model, x[:, 3:], caches[0], rd.ExitAfter(steps))
            assert left.logits.equal(rd.extend(model, x[:, 3:], caches[1], steps)[:, 0])
        assert left.num_steps.tolist() == [steps] * 2
        assert_same(*caches)
        if dtype == torch.float64:
            assert_near(left.logits, model(x, steps)[:, -1])


def test_no_row_takes_more_steps_than_it_may_and_it_may_take_more_than_trained():
    model, x, onlooker = some_model(), some_tokens(2, 4), Onlooker()
    with torch.no_grad():
        left = rd.extend_until(model, x[:, 3:], filled(model, x[:, :3]), onlooker, num_steps=2)
        assert left.num_steps.tolist() == [2, 2]
        assert left.logits.equal(rd.extend(model, x[:, 3:], filled(model, x[:, :3]), 2)[:, 0])
        with pytest.warns(UserWarning, match="6 steps asked for, but full depth is 4"):
            deep = rd.extend_until(model, x[:, 3:], filled(model, x[:, :3]), rd.ExitAfter(5), num_steps=6)
    assert deep.num_steps.tolist() == [5, 5]


class Breaking(rd.ExitRule):
    """Lets the first of its rows go, and breaks after its second step."""

    def hazard(self, carry, state, readout, step):
        readout(state)
        if step == 1:
            raise RuntimeError("a rule that breaks")
        hazard = torch.zeros_like(state.write)
        hazard[0] = 1
        return carry, hazard


def belongings(model: nn.Module) -> dict:
    """All that the modules hold, by identity."""
    return {(name, key): id(value) for name, part in model.named_modules() for key, value in vars(part).items()}


@every_policy
@pytest.mark.parametrize("differentiable", [False, True])
def test_a_rule_that_breaks_leaves_model_and_cache_as_they_were(case, differentiable):
    model, x = some_model(), some_tokens(3, 5)
    policy = case.make(model)
    cache, untouched = (filled(model, x[:, :4], policy) for _ in range(2))
    before = belongings(model)
    with torch.set_grad_enabled(differentiable), pytest.raises(RuntimeError, match="a rule that breaks"):
        rd.extend_until(model, x[:, 4:], cache, Breaking())
    assert belongings(model) == before
    assert_same(cache, untouched)
    with torch.no_grad():
        assert rd.extend(model, x[:, 4:], cache).equal(rd.extend(model, x[:, 4:], untouched))
    assert_same(cache, untouched)


# Counted, not believed


@every_rule
@pytest.mark.parametrize("layout", [rd.Layout(1, 1, 4, 1), rd.Layout(0, 2, 4, 2)], ids=str)
def test_rows_that_left_cost_nothing_and_only_rules_that_say_so_look_at_logits(case, layout):
    model, text = some_model(layout=layout), some_text()
    rule = case.make(text.share, 16)
    with counted(blocks_of(model.core)[-1]) as core, counted(model.coda.blocks[-1]) as coda:
        _, depths = read_leaving(model, text, rd.DepthCache(), rule)
    taken = [steps for row in depths for steps in row]
    prompt = text.tokens.shape[0] * text.num_first
    assert sum(core) == prompt * 4 + sum(taken)
    # Nobody is asked after the last step, behind which all leave.
    looks = sum(min(steps, 3) for steps in taken) if case.reads else 0
    assert sum(coda) == prompt + len(taken) + looks


@every_rule
def test_text_written_under_a_rule_costs_the_steps_that_its_tokens_took(case):
    model, prompt = some_model(), some_tokens(5, 3)
    rule, padding = case.make(0.5, 16), [0, 1, 2, 0, 1]
    mask = torch.arange(3)[None] >= torch.tensor(padding)[:, None]
    with counted(model.core.stack) as written:
        found = rd.generate(model, prompt, max_new_tokens=5, mask=mask, exit=rule)
    with counted(model.core.stack) as read:
        logits, depths = read_leaving(model, Text(found[:, :-1], padding, 3, 0.5), rd.DepthCache(), rule)
    assert found[:, 3:].equal(logits[:, 2:].argmax(-1))
    assert written == read
    assert sum(written) == 5 * 3 * 4 + sum(steps for row in depths for steps in row)


# What is refused


BAD = {
    "two tokens": ({"tokens": some_tokens(2, 2)}, "leave at one new token each, got 2 tokens"),
    "no token": ({"tokens": some_tokens(2, 0)}, r"tokens must be \(batch, token\) and not empty"),
    "no such token": ({"tokens": some_tokens(2, 1) + VOCAB_SIZE}, "tokens must lie in 0 to 22"),
    "other rows": ({"tokens": some_tokens(3, 1)}, "tokens has 3 rows, but the cache holds 2"),
    "no steps": ({"num_steps": 0}, "num_steps is 0, but must be a whole number of at least 1"),
    "a depth for each row": ({"num_steps": [1, 2]}, r"num_steps is \[1, 2\], but must be a whole number"),
    "a mask of the new": ({"mask": torch.ones(2, 1).bool()}, r"mask must be \(2, 5\), over the 4 tokens"),
}


@pytest.mark.usefixtures("as_a_user_runs_it")
@pytest.mark.parametrize("changes, message", BAD.values(), ids=BAD)
def test_bad_arguments_are_refused_and_the_cache_stays_usable(changes, message):
    model, x = some_model(), some_tokens(2, 5)
    cache, untouched = (filled(model, x[:, :4], max_tokens=6) for _ in range(2))
    arguments = {"tokens": x[:, 4:], "cache": cache, "exit": rd.GateClosed(0.5), **changes}
    with torch.no_grad():
        with pytest.raises(ValueError, match=message):
            rd.extend_until(model, **arguments)
        assert_same(cache, untouched)
        found, expected = (rd.extend_until(model, x[:, 4:], one, rd.GateClosed(0.5)) for one in (cache, untouched))
        assert found.logits.equal(expected.logits)
    assert_same(cache, untouched)


def test_a_full_cache_is_refused_and_stays_usable():
    model, x = some_model(), some_tokens(2, 5)
    cache, untouched = (filled(model, x[:, :4], max_tokens=4) for _ in range(2))
    with torch.no_grad(), pytest.raises(ValueError, match="cache is full: it holds 4 of max_tokens=4 tokens"):
        rd.extend_until(model, x[:, 4:], cache, rd.GateClosed(0.5))
    assert_same(cache, untouched)
