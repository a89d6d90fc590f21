"""Noise: where it enters, when it is drawn, and that evaluation never sees it unless asked."""

from functools import partial

import pytest
import torch
from battery import lively, tiny
from torch import nn
from torch.testing import assert_close

import recurrent_depth as rd


def draws(function) -> bool:
    """Whether a function moves the global RNG."""
    before = torch.get_rng_state()
    function()
    return not torch.equal(torch.get_rng_state(), before)


def test_noise_has_the_deviation_it_says_and_is_drawn_anew_at_each_call():
    noise, x = rd.GaussianNoise(0.3), torch.randn(40, 50, 30)
    first, second = noise(x) - x, noise(x) - x
    assert first.std().item() == pytest.approx(0.3, rel=0.02)
    assert abs(first.mean().item()) < 0.005
    assert abs(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1].item()) < 0.02


def test_one_draw_per_token_is_shared_by_its_features():
    x = torch.randn(4, 5, 6)
    added = rd.GaussianNoise(0.5, per_token=True)(x) - x
    assert_close(added, added[..., :1].expand_as(added))
    assert len(added[..., 0].flatten().unique()) == 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noise_keeps_the_dtype(dtype):
    x = torch.zeros(2, 3, 4, dtype=dtype)
    assert rd.GaussianNoise(0.1)(x).dtype == dtype


def test_noise_is_drawn_in_training_only_and_never_with_a_deviation_of_zero():
    x = torch.randn(2, 3, 4)
    for std, training, in_evaluation in [(0.0, True, True), (0.0, False, True), (0.1, False, False)]:
        noise = rd.GaussianNoise(std, in_evaluation=in_evaluation).train(training)
        assert not draws(partial(noise, x))
        assert noise(x) is x
    assert draws(partial(rd.GaussianNoise(0.1), x))
    assert draws(partial(rd.GaussianNoise(0.1, in_evaluation=True).eval(), x))


@pytest.mark.parametrize("which", ["state_noise", "gate_noise"])
def test_each_noise_alone_makes_training_random_and_evaluation_not(which):
    off = {"state_noise": 0.0, "gate_noise": 0.0}
    x = torch.randint(23, (2, 5))
    model = lively(tiny(update=partial(rd.gated, **off | {which: 0.1})))
    assert draws(partial(model, x))
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert not draws(partial(model, x))
    assert torch.equal(model(x), model(x))


def test_without_noise_training_is_evaluation_and_draws_nothing():
    model = lively(tiny(update=partial(rd.gated, state_noise=0.0, gate_noise=0.0)))
    x = torch.randint(23, (2, 5))
    assert not draws(partial(model, x))
    assert torch.equal(model(x), model.eval()(x))


def test_noise_in_evaluation_is_there_when_asked_for():
    def update(dim):
        return rd.GatedDepthUpdate(
            rd.ConcatProjection(dim, rd.GaussianNoise(0.1, in_evaluation=True)), rd.AnchoredGate(dim)
        )

    model = lively(tiny(update=update)).eval()
    x = torch.randint(23, (2, 5))
    assert not torch.equal(model(x), model(x))


def test_noise_on_the_start_is_the_other_reading():
    def update(dim):
        return rd.GatedDepthUpdate(rd.ConcatProjection(dim), rd.AnchoredGate(dim), start=rd.GaussianNoise(0.1))

    core = rd.RecurrentCore([rd.PlainBlock(nn.Identity())], update(16))
    anchor = torch.randn(2, 5, 16)
    begun = core.update.begin(anchor, rd.Call(3)).h
    assert (begun - anchor).std().item() == pytest.approx(0.1, rel=0.2)
    assert torch.equal(core.eval().update.begin(anchor, rd.Call(3)).h, anchor)
    torch.manual_seed(1)
    drawn = torch.randn_like(anchor)
    torch.manual_seed(1)
    assert_close(core.train().update.begin(anchor, rd.Call(3)).h, anchor + 0.1 * drawn)


def test_a_step_draws_its_own_noise():
    model = lively(tiny(rd.grt, rd.Layout(0, 1, 6, 0), update=partial(rd.gated, state_noise=0.1, gate_noise=0.0)))
    seen = []
    model.core.update.inject.noise.register_forward_hook(lambda m, inputs, out: seen.append((out - inputs[0])[0, 0, 0]))
    model(torch.randint(23, (2, 5)))
    assert len({round(one.item(), 6) for one in seen}) == 6


def test_the_gate_and_the_blend_read_the_state_without_its_noise():
    update = rd.gated(16, state_noise=50.0, gate_noise=0.0)
    core = rd.RecurrentCore([rd.PlainBlock(nn.Threshold(torch.inf, 0.0))], update)  # a candidate of zeros
    anchor = torch.randn(2, 5, 16)
    assert_close(core(anchor, 1), (1 - update.gate(anchor, update.gate.begin(anchor))) * anchor)


@pytest.mark.parametrize("std", [-0.1, float("nan"), float("inf")])
def test_a_negative_deviation_is_refused(std):
    with pytest.raises(ValueError, match=f"std of the noise is {std}, but must be a finite number of at least 0"):
        rd.GaussianNoise(std)
