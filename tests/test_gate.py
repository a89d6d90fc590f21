"""The gate: its start, its temperature, its precision, its learning."""

from functools import partial

import pytest
import torch
from battery import tiny
from torch import nn
from torch.testing import assert_close

import recurrent_depth as rd


@pytest.mark.parametrize("bias", [4.0, 0.0, -2.0])
def test_at_the_start_a_step_writes_what_the_bias_says(bias):
    model = rd.grt(
        rd.Layout(1, 1, 4, 1),
        dim=64,
        num_heads=4,
        vocab_size=50,
        context_length=32,
        update=partial(rd.gated, bias=bias),
    )
    x = torch.randint(50, (4, 32))
    for state in model.eval().trajectory(x, every_step=True).states:
        assert state.write.mean().item() == pytest.approx(1 / (1 + torch.tensor(bias).exp().item()), rel=0.02)
        assert state.write.std() > 0


def test_the_gate_depends_on_its_input_from_the_start():
    gate = tiny().core.update.gate
    assert (gate.write.bias == 4).all()
    assert gate.state.weight.std().item() == pytest.approx(0.02, rel=0.2)
    assert gate.write.linear.weight.std().item() == pytest.approx(0.02, rel=0.2)


def test_a_temperature_flattens_the_gate():
    hot, cold = (rd.AnchoredGate(8, temperature=tau) for tau in (100.0, 1.0))
    h = torch.randn(1, 3, 8)
    assert_close(hot(h, hot.begin(h)), torch.full((1, 3, 8), 0.49), atol=5e-3, rtol=0)
    assert (cold(h, cold.begin(h)) < 0.05).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gate_at_seven_still_writes_and_learns(dtype):
    # In bfloat16 1 - sigmoid(7) is 0 and so is its gradient.
    update = rd.gated(16, bias=7.0, state_noise=0.0, gate_noise=0.0).to(dtype)
    core = rd.RecurrentCore([rd.PlainBlock(nn.Linear(16, 16))], update).to(dtype)
    x = torch.randn(2, 3, 16, dtype=dtype)
    h = core(x, 2)
    assert (update.gate(x, update.gate.begin(x)) > 5e-4).all()
    assert h.dtype == dtype
    (h.float() - 100 * x.float()).square().mean().backward()
    assert (update.gate.write.bias.grad.abs() > 0).all()
    assert update.gate.state.weight.grad.abs().max() > 0


@pytest.mark.parametrize("logit", [7.0, 30.0, 80.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_share_is_exact_however_closed_the_gate_is(dtype, logit):
    # 1 - sigmoid(30) is 0 in float32 too.
    gate = rd.AnchoredGate(16, bias=logit).to(dtype)
    nn.init.zeros_(gate.write.linear.weight)
    h = torch.randn(2, 3, 16, dtype=dtype)
    share = gate(h, gate.begin(h))
    assert share.dtype == torch.float32
    assert_close(share.double(), torch.full((2, 3, 16), -logit, dtype=torch.float64).exp(), atol=0, rtol=2e-3)


@pytest.mark.parametrize("bias", [4.0, 0.0])
def test_a_bfloat16_model_stays_finite_and_keeps_learning(bias):
    model = tiny(update=partial(rd.gated, bias=bias)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randint(23, (4, 12))
    losses = []
    for _ in range(30):
        loss = rd.next_token_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(weight.isfinite().all() for weight in model.parameters())
    assert losses[-1] < 0.6 * losses[0]
    assert sum(losses[20:]) < sum(losses[10:20]) < sum(losses[:10])
