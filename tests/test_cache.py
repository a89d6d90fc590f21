"""What may be done to a cache between forwards, what it refuses, and what a forward that fails leaves: nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from battery import gradients, lively, tiny
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reading import BUILDS, POLICIES, Script, attention, every_build, every_policy, grouped, read
from strategies import Recipe, depths, few, loops, recipes, seeds, shares
from torch import Tensor, nn
from torch.testing import assert_close
from user_parts import LateBlocks

import recurrent_depth as rd
from recurrent_depth import cache as cache_module
from recurrent_depth.compiled_decoding import decode

LAYOUT = rd.Layout(1, 2, 3, 1)
ROOM = 48
any_build = st.sampled_from(sorted(BUILDS))
double = st.just(torch.float64)
fewer = settings(few, max_examples=max(2, few.max_examples // 2))


def long(build):
    """The same with room for the longest text that is drawn."""
    return lambda layout, **sizes: BUILDS[build](layout, **{**sizes, "context_length": ROOM})


class BrokenError(Exception):
    """What a block raises in the middle of a forward."""


@contextmanager
def breaking(model: rd.RecurrentTransformer, at: int) -> Iterator[None]:
    """All keys and values are NaN, and an error comes in step `at`, or else behind the coda."""
    count = 0

    def fail(*_):
        raise BrokenError

    def fail_in_time(*_):
        nonlocal count
        count += 1
        if count > at:
            raise BrokenError

    inside = [m for m in model.modules() if isinstance(m, rd.Attention)]
    hooks = [one.qkv.register_forward_hook(lambda m, inputs, out: out * float("nan")) for one in inside]
    hooks += [model.core.stack.register_forward_hook(fail_in_time), model.norm.register_forward_hook(fail)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class Snapshot(NamedTuple):
    """All that a cache knows of the tokens seen."""

    counts: tuple
    mask: Tensor | None
    held: dict[object, Tensor]


def snapshot(cache: rd.DepthCache) -> Snapshot:
    both = {(key, i): slot.both[i] for key, slot in cache.slots.items() for i in (0, 1)}
    held = {key: buffer[:, :, : cache.length].detach().clone() for key, buffer in {**both, **cache.valid}.items()}
    counts = (cache.length, cache.batch, cache.num_copies)
    return Snapshot(counts, None if cache.mask is None else cache.mask.clone(), held)


def assert_same(found: Snapshot, expected: Snapshot) -> None:
    assert found.counts == expected.counts
    assert (found.mask is None) == (expected.mask is None)
    assert found.mask is None or torch.equal(found.mask, expected.mask)
    assert found.held.keys() == expected.held.keys()
    assert all(torch.equal(found.held[key], held) for key, held in expected.held.items())


class Chunk(NamedTuple):
    """What one row read in one forward: ids, which of them are real, and its depth."""

    ids: list[int]
    real: list[bool]
    num_steps: int


class Book:
    """What rows of a cache have read, by hand: lists of chunks, copied and cut as the cache is."""

    def __init__(self, model: rd.RecurrentTransformer, cache: rd.DepthCache, batch: int):
        self.model, self.cache, self.rows = model, cache, [[] for _ in range(batch)]

    @property
    def length(self) -> int:
        return sum(len(chunk.ids) for chunk in self.rows[0])

    @property
    def mask(self) -> Tensor:
        return torch.tensor([[real for chunk in row for real in chunk.real] for row in self.rows])

    def crop(self, length: int) -> None:
        self.rows = [list(cut(row, length)) for row in self.rows]

    def alone(self, row: int, policy: rd.KVStepPolicy) -> Tensor:
        """The logits of a row's real tokens, read by a fresh cache, without the padding."""
        kept = [chunk for chunk in self.rows[row] if any(chunk.real)]
        lengths = torch.tensor([sum(chunk.real) for chunk in kept])
        ids = [i for chunk in kept for i, real in zip(chunk.ids, chunk.real, strict=True) if real]
        script = Script(torch.tensor([ids]), None, lengths.cumsum(0).tolist(), [[chunk.num_steps] for chunk in kept])
        return read(self.model, script, rd.DepthCache(policy))[0]


def cut(row: list[Chunk], length: int) -> Iterator[Chunk]:
    for ids, real, num_steps in row:
        if length > 0:
            yield Chunk(ids[:length], real[:length], num_steps)
        length -= len(ids)


class Extend(NamedTuple):
    """Some tokens more, of which a mask hides some; depths are shares of full depth."""

    seed: int
    num_tokens: int
    shares: list[float]
    holes: float
    differentiable: bool

    def do(self, book: Book) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        size = (len(book.rows), self.num_tokens)
        x = torch.randint(23, size, generator=generator)
        real = torch.rand(size, generator=generator) >= self.holes
        num_steps = [depths(self.shares, book.model)[row % len(self.shares)] for row in range(size[0])]
        for row, *chunk in zip(book.rows, x.tolist(), real.tolist(), num_steps, strict=True):
            row.append(Chunk(*chunk))
        with torch.set_grad_enabled(self.differentiable):
            mask = book.mask if self.holes else None
            return rd.extend(
                book.model, x, book.cache, num_steps if len(set(num_steps)) > 1 else num_steps[0], mask=mask
            )


class Fail(NamedTuple):
    """A forward that fails, with NaNs all over the place."""

    num_tokens: int
    at: int
    differentiable: bool

    def do(self, book: Book) -> None:
        before = snapshot(book.cache)
        x = torch.zeros(len(book.rows), self.num_tokens, dtype=torch.long)
        with breaking(book.model, self.at), torch.set_grad_enabled(self.differentiable), pytest.raises(BrokenError):
            rd.extend(book.model, x, book.cache)
        assert_same(snapshot(book.cache), before)


class Crop(NamedTuple):
    """A share of the tokens is forgotten, the last ones."""

    share: float

    def do(self, book: Book) -> None:
        length = round(self.share * book.length)
        book.crop(length)
        book.cache.crop(length)


class Select(NamedTuple):
    """Rows, as shares of the batch; some more than once, some not at all."""

    shares: list[float]

    def do(self, book: Book) -> None:
        rows = [int(share * (len(book.rows) - 1) + 0.5) for share in self.shares]
        if book.cache.batch is not None:
            book.rows = [list(book.rows[row]) for row in rows]
            book.cache.select(torch.tensor(rows))


class Repeat(NamedTuple):
    """Each row twice, one behind the other."""

    def do(self, book: Book) -> None:
        if book.cache.batch is not None and len(book.rows) < 4:
            book.rows = [list(row) for row in book.rows for _ in range(2)]
            book.cache.repeat(2)


class Move(NamedTuple):
    """To where it is: nothing changes."""

    def do(self, book: Book) -> None:
        assert book.cache.to("cpu") is book.cache


extensions = st.builds(
    Extend, seeds, st.integers(1, 4), shares(2), st.sampled_from([0, 0.4]), st.sampled_from([False, False, True])
)
operations = st.one_of(
    extensions,
    st.builds(Fail, st.integers(1, 4), st.integers(0, 4), st.booleans()),
    st.builds(Crop, st.floats(0, 1)),
    st.builds(Select, st.lists(st.floats(0, 1), min_size=1, max_size=3)),
    st.builds(Repeat),
    st.builds(Move),
)
programs = st.tuples(extensions, st.lists(operations, max_size=6), extensions).map(lambda o: [o[0], *o[1], o[2]])

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.05}
"""Of the largest logit. The models are lively, and the last digits of half precision with them."""


def run(model: rd.RecurrentTransformer, cache: rd.DepthCache, program: list, tolerance: float) -> None:
    """Does it all; at the end each row's last logits are those of the row alone, which saw only what was kept."""
    book, last = Book(model, cache, 2), torch.empty(0)
    for operation in program:
        last = operation.do(book)
        assert (cache.length, cache.batch or 2) == (book.length, len(book.rows))
    assert last.isfinite().all()
    for row, logits in enumerate(last):
        real = torch.tensor(book.rows[row][-1].real)
        if real.any():
            expected = book.alone(row, cache.policy)[-int(real.sum()) :]
            assert_close(logits[real], expected, atol=tolerance * expected.abs().max().item(), rtol=0)


def extend(seed: int, num_tokens: int, shares=(1.0, 1.0), holes=0.0, differentiable=False) -> Extend:
    return Extend(seed, num_tokens, list(shares), holes, differentiable)


DEEPER_FAILS = [extend(0, 3, (0.0, 0.0)), Fail(2, 2, False), extend(1, 1, (0.0, 0.5)), extend(2, 2)]
FIRST_FAILS = [Fail(3, 1, False), Fail(2, 4, True), extend(0, 3, holes=0.4), Fail(1, 4, False), extend(1, 2)]
WRITTEN_AFTER_GRADIENTS = [
    extend(0, 4, differentiable=True),
    Crop(0.5),
    extend(1, 1),
    extend(2, 2, differentiable=True),
]
RECIPE = Recipe(LAYOUT, (16, 4), torch.float64, 0)


@every_policy
@few
@given(recipes(loops, double), any_build, programs, st.sampled_from([None, None, ROOM]), st.booleans())
@example(RECIPE, "grt-llama", DEEPER_FAILS, None, False)
@example(RECIPE, "grt-gpt2", FIRST_FAILS, ROOM, True)
@example(RECIPE, "grt-llama", WRITTEN_AFTER_GRADIENTS, None, False)
def test_whatever_is_done_to_a_cache_each_row_reads_on_as_alone(case, recipe, build, program, max_tokens, whole):
    # With `decode` in place a single token sees the whole buffer under a mask, as compiled decoding does. The other
    # caches start with room for two, so that they grow again and again.
    model = recipe.model(long(build))
    model.decode = decode if whole else None
    with patch.object(cache_module, "SMALLEST", 2):
        run(model, rd.DepthCache(case.make(model), max_tokens=max_tokens), program, 1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("policy", ["all", "mean", "two-in-turn"])
@fewer
@given(recipes(loops), any_build, programs, st.sampled_from([None, ROOM]))
def test_a_cache_holds_the_dtype_of_the_model(policy, dtype, recipe, build, program, max_tokens):
    model = recipe._replace(dtype=dtype).model(long(build))
    cache = rd.DepthCache(POLICIES[policy].make(model), max_tokens=max_tokens)
    run(model, cache, program, TOLERANCES[dtype])
    assert {buffer.dtype for slot in cache.slots.values() for buffer in slot.both} == {dtype}


def language_model(form=rd.GPT2Form, dtype=torch.float64, **sizes) -> rd.RecurrentTransformer:
    return lively(tiny(form=form, layout=LAYOUT, **sizes)).to(dtype).eval().requires_grad_(False)


def some_tokens(batch: int = 2, num_tokens: int = 8) -> Tensor:
    return torch.randint(23, (batch, num_tokens))


@every_policy
@every_build
@torch.no_grad()
def test_beams_that_are_permuted_by_hand_go_on_as_the_permuted_batch(build, case):
    model, prompts, new = lively(tiny(build, LAYOUT)).double().eval(), some_tokens(2, 4), some_tokens(4, 3)
    mask, parents = torch.arange(4)[None] >= torch.tensor([[0], [2]]), torch.tensor([1, 1, 3, 2])
    policy = case.make(model)
    cache, fresh = rd.DepthCache(policy), rd.DepthCache(policy)
    rd.extend(model, prompts, cache, mask=mask)
    cache.repeat(2)
    rd.extend(model, new[:, :1], cache)
    cache.select(parents)
    found = rd.extend(model, new[:, 1:], cache)
    rd.extend(model, prompts.repeat_interleave(2, 0)[parents], fresh, mask=mask.repeat_interleave(2, 0)[parents])
    rd.extend(model, new[parents, :1], fresh)
    assert_close(found, rd.extend(model, new[:, 1:], fresh), rtol=1e-9, atol=1e-9)
    assert torch.equal(cache.mask, fresh.mask)


@torch.no_grad()
def test_rows_may_be_chosen_by_booleans():
    model, x, cache = language_model(), some_tokens(3), rd.DepthCache()
    rd.extend(model, x[:, :5], cache)
    cache.select(torch.tensor([True, False, True]))
    assert cache.batch == 2
    assert_close(rd.extend(model, x[[0, 2], 5:], cache), model(x[[0, 2]])[:, 5:])


@torch.no_grad()
def test_a_cache_that_grows_by_doubling_holds_what_one_of_fixed_capacity_holds():
    model, x = language_model(rd.LlamaForm), some_tokens(2, 140)
    growing, fixed = rd.DepthCache(rd.KeepMean()), rd.DepthCache(rd.KeepMean(), max_tokens=140)
    for begin, end, capacity in ((0, 60, 64), (60, 64, 64), (64, 65, 128), (65, 140, 256)):
        found = [rd.extend(model, x[:, begin:end], cache) for cache in (growing, fixed)]
        assert_close(*found, rtol=1e-12, atol=1e-12)
        assert (growing.capacity, fixed.capacity) == (capacity, 140)
        for cache in (growing, fixed):
            sizes = [buffer.nbytes for slot in cache.slots.values() for buffer in slot.both]
            assert cache.num_bytes == sum(sizes) == 2 * 4 * 2 * cache.capacity * 16 * 8
    assert_close(snapshot(growing).held, snapshot(fixed).held, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_length_counts_tokens_seen_and_is_0_before_any():
    model, cache = language_model(), rd.DepthCache(rd.KeepMean())
    empty = (0, None, None, 0, 0, 0)

    def seen() -> tuple:
        return (cache.length, cache.batch, cache.mask, cache.num_copies, cache.num_bytes, cache.capacity)

    assert seen() == empty
    rd.extend(model, some_tokens(4, 5), cache)
    rd.extend(model, some_tokens(4, 1), cache)
    assert seen() == (6, 4, None, 1, 2 * 4 * 4 * 64 * 16 * 8, 64)
    cache.crop(0)
    assert (cache.length, cache.batch, cache.capacity) == (0, 4, 64)
    cache.reset()
    assert seen() == empty


@torch.no_grad()
def test_every_block_finds_the_same_length_all_through_a_forward():
    model, cache, seen = language_model(), rd.DepthCache(), []
    for one in model.modules():
        if isinstance(one, rd.Attention):
            one.register_forward_hook(lambda *_: seen.append(cache.length))
    for new, length in ((5, 0), (1, 5), (2, 6)):
        rd.extend(model, some_tokens(1, new), cache)
        assert seen == [length] * LAYOUT.executed
        seen.clear()


@every_policy
@torch.no_grad()
def test_nothing_lives_in_modules(case):
    model, cache = language_model(), rd.DepthCache(case.make(language_model()))
    weights, before = (
        {k: v.clone() for k, v in model.state_dict().items()},
        [attributes(model), attributes(cache.policy)],
    )
    rd.extend(model, some_tokens(), cache, mask=torch.ones(2, 8).bool())
    assert [attributes(model), attributes(cache.policy)] == before
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in weights.items())


def attributes(model: nn.Module) -> dict[str, list[str]]:
    """What each module holds beside its parts, and which tensors it has."""
    return {
        name: [*sorted(vars(module)), *module._parameters, *module._buffers]
        + [key for key, value in vars(module).items() if isinstance(value, Tensor)]
        for name, module in model.named_modules()
    }


@torch.no_grad()
def test_a_cache_moves_to_a_device_and_a_model_on_another_is_refused():
    # There is no second device here that computes; the meta device stands for one.
    model, cache, x = language_model(), rd.DepthCache(), some_tokens()
    rd.extend(model, x[:, :4], cache)
    num_bytes = cache.num_bytes
    assert cache.to("meta").num_bytes == num_bytes
    assert {buffer.device.type for slot in cache.slots.values() for buffer in slot.both} == {"meta"}
    with pytest.raises(ValueError, match="on meta"):
        rd.extend(model, x[:, 4:], cache)


@pytest.mark.parametrize("deeper", [5, [5, 2]], ids=str)
@torch.no_grad()
def test_more_steps_than_full_depth_warn_and_get_copies_of_their_own(deeper):
    model, cache, x = language_model(), rd.DepthCache(), some_tokens()
    found = []
    for new in x.split([5, 3], dim=1):
        with pytest.warns(UserWarning, match="deeper than trained"):
            found.append(rd.extend(model, new, cache, deeper))
    with pytest.warns(UserWarning, match="deeper than trained"):
        expected = model(x, deeper)
    assert_close(torch.cat(found, dim=1), expected)
    assert (cache.num_copies, len(cache.slots)) == (5, 1 + 2 * 5 + 1)


@torch.no_grad()
def test_64_steps_of_one_block_decode_as_they_read():
    model, x = lively(tiny(layout=rd.Layout(1, 1, 64, 1)), 0.1).double().eval(), some_tokens()
    cache = rd.DepthCache()
    found = [rd.extend(model, new, cache) for new in x.split([6, 1, 1], dim=1)]
    assert_close(torch.cat(found, dim=1), model(x), rtol=1e-8, atol=1e-8)
    assert cache.num_copies == 64


@torch.no_grad()
def test_blocks_that_not_every_step_runs_leave_copies_where_they_ran():
    # Blocks run in steps 1 and 3 alone: with one step in none, and of such a token later ones find nothing.
    model, x = (
        lively(tiny(layout=rd.Layout(1, 1, 4, 1), update=lambda dim: LateBlocks())).double().eval(),
        some_tokens(),
    )
    for num_steps in (1, 2, 4, [4, 1]):
        cache = rd.DepthCache()
        found = [rd.extend(model, new, cache, num_steps) for new in x.split([5, 3], dim=1)]
        assert_close(torch.cat(found, dim=1), model(x, num_steps))
    mean = rd.DepthCache(rd.KeepMean())
    rd.extend(model, x, mean)
    copies = [slot for key, slot in cache.slots.items() if key.part == "core"]
    (one,) = [slot for key, slot in mean.slots.items() if key.part == "core"]
    expected = torch.stack([slot.keys[0, :, 0] for slot in copies]).mean(0)
    assert_close(one.keys[0, :, 0], expected)  # a first token sees itself alone, whatever is kept


@torch.no_grad()
def test_tokens_that_ran_no_block_are_holes_to_later_ones():
    model, x = (
        lively(tiny(layout=rd.Layout(0, 1, 2, 0), update=lambda dim: LateBlocks())).double().eval(),
        some_tokens(),
    )
    model.embed.position.weight.zero_()
    cache, without = rd.DepthCache(), rd.DepthCache()
    rd.extend(model, x[:, :3], cache, 2)
    rd.extend(model, x[:, :3], without, 2)
    rd.extend(model, x[:, 3:6], cache, 1)
    assert_close(rd.extend(model, x[:, 6:], cache, 2), rd.extend(model, x[:, 6:], without, 2))


# Gradients


@every_build
@few
@given(recipes(loops, double), st.sets(st.integers(1, 5), max_size=2), st.sampled_from([None, 1, 2]), shares(2))
def test_gradients_through_a_cache_that_keeps_all_are_those_of_one_forward(build, recipe, cuts, grad_steps, drawn):
    model, x = recipe.model(build), some_tokens(2, 6)
    rows = depths(drawn, model)
    depth = rd.Depth(max(rows), None if grad_steps is None else min(grad_steps, min(rows)), tuple(rows))
    weights, bounds = torch.randn(2, 6, 23).double(), [0, *sorted(cuts), 6]
    expected = model(x, depth)
    (weights * expected).sum().backward()
    wanted, cache = gradients(model), rd.DepthCache()
    found = [rd.extend(model, x[:, a:b], cache, depth) for a, b in pairwise(bounds)]
    found = torch.cat(found, dim=1)
    assert_close(found, expected, rtol=1e-8, atol=1e-8)
    (weights * found).sum().backward()
    for name, gradient in gradients(model).items():
        size = max(1.0, wanted[name].abs().max().item())
        assert_close(gradient, wanted[name], rtol=1e-7, atol=1e-7 * size, msg=lambda text, name=name: f"{name}: {text}")


@every_policy
def test_truncated_gradients_change_no_number(case):
    # Rows that learn and rows that don't take a step apart from each other, and each writes its own part of a copy.
    model, x = lively(tiny(layout=LAYOUT)).double().eval(), some_tokens(3)
    policy = case.make(model)
    for grad in (True, False):
        caches = [rd.DepthCache(policy) for _ in range(2)]
        with torch.set_grad_enabled(grad):
            found = [
                torch.cat([rd.extend(model, new, cache, depth) for new in x.split([5, 3], dim=1)], dim=1)
                for cache, depth in zip(caches, (rd.Depth(3, 1, (3, 1, 2)), rd.Depth(3, None, (3, 1, 2))), strict=True)
            ]
        assert_close(*found, rtol=1e-9, atol=1e-9)


@every_policy
def test_two_training_steps_in_a_row_through_a_cache_learn(case):
    model, x = lively(tiny(layout=LAYOUT), 0.1).double(), some_tokens()
    optimizer, cache = torch.optim.SGD(model.parameters(), lr=0.01), rd.DepthCache(case.make(model))
    losses = []
    for _ in range(3):
        cache.reset()
        logits = torch.cat([rd.extend(model, new, cache) for new in x.split([4, 3, 1], dim=1)], dim=1)
        losses.append(rd.next_token_loss(logits, x))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[0] > losses[1] > losses[2]


def test_text_read_without_gradients_may_be_followed_by_text_with_them_and_the_other_way_round():
    model, x, cache = lively(tiny(layout=LAYOUT)).double().eval(), some_tokens(), rd.DepthCache()
    found = []
    for number, new in enumerate(x.split(2, dim=1)):
        with torch.set_grad_enabled(number % 2 == 1):
            found.append(rd.extend(model, new, cache))
    assert_close(torch.cat(found, dim=1), model(x))
    found[-1].sum().backward()
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


def test_what_is_written_without_gradients_over_what_had_them_takes_none():
    # The room of cropped tokens must not lead back to the graph that once filled it.
    model, x, cache = lively(tiny(layout=LAYOUT)).double().eval(), some_tokens(), rd.DepthCache()
    old = rd.extend(model, x, cache).sum()
    cache.crop(0)
    with torch.no_grad():
        rd.extend(model, x[:, :4], cache)
    rd.extend(model, x[:, 4:], cache).sum().backward()
    found, fresh = gradients(model), rd.DepthCache()
    with torch.no_grad():
        rd.extend(model, x[:, :4], fresh)
    rd.extend(model, x[:, 4:], fresh).sum().backward()
    expected = gradients(model)
    assert_close(found, expected)
    old.backward()
    assert gradients(model)["embed.token.weight"].abs().max() > 0


# The blend


def blend(model: rd.RecurrentTransformer, num_layers: int = 2, num_steps: int = 3) -> rd.KeepBlend:
    inside = attention(model)
    return rd.KeepBlend(
        num_layers=num_layers, num_steps=num_steps, num_kv_heads=inside.num_kv_heads, head_size=inside.head_size
    )


def in_halves(model: rd.RecurrentTransformer, x: Tensor, policy: rd.KVStepPolicy) -> Tensor:
    """The logits of the second half of the text, which finds what the policy keeps of the first."""
    cache = rd.DepthCache(policy)
    first, second = x.chunk(2, dim=1)
    rd.extend(model, first, cache)
    return rd.extend(model, second, cache)


@every_build
def test_a_new_blend_is_the_mean(build):
    model, x = lively(tiny(build, LAYOUT)).double().eval(), some_tokens()
    with torch.no_grad():
        assert_close(in_halves(model, x, blend(model)), in_halves(model, x, rd.KeepMean()), rtol=1e-6, atol=1e-6)


def test_a_blend_is_learned_from_what_later_chunks_find():
    model, x = language_model(form=grouped), some_tokens(8)
    policy, exact = blend(model).double(), model(x)[:, 4:]
    optimizer, losses = torch.optim.SGD(policy.parameters(), lr=3.0), []
    for _ in range(15):
        losses.append((in_halves(model, x, policy) - exact).square().mean())
        optimizer.zero_grad()
        losses[-1].backward()
        assert all(weight.grad.abs().amax((2, 3, 4)).min() > 0 for weight in policy.parameters())
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]
    assert all(weight.grad is None for weight in model.parameters())


def test_a_blend_learns_nothing_from_the_chunk_itself():
    model, policy = language_model(), blend(language_model())
    assert not rd.extend(model, some_tokens(), rd.DepthCache(policy)).requires_grad


@torch.no_grad()
def test_a_blend_is_refused_where_it_has_no_weights_and_the_cache_goes_on():
    model, x = language_model(), some_tokens()
    cache, fresh = rd.DepthCache(blend(model, num_steps=2)), rd.DepthCache(blend(model, num_steps=2))
    for one in (cache, fresh):
        rd.extend(model, x[:, :4], one, 2)
    before = snapshot(cache)
    with pytest.raises(ValueError, match=r"step 3 of block 1 was run, but this KeepBlend was built for 2 steps"):
        rd.extend(model, x[:, 4:], cache, 3)
    assert_same(snapshot(cache), before)
    assert_close(rd.extend(model, x[:, 4:], cache, 2), rd.extend(model, x[:, 4:], fresh, 2))
    with pytest.raises(ValueError, match=r"block 2 was run, .* 3 steps of 1 blocks"):
        rd.extend(model, x, rd.DepthCache(blend(model, num_layers=1)))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: rd.KeepCyclic(0), "num is 0"),
        (lambda: rd.KeepCyclic(1.5), "num is 1.5"),
        (lambda: rd.KeepBlend(num_layers=0, num_steps=1, num_kv_heads=1, head_size=2), "num_layers is 0"),
        (lambda: rd.KeepBlend(num_layers=1, num_steps=-1, num_kv_heads=1, head_size=2), "num_steps is -1"),
        (lambda: rd.KeepBlend(num_layers=1, num_steps=1, num_kv_heads=True, head_size=2), "num_kv_heads is True"),
        (lambda: rd.KeepBlend(num_layers=1, num_steps=1, num_kv_heads=1, head_size=3), "head_size is 3, .* even"),
        (lambda: rd.DepthCache(max_tokens=0), "max_tokens is 0"),
        (lambda: rd.DepthCache(max_tokens=8.0), "max_tokens is 8.0"),
    ],
)
@pytest.mark.usefixtures("as_a_user_runs_it")
def test_parts_that_cannot_be_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# Bad input


def other(**changes):
    return lambda model: lively(tiny(**{"layout": LAYOUT, "form": grouped, "num_heads": 4, **changes})).double().eval()


def with_mask(batch: int, num_keys: int, dtype=torch.bool):
    return lambda model, cache, x: rd.extend(model, x[:, 5:7], cache, mask=torch.ones(batch, num_keys, dtype=dtype))


def at_depth(num_steps):
    return lambda model, cache, x: rd.extend(model, x[:, 5:7], cache, num_steps)


def of_model(make):
    return lambda model, cache, x: rd.extend(make(model), x[:, 5:7], cache)


def of_tokens(change):
    return lambda model, cache, x: rd.extend(model, change(x), cache)


WRONG = {
    r"mask must be \(2, 7\), over the 5 tokens .* 2 new ones; got \(2, 2\)": with_mask(2, 2),
    r"mask must be \(2, 7\), .* got \(2, 9\)": with_mask(2, 9),
    r"mask must be \(2, 7\), .* got \(1, 7\)": with_mask(1, 7),
    "mask must be boolean or of integers": with_mask(2, 7, torch.float32),
    "4 heads of 2 .* belongs to another model": of_model(other(dim=8, num_heads=4, form=rd.LlamaForm)),
    "2 heads of 8 .* belongs to another model": of_model(other(num_heads=2, form=rd.LlamaForm)),
    "nothing for block 1 of the prelude: it belongs to another model": of_model(other(layout=rd.Layout(2, 2, 3, 1))),
    "nothing for block 2 of the core": of_model(other(layout=rd.Layout(1, 3, 3, 1))),
    "nothing for block 1 of the coda": of_model(other(layout=rd.Layout(1, 2, 3, 2))),
    "something for block 0 of the prelude, but the model ran no": of_model(other(layout=rd.Layout(0, 2, 3, 1))),
    "something for block 1 of the core, but the model ran no": of_model(other(layout=rd.Layout(1, 1, 3, 1))),
    "something for block 0 of the coda, but the model ran no": of_model(other(layout=rd.Layout(1, 2, 3, 0))),
    "torch.float64 .* but the model makes .* torch.bfloat16": of_model(lambda model: model.to(torch.bfloat16)),
    "tokens has 3 rows, but the cache holds 2": of_tokens(lambda x: x[[0, 0, 1], 5:7]),
    "holds 5 of max_tokens=8 tokens, and 4 more were to come": of_tokens(lambda x: x[:, 4:]),
    r"tokens must be .* not empty, got shape \(2, 0\)": of_tokens(lambda x: x[:, :0]),
    r"tokens must be .* got shape \(2,\)": of_tokens(lambda x: x[:, 0]),
    "tokens must lie in 0 to 22, the vocabulary; got .* to 23": of_tokens(lambda x: x[:, 5:7] * 0 + 23),
    "tokens must lie in 0 to 22, the vocabulary; got -1 to": of_tokens(lambda x: x[:, 5:7] * 0 - 1),
    "tokens must be integers, got torch.float32": of_tokens(lambda x: x[:, 5:7].float()),
    "num_steps is 0": at_depth(0),
    "num_steps is -1": at_depth(-1),
    "num_steps is 1.5": at_depth(1.5),
    r"num_steps holds 3 depths, .* each of the 2 rows": at_depth([1, 2, 3]),
    r"num_steps\[1\] is 0": at_depth([1, 0]),
    "length is 6, but the cache holds 5 tokens": lambda model, cache, x: cache.crop(6),
    "length is -1": lambda model, cache, x: cache.crop(-1),
    "length is 2.0": lambda model, cache, x: cache.crop(2.0),
    r"rows is \[0, 2\], but the cache holds rows 0 to 1": lambda model, cache, x: cache.select(torch.tensor([0, 2])),
    r"rows is \[-1\], but": lambda model, cache, x: cache.select(torch.tensor([-1])),
    r"rows is \[\], but": lambda model, cache, x: cache.select(torch.tensor([], dtype=torch.long)),
    r"one boolean for each of the 2 rows; got \(3,\)": lambda model, cache, x: cache.select(torch.ones(3).bool()),
    r"got \(1, 2\) of torch.int64": lambda model, cache, x: cache.select(torch.tensor([[0, 1]])),
    "of torch.float32": lambda model, cache, x: cache.select(torch.ones(2)),
    "times is 0": lambda model, cache, x: cache.repeat(0),
}


@pytest.mark.usefixtures("as_a_user_runs_it")
@pytest.mark.parametrize("message", WRONG)
@pytest.mark.parametrize("masked", [False, True], ids=["no-mask", "masked"])
@torch.no_grad()
def test_a_mistake_is_refused_by_name_and_leaves_the_cache_as_it_was(message, masked):
    model, x = other()(None), some_tokens()
    mask = torch.arange(5)[None] >= torch.tensor([[0], [2]]) if masked else None
    cache, fresh = (rd.DepthCache(max_tokens=8) for _ in range(2))
    for one in (cache, fresh):
        rd.extend(model, x[:, :5], one, mask=mask)
    before, num_bytes = snapshot(cache), cache.num_bytes
    with pytest.raises(ValueError, match=message):
        WRONG[message](model, cache, x)
    assert_same(snapshot(cache), before)
    assert cache.num_bytes == num_bytes
    model.double()
    expected = rd.extend(model, x[:, 5:], fresh)
    assert_close(rd.extend(model, x[:, 5:], cache), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("as_a_user_runs_it")
@torch.no_grad()
def test_text_beyond_the_learned_positions_is_refused_and_the_cache_goes_on():
    model, x, cache = language_model(), some_tokens(1, 16), rd.DepthCache()
    rd.extend(model, x[:, :12], cache)
    with pytest.raises(ValueError, match="positions 0 to 15, but the sequence has 0 to 16"):
        rd.extend(model, some_tokens(1, 5), cache)
    assert_close(rd.extend(model, x[:, 12:], cache), model(x)[:, 12:])


@torch.no_grad()
def test_rows_of_an_empty_cache_are_not_there():
    cache = rd.DepthCache()
    with pytest.raises(ValueError, match="rows"):
        cache.select(torch.tensor([0]))
    cache.repeat(3)
    assert cache.batch is None


# A forward that fails


@pytest.mark.parametrize("at", [0, 2, 3])
@every_policy
@torch.no_grad()
def test_a_first_forward_that_fails_leaves_an_empty_cache(case, at):
    model, x = language_model(), some_tokens()
    policy = case.make(model)
    cache, fresh = (rd.DepthCache(policy, max_tokens=max_tokens) for max_tokens in (8, None))
    with breaking(model, at), pytest.raises(BrokenError):
        rd.extend(model, some_tokens(3, 4), cache, [3, 1, 2])
    assert (cache.length, cache.batch, cache.mask, cache.num_copies, cache.num_bytes) == (0, None, None, 0, 0)
    found, expected = ([rd.extend(model, new, one) for new in x.split([5, 3], dim=1)] for one in (cache, fresh))
    assert_close(found, expected)


@torch.no_grad()
def test_a_failed_forward_that_went_deeper_leaves_no_copies():
    model, x, cache = language_model(), some_tokens(), rd.DepthCache()
    rd.extend(model, x[:, :4], cache, 2)
    before = snapshot(cache)
    with breaking(model, 3), pytest.raises(BrokenError):
        rd.extend(model, x[:, 4:6], cache, 3)
    assert_same(snapshot(cache), before)
    assert_close(rd.extend(model, x[:, 4:], cache, 2), model(x, 2)[:, 4:])


@pytest.mark.parametrize("change", ["crop", "select", "repeat"])
@torch.no_grad()
def test_numbers_that_are_none_stay_behind_whatever_is_done_before_the_next_forward(change):
    # One token sees the whole buffer under a mask: there 0 * NaN would reach it from the room behind.
    model, x, cache = language_model(), some_tokens(), rd.DepthCache(max_tokens=8)
    model.decode, rows, length = decode, torch.tensor([0, 1]), 5
    rd.extend(model, x[:, :5], cache)
    with breaking(model, 3), pytest.raises(BrokenError):
        rd.extend(model, x[:, :3], cache)
    if change == "crop":
        cache.crop(length := 2)
    elif change == "select":
        cache.select(rows := torch.tensor([1, 0, 1]))
    else:
        cache.repeat(2)
        rows = torch.tensor([0, 0, 1, 1])
    found = rd.extend(model, x[rows, -1:], cache)
    assert_close(found, model(torch.cat([x[:, :length], x[:, -1:]], dim=1))[rows, -1:])


def test_a_failed_forward_with_gradients_leaves_the_graph_usable():
    model, x, cache = lively(tiny(layout=LAYOUT)).double().eval(), some_tokens(), rd.DepthCache()
    model(x).sum().backward()
    expected = gradients(model)
    found = rd.extend(model, x[:, :4], cache).sum()
    with breaking(model, 2), pytest.raises(BrokenError):
        rd.extend(model, x[:, 4:], cache)
    (found + rd.extend(model, x[:, 4:], cache).sum()).backward()
    assert_close(gradients(model), expected)


@torch.no_grad()
def test_a_cache_keeps_the_mask_that_it_was_given_whatever_the_caller_does_with_it():
    model, x, cache = language_model(), some_tokens(), rd.DepthCache()
    mask = torch.arange(5)[None] >= torch.tensor([[0], [2]])
    rd.extend(model, x[:, :5], cache, mask=mask)
    mask.fill_(True)
    assert_close(rd.extend(model, x[:, 5:], cache)[1:], model(x[1:, 2:])[:, 3:])
