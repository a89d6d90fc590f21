"""A growing cache behind the `kv` contract: one slot for each step and block, written here in a few lines."""

from collections import defaultdict
from itertools import pairwise

import pytest
import torch
from battery import close, gradients, lively, tiny
from hypothesis import given
from hypothesis import strategies as st
from strategies import few, seeds
from torch import nn
from torch.testing import assert_close

import recurrent_depth as rd

FORMS = {"gpt2": rd.GPT2Form, "llama": lambda dim, heads: rd.LlamaForm(dim, heads, num_kv_heads=1)}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
TOKENS = 9


class Slot(rd.KeyValues):
    """Keys and values of one block at one step."""

    def __init__(self):
        self.keys, self.values = None, None

    def update(self, keys, values):
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], dim=2)
        self.values = values if self.values is None else torch.cat([self.values, values], dim=2)
        return self.keys, self.values

    @property
    def length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]


class Cache:
    """Every slot of a model, made when it is first asked for."""

    def __init__(self, layout: rd.Layout):
        self.layout, self.slots = layout, defaultdict(Slot)

    def views(self) -> rd.ModelKeyValues:
        return rd.ModelKeyValues(
            prelude=lambda: [self.slots["prelude", i] for i in range(self.layout.prelude)],
            core=lambda step: [self.slots["core", step, i] for i in range(self.layout.core)],
            coda=lambda: [self.slots["coda", i] for i in range(self.layout.coda)],
        )


def decode(model, x, chunks: list[int], num_steps: int, mask=None, cache: Cache | None = None) -> torch.Tensor:
    """Logits, computed chunk by chunk with a cache."""
    cache = cache or Cache(model.layout)
    logits, start = [], 0
    for size in chunks:
        end = start + size
        where = {"positions": torch.arange(start, end)[None]} if mask is None else {"mask": mask[:, :end]}
        logits.append(model(x[:, start:end], num_steps, kv=cache.views(), **where))
        start = end
    return torch.cat(logits, dim=1)


def cuts(points: set[int]) -> list[int]:
    """Sizes of the chunks between cuts."""
    return [end - start for start, end in pairwise([0, *sorted(points), TOKENS])]


def language_model(form, dtype=torch.float32) -> rd.RecurrentTransformer:
    return lively(tiny(form=form)).to(dtype).eval()


@every_form
@pytest.mark.parametrize("chunks", [[1] * TOKENS, [5, 1, 1, 1, 1], [4, 3, 2], [1, 8], [TOKENS]], ids=str)
@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_cached_decoding_is_the_parallel_pass(form, chunks, num_steps):
    model, x = language_model(form), torch.randint(23, (2, TOKENS))
    assert_close(decode(model, x, chunks, num_steps), model(x, num_steps), **close)


@every_form
@few
@given(st.sets(st.integers(1, TOKENS - 1)), st.integers(1, 3), st.sets(st.integers(1, TOKENS - 1)), seeds)
def test_cached_decoding_of_padded_rows_is_the_rows_alone(form, points, num_steps, holes, seed):
    # Padding on the left, and in the middle as a padded second chunk leaves it.
    torch.manual_seed(seed)
    model, x = language_model(form), torch.randint(23, (3, TOKENS))
    mask = torch.ones(3, TOKENS, dtype=torch.bool)
    mask[1, :4], mask[2, sorted(holes)] = False, False
    found = decode(model, x, cuts(points), num_steps, mask=mask)
    assert found.isfinite().all()
    for row, real in enumerate(mask):
        assert_close(found[row][real], model(x[row : row + 1, real], num_steps)[0], **close)


@every_form
def test_a_mask_of_ones_is_no_mask(form):
    model, x = language_model(form), torch.randint(23, (2, TOKENS))
    ones = torch.ones(2, TOKENS, dtype=torch.long)
    assert_close(decode(model, x, [4, 3, 1, 1], 3, mask=ones), decode(model, x, [4, 3, 1, 1], 3), **close)


@every_form
def test_chunks_in_bfloat16_keep_their_dtype_and_stay_close(form):
    model, x = lively(tiny(form=form), 0.1).to(torch.bfloat16).eval(), torch.randint(23, (2, TOKENS))
    mask = torch.arange(TOKENS)[None] >= torch.tensor([[0], [3]])
    found = decode(model, x, [5, 3, 1], 3, mask=mask)
    assert found.dtype == torch.bfloat16
    assert_close(found[mask], model(x, mask=mask)[mask], atol=0.1, rtol=0.1)


def test_every_step_and_block_has_a_slot_of_its_own_which_grows_by_what_was_seen():
    model, cache = language_model(rd.GPT2Form), Cache(rd.Layout(1, 2, 3, 1))
    decode(model, torch.randint(23, (2, 5)), [4, 1], 3, cache=cache)
    assert len(cache.slots) == cache.layout.executed == 8
    assert {slot.length for slot in cache.slots.values()} == {5}
    keys = [slot.keys for slot in cache.slots.values()]
    assert not any(torch.allclose(one, other) for i, one in enumerate(keys) for other in keys[:i])


def test_more_steps_than_full_depth_take_more_slots():
    model, cache = language_model(rd.GPT2Form), Cache(rd.Layout(1, 2, 3, 1))
    with pytest.warns(UserWarning, match="deeper than trained"):
        decode(model, torch.randint(23, (2, 5)), [4, 1], 5, cache=cache)
    assert len(cache.slots) == 1 + 2 * 5 + 1


def test_the_blocks_run_on_new_tokens_alone():
    model, seen = language_model(rd.GPT2Form), []
    model.core.stack.register_forward_hook(lambda m, inputs, out: seen.append(out.shape[1]))
    decode(model, torch.randint(23, (1, TOKENS)), [5, 1, 1, 1, 1], 3)
    assert seen == [5] * 3 + [1] * 3 * 4


def test_without_positions_or_a_mask_a_cached_forward_is_refused():
    # The contract of a cache tells no length, and counting from 0 again would be wrong without an error.
    model, cache = language_model(rd.LlamaForm), Cache(rd.Layout(1, 2, 3, 1))
    with pytest.raises(ValueError, match="positions or a mask"):
        model(torch.randint(23, (1, 2)), kv=cache.views())
    core = rd.RecurrentCore([OwnAttention()], rd.plain(8))
    with pytest.raises(ValueError, match="needs positions"):
        core(torch.randn(1, 2, 8), 2, kv=lambda step: [Slot()])


def test_a_mask_that_leaves_out_what_the_cache_holds_is_refused():
    # One column would be broadcast over all keys, and padding seen.
    model, cache = language_model(rd.LlamaForm), Cache(rd.Layout(1, 2, 3, 1))
    model(torch.randint(23, (2, 4)), mask=torch.ones(2, 4, dtype=torch.bool), kv=cache.views())
    with pytest.raises(ValueError, match=r"mask must cover all 5 keys.* covers 1"):
        model(torch.randint(23, (2, 1)), mask=torch.ones(2, 1, dtype=torch.bool), kv=cache.views())


@pytest.mark.parametrize("grad_steps", [None, 1])
def test_checkpointing_leaves_a_forward_with_a_cache_alone(grad_steps):
    model, x = lively(tiny()), torch.randint(23, (2, 5))
    call = {"positions": torch.arange(5)[None]}
    torch.manual_seed(0)
    model(x, rd.Depth(3, grad_steps), **call).square().sum().backward()
    expected = gradients(model)
    model.core.checkpointing, cache = True, Cache(model.layout)
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="not checkpointed"):
        model(x, rd.Depth(3, grad_steps), kv=cache.views(), **call).square().sum().backward()
    assert {slot.length for slot in cache.slots.values()} == {5}
    for name, gradient in gradients(model).items():
        assert_close(gradient, expected[name], **close)


class OwnAttention(nn.Module):
    """Causal attention without a softmax, as a user might write it: `at.kv` is all that a cache takes."""

    def __init__(self, dim: int = 8):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x, at):
        q, k, v = self.qkv(x)[:, None].chunk(3, dim=-1)
        if at.kv is not None:
            k, v = at.kv.update(k, v)
        scores = (q @ k.transpose(2, 3)).tril(k.shape[2] - q.shape[2])
        return x + torch.tanh(scores @ v / 10)[:, 0]


def test_a_block_of_ones_own_decodes_with_a_cache():
    core, x = rd.RecurrentCore([OwnAttention(), OwnAttention()], rd.gated(8, bias=0.0)).eval(), torch.randn(2, 6, 8)
    slots = defaultdict(lambda: [Slot(), Slot()])
    found = [core(x[:, i : i + 1], 3, positions=torch.tensor([[i]]), kv=slots.__getitem__) for i in range(6)]
    assert_close(torch.cat(found, dim=1), core(x, 3), **close)
    assert sorted(slots) == [0, 1, 2]
