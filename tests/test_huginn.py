"""Huginn: its equations, its random start, its initialisation, and the traps of both."""

import math
from functools import partial

import numpy as np
import pytest
import torch
import transcription_relatives as slow
from battery import close, lively, tiny
from hypothesis import given
from hypothesis import strategies as st
from strategies import few
from torch import nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

import recurrent_depth as rd

LAYOUT = rd.Layout(1, 2, 3, 1)


def logits_of(model: rd.RecurrentTransformer, x: torch.Tensor, num_steps: int, start: torch.Tensor) -> torch.Tensor:
    """The transcription's, row by row."""
    weights = slow.arrays(model.state_dict())
    rows = [slow.huginn(weights, t.tolist(), 2, num_steps, s.double().numpy()) for t, s in zip(x, start, strict=True)]
    return torch.from_numpy(np.stack(rows)).float()


def draws(function) -> bool:
    before = torch.get_rng_state()
    function()
    return not torch.equal(torch.get_rng_state(), before)


# The equations


@few
@given(st.integers(0, 2), st.integers(1, 2), st.integers(1, 4), st.integers(0, 2))
def test_evaluation_is_the_published_equations_from_zeros(prelude, core, num_steps, coda):
    model = lively(tiny(rd.huginn, rd.Layout(prelude, core, num_steps, coda)), 0.1).eval()
    x = torch.randint(23, (2, 5))
    for steps in range(1, num_steps + 1):
        assert_close(model(x, steps), logits_of(model, x, steps, torch.zeros(2, 5, 16)), **close)


def test_a_start_that_is_given_takes_the_place_of_the_models_own():
    model = lively(tiny(rd.huginn, LAYOUT), 0.1)
    x, start = torch.randint(23, (2, 5)), torch.randn(2, 5, 16)
    for mode in (True, False):
        assert_close(model.train(mode)(x, start=start), logits_of(model, x, 3, start), **close)


def test_training_is_the_same_equations_from_noise():
    model = lively(tiny(rd.huginn, LAYOUT), 0.1)
    x, seen = torch.randint(23, (2, 5)), []
    model.core.update.inner.start.register_forward_hook(lambda module, inputs, out: seen.append(out))
    logits = model(x)
    assert len(seen) == 1
    assert_close(logits, logits_of(model, x, 3, seen[0]), **close)
    assert not torch.equal(model(x), logits)


def test_a_longer_loop_forgets_where_it_started():
    model = tiny(rd.huginn, rd.Layout(1, 1, 64, 1)).eval()
    x = torch.randint(23, (1, 5))
    starts = [torch.zeros(1, 5, 16), torch.randn(1, 5, 16)]
    short, long = (torch.dist(*[model(x, steps, start=start).log_softmax(-1) for start in starts]) for steps in (1, 64))
    assert long < short


def test_the_norm_before_the_coda_is_the_final_norm_itself():
    model = tiny(rd.huginn, LAYOUT)
    assert model.core.update.module.module is model.norm
    assert sum("norm.weight" in name and "around" not in name for name in model.state_dict()) == 1
    x = torch.randint(23, (1, 4))
    before, reads = model.eval()(x), []
    model.norm.register_forward_hook(lambda *_: reads.append(1))
    assert_close(model(x), before)
    assert len(reads) == 2


def test_an_adapter_that_ignores_the_anchor_leaves_the_plain_loop():
    # [I | 0]: the anchor says nothing, and from a start that is the embedding Huginn's core is the naive loop.
    model = lively(tiny(rd.huginn, rd.Layout(0, 2, 3, 0)), 0.1).eval()
    inject = model.core.update.inner.inject
    nn.init.eye_(inject.state.weight)
    nn.init.zeros_(inject.anchor.weight)
    naive = rd.RecurrentCore(model.core.stack, rd.ReplaceState(rd.KeepState()))
    start, anchor = torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    assert_close(model.core(anchor, 3, start=start), model.norm(naive(start, 3)))


def test_noise_on_the_state_leaves_the_anchor_clean():
    update = rd.ReplaceState(rd.ConcatProjection(16, rd.GaussianNoise(0.5), bias=False), start=rd.RandomState(0.6))
    core = rd.RecurrentCore([rd.PlainBlock(nn.Identity())], update)
    nn.init.zeros_(update.inject.state.weight)
    anchor = torch.randn(2, 5, 16)
    assert_close(core(anchor, 3), update.inject.anchor(anchor))


def test_the_sandwich_is_an_option():
    names = tiny(partial(rd.huginn, form=rd.LlamaForm), LAYOUT).state_dict()
    assert "core.stack.blocks.0.around_mlp.norm.weight" in names
    assert "core.stack.blocks.0.around_mlp.after.weight" in tiny(rd.huginn, LAYOUT).state_dict()


# The random start


def test_the_start_looks_like_an_embedding():
    model = tiny(rd.huginn, LAYOUT, dim=64, vocab_size=500)
    anchor = torch.zeros(4, 50, 64)
    state = model.core.update.begin(anchor, rd.Call(3)).h
    embedded = model.embed(torch.arange(500)[None], torch.arange(500)[None])
    cut = 0.9866  # what is left of the deviation when a normal law is cut at three of its deviations
    assert state.std().item() == pytest.approx(math.sqrt(2 / 5) * cut, rel=0.02)
    assert embedded.std().item() == pytest.approx(math.sqrt(2 / 5) * cut, rel=0.02)
    assert state.abs().max() <= 3 * math.sqrt(2 / 5) + 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_start_keeps_shape_and_dtype_and_is_drawn_anew(dtype):
    start, anchor = rd.RandomState(0.5), torch.randn(2, 3, 4, dtype=dtype)
    first, second = start(anchor), start(anchor)
    assert first.shape == anchor.shape
    assert first.dtype == dtype
    assert not torch.equal(first, second)


def test_evaluation_starts_from_zeros_and_draws_nothing():
    anchor = torch.randn(2, 3, 4)
    for std, training, in_evaluation in [(0.5, False, False), (0.0, True, False), (0, True, True)]:
        start = rd.RandomState(std, in_evaluation=in_evaluation).train(training)
        assert not draws(partial(start, anchor))
        assert (start(anchor) == 0).all()
    assert draws(partial(rd.RandomState(0.5, in_evaluation=True).eval(), anchor))


def test_the_start_knows_nothing_of_the_anchor_but_its_shape():
    start, found = rd.RandomState(0.5), []
    for anchor in (torch.zeros(2, 3, 4), torch.randn(2, 3, 4)):
        torch.manual_seed(1)
        found.append(start(anchor))
    assert torch.equal(*found)


@pytest.mark.parametrize("std", [-0.1, math.nan, math.inf])
def test_an_impossible_deviation_is_refused(std):
    with pytest.raises(ValueError, match=r"std of the initial state is .*, but must be a finite number of at least 0"):
        tiny(partial(rd.huginn, state_std=std))


# Initialisation and sizes


def test_weights_start_from_a_cut_normal_law_narrower_where_a_branch_ends():
    layout = rd.Layout(2, 4, 32, 2)
    assert layout.executed == 132
    model = tiny(rd.huginn, layout, dim=64, vocab_size=500)
    std = math.sqrt(2 / (5 * 64))
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            assert (weight == 1).all(), name
            continue
        expected = std / math.sqrt(2 * 132) if name.endswith("out.weight") else std
        assert weight.std().item() == pytest.approx(expected * 0.9866, rel=0.05), name
        assert weight.abs().max() <= 3 * expected * 1.0001, name


def test_the_embedding_is_scaled_on_the_way_in_and_not_in_the_head():
    model = tiny(rd.huginn, LAYOUT, dim=64)
    x, weight = torch.randint(23, (2, 5)), model.embed.token.weight
    assert_close(model.embed(x, torch.arange(5)[None]), 8.0 * weight[x])
    h = torch.randn(2, 5, 64)
    assert_close(model.head(h, weight), h @ weight.T)
    assert "embed.token.weight" in model.state_dict()


def test_scaling_an_embedding_keeps_its_weights():
    embed = rd.PositionedEmbedding(23, 16, 8)
    x, places, names = torch.randint(23, (2, 5)), torch.arange(5)[None], dict(embed.named_parameters())
    before = embed(x, places)
    assert rd.scaled_embedding(embed, 4.0) is embed
    assert_close(embed(x, places), 4 * before)
    assert all(dict(embed.named_parameters())[name] is parameter for name, parameter in names.items())


def test_learned_positions_are_scaled_like_tokens():
    model = tiny(partial(rd.huginn, form=rd.GPT2Form), dim=64)
    x, embed = torch.randint(23, (2, 5)), model.embed
    expected = 8.0 * (embed.token.weight[x] + embed.position.weight[:5])
    assert_close(embed(x, torch.arange(5)[None]), expected)


def test_the_published_model_has_three_and_a_half_billion_parameters():
    dim, hidden, vocab = 5280, 17920, 65536
    with torch.device("meta"):
        model = rd.huginn(
            rd.Layout(2, 4, 32, 2),
            dim=dim,
            num_heads=55,
            vocab_size=vocab,
            context_length=4096,
            form=partial(rd.LlamaForm, hidden=hidden, arrangement=rd.ResidualSandwich),
        )
    block = 4 * dim**2 + 3 * dim * hidden + 4 * dim
    assert rd.accounting.num_parameters(model) == 8 * block + vocab * dim + 2 * dim**2 + dim
    assert rd.accounting.num_parameters(model) / 1e9 == pytest.approx(3.5, abs=0.1)


def test_the_closed_form_of_its_flops_is_what_torch_counts():
    with torch.device("meta"):
        model = tiny(rd.huginn, LAYOUT)
        x = torch.zeros(1, 7, dtype=torch.long)
    for steps in (1, 3):
        with FlopCounterMode(display=False) as counter:
            model(x, steps)
        assert rd.accounting.flops(model, 7, steps) == counter.get_total_flops()


# The sampler it is trained with


def test_its_sampler_averages_one_step_more_than_the_mean():
    sampler = rd.PoissonLogNormalDepth(mean=32, grad_steps=8)
    assert sampler.expected().num_steps == 33
    drawn = [sampler(draw) for draw in range(4000)]
    assert sum(depth.num_steps for depth in drawn) / 4000 == pytest.approx(33, abs=1)
    assert all(depth.grad_steps == min(8, depth.num_steps) for depth in drawn)


def test_it_trains_at_drawn_depths_and_only_the_last_steps_learn():
    model = tiny(rd.huginn, rd.Layout(1, 1, 4, 1))
    x = torch.randint(23, (2, 6))
    depth = rd.Depth(5, grad_steps=2)
    trajectory = model.trajectory(x, depth, every_step=True)
    assert [state.h.requires_grad for state in trajectory.states] == [False, False, False, True, True]
    rd.last_step_loss(trajectory, x).backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())


@pytest.mark.parametrize("sizes", [{"vocab_size": 0}, {"context_length": 0}, {"dim": 0}, {"num_heads": 3}])
def test_impossible_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match=next(iter(sizes))):
        tiny(rd.huginn, **sizes)
