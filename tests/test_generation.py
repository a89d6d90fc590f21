"""Generated text against a loop without a cache, and what a row must not notice of its neighbours."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from battery import METHODS, NO_PREFIX, SKIPS, blocks_of, every_method, every_method_but, lively, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import BUILDS, Script, every_policy, read_slowly
from strategies import VOCAB_SIZE, depths, few, layouts, recipes, seeds, shares, tokens
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import recurrent_depth as rd
from recurrent_depth.draw import RowStreams, draw

NEW = 4
LAYOUT = rd.Layout(1, 1, 4, 1)
EXITS = {
    "none": lambda: None,
    "gate": lambda: rd.GateClosed(0.4),
    "latent": lambda: rd.LatentConverged(0.5),
    "argmax": lambda: rd.ArgmaxStable(1),
}
CHOICES = {
    "greedy": rd.Greedy(),
    "greedy, no repetition": rd.Greedy(repetition_penalty=3.0),
    "all": rd.Sampling(),
    "filtered": rd.Sampling(temperature=0.8, top_k=15, top_p=0.95, min_p=0.01, repetition_penalty=1.5),
}
every_choice = pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
double = st.just(torch.float64)
any_build = st.sampled_from(sorted(BUILDS))
more = settings(few, max_examples=2 * few.max_examples)


class Prompts(NamedTuple):
    """Prompts for a model that is not yet built: how much of each row is padding, and its share of full depth."""

    tokens: Tensor
    padding: list[int]
    shares: list[float]

    @property
    def mask(self) -> Tensor:
        return torch.arange(self.tokens.shape[1])[None] >= torch.tensor(self.padding)[:, None]

    def alone(self) -> list[Tensor]:
        """Each row without its padding."""
        return [self.tokens[row : row + 1, padding:] for row, padding in enumerate(self.padding)]


@st.composite
def prompts(draw, batch=st.integers(1, 3)) -> Prompts:
    """Up to three rows of up to eight tokens; of each row some may be padding, but not all."""
    x = draw(tokens(batch, st.integers(1, 8)))
    batch, length = x.shape
    padding = draw(st.lists(st.integers(0, length - 1), min_size=batch, max_size=batch))
    return Prompts(x, padding, draw(shares(batch)))


def continued(prompt: Tensor, text: Tensor) -> list[list[int]]:
    """What was written behind the prompt, which is still there."""
    assert text[:, : prompt.shape[1]].equal(prompt)
    return text[:, prompt.shape[1] :].tolist()


def slowly(
    model: rd.RecurrentTransformer,
    prompt: Tensor,
    num_steps: int,
    choose: rd.NextTokenRule,
    streams: RowStreams,
    row: int,
) -> list[int]:
    """What follows the prompt of one row, by a forward over the whole text for each token, without a cache."""
    text = prompt
    for _ in range(NEW):
        chances = choose.probabilities(model(text, num_steps)[:, -1], text)
        text = torch.cat([text, draw(chances, streams.uniforms([row]))[:, None]], dim=1)
    return text[0, prompt.shape[1] :].tolist()


def some_model(build=rd.grt, seed: int = 1, layout: rd.Layout = LAYOUT, **changes) -> rd.RecurrentTransformer:
    torch.manual_seed(seed)
    return lively(tiny(build, layout, **changes)).double().eval()


def some_prompt(batch: int = 3, num_tokens: int = 4) -> Tensor:
    return torch.randint(VOCAB_SIZE, (batch, num_tokens), generator=torch.Generator().manual_seed(2))


@contextmanager
def counted(module: nn.Module) -> Iterator[list[int]]:
    """The rows times tokens of each call of a module."""
    seen: list[int] = []
    handle = module.register_forward_hook(lambda module, inputs, out: seen.append(out.shape[0] * out.shape[1]))
    yield seen
    handle.remove()


# The text


@every_method_but(NO_PREFIX)
@few
@given(recipes(layouts, double), prompts())
def test_greedy_text_is_what_a_loop_without_a_cache_writes(build, recipe, drawn):
    model = recipe.model(build)
    steps = depths(drawn.shares, model)
    found = rd.generate(model, drawn.tokens, max_new_tokens=NEW, num_steps=steps, mask=drawn.mask)
    for row, (written, alone) in enumerate(zip(continued(drawn.tokens, found), drawn.alone(), strict=True)):
        text = alone
        for _ in range(NEW):
            text = torch.cat([text, model(text, steps[row])[:, -1:].argmax(-1)], dim=1)
        assert written == text[0, alone.shape[1] :].tolist()


@every_method_but(SKIPS)
def test_full_depth_is_the_default_and_texts_differ(build):
    # Otherwise the law above would compare less than it seems to.
    model, prompt = some_model(build), some_prompt(8, 6)
    text = rd.generate(model, prompt, max_new_tokens=NEW)
    assert text.equal(rd.generate(model, prompt, max_new_tokens=NEW, num_steps=model.num_steps))
    written = continued(prompt, text)
    assert len({token for row in written for token in row}) > 1
    if model.num_steps > 1:
        assert continued(prompt, rd.generate(model, prompt, max_new_tokens=NEW, num_steps=1)) != written


@every_policy
@few
@given(recipes(layouts, double), any_build, prompts())
def test_greedy_text_under_a_policy_is_what_the_written_reference_chooses(case, recipe, build, drawn):
    model = recipe.model(BUILDS[build])
    steps, policy, length = depths(drawn.shares, model), case.make(model), drawn.tokens.shape[1]
    text = rd.generate(model, drawn.tokens, max_new_tokens=NEW, num_steps=steps, mask=drawn.mask, kv=policy)
    mask = torch.cat([drawn.mask, drawn.mask.new_ones(len(text), NEW - 1)], dim=1)
    script = Script(text[:, :-1], mask, [length + i for i in range(NEW)], [steps] * NEW)
    for row, written in enumerate(continued(drawn.tokens, text)):
        logits = read_slowly(model, script.alone(row), case.write(policy))[0, -NEW:]
        assert written == logits.argmax(-1).tolist()


@every_policy
@few
@pytest.mark.filterwarnings("ignore:exit is GateClosed, but this model has no gate")
@given(recipes(layouts, double), any_build, prompts(), st.sampled_from(sorted(EXITS)))
def test_a_row_of_a_padded_batch_is_the_row_alone(case, recipe, build, drawn, exit_rule):
    model, rule = recipe.model(BUILDS[build]), EXITS[exit_rule]()
    steps = depths(drawn.shares, model) if rule is None else [model.num_steps] * len(drawn.tokens)
    how = {"max_new_tokens": NEW, "kv": case.make(model), "exit": rule}
    found = rd.generate(model, drawn.tokens, num_steps=steps, mask=drawn.mask, **how)
    for row, (written, alone) in enumerate(zip(continued(drawn.tokens, found), drawn.alone(), strict=True)):
        assert continued(alone, rd.generate(model, alone, num_steps=steps[row], **how)) == [written]


def test_rows_of_different_depths_are_each_the_run_at_its_depth():
    model, prompt = some_model(), some_prompt()
    found = rd.generate(model, prompt, max_new_tokens=8, num_steps=[1, 4, 2])
    for row, steps in enumerate([1, 4, 2]):
        assert found[row : row + 1].equal(rd.generate(model, prompt[row : row + 1], max_new_tokens=8, num_steps=steps))


def test_a_row_may_go_deeper_than_trained():
    model, prompt = some_model(), some_prompt()
    with pytest.warns(UserWarning, match="6 steps asked for, but full depth is 4: deeper than trained"):
        found = rd.generate(model, prompt, max_new_tokens=NEW, num_steps=[6, 1, 5])
    with pytest.warns(UserWarning, match="deeper than trained"):
        wanted = [slowly(model, prompt[[i]], n, rd.Greedy(), RowStreams(1), 0) for i, n in enumerate([6, 1, 5])]
    assert continued(prompt, found) == wanted


@every_policy
@pytest.mark.parametrize("build", ["grt-llama", "naive-gpt2"])
def test_a_mask_of_ones_is_no_mask(case, build):
    model, prompt = some_model(BUILDS[build]), some_prompt()
    policy = case.make(model)
    wanted = rd.generate(model, prompt, max_new_tokens=NEW, kv=policy)
    for ones in (torch.ones_like(prompt), torch.ones_like(prompt).bool()):
        assert rd.generate(model, prompt, max_new_tokens=NEW, kv=policy, mask=ones).equal(wanted)


@pytest.mark.parametrize("build", BUILDS)
def test_padding_takes_no_position_and_is_never_looked_at(build):
    # Sixteen columns and four more pass the sixteen positions that the GPT-2 form has learned.
    model, prompt = some_model(BUILDS[build]), some_prompt(2, 16)
    mask = torch.arange(16)[None] >= torch.tensor([[4], [7]])
    found = rd.generate(model, prompt, max_new_tokens=5, mask=mask)
    other = rd.generate(model, prompt.where(mask, 0), max_new_tokens=5, mask=mask.int())
    assert found[:, 16:].equal(other[:, 16:])
    for row, real in enumerate(mask):
        assert found[row, 16:].equal(rd.generate(model, prompt[row : row + 1, real], max_new_tokens=5)[0, real.sum() :])


# Ends of rows


def cut(written: list[list[int]], stops: set[int]) -> tuple[list[list[int]], list[int]]:
    """Rows that end behind their first stop token, their last token repeated; and how long each is."""
    lengths = [next((i for i, token in enumerate(row, 1) if token in stops), len(row)) for row in written]
    longest = max(lengths)
    return [row[:end] + [row[end - 1]] * (longest - end) for row, end in zip(written, lengths, strict=True)], lengths


@more
@given(recipes(layouts, double), any_build, prompts(st.integers(3, 5)), st.sets(st.integers(0, 9)), st.booleans())
def test_a_row_ends_behind_its_first_stop_token_and_costs_nothing_more(recipe, build, drawn, which, masked):
    model, prompt = recipe.model(BUILDS[build]), drawn.tokens
    steps = depths(drawn.shares, model)
    how = {"max_new_tokens": 8, "num_steps": steps, "mask": drawn.mask if masked else None}
    written = continued(prompt, rd.generate(model, prompt, **how))
    flat = [token for row in written for token in row[:2]]
    stops = {flat[i % len(flat)] for i in which}
    with counted(model.core.stack) as seen:
        found = continued(prompt, rd.generate(model, prompt, stop_tokens=sorted(stops), **how))
    wanted, lengths = cut(written, stops)
    assert found == wanted
    # The prompt at once, then each token but the last, in each row so many times as it has steps.
    assert sum(seen) == sum(n * (prompt.shape[1] + length - 1) for n, length in zip(steps, lengths, strict=True))


def test_all_rows_may_end_at_once_and_stop_tokens_of_the_prompt_end_nothing():
    model, prompt = some_model(), some_prompt()
    first = rd.generate(model, prompt, max_new_tokens=1)
    everything = range(VOCAB_SIZE)
    assert rd.generate(model, prompt, max_new_tokens=9, stop_tokens=everything).equal(first)


@pytest.mark.parametrize("layout", [rd.Layout(1, 2, 4, 1), rd.Layout(0, 1, 3, 0), rd.Layout(2, 3, 1, 0)], ids=str)
def test_cached_decoding_runs_each_block_once_a_token_and_step(layout):
    model, prompt = some_model(layout=layout), some_prompt(3, 4)
    for block in blocks_of(model.core):
        with counted(block) as seen:
            rd.generate(model, prompt, max_new_tokens=7)
        assert seen == [3 * 4] * layout.num_steps + [3] * layout.num_steps * 6


# Streams


@every_choice
@few
@given(recipes(layouts, double), any_build, prompts(), seeds)
def test_a_stream_yields_what_generate_returns(choose, recipe, build, drawn, seed):
    model = recipe.model(BUILDS[build])
    stops = range(0, VOCAB_SIZE, 7)
    how = {"max_new_tokens": 8, "choose": choose, "seed": seed, "mask": drawn.mask, "stop_tokens": stops}
    how["num_steps"] = depths(drawn.shares, model)
    wanted = continued(drawn.tokens, rd.generate(model, drawn.tokens, **how))
    found = [new.tolist() for new in rd.stream(model, drawn.tokens, **how)]
    assert [list(row) for row in zip(*found, strict=True)] == wanted


def test_a_stream_computes_a_token_when_it_is_asked_for():
    model, prompt = some_model(), some_prompt(2, 4)
    with counted(model.core.stack) as seen:
        stream = rd.stream(model, prompt, max_new_tokens=3)
        costs = [sum(seen)]
        for new in stream:
            assert new.shape == (2,)
            assert torch.is_grad_enabled()  # the caller's own
            costs.append(sum(seen))
    assert costs == [0, 2 * 4 * 4, 2 * 4 * 5, 2 * 4 * 6]


def test_streams_of_one_model_do_not_disturb_each_other():
    model, prompt, policy = some_model(), some_prompt(), rd.KeepMean()
    other = prompt.flip(1)
    pair = [rd.stream(model, x, max_new_tokens=6, kv=policy) for x in (prompt, other)]
    together = [torch.stack(parts, dim=1) for parts in zip(*zip(*pair, strict=True), strict=True)]
    for x, found in zip((prompt, other), together, strict=True):
        assert torch.cat([x, found], dim=1).equal(rd.generate(model, x, max_new_tokens=6, kv=policy))


def test_what_a_stream_yields_is_the_callers():
    model, prompt = some_model(), some_prompt()
    stops = continued(prompt, rd.generate(model, prompt, max_new_tokens=1))[0]
    wanted = rd.generate(model, prompt, max_new_tokens=6, stop_tokens=stops)
    kept = []
    for new in rd.stream(model, prompt, max_new_tokens=6, stop_tokens=stops):
        kept.append(new.clone())
        new.fill_(0)
    assert torch.cat([prompt, torch.stack(kept, dim=1)], dim=1).equal(wanted)


# Chance


@every_choice
@few
@given(recipes(layouts, double), any_build, prompts(), seeds)
def test_each_row_is_drawn_from_its_own_numbers(choose, recipe, build, drawn, seed):
    model = recipe.model(BUILDS[build])
    steps = depths(drawn.shares, model)
    how = {"max_new_tokens": NEW, "num_steps": steps, "choose": choose, "seed": seed}
    found = rd.generate(model, drawn.tokens, mask=drawn.mask, **how)
    streams = RowStreams(len(steps), seed)
    for row, (written, alone) in enumerate(zip(continued(drawn.tokens, found), drawn.alone(), strict=True)):
        assert written == slowly(model, alone, steps[row], choose, streams, row)


def test_a_seed_repeats_the_text_and_without_one_it_is_new():
    model, prompt = some_model(), some_prompt()

    def text(seed: int | None) -> Tensor:
        return rd.generate(model, prompt, max_new_tokens=8, choose=rd.Sampling(temperature=9.0), seed=seed)

    assert text(7).equal(text(7))
    assert len({str(text(seed).tolist()) for seed in (7, 8, 9, None, None, None)}) == 6


def test_equal_prompts_in_a_batch_are_continued_differently():
    model = some_model()
    found = rd.generate(model, some_prompt(1).expand(6, -1), max_new_tokens=8, choose=rd.Sampling(9.0), seed=0)
    assert len({str(row) for row in found.tolist()}) == 6


def test_a_row_is_drawn_alike_whatever_its_neighbours_are_and_when_they_end():
    model, prompt = some_model(), some_prompt()
    how = {"max_new_tokens": 6, "choose": rd.Sampling(9.0), "seed": 3}
    wanted = rd.generate(model, prompt, **how)[1]
    others = prompt.flip(0)
    others[1] = prompt[1]
    assert rd.generate(model, others, **how)[1].equal(wanted)
    assert rd.generate(model, others[:2], num_steps=[1, 4], **how)[1].equal(wanted)
    stop = next(token for token in rd.generate(model, others, **how)[0, 4:].tolist() if token not in wanted)
    assert rd.generate(model, others, stop_tokens=[stop], **how)[1].equal(wanted)


def test_the_one_most_probable_token_is_the_greedy_choice():
    model, prompt = some_model(), some_prompt()
    found = rd.generate(model, prompt, max_new_tokens=6, choose=rd.Sampling(temperature=2.0, top_k=1))
    assert found.equal(rd.generate(model, prompt, max_new_tokens=6))


@pytest.mark.usefixtures("as_a_user_runs_it")  # the hook itself draws
@every_choice
@pytest.mark.parametrize("seed", [None, 3])
def test_no_global_random_number_is_drawn_or_read(choose, seed):
    model, prompt = some_model(), some_prompt()
    before, python = torch.get_rng_state(), random.getstate()
    found = rd.generate(model, prompt, max_new_tokens=4, choose=choose, seed=seed, exit=rd.GateClosed(0.4))
    assert torch.get_rng_state().equal(before)
    assert random.getstate() == python
    if seed is not None:
        torch.manual_seed(99)
        again = rd.generate(model, prompt, max_new_tokens=4, choose=choose, seed=seed, exit=rd.GateClosed(0.4))
        assert again.equal(found)


# What generating leaves as it was


def belongings(model: nn.Module) -> dict:
    """All that the modules hold, by identity: what a forward left there would show."""
    held = {(name, key): id(value) for name, part in model.named_modules() for key, value in vars(part).items()}
    inside = {
        (name, key, inner): id(kept)
        for name, part in model.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, dict)
        for inner, kept in value.items()
    }
    return {**held, **inside, "training": [part.training for part in model.modules()]}


@pytest.mark.filterwarnings("ignore:exit is KLConverged, but this model's router")
@every_method
def test_generating_is_deterministic_and_leaves_nothing_on_the_model(build):
    model, prompt = some_model(build), some_prompt()
    policy, rule = rd.KeepMean(), rd.KLConverged(0.1)
    before = [belongings(part) for part in (model, policy, rule)]
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    found = rd.generate(model, prompt, max_new_tokens=NEW, kv=policy, exit=rule)
    assert found.equal(rd.generate(model, prompt, max_new_tokens=NEW, kv=policy, exit=rule))
    assert [belongings(part) for part in (model, policy, rule)] == before
    assert all(weight.equal(weights[name]) for name, weight in model.state_dict().items())


def test_training_goes_on_after_generating():
    model, prompt = some_model().train(), some_prompt()
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"model is in training mode.*model.eval\(\)"):
            rd.generate(model, prompt, max_new_tokens=3, choose=rd.Sampling())
        assert model.training
        rd.next_token_loss(model(prompt), prompt).backward()
        model.zero_grad()


class Spy(rd.NextTokenRule):
    """Greedy; keeps the logits that it was given."""

    def __init__(self):
        self.logits: list[Tensor] = []

    def probabilities(self, logits, seen, seen_mask=None):
        return rd.Greedy().probabilities(logits, seen, seen_mask)

    def choose(self, logits, seen, seen_mask, uniforms):
        self.logits.append(logits)
        return rd.Greedy().choose(logits, seen, seen_mask, uniforms)


@pytest.mark.parametrize("frozen", [False, True])
def test_no_graph_is_kept_whether_or_not_gradients_are_enabled(frozen):
    model, prompt, spy = some_model().requires_grad_(not frozen), some_prompt(), Spy()
    with torch.enable_grad():
        found = rd.generate(model, prompt, max_new_tokens=NEW, choose=spy)
    assert [logits.shape for logits in spy.logits] == [(3, VOCAB_SIZE)] * NEW
    assert not any(logits.requires_grad for logits in spy.logits)
    with torch.inference_mode():
        assert rd.generate(model, prompt, max_new_tokens=NEW).equal(found)


# Dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_policy
def test_models_of_any_dtype_write_what_they_find_most_probable(dtype, case):
    model, prompt, spy = lively(tiny(), 0.1).to(dtype).eval(), some_prompt(), Spy()
    found = rd.generate(model, prompt, max_new_tokens=NEW, kv=case.make(model).to(dtype), choose=spy)
    assert {logits.dtype for logits in spy.logits} == {dtype}
    first, then = (model(found[:, :length])[:, -1].double() for length in (4, 5))
    assert (spy.logits[0] - first).abs().max() < 0.1
    assert first.gather(1, found[:, 4:5]).add(0.1).gt(first.amax(1, keepdim=True)).all()
    assert (spy.logits[1] - then).abs().max() < 1


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8], ids=str)
def test_text_of_small_integers_holds_every_token(dtype):
    # A byte holds every token of the prompt, but not the vocabulary's last.
    model, prompt = some_model(vocab_size=300), some_prompt()
    choose = rd.Sampling(temperature=1e9)
    wanted = rd.generate(model, prompt, max_new_tokens=12, choose=choose, seed=0)
    assert wanted.max() > 255
    found = rd.generate(model, prompt.to(dtype), max_new_tokens=12, choose=choose, seed=0)
    assert found.tolist() == wanted.tolist()
    assert found.dtype == (torch.int32 if dtype == torch.int32 else torch.int64)
    assert {new.dtype for new in rd.stream(model, prompt.to(dtype), max_new_tokens=2)} == {found.dtype}


class CountingOperations(TorchDispatchMode):
    """How many operations are run."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("rule", [None, rd.KLConverged(below=1e-30)], ids=["all steps", "asked"])
def test_a_token_takes_as_many_operations_whatever_came_before(padded, rule):
    model, counts = some_model(context_length=128), []
    mask = torch.arange(4)[None] >= torch.tensor([[0], [int(padded)]])
    stream = rd.stream(model, X, max_new_tokens=100, mask=mask if padded else None, exit=rule)
    for _ in range(100):
        with CountingOperations() as operations:
            next(stream)
        counts.append(operations.count)
    assert len(set(counts[1:])) == 1


# What is refused


X = some_prompt(2, 4)
BAD = {
    "no tokens": ({"prompt": X[:, :0]}, r"tokens must be \(batch, token\) and not empty, got shape \(2, 0\)"),
    "no rows": ({"prompt": X[:0]}, r"not empty, got shape \(0, 4\)"),
    "one axis": ({"prompt": X[0]}, r"tokens must be \(batch, token\).*got shape \(4,\)"),
    "floats": ({"prompt": X.double()}, "tokens must be integers, got torch.float64"),
    "a list": ({"prompt": X.tolist()}, "tokens must be a tensor"),
    "no such token": ({"prompt": X + VOCAB_SIZE}, "tokens must lie in 0 to 22"),
    "nothing new": ({"max_new_tokens": 0}, "max_new_tokens is 0, but must be a whole number of at least 1"),
    "half a token": ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5"),
    "no steps": ({"num_steps": 0}, "num_steps is 0, but must be a whole number of at least 1"),
    "half a step": ({"num_steps": 1.5}, "num_steps is 1.5"),
    "a row without steps": ({"num_steps": [2, 0]}, r"num_steps\[1\] is 0, but must be a whole number of at least 1"),
    "too few depths": ({"num_steps": [2]}, "num_steps holds 1 depths.* one for each of the 2 rows"),
    "too many depths": ({"num_steps": [1, 2, 3]}, "num_steps holds 3 depths.* one for each of the 2 rows"),
    "a short mask": ({"mask": torch.ones(2, 3).bool()}, r"mask must be \(2, 4\) like tokens, got \(2, 3\)"),
    "a long mask": ({"mask": torch.ones(2, 5).bool()}, r"mask must be \(2, 4\) like tokens, got \(2, 5\)"),
    "a mask for one row": ({"mask": torch.ones(1, 4).bool()}, r"mask must be \(2, 4\) like tokens, got \(1, 4\)"),
    "a mask of floats": ({"mask": torch.ones(2, 4)}, "mask must be boolean or of integers"),
    "padding on the right": ({"mask": torch.tensor([[1] * 4, [1, 1, 0, 0]])}, r"padding at the end of rows \[1\]"),
    "only padding": ({"mask": torch.tensor([[0] * 4, [1] * 4])}, r"padding at the end of rows \[0\]"),
    "too long": ({"max_new_tokens": 14}, "need 17 positions, but the model learned 16; ask for 13 at most"),
    "exit at own depths": ({"exit": rd.GateClosed(), "num_steps": [1, 2]}, r"num_steps is \[1, 2\].* exit rule"),
    "one stop token, no list": ({"stop_tokens": 5}, "stop_tokens is 5, but must be a list of token ids"),
    "half a stop token": ({"stop_tokens": [2.5]}, "a stop token is 2.5, but must be a whole number"),
    "no seed": ({"seed": 1.5}, "seed is 1.5, but must be a whole number"),
}


@pytest.mark.usefixtures("as_a_user_runs_it")
@pytest.mark.parametrize("changes, message", BAD.values(), ids=BAD)
def test_bad_arguments_are_refused_by_the_call_itself(changes, message):
    model = some_model()
    arguments = {"prompt": X, "max_new_tokens": 4, **changes}
    with counted(model.core.stack) as seen:
        for call in (rd.generate, rd.stream):
            with pytest.raises(ValueError, match=message):
                call(model, **arguments)
    assert seen == []


def test_a_text_may_fill_all_positions():
    model = some_model()
    assert rd.generate(model, X, max_new_tokens=13).shape == (2, 17)  # the last token is never read
    mask = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    assert rd.generate(model, X, max_new_tokens=14, mask=mask).shape == (2, 18)


def test_equal_depths_go_with_an_exit_rule():
    model = some_model()
    found = rd.generate(model, X, max_new_tokens=6, num_steps=[3, 3], exit=rd.ExitAfter(2))
    assert found.equal(rd.generate(model, X, max_new_tokens=6, num_steps=3, exit=rd.ExitAfter(2)))


def test_logits_that_are_no_numbers_are_refused_and_all_stays_usable():
    model = some_model(METHODS["naive-llama-untied"])
    wanted = rd.generate(model, X, max_new_tokens=6)
    good = model.head.get_parameter("linear.weight").detach().clone()
    model.head.get_parameter("linear.weight").data[3] = torch.nan
    with pytest.raises(ValueError, match=r"logits hold NaN in rows \[0, 1\]"):
        rd.generate(model, X, max_new_tokens=6)
    model.head.get_parameter("linear.weight").data.copy_(good)
    assert rd.generate(model, X, max_new_tokens=6).equal(wanted)


def test_a_row_that_breaks_does_so_when_its_token_is_asked_for():
    model, prompt = some_model(METHODS["naive-llama-untied"]), some_prompt()
    how = {"max_new_tokens": 6, "num_steps": [1, 4, 2], "choose": rd.Sampling(9.0), "seed": 2}
    written = continued(prompt, rd.generate(model, prompt, **how))
    assert written[2][1] not in {written[0][0], written[1][0], written[2][0], *prompt.flatten().tolist()}
    model.embed.token.weight.data[written[2][1]] = torch.nan
    stream = rd.stream(model, prompt, **how)
    assert [next(stream)[2].item(), next(stream)[2].item()] == written[2][:2]
    # Row 1 may have drawn that token too; row 0, the shallowest and so the last of the batch, has not.
    with pytest.raises(ValueError, match=r"logits hold NaN in rows \[(1, )?2\]"):
        next(stream)
