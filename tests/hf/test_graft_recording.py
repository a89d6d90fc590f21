"""What a graft's loop went through, on request."""

import hosts
import pytest
import torch

import recurrent_depth as rd
from recurrent_depth.hf import corrected, graft


@pytest.mark.parametrize("update", [corrected, rd.gated, rd.plain, rd.damped])
def test_recording_gives_the_state_after_each_step_and_changes_nothing(update):
    model, tokens = hosts.grafted("llama", update=update), hosts.tokens()
    expected = model(tokens).logits
    with model.recurrence.recording() as steps:
        assert torch.equal(model(tokens).logits, expected)
    assert [step.h.shape for step in steps] == [(2, 9, 32)] * 3
    assert [step.write.shape for step in steps] == [(2, 9)] * 3
    model(tokens)
    assert len(steps) == 3


def test_recorded_states_are_what_the_layers_behind_the_core_see():
    model, tokens, seen = hosts.grafted("llama"), hosts.tokens(), []
    model.model.layers[4].register_forward_pre_hook(lambda layer, given: seen.append(given[0]))
    for num_steps in (1, 2, 4):
        with model.recurrence.recording() as steps:
            model(tokens, num_steps=num_steps)
        assert len(steps) == num_steps
        assert torch.equal(steps[-1].h, seen[-1])


def test_the_share_that_a_step_wrote_is_the_gates():
    model, tokens = graft(hosts.host("llama"), range(1, 4), 3), hosts.tokens()
    gate = model.recurrence.core.update.inner.gate.write
    torch.nn.init.zeros_(gate.linear.weight)
    for bias in (0.0, 4.0):
        torch.nn.init.constant_(gate.bias, bias)
        with model.recurrence.recording() as steps:
            model(tokens)
        share = torch.sigmoid(torch.tensor(-bias))
        assert (steps[0].write == 1).all()  # the host's own pass
        for step in steps[1:]:
            torch.testing.assert_close(step.write, share.expand(2, 9))


def test_recording_goes_with_at_depth_and_generate():
    model, tokens = hosts.grafted("llama"), hosts.tokens()
    with model.recurrence.at_depth(2), model.recurrence.recording() as steps:
        model.base_model(tokens)
    assert len(steps) == 2
    with model.recurrence.recording() as steps, model.recurrence.at_depth(2):
        model.base_model(tokens)
    assert len(steps) == 2
    settings = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 3, "min_new_tokens": 3}
    with model.recurrence.recording() as steps:
        model.generate(tokens, **settings, do_sample=False, num_steps=2)
    assert [step.h.shape[1] for step in steps] == [9, 9, 1, 1, 1, 1]


def fail_behind(model, tokens):
    model(tokens)
    raise ZeroDivisionError


def test_a_recording_within_another_is_in_both_and_ends_with_an_error_too():
    model, tokens = hosts.grafted("llama"), hosts.tokens()
    with model.recurrence.recording() as outer:
        with pytest.raises(ZeroDivisionError), model.recurrence.recording() as inner:
            fail_behind(model, tokens)
        model(tokens, num_steps=1)
    model(tokens)
    assert (len(outer), len(inner)) == (4, 3)
    assert all(one is other for one, other in zip(inner, outer, strict=False))


def test_recorded_states_learn():
    model, tokens = hosts.grafted("llama"), hosts.tokens()
    with model.recurrence.recording() as steps:
        model(tokens)
    torch.stack([step.write.mean() for step in steps[1:]]).mean().backward()
    assert model.recurrence.core.update.inner.gate.write.bias.grad.any()


def test_steps_that_are_recomputed_are_recorded_once():
    model, tokens = hosts.grafted("llama").train(), hosts.tokens()
    model.recurrence.gradient_checkpointing = True
    with model.recurrence.recording() as steps:
        model(tokens, labels=tokens, use_cache=False).loss.backward()
    assert len(steps) == 3


@pytest.mark.compile
def test_recording_works_around_a_compiled_step():
    torch.compiler.reset()
    model, tokens = hosts.grafted("llama"), hosts.tokens()
    with torch.no_grad(), model.recurrence.recording() as expected:
        model(tokens, use_cache=False)
    model.recurrence.core.compile_step(backend="eager", fullgraph=True)
    with torch.no_grad(), model.recurrence.recording() as steps:
        model(tokens, use_cache=False)
    for step, other in zip(steps, expected, strict=True):
        torch.testing.assert_close(step.h, other.h)
        torch.testing.assert_close(step.write, other.write)


@pytest.mark.compile
def test_recording_breaks_a_compiled_model_into_graphs_and_sees_its_steps():
    torch.compiler.reset()
    model, tokens = hosts.grafted("llama"), hosts.tokens()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(tokens, use_cache=False)
        with model.recurrence.recording() as expected:
            model(tokens, use_cache=False)
        with model.recurrence.recording() as steps:
            compiled(tokens, use_cache=False)
    for step, other in zip(steps, expected, strict=True):
        torch.testing.assert_close(step.h, other.h)
