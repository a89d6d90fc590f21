"""Picked tokens: what a router needs of the contracts."""

import pytest
import torch
from battery import close, gradients, lively
from hypothesis import given
from hypothesis import strategies as st
from strategies import few, seeds
from torch import nn
from torch.testing import assert_close
from user_parts import Balanced, Mixing, Recorded, Remembering

import recurrent_depth as rd

BATCH, TOKENS = 3, 6


@st.composite
def picks(draw, batch: int = BATCH, num_tokens: int = TOKENS) -> rd.Pick:
    """Picks of different sizes for each row, padded; one row may have none."""
    rows = [sorted(draw(st.sets(st.integers(0, num_tokens - 1)))) for _ in range(batch)]
    width = max(1, *(len(row) for row in rows))
    fill = draw(st.integers(0, num_tokens - 1))
    index = torch.tensor([row + [fill] * (width - len(row)) for row in rows])
    valid = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows])
    return rd.Pick(index, None if valid.all() and draw(st.booleans()) else valid)


def chosen(pick: rd.Pick) -> list[list[int]]:
    valid = pick.valid_like()
    return [pick.index[row][valid[row]].tolist() for row in range(len(valid))]


@given(picks(), st.sampled_from([(), (4,), (2, 3)]))
def test_what_is_scattered_is_what_was_gathered_and_padding_goes_nowhere(pick, tail):
    x = torch.randn(BATCH, TOKENS, *tail)
    assert torch.equal(pick.scatter(x, pick.gather(x)), x)
    found = pick.scatter(x, torch.full_like(pick.gather(x), 7.0))
    for row, tokens in enumerate(chosen(pick)):
        for token in range(TOKENS):
            assert torch.equal(
                found[row, token], torch.full_like(x[row, token], 7.0) if token in tokens else x[row, token]
            )


@given(st.data())
def test_the_pick_of_a_pick_is_a_pick(data):
    outer = data.draw(picks())
    inner = data.draw(picks(num_tokens=outer.index.shape[1]))
    x = torch.arange(BATCH * TOKENS).reshape(BATCH, TOKENS)
    narrow = outer.narrow(inner)
    assert torch.equal(narrow.gather(x), inner.gather(outer.gather(x)))
    assert torch.equal(narrow.valid_like(), inner.valid_like() & inner.gather(outer.valid_like()))


def transformer_blocks(form=rd.LlamaForm) -> list[nn.Module]:
    return [lively(form(8, 2).block()) for _ in range(2)]


def steps(stack: nn.Module, mask=None, valid=None, notes=None) -> rd.StepBlocks:
    at = rd.At(torch.arange(TOKENS)[None], mask, valid)
    return rd.StepBlocks(stack, at, 0, None, notes or rd.Notes())


def left_padding() -> torch.Tensor:
    return torch.arange(TOKENS)[None] >= torch.tensor([[0], [2], [5]])


@pytest.mark.parametrize("masked", ["nothing", "keys", "pairs"])
@few
@given(pick=picks(), seed=seeds)
def test_picked_tokens_attend_to_each_other_at_their_own_positions(masked, pick, seed):
    torch.manual_seed(seed)
    stack, x, real = rd.Stack(transformer_blocks()), torch.randn(BATCH, TOKENS, 8), left_padding()
    mask = {"nothing": None, "keys": real, "pairs": rd.causal_mask(real, TOKENS)}[masked]
    valid = None if mask is None else real
    found = steps(stack, mask, valid)(pick.gather(x), pick=pick)
    assert torch.equal(found, steps(stack, mask, valid).picked(pick)(pick.gather(x)))
    assert found.isfinite().all()
    for row, tokens in enumerate(chosen(pick)):
        kept = [token for token in tokens if valid is None or real[row, token]]
        if not kept:
            continue
        alone = stack(x[row : row + 1, kept], rd.At(torch.tensor([kept])))
        assert_close(found[row, [tokens.index(token) for token in kept]], alone[0], **close)


@pytest.mark.parametrize("masked", ["nothing", "keys", "pairs"])
def test_padded_picks_change_nothing_and_send_no_gradient(masked):
    # A padded pick whose mask hid everything would be 0 / 0, and reach the weights as 0 * nan.
    stack, real = rd.Stack(transformer_blocks()), left_padding()
    mask = {"nothing": None, "keys": real, "pairs": rd.causal_mask(real, TOKENS)}[masked]
    pick = rd.Pick(
        torch.tensor([[3, 5, 0], [4, 0, 0], [0, 0, 0]]), torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]]).bool()
    )
    x = torch.randn(BATCH, TOKENS, 8)
    out = pick.scatter(x, steps(stack, mask, None if mask is None else real)(pick.gather(x), pick=pick))
    assert torch.equal(out[2], x[2])
    assert torch.equal(out[0, [0, 1, 2, 4]], x[0, [0, 1, 2, 4]])
    out.square().sum().backward()
    assert all(gradient.isfinite().all() for gradient in gradients(stack).values())


def test_a_block_sees_what_belongs_to_its_picked_tokens():
    seen = []

    class Seeing(Mixing):
        def forward(self, x, at):
            seen.append(at)
            return super().forward(x, at)

    real = left_padding()
    pick = rd.Pick(torch.tensor([[1, 3], [2, 4], [0, 5]]), torch.tensor([[True, True], [True, False], [True, True]]))
    steps(rd.Stack([Seeing()]), real, real)(torch.randn(BATCH, 2, 8), pick=pick, condition="time")
    (at,) = seen
    assert at.positions.tolist() == [[1, 3], [2, 4], [0, 5]]
    assert at.valid.tolist() == [[True, True], [True, False], [False, True]]
    assert torch.equal(at.mask, at.valid)
    assert at.condition == "time"


PICK = rd.Pick(torch.tensor([[0, 2], [1, 1], [5, 5]]), torch.tensor([[True, True], [True, False], [True, False]]))
PICKED = torch.tensor([[1, 0, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1]]).bool()


def test_memory_is_gathered_and_scattered():
    stack, x = rd.Stack([Remembering()]), torch.randn(BATCH, TOKENS, 8)
    before = torch.ones(BATCH, TOKENS, 1), torch.randn(BATCH, TOKENS, 8)
    notes, fresh = rd.Notes({0: before}), rd.Notes()
    steps(stack, notes=notes)(PICK.gather(x), pick=PICK)
    steps(stack, notes=fresh)(PICK.gather(x), pick=PICK)
    count, total = notes.after[0]
    assert torch.equal(count[..., 0], 1 + PICKED.float())
    assert_close(total, before[1] + PICKED[..., None] * x)
    assert torch.equal(fresh.after[0][0][..., 0], PICKED.float())


def test_losses_leave_padded_picks_out():
    x, notes = torch.randn(BATCH, TOKENS, 8), rd.Notes()
    steps(rd.Stack([Balanced()]), notes=notes)(PICK.gather(x), pick=PICK)
    assert_close(notes.losses["balance"], x[PICKED].square().sum())


def test_an_update_may_narrow_a_pick_once_more():
    outer, inner = rd.Pick(torch.tensor([[1, 3, 5]])), rd.Pick(torch.tensor([[0, 2]]))
    stack, x = rd.Stack(transformer_blocks()), torch.randn(1, 2, 8)
    blocks = steps(stack)
    assert_close(blocks.picked(outer)(x, pick=inner), blocks(x, pick=rd.Pick(torch.tensor([[1, 5]]))))


def ragged(h: torch.Tensor, step: int) -> rd.Pick:
    """Every other token, of the first row one less."""
    index = torch.arange(step % 2, h.shape[1], 2).expand(len(h), -1)
    valid = torch.ones_like(index, dtype=torch.bool)
    valid[0, -1] = False
    return rd.Pick(index, valid)


def test_the_loop_keeps_the_memory_of_routed_tokens():
    class PickedLoop(Recorded):
        def forward(self, state, blocks, step):
            pick = ragged(state.h, step)
            return state._replace(h=pick.scatter(state.h, blocks(pick.gather(state.h), pick=pick)))

    core = rd.RecurrentCore([Remembering()], PickedLoop())
    at = rd.At(torch.arange(TOKENS)[None])
    last = list(core.states(torch.randn(2, TOKENS, 8), rd.Depth(3), rd.Call(3), at))[-1]
    visits = torch.zeros(2, TOKENS)
    for step in range(3):
        for row, tokens in enumerate(chosen(ragged(last.h, step))):
            visits[row, tokens] += 1
    assert torch.equal(last.memory[0][0][..., 0], visits)
