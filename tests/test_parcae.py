"""Parcae: the diagonal injection, its equations and its stability; a depth for each row."""

import math

import jaxtyping
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
from recurrent_depth.training import parameter_groups

LAYOUT = rd.Layout(1, 2, 3, 1)


def core_of(inject: rd.DiagonalInjection) -> rd.RecurrentCore:
    """A loop whose blocks do nothing."""
    update = rd.ReplaceState(inject, start=rd.RandomState(0.0))
    return rd.RecurrentCore([rd.PlainBlock(nn.Identity())], update)


# The equations


@few
@given(st.integers(0, 2), st.integers(1, 2), st.integers(1, 4), st.integers(0, 2))
def test_evaluation_is_the_published_equations_from_zeros(prelude, core, num_steps, coda):
    model = lively(tiny(rd.parcae, rd.Layout(prelude, core, num_steps, coda)), 0.1).eval()
    x, weights = torch.randint(23, (2, 5)), slow.arrays(model.state_dict())
    for steps in range(1, num_steps + 1):
        expected = np.stack([slow.parcae(weights, row.tolist(), 2, steps) for row in x])
        assert_close(model(x, steps), torch.from_numpy(expected).float(), **close)


def test_it_starts_with_a_decay_of_the_root_of_a_fifth_and_maps_that_are_the_identity():
    inject = tiny(rd.parcae, LAYOUT).core.update.inner.inject
    assert_close(inject.decay(), torch.full((16,), math.sqrt(1 / 5)))
    assert_close(inject.step_size(), torch.full((16,), -math.log(math.sqrt(1 / 5))))
    assert (inject.log_rate == 0).all()
    for square in (inject.input, tiny(rd.parcae, LAYOUT).core.update.module):
        assert torch.equal(square.linear.weight, torch.eye(16))


def test_without_blocks_the_state_is_a_geometric_sum():
    inject = rd.DiagonalInjection(4)
    anchor, decay, dt = torch.randn(2, 3, 4), inject.decay(), inject.step_size()
    for steps in range(1, 6):
        expected = dt * anchor * sum(decay**power for power in range(steps))
        assert_close(core_of(inject)(anchor, steps), expected)
    assert_close(core_of(inject)(anchor, 60), dt * anchor / (1 - decay))


@given(st.floats(-20, 5), st.floats(-20, 20))
def test_a_step_is_a_contraction_whatever_the_weights(log_rate, dt_bias):
    inject = rd.DiagonalInjection(4)
    nn.init.constant_(inject.log_rate, log_rate)
    nn.init.constant_(inject.dt_bias, dt_bias)
    assert ((inject.decay() >= 0) & (inject.decay() <= 1)).all()
    first, second, anchor = torch.randn(3, 2, 3, 4)
    ends = [core_of(inject)(anchor, 3, start=start) for start in (first, second)]
    assert torch.dist(*ends) <= torch.dist(first, second) * 1.001 + 1e-5


def test_a_large_input_does_not_blow_up_the_state():
    inject = rd.DiagonalInjection(4)
    ends = [core_of(inject)(torch.full((1, 1, 4), 100.0), steps).abs().max() for steps in (1, 10, 1000)]
    assert ends[2] <= 100 * inject.step_size().max() / (1 - inject.decay().max()) + 1e-3


def test_the_anchor_is_normed_and_mapped_once_for_all_steps():
    model, seen = tiny(rd.parcae, LAYOUT).eval(), []
    model.core.update.inner.inject.norm.register_forward_hook(lambda module, inputs, out: seen.append(out))
    model(torch.randint(23, (2, 5)))
    assert len(seen) == 1
    assert_close(seen[0].square().mean(-1), torch.ones(2, 5), atol=1e-2, rtol=0)


def test_decay_and_step_size_are_float32_in_a_narrow_model():
    inject = rd.DiagonalInjection(4).bfloat16()
    anchor = torch.randn(2, 3, 4, dtype=torch.bfloat16)
    assert inject.decay().dtype == inject.step_size().dtype == torch.float32
    context = inject.begin(anchor, rd.Call(1))
    assert context.dtype == inject(anchor, context, 0).dtype == torch.bfloat16


def test_the_closed_form_of_its_flops_is_what_torch_counts():
    with torch.device("meta"):
        model, x = tiny(rd.parcae, LAYOUT), torch.zeros(1, 7, dtype=torch.long)
    for steps in (1, 3):
        with FlopCounterMode(display=False) as counter:
            model(x, steps)
        assert rd.accounting.flops(model, 7, steps) == counter.get_total_flops()


def test_its_recurrence_can_be_left_without_weight_decay():
    model = tiny(rd.parcae, LAYOUT)
    groups = parameter_groups(model, 0.1, undecayed=["core.update"])
    decayed = {id(p) for group in groups if group["weight_decay"] > 0 for p in group["params"]}
    for name, parameter in model.named_parameters():
        assert (id(parameter) in decayed) == (parameter.ndim == 2 and not name.startswith("core.update")), name
    with pytest.raises(ValueError, match=r"undecayed names 'core.gate', but no parameter begins so"):
        parameter_groups(model, undecayed=["core.gate"])


# A depth for each row


@pytest.mark.parametrize("mean", [0.3, 1, 8])
@pytest.mark.parametrize("grad_steps", [None, 1, 4])
def test_rows_draw_what_is_expected_of_them(mean, grad_steps):
    sampler = rd.PoissonDepthPerRow(mean, num_rows=50, grad_steps=grad_steps)
    draws = [sampler(draw) for draw in range(200)]
    rows = [row for draw in draws for row in draw.rows or ()]
    assert all(draw.grad_steps == (grad_steps and min(grad_steps, draw.num_steps)) for draw in draws)
    limit = grad_steps or max(rows)
    expected = sampler.expected()
    assert min(rows) == 1
    assert expected.num_steps == pytest.approx(mean + math.exp(-mean))
    assert sum(rows) / len(rows) == pytest.approx(expected.num_steps, rel=0.03)
    assert sum(min(limit, row) for row in rows) / len(rows) == pytest.approx(expected.grad_steps, rel=0.03)


def test_a_draw_is_a_pure_function_of_seed_and_number():
    before = torch.get_rng_state()
    sampler = rd.PoissonDepthPerRow(8, num_rows=4, grad_steps=4, seed=3)
    later = sampler(7)
    assert [sampler(draw) for draw in range(8)][7] == later
    assert later != sampler(8)
    assert later != rd.PoissonDepthPerRow(8, num_rows=4, grad_steps=4, seed=4)(7)
    assert len(set(later.rows)) > 1
    assert torch.equal(torch.get_rng_state(), before)


def test_it_trains_with_a_depth_for_each_row():
    model, x = tiny(rd.parcae, rd.Layout(1, 1, 20, 1)), torch.randint(23, (4, 6))
    loss = rd.WithObjective(model)(x, rd.PoissonDepthPerRow(4, num_rows=4, grad_steps=2)(0))
    loss.backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())


@pytest.mark.parametrize(
    "arguments, name",
    [
        ({"mean": 0}, "mean"),
        ({"mean": math.nan}, "mean"),
        ({"mean": 1e6}, "mean"),
        ({"mean": None}, "mean is None"),
        ({"mean": "8"}, "mean is '8'"),
        ({"mean": True}, "mean is True"),
        ({"num_rows": 0}, "num_rows"),
        ({"grad_steps": 0}, "grad_steps"),
    ],
    ids=str,
)
def test_an_impossible_sampler_is_refused(arguments, name, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as a user runs it
    with pytest.raises(ValueError, match=name):
        rd.PoissonDepthPerRow(**{"mean": 8, "num_rows": 4, "grad_steps": 4, **arguments})
