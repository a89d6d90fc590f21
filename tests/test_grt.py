"""The GRT against a transcription of its equations, its limits, and its start."""

from functools import partial

import numpy as np
import pytest
import torch
import transcription
from agreement import assert_agrees, assert_all_agree, assert_slopes_agree
from battery import joint_norm, lively, noise_per_token, tiny
from hypothesis import given
from hypothesis import strategies as st
from strategies import few, loops, recipes, tokens
from torch import nn
from torch.testing import assert_close
from transcription_parts import arrays

import recurrent_depth as rd

close = {"atol": 1e-5, "rtol": 1e-5}
READINGS = {"two norms": rd.gated, "joint norm": joint_norm, "temperature": partial(rd.gated, temperature=0.5)}
either_reading = pytest.mark.parametrize("update", READINGS.values(), ids=READINGS)


def transcribe(model, x, weights=None, **changes):
    call = {"layout": model.layout, "num_heads": model.core.stack.blocks[0].attention.num_heads}
    call["tau"] = model.core.update.gate.write.temperature
    return transcription.grt(weights or arrays(model.state_dict()), x.numpy(), **call | changes)


@pytest.fixture
def drawn(monkeypatch) -> list[torch.Tensor]:
    """All noise that is drawn, in order."""
    record: list[torch.Tensor] = []
    randn_like = torch.randn_like

    def recorded(x):
        record.append(randn_like(x))
        return record[-1]

    monkeypatch.setattr(torch, "randn_like", recorded)
    return record


@either_reading
@pytest.mark.parametrize("dtype, accuracy", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@few
@given(recipes(), tokens())
def test_it_is_the_function_of_the_paper(update, dtype, accuracy, recipe, x):
    model = recipe._replace(dtype=dtype).model(partial(rd.grt, update=update))
    assert_all_agree(model.trajectory(x, every_step=True), *transcribe(model, x), accuracy)


@either_reading
@pytest.mark.parametrize("per_token", [False, True])
def test_it_is_the_function_of_the_paper_with_noise_on(update, per_token, drawn):
    model = lively(tiny(update=update)).double()
    for module in model.modules():
        if isinstance(module, rd.GaussianNoise):
            module.std, module.per_token = 0.3, per_token
    x = torch.randint(23, (2, 6))
    drawn.clear()
    found = model(x)
    assert len(drawn) == 2 * model.num_steps
    assert {noise.shape for noise in drawn} == {(2, 6, 1 if per_token else 16)}
    scaled = [0.3 * noise.numpy() for noise in drawn]
    assert_agrees(found, transcribe(model, x, noise=list(zip(scaled[::2], scaled[1::2], strict=True)))[0])
    assert not np.allclose(found.detach(), transcribe(model, x)[0], rtol=1e-2)


@pytest.mark.parametrize("grad_steps", [None, 1, 2])
def test_its_gradients_are_those_of_the_paper(grad_steps):
    model = lively(tiny(), 0.1).double().eval()
    x = torch.randint(23, (2, 6))
    _, states = transcribe(model, x)
    entering = {3 - grad_steps: states[2 - grad_steps]} if grad_steps else {}

    def written(weights):
        return (transcribe(model, x, weights, entering=entering)[0] ** 2).sum()

    assert_slopes_agree(model, model(x, rd.Depth(3, grad_steps)).square().sum(), written)


@few
@given(recipes(loops), tokens())
def test_the_state_lies_between_the_last_one_and_the_candidate(recipe, x):
    model = recipe.model(rd.grt)
    candidates: list[torch.Tensor] = []
    model.core.stack.register_forward_hook(lambda module, inputs, output: candidates.append(output))
    start = model.prelude(model.embed(x, torch.arange(x.shape[1])[None]), rd.At(torch.arange(x.shape[1])[None]))
    states = [start, *(state.h for state in model.trajectory(x, every_step=True).states)]
    assert len(candidates) == model.num_steps
    for before, after, candidate in zip(states, states[1:], candidates, strict=False):
        slack = 1e-6 * (before.abs() + candidate.abs())
        assert (after >= torch.minimum(before, candidate) - slack).all()
        assert (after <= torch.maximum(before, candidate) + slack).all()


def with_bias(model: rd.RecurrentTransformer, bias: float) -> rd.RecurrentTransformer:
    nn.init.constant_(model.core.update.gate.write.bias, bias)
    return model


@few
@given(recipes(), tokens())
def test_a_closed_gate_is_the_identity(recipe, x):
    model = with_bias(recipe.model(rd.grt), 1e4)
    trajectory = model.trajectory(x, every_step=True)
    at = rd.At(torch.arange(x.shape[1])[None])
    anchor = model.prelude(model.embed(x, at.positions), at)
    for state in trajectory.states:
        assert torch.equal(state.h, anchor)
        assert (state.write == 0).all()


@few
@given(recipes(), tokens())
def test_an_open_gate_is_the_projected_loop(recipe, x):
    model = with_bias(recipe.model(rd.grt), -1e4)
    projected = rd.RecurrentCore(model.core.stack, rd.ReplaceState(model.core.update.inject)).eval()
    found = model(x)
    model.core = projected
    assert_close(found, model(x), **close)


def test_what_no_step_changes_is_computed_once_and_the_blocks_run_at_every_step():
    model = tiny()
    calls: dict[str, int] = {}

    def count(name):
        return lambda *_: calls.__setitem__(name, calls.get(name, 0) + 1)

    for name, module in model.named_modules():
        module.register_forward_hook(count(name))
    update = "core.update."
    for num_steps in (1, 3):
        calls.clear()
        model(torch.randint(23, (2, 6)), num_steps)
        once = ["inject.anchor", "gate.anchor", "gate.anchor_norm"]
        each = [
            "inject.state",
            "inject.noise",
            "gate.state",
            "gate.state_norm",
            "gate.write.linear",
            "gate.write.noise",
        ]
        assert [calls[update + name] for name in once] == [1] * len(once)
        assert [calls[update + name] for name in each] == [num_steps] * len(each)
        assert [calls[f"core.stack.blocks.{i}"] for i in range(2)] == [num_steps] * 2
        assert calls["prelude.blocks.0"] == calls["coda.blocks.0"] == calls["norm"] == calls["head"] == 1


@given(st.sampled_from([rd.gated, joint_norm, noise_per_token]), st.integers(1, 12))
@few
def test_the_number_of_weights_does_not_depend_on_the_number_of_steps(update, num_steps):
    layout = rd.Layout(1, 1, num_steps, 1)
    deep, shallow = (tiny(layout=one, update=update) for one in (layout, rd.Layout(1, 1, 1, 1)))
    assert [weight.shape for weight in deep.parameters()] == [weight.shape for weight in shallow.parameters()]
