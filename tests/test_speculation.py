"""Drafts of the first steps, verified by the others: the text at full depth, and no block run twice for it."""

import itertools
import math
from collections import Counter
from functools import partial
from typing import NamedTuple

import pytest
import torch
from battery import METHODS, lively, tiny
from hypothesis import given
from hypothesis import strategies as st
from reading import every_build
from strategies import Recipe, few, loops, seeds, tokens, widths
from torch import Tensor
from user_parts import LateBlocks, Momentum, Recorded, Remembering

import recurrent_depth as rd
from recurrent_depth import writing
from recurrent_depth.drafting import num_accepted, remainder
from recurrent_depth.draw import draw
from recurrent_depth.speculation import speculate

PADDED = torch.tensor([[False, False, True, True, True], [True] * 5, [False, True, True, True, True]])


def model_of(build=rd.grt, layout=rd.Layout(1, 2, 4, 1), seed: int = 0, **changes) -> rd.RecurrentTransformer:
    torch.manual_seed(seed)
    return lively(tiny(build, layout, context_length=24, **changes)).double().eval()


def slowly(model, prompt, max_new_tokens, num_steps=None, mask=None, choose=rd.Greedy()) -> Tensor:
    """Greedy text of full forwards, without a cache."""
    seen = prompt
    for _ in range(max_new_tokens):
        logits = model(seen, num_steps, mask=mask)[:, -1].detach()
        new = choose.probabilities(logits, seen, mask).argmax(-1, keepdim=True)
        seen = torch.cat([seen, new], dim=1)
        mask = None if mask is None else torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
    return seen


class Case(NamedTuple):
    """Prompts, and how their continuation is drafted."""

    prompt: Tensor
    padding: list[int]
    max_new_tokens: int
    draft_tokens: int
    draft_share: float

    def mask(self) -> Tensor | None:
        mask = torch.arange(self.prompt.shape[1])[None] >= torch.tensor(self.padding)[:, None]
        return mask if any(self.padding) else None

    def draft_steps(self, model) -> int:
        return 1 + round(self.draft_share * (model.num_steps - 2))


@st.composite
def cases(draw) -> Case:
    prompt = draw(tokens(num_tokens=st.integers(1, 6)))
    padding = draw(st.lists(st.integers(0, prompt.shape[1] - 1), min_size=len(prompt), max_size=len(prompt)))
    return Case(prompt, padding, draw(st.integers(1, 8)), draw(st.integers(1, 5)), draw(st.floats(0, 1)))


@every_build
@few
@given(recipe=st.builds(Recipe, loops, widths, st.just(torch.float64), seeds), case=cases())
def test_greedy_text_is_that_of_full_depth_token_for_token(build, recipe, case):
    model, mask = recipe.model(build), case.mask()
    done = speculate(
        model,
        case.prompt,
        max_new_tokens=case.max_new_tokens,
        draft_steps=case.draft_steps(model),
        draft_tokens=case.draft_tokens,
        mask=mask,
    )
    assert torch.equal(done.tokens, slowly(model, case.prompt, case.max_new_tokens, mask=mask))
    assert 0 <= done.num_accepted <= done.num_drafted


class Hurried(Recorded):
    """Steps that shrink with the depth of the whole forward."""

    def begin(self, anchor, call):
        return rd.initial_state(anchor, context=torch.full_like(anchor[..., :1], 1 / call.num_steps))

    def forward(self, state, blocks, step):
        return state._replace(h=state.h + state.context * (step + 1) * (blocks(state.h) - state.h))


class Choosy(Recorded):
    """Only tokens whose first features sum to more than 0 take a step; sometimes nobody, sometimes all."""

    def forward(self, state, blocks, step):
        order = (state.h[..., :3].sum(-1) <= 0).long().argsort(dim=1, stable=True)
        wanted = (state.h[..., :3].sum(-1) > 0).gather(1, order)
        pick = rd.Pick(order, wanted)
        return state._replace(h=pick.scatter(state.h, blocks(pick.gather(state.h), pick)))


def remembering(layout, **sizes) -> rd.RecurrentTransformer:
    model = rd.naive(layout, **sizes)
    model.core.stack.blocks.append(Remembering(sizes["dim"]))
    return model


OWN = {cls.__name__: partial(rd.grt, update=lambda dim, cls=cls: cls()) for cls in (Momentum, LateBlocks, Hurried)}
OWN |= {"Choosy": partial(rd.grt, update=lambda dim: Choosy(), form=rd.LlamaForm), "Remembering": remembering}
looped = {name: build for name, build in {**METHODS, **OWN}.items() if name != "dense"}


@pytest.mark.parametrize("build", looped.values(), ids=looped)
def test_every_looped_method_is_drafted_and_verified(build):
    model, prompt = model_of(build, rd.Layout(1, 1, 4, 1)), torch.randint(23, (3, 5))
    done = speculate(model, prompt, max_new_tokens=6, draft_steps=3, draft_tokens=2, mask=PADDED)
    assert torch.equal(done.tokens, slowly(model, prompt, 6, mask=PADDED))


def test_drafts_are_verified_at_the_depth_that_is_asked_for():
    model, prompt = model_of(), torch.randint(23, (2, 4))
    done = speculate(model, prompt, max_new_tokens=6, draft_steps=1, num_steps=2)
    assert torch.equal(done.tokens, slowly(model, prompt, 6, num_steps=2))
    with pytest.warns(UserWarning, match="deeper than trained"):
        done = speculate(model, prompt, max_new_tokens=6, draft_steps=4, num_steps=5)
    model.num_steps = 5
    assert torch.equal(done.tokens, slowly(model, prompt, 6))


class Ready(Recorded):
    """Wraps an update: after so many steps nothing changes any more."""

    def __init__(self, inner: rd.DepthUpdate, num_steps: int):
        super().__init__()
        self.inner, self.num_steps = inner, num_steps

    def begin(self, anchor, call):
        return self.inner.begin(anchor, call)

    def forward(self, state, blocks, step):
        after = self.inner(state, blocks, step)
        return after if step < self.num_steps else state


def ready(num_steps: int, **changes) -> rd.RecurrentTransformer:
    """A model whose drafts after so many steps are right."""
    model = model_of(**changes)
    model.core.update = Ready(model.core.update, num_steps)
    return model


def test_a_repetition_penalty_counts_the_drafts_before_each_token():
    model, prompt = ready(2), torch.randint(23, (3, 5))
    choose = rd.Greedy(repetition_penalty=3.0)
    done = speculate(model, prompt, max_new_tokens=9, draft_steps=2, draft_tokens=7, mask=PADDED, choose=choose)
    assert torch.equal(done.tokens, slowly(model, prompt, 9, mask=PADDED, choose=choose))
    assert done.acceptance_rate == 1
    assert not torch.equal(done.tokens, slowly(model, prompt, 9, mask=PADDED))


def test_a_row_ends_behind_its_stop_token_and_holds_nobody_back():
    model, prompt = ready(2, layout=rd.Layout(1, 1, 3, 1), seed=3), torch.randint(23, (3, 5))
    text = slowly(model, prompt, 9)[:, 5:]
    for place in range(0, 8, 2):  # each row ends somewhere else, among the drafts too
        arguments = {"max_new_tokens": 9, "stop_tokens": [int(text[0, place]), int(text[1, 7 - place])]}
        done = speculate(model, prompt, draft_steps=1, **arguments)
        assert torch.equal(done.tokens, rd.generate(model, prompt, **arguments))
        done = speculate(model, prompt, draft_steps=2, draft_tokens=7, **arguments)
        assert torch.equal(done.tokens, rd.generate(model, prompt, **arguments))
        ends = torch.isin(text, torch.tensor(arguments["stop_tokens"])).cumsum(1)
        num_written = 1 + (ends[:, :-1] == 0).sum(1)
        assert done.num_accepted == (num_written - 1).clamp(max=7).sum()  # the first is no draft, nor is the last
    everything = speculate(model, prompt, draft_steps=2, max_new_tokens=9, stop_tokens=range(23))
    assert torch.equal(everything.tokens, slowly(model, prompt, 1))
    assert math.isnan(everything.acceptance_rate)


@pytest.mark.parametrize("draft_tokens", [1, 4, 50])
def test_drafts_that_are_right_are_all_accepted(draft_tokens):
    model, prompt = ready(2), torch.randint(23, (2, 5))
    done = speculate(model, prompt, max_new_tokens=9, draft_steps=2, draft_tokens=draft_tokens)
    assert torch.equal(done.tokens, slowly(model, prompt, 9))
    rounds, rest = divmod(8, draft_tokens + 1)
    expected = 2 * (rounds * draft_tokens + max(rest - 1, 0))
    assert done.num_drafted == done.num_accepted == expected
    assert done.acceptance_rate == 1


def test_the_acceptance_is_that_of_drafts_written_without_a_cache():
    """Without a coda: earlier tokens' coda is that of full depth for a draft too, which the slow text lacks."""
    for seed in range(3):
        model, prompt = model_of(layout=rd.Layout(0, 1, 4, 0), seed=seed), torch.randint(23, (1, 4))
        text, seen, drafted, accepted = slowly(model, prompt, 12), 5, 0, 0
        while seen < 16:
            num_drafts = min(3, 16 - seen - 1)
            guess = slowly(model, text[:, :seen], num_drafts, num_steps=3)[0, seen:]
            right = (guess == text[0, seen : seen + num_drafts]).long().cumprod(0).sum().item()
            drafted, accepted, seen = drafted + num_drafts, accepted + right, seen + right + 1
        done = speculate(model, prompt, max_new_tokens=12, draft_steps=3, draft_tokens=3)
        assert (done.num_drafted, done.num_accepted) == (drafted, accepted)
        assert done.acceptance_rate == accepted / drafted


def counted(model) -> Counter:
    """Block-row evaluations of the core, by step and by how many tokens came together; grows as the model runs."""
    found = Counter()

    def hook(stack, inputs, output):
        x, _, step, *_ = inputs
        found[step, x.shape[1]] += x.shape[0] * x.shape[1] * len(stack.blocks)

    model.core.stack.register_forward_hook(hook)
    return found


def test_no_block_runs_twice_for_a_token_that_is_not_refused():
    model = ready(2)
    found = counted(model)
    speculate(model, torch.randint(23, (3, 5)), max_new_tokens=11, draft_steps=2, draft_tokens=4)
    assert found == {
        **{(step, 5): 3 * 5 * 2 + (0 if step < 2 else 3 * 10 * 2) for step in range(4)},  # two rounds, five inputs each
        **{(step, 1): 3 * 10 * 2 for step in range(2)},
    }


@pytest.mark.parametrize("draft_steps", [1, 2, 3])
def test_each_input_of_a_round_takes_each_step_once(draft_steps):
    model, batch = model_of(), 2
    found = counted(model)
    done = speculate(model, torch.randint(23, (batch, 7)), max_new_tokens=9, draft_steps=draft_steps, draft_tokens=3)
    rows = {step: sum(count for (of, _), count in found.items() if of == step) for step in range(4)}
    assert len(set(rows.values())) == 1
    assert all((step, 1) in found for step in range(draft_steps))
    num_inputs = rows[0] / len(model.core.stack.blocks) / batch - 7
    assert done.num_drafted / batch < num_inputs <= done.num_drafted / batch + 8  # one input more for each round


class Ranked(rd.NextTokenRule):
    """The likeliest token at 2/3, the next at 1/3: a regular grid of numbers draws them exactly."""

    def probabilities(self, logits, seen, seen_mask=None):
        shares = torch.tensor([2 / 3, 1 / 3], dtype=logits.dtype).expand(len(logits), -1)
        return torch.zeros_like(logits).scatter(-1, logits.topk(2).indices, shares)

    def choose(self, logits, seen, seen_mask, uniforms):
        return draw(self.probabilities(logits, seen, seen_mask), uniforms())


def exact(model, prompt, num_new: int, choose: rd.NextTokenRule) -> dict[tuple[int, ...], float]:
    """The chance of each continuation at full depth, without a cache."""
    chances = {(): 1.0}
    for _ in range(num_new):
        seen = torch.cat([prompt.expand(len(chances), -1), torch.tensor(list(chances)).long()], dim=1)
        new = choose.probabilities(model(seen)[:, -1].detach(), seen).tolist()
        chances = {
            (*text, token): chance * share
            for (text, chance), shares in zip(chances.items(), new, strict=True)
            for token, share in enumerate(shares)
            if share > 0
        }
    return chances


class Scripted:
    """Gives one row numbers that were written down."""

    def __init__(self, numbers):
        self.numbers = iter(numbers)

    def uniforms(self, rows):
        return torch.tensor([next(self.numbers)], dtype=torch.float64)


def midpoints(count: int) -> list[float]:
    return [(i + 0.5) / count for i in range(count)]


@pytest.mark.parametrize("seed", [4, 11])
def test_random_text_follows_the_distribution_of_full_depth_exactly(monkeypatch, seed):
    """Over a grid that tries every way in which a draft, its test and the rest can come out.

    One model wants a draft half as often as it is made, of the other's refused drafts two tokens remain.
    """
    model, prompt = model_of(layout=rd.Layout(0, 1, 2, 1), seed=seed, vocab_size=5), torch.tensor([[1, 4]])
    found, rates = Counter(), Counter()
    # What remains of a refused draft are halves or thirds.
    grid = list(itertools.product([0.6], midpoints(3), midpoints(2), midpoints(6), midpoints(3)))
    for numbers in grid:
        monkeypatch.setattr(writing, "RowStreams", lambda *_, numbers=numbers: Scripted(numbers))
        done = speculate(model, prompt, max_new_tokens=3, draft_steps=1, draft_tokens=1, choose=Ranked())
        found[tuple(done.tokens[0, 2:].tolist())] += 1
        rates[done.acceptance_rate] += 1
    (first,) = {text[0] for text in found}
    chances = exact(model, torch.cat([prompt, torch.tensor([[first]])], dim=1), 2, Ranked())
    assert found == {(first, *text): round(len(grid) * chance) for text, chance in chances.items()}
    assert min(rates[0.0], rates[1.0]) > len(grid) / 5


@given(st.integers(1, 6), st.data())
def test_what_is_accepted_and_what_remains_make_the_wanted_distribution(size, data):
    shares = st.lists(st.integers(0, 8), min_size=size, max_size=size).filter(any)
    guess, chance = (torch.tensor(data.draw(shares), dtype=torch.float64) for _ in range(2))
    guess, chance = guess / guess.sum(), chance / chance.sum()
    made, grid = torch.zeros_like(chance), torch.tensor(midpoints(1000))[:, None]
    rest = remainder(guess[None], chance[None])[0]
    for token in guess.nonzero()[:, 0]:
        drafts = token.expand(1000, 1)
        share = num_accepted(drafts, guess.expand(1000, 1, -1), chance.expand(1000, 1, -1), grid).double().mean()
        torch.testing.assert_close(share, (chance[token] / guess[token]).clamp(max=1), atol=1e-3, rtol=0)
        made[token] += guess[token] * share
        made += guess[token] * (1 - share) * rest / rest.sum()
    torch.testing.assert_close(made, chance, atol=2e-3, rtol=0)


def test_nothing_is_left_of_two_distributions_that_rounding_tells_apart():
    guess = torch.tensor([[0.0, 0.5, 0.5]])
    assert draw(remainder(guess, guess), torch.tensor([0.0])).tolist() == [1]


def test_rows_that_wait_for_each_other_keep_their_distribution():
    """Of so many rows one always has its first draft refused: the others' accepted drafts are drafted again."""
    model, num_rows = model_of(layout=rd.Layout(0, 1, 3, 1), seed=1, vocab_size=4), 6000
    choose, prompt = rd.Sampling(temperature=2.0, top_k=3, repetition_penalty=1.5), torch.tensor([[1, 3, 3]])
    done = speculate(
        model, prompt.expand(num_rows, -1), max_new_tokens=3, draft_steps=1, draft_tokens=2, choose=choose, seed=0
    )
    assert 0 < done.acceptance_rate < 1
    found = Counter(map(tuple, done.tokens[:, 3:].tolist()))
    chances = exact(model, prompt, 3, choose)
    assert set(found) <= set(chances)
    for text, chance in chances.items():
        assert abs(found[text] - num_rows * chance) < 4 * (num_rows * chance) ** 0.5 + 2, text


def test_a_seed_repeats_a_text_and_no_global_number_is_drawn():
    model, prompt = model_of(), torch.randint(23, (3, 5), dtype=torch.int16)
    arguments = {"max_new_tokens": 8, "draft_steps": 2, "choose": rd.Sampling(temperature=3.0), "mask": PADDED}
    state = torch.get_rng_state()
    first, again, other = (speculate(model, prompt, seed=seed, **arguments) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert first.tokens.dtype == rd.generate(model, prompt, max_new_tokens=1).dtype
    assert torch.equal(first.tokens, again.tokens)
    assert not torch.equal(first.tokens, other.tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_are_spoken_too(dtype):
    model, prompt = ready(1).to(dtype), torch.randint(23, (2, 5))
    done = speculate(model, prompt, max_new_tokens=6, draft_steps=1, choose=rd.Sampling(), seed=0)
    assert done.tokens.shape == (2, 11)
    assert done.acceptance_rate > 0.8  # drafts are right, but for rounding


REFUSED = {
    "draft_steps is 4, but must be fewer than the 4 steps": {"draft_steps": 4},
    "draft_steps is 2, but must be fewer than the 2 steps": {"draft_steps": 2, "num_steps": 2},
    "draft_steps is 0": {"draft_steps": 0},
    "draft_tokens is 0": {"draft_tokens": 0},
    "max_new_tokens is 0": {"max_new_tokens": 0},
    "need 25 positions, but the model learned 24": {"max_new_tokens": 21},
    "padding at the end of rows \\[1\\]": {"mask": torch.tensor([[True] * 5, [True] * 4 + [False]])},
    "not empty": {"prompt": torch.zeros(2, 0).long()},
    "must lie in 0 to 22": {"prompt": torch.full((2, 5), 23)},
}


def test_what_cannot_be_is_refused_and_breaks_nothing():
    model, arguments = model_of(), {"prompt": torch.randint(23, (2, 5)), "max_new_tokens": 5, "draft_steps": 2}
    for message, changes in REFUSED.items():
        with pytest.raises(ValueError, match=message):
            speculate(model, **{**arguments, **changes})
    assert torch.equal(speculate(model, **arguments).tokens, slowly(model, arguments["prompt"], 5))


@pytest.mark.parametrize("step", [1, 2])
def test_logits_that_are_not_numbers_are_refused_wherever_they_appear(step):
    """Those of a draft, by the second of its two steps, and those that verify, by the third step."""
    model, arguments = model_of(), {"prompt": torch.randint(23, (2, 5)), "max_new_tokens": 5, "draft_steps": 2}
    expected = speculate(model, **arguments).tokens
    calls = Counter()

    def spoil(stack, inputs, output):
        calls[inputs[2]] += 1
        return output * torch.nan if calls[step] == 2 else output  # at the first time it reads the prompt

    hook = model.core.stack.register_forward_hook(spoil)
    with pytest.raises(ValueError, match="logits hold NaN in rows \\[0, 1\\]"):
        speculate(model, **arguments)
    hook.remove()
    assert torch.equal(speculate(model, **arguments).tokens, expected)
