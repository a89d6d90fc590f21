"""LoopFormer: its times, its start, and the loss over two depths; its equations are in a file of their own."""

import random
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import jaxtyping
import numpy as np
import pytest
import torch
from battery import gradients, lively, tiny
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

import recurrent_depth as rd

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from live_bytes import LiveBytes

DOUBLE = torch.float64


def looped(layout=rd.Layout(0, 2, 4, 0), **changes) -> rd.RecurrentTransformer:
    return lively(tiny(rd.loopformer, layout, **changes)).double().eval()


# Times


@given(st.integers(1, 12), st.integers(1, 15), st.booleans())
def test_times_go_from_0_to_1_in_as_many_steps(finest, num_steps, training):
    times = rd.CoarseTimes(finest).train(training)(num_steps)
    assert (times[0], times[-1], len(times)) == (0, 1, num_steps + 1)
    lengths = np.diff(times)
    if training and num_steps < finest:
        assert_close(torch.tensor(lengths * finest), torch.tensor(np.round(lengths * finest)))
        assert (lengths > 0).all()
    else:
        np.testing.assert_allclose(lengths, 1 / num_steps)


def drawn_as_published(max_loops: int, num_steps: int) -> tuple[int, ...]:
    """The source's sampler for a given number of steps, in units of 1 / max_loops."""
    taken, remaining = [], max_loops
    for left in range(num_steps, 1, -1):
        taken.append(random.choice([s for s in range(1, max_loops + 1) if s <= remaining - (left - 1)]))
        remaining -= taken[-1]
    return (*taken, remaining)


def test_random_times_are_distributed_as_published():
    random.seed(0)
    count, times = 4000, rd.CoarseTimes(6)
    found = Counter(tuple(np.diff(np.round(np.array(times(3)) * 6)).astype(int).tolist()) for _ in range(count))
    expected = Counter(drawn_as_published(6, 3) for _ in range(count))
    assert found.keys() == expected.keys()
    assert all(found[key] == pytest.approx(expected[key], abs=5 * (2 * expected[key]) ** 0.5) for key in expected)


def test_a_shallower_run_is_no_prefix():
    # Declared where the laws are: the first of two steps goes as far as the first two of four.
    model, x = looped(), torch.randint(23, (1, 6))
    full = model.trajectory(x, every_step=True)
    assert (model.trajectory(x, 2).states[-1].h - full.states[1].h).abs().max() > 0.01


def test_rows_that_leave_early_follow_the_times_of_the_deepest():
    model, x = looped(), torch.randint(23, (2, 6))
    full = model.trajectory(x, every_step=True)
    assert_close(model.trajectory(x, [2, 4]).states[-1].h[0], full.states[1].h[0])


# The start


def test_the_loop_starts_as_the_identity():
    model = tiny(rd.loopformer)
    x = torch.randint(23, (2, 5))
    states = model.trajectory(x, every_step=True).states
    assert torch.equal(states[0].h, states[2].h)
    rd.initialise(lively(model))
    assert not model.core.stack.blocks[0].modulation.weight.any()


def test_gradients_reach_the_gates_at_once_and_all_else_once_these_have_moved():
    model, x = tiny(rd.loopformer), torch.randint(23, (2, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = {}
    for _ in range(3):
        rd.WithConsistency(model)(x, 2).backward()
        found = {name: weight.grad.clone() for name, weight in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    for name, gradient in found.items():
        assert gradient.abs().max() > 0, name


# The loss over two depths


def test_it_is_zero_where_both_depths_agree():
    x = torch.randn(2, 5, 8)
    assert rd.consistency_loss(x, x) == 0
    # Such a loop starts as the identity, so that every depth ends where it begins.
    model, tokens = tiny(rd.loopformer), torch.randint(23, (2, 6))
    loss = rd.WithConsistency(model)(tokens, 1)
    assert_close(loss, 1.1 * rd.next_token_loss(model(tokens), tokens))


def test_it_is_the_mean_square_of_the_real_tokens_and_moves_the_short_run_alone():
    long, short = (torch.randn(2, 3, 4, dtype=DOUBLE, requires_grad=True) for _ in range(2))
    mask = torch.tensor([[True, True, True], [False, True, True]])
    loss = rd.consistency_loss(long, short, mask)
    assert_close(loss, ((long - short) ** 2)[mask].mean())
    loss.backward()
    assert long.grad is None
    assert_close(short.grad, 2 * (short - long).detach() * mask[..., None] / 20)
    assert rd.consistency_loss(long, short, torch.zeros_like(mask)) == 0


def test_the_loss_is_the_published_sum():
    model, x = looped(rd.Layout(0, 2, 4, 1)), torch.randint(23, (2, 6))
    mask = torch.ones_like(x).bool()
    mask[0, :2] = False
    at = model.begin(x, mask=mask).at
    runs = [model.core.update.read(model.trajectory(x, steps, mask=mask).states[-1]) for steps in (4, 2)]
    long, short = (model.norm(model.coda(h, at)) for h in runs)
    first, second = (rd.next_token_loss(model(x, steps, mask=mask), x, mask) for steps in (4, 2))
    expected = first + 0.1 * second + 0.1 * rd.consistency_loss(long, short, mask)
    assert_close(rd.WithConsistency(model)(x, 2, mask=mask), expected)
    other = rd.WithConsistency(model, short=0.0, consistency=3.0)(x, 2, mask=mask)
    assert_close(other, first + 3 * rd.consistency_loss(long, short, mask))


def test_auxiliary_losses_of_both_runs_count():
    update = partial(rd.halted, ponder=1.0, bias=-2.0)
    model = lively(tiny(rd.universal, update=update), 0.1).double().eval()
    x = torch.randint(23, (2, 6))
    first, second = (model.trajectory(x, steps).losses["ponder"] for steps in (3, 1))
    losses = []
    for model.core.update.ponder in (0.0, 1.0):
        losses.append(rd.WithConsistency(model)(x, 1))
    assert_close(losses[1] - losses[0], first + 0.1 * second)


def test_padding_leaves_the_loss():
    model, x = looped(), torch.randint(23, (1, 6))
    padded, mask = torch.cat([x.new_zeros(1, 3), x], dim=1), torch.arange(9)[None] >= 3
    loss = rd.WithConsistency(model)
    assert_close(loss(padded, 2, mask=mask), loss(x, 2))


def peak(trained, *depth: int) -> int:
    x = torch.randint(6000, (2, 16))
    trained(x, *depth).backward()  # makes the gradients, which stay
    with LiveBytes() as live:
        trained(x, *depth).backward()
    return live.peak


def test_two_runs_hold_the_logits_of_one():
    logits = 2 * 16 * 6000 * 4
    model = tiny(rd.loopformer, rd.Layout(0, 1, 4, 0), dim=8, vocab_size=6000)
    one, both = peak(rd.WithObjective(model)), peak(rd.WithConsistency(model), 2)
    assert one > 2 * logits
    assert both - one < logits


# Compositions and cost


def test_a_gated_loop_may_know_the_time():
    model = lively(tiny(rd.loopformer, update=partial(rd.gated, bias=0.0)))
    x = torch.randint(23, (2, 6))
    rd.WithConsistency(model)(x, 2).backward()
    for name, gradient in gradients(model).items():
        assert gradient.abs().max() > 0, name


def test_halting_may_stand_within_and_around():
    x = torch.randint(23, (2, 6))
    model = looped(update=partial(rd.halted, bias=-1.0))
    within = model(x)
    timed = model.core.update
    halting = timed.inner
    timed.inner = halting.inner
    halting.inner = timed
    model.core.update = halting
    assert_close(model(x), within)


class Times(nn.Module):
    def forward(self, x, at, step, kv):
        return x * at.condition


def test_the_time_reaches_picked_tokens():
    blocks = rd.StepBlocks(Times(), rd.At(torch.arange(4)[None]), 0, None, rd.Notes())
    x, pick = torch.ones(1, 2, 3), rd.Pick(torch.tensor([[0, 2]]))
    two = torch.tensor([[[2.0]]])
    for ready in (blocks.conditioned(two).picked(pick), blocks.picked(pick).conditioned(two)):
        assert_close(ready(x), 2 * x)
        assert_close(ready(x, condition=3 * two), 6 * x)
    assert_close(blocks.conditioned(two)(x, pick=pick), 2 * x)


def test_the_cost_leaves_out_what_depends_on_time_alone():
    model, dim, num_steps, num_blocks = tiny(rd.loopformer).to("meta"), 16, 3, 2
    per_step = 2 * 2 * (256 * dim + dim * dim) + num_blocks * 2 * 4 * dim * dim
    for batch, length in ((1, 10), (3, 5)):
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(batch, length, dtype=torch.long, device="meta"))
        counted = batch * rd.accounting.flops(model, length) + num_steps * per_step
        assert counter.get_total_flops() == counted


# Bad input


def test_a_block_without_a_condition_says_what_is_missing():
    block = rd.ConditionedBlock(rd.Attention(8, 2), rd.MLP(8, 16), 8)
    core = rd.RecurrentCore([block], rd.ReplaceState(rd.KeepState()))
    with pytest.raises(ValueError, match=r"at\.condition is None"):
        core(torch.randn(1, 3, 8), num_steps=1)


def test_numbers_that_cannot_be_are_refused():
    model = tiny(rd.loopformer)
    for name, build in (
        ("finest", lambda: rd.CoarseTimes(0)),
        ("dim", lambda: rd.TimeEmbedding(0)),
        ("num_frequencies", lambda: rd.TimeEmbedding(8, num_frequencies=0)),
        ("short", lambda: rd.WithConsistency(model, short=float("nan"))),
        ("consistency is -0.1, but must be", lambda: rd.WithConsistency(model, consistency=-0.1)),
        ("hidden", lambda: tiny(rd.loopformer, hidden=0)),
    ):
        with pytest.raises(ValueError, match=name):
            build()


@pytest.mark.parametrize("depth", [None, 4, 9, [2, 4], rd.Depth(4, grad_steps=1)], ids=str)
def test_a_shallower_run_that_is_none_is_refused(depth):
    with pytest.raises(ValueError, match=r"num_steps is .*, but the shallower run must take from 1 to 3, below full"):
        rd.WithConsistency(looped())(torch.randint(23, (2, 6)), depth)


def test_a_shallower_run_may_differ_by_row():
    assert rd.WithConsistency(looped())(torch.randint(23, (2, 6)), [1, 3]).isfinite()


def test_a_model_without_a_shallower_run_is_refused(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as a user runs it
    with pytest.raises(ValueError, match="num_steps of the model is 1, but must be a whole number of at least 2"):
        rd.WithConsistency(tiny(rd.naive, rd.Layout(0, 1, 1, 0)))
    with pytest.raises(ValueError, match=r"model is .*Linear.*, but must be a RecurrentTransformer"):
        rd.WithConsistency(nn.Linear(2, 2))


def test_what_cannot_be_compared_is_refused(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as a user runs it
    x = torch.randn(2, 4, 8)
    with pytest.raises(ValueError, match=r"short must be \(2, 4, 8\) like long, got \(2, 4, 1\)"):
        rd.consistency_loss(x, x[..., :1])
    with pytest.raises(ValueError, match=r"mask must be \(2, 4\) like the tokens, got \(2, 3\)"):
        rd.consistency_loss(x, x, torch.ones(2, 3, dtype=torch.bool))


def test_the_hidden_width_is_an_argument():
    assert tiny(rd.loopformer, hidden=40).core.stack.blocks[0].mlp.up.weight.shape == (40, 16)
