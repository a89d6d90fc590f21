"""Distillation: from a dense teacher's logits, and from its states where they are aligned with steps."""

import copy
import math

import pytest
import torch
from battery import close, lively, tiny
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributions import Categorical, kl_divergence
from torch.testing import assert_close

import recurrent_depth as rd

MASK = torch.tensor([[False, False, True, True, True], [True] * 5])


def dense(num_blocks: int = 3) -> rd.RecurrentTransformer:
    return lively(tiny(lambda layout, **sizes: rd.dense(num_blocks, **sizes))).eval()


@given(st.floats(0.5, 4), st.booleans())
def test_the_divergence_is_that_of_torch_over_real_tokens(temperature, padded):
    student, teacher = torch.randn(2, 2, 5, 7)
    exact = kl_divergence(Categorical(logits=teacher / temperature), Categorical(logits=student / temperature))
    expected = temperature**2 * (exact[MASK] if padded else exact).mean()
    found = rd.distillation_loss(student, teacher, MASK if padded else None, temperature=temperature)
    assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_states_are_compared_pair_by_pair_over_real_tokens():
    ours, theirs = list(torch.randn(2, 2, 5, 4)), list(torch.randn(2, 2, 5, 4))
    expected = (torch.stack(ours) - torch.stack(theirs)).square()
    assert_close(rd.aligned_state_loss(ours, theirs), expected.mean())
    assert_close(rd.aligned_state_loss(ours, theirs, MASK), expected[:, MASK].mean())


def test_a_teacher_tells_its_state_after_each_block_and_keeps_no_hook():
    model, x = lively(tiny()).eval(), torch.randint(23, (2, 5))
    said = rd.taught(model, x)
    assert len(said.states) == model.layout.executed == 8
    assert_close(said.logits, model(x))
    assert_close(model.head(model.norm(said.states[-1]), model.embed.token.weight), said.logits)
    assert not said.logits.requires_grad
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_has_nothing_to_learn_from_itself():
    model, x = dense(), torch.randint(23, (2, 5))
    teacher = copy.deepcopy(model)
    objective = rd.DistilledLoss(teacher, states=1.0, align={1: 3})
    assert_close(rd.WithObjective(model, objective)(x), rd.next_token_loss(model(x), x))


def test_a_teacher_reads_the_text_whole_and_teaches_where_something_is_to_be_predicted():
    model, teacher, x = tiny(rd.naive, rd.Layout(0, 1, 3, 0)).eval(), dense(), torch.randint(23, (2, 6))
    labels = x.masked_fill(torch.arange(6) < 3, -100)
    found = rd.WithObjective(model, rd.DistilledLoss(teacher))(x, labels=labels)
    asked = torch.tensor([[False, False, True, True, True, True]] * 2)
    taught = rd.distillation_loss(model(x), teacher(x), asked)
    assert_close(found, rd.next_token_loss(model(x), labels) + taught, **close)
    aligned = rd.DistilledLoss(teacher, states=1.0, align={1: 1})
    for padded, nothing in ((labels.masked_fill(torch.arange(6) > 3, -100), False), (torch.full_like(x, -100), True)):
        loss = rd.WithObjective(model, aligned, every_step=True)(x, labels=padded)
        assert (loss == 0) == nothing


@pytest.mark.parametrize(
    "wrapped", [rd.WithObjective, lambda model: rd.WithConsistency(model)], ids=["objective", "consistency"]
)
def test_labels_are_what_is_to_be_predicted(wrapped):
    model, x = lively(tiny(rd.naive, rd.Layout(0, 1, 3, 0))).eval(), torch.randint(23, (2, 6))
    trained = wrapped(model)
    assert_close(trained(x, 2, labels=x), trained(x, 2))
    labels = x.clone()
    labels[0] = -100
    if isinstance(trained, rd.WithObjective):
        assert_close(trained(x, 2, labels=labels), trained(x[1:], 2))
    labels[:] = -100
    prediction = trained(x, 2) - trained(x, 2, labels=labels)
    losses = [rd.next_token_loss(model(x, steps), x) for steps in (3, 2)]
    expected = losses[1] if isinstance(trained, rd.WithObjective) else losses[0] + trained.short * losses[1]
    assert_close(prediction, expected, **close)


def test_states_are_not_aligned_with_steps_that_some_rows_do_not_take():
    model, x = tiny(rd.naive, rd.Layout(0, 1, 3, 0)), torch.randint(23, (2, 6))
    objective = rd.WithObjective(model, rd.DistilledLoss(dense(), states=1.0, align={1: 3}), every_step=True)
    with pytest.raises(ValueError, match="give one depth for all"):
        objective(x, [1, 2])


def test_a_student_is_drawn_to_its_teacher_and_the_teacher_stays():
    model, teacher = tiny(rd.naive, rd.Layout(0, 1, 3, 0)), dense()
    before = copy.deepcopy(teacher.state_dict())
    trained = rd.WithObjective(
        model, rd.DistilledLoss(teacher, logits=5.0, states=0.1, align={1: 1, 2: 2, 3: 3}), every_step=True
    )
    assert not any("teacher" in name for name in trained.state_dict())
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    x = torch.randint(23, (4, 9))
    distance = rd.distillation_loss(model(x), teacher(x)).item()
    for _ in range(60):
        optimizer.zero_grad()
        trained(x).backward()
        optimizer.step()
    assert rd.distillation_loss(model(x), teacher(x)) < 0.8 * distance
    assert all(torch.equal(weight, before[name]) for name, weight in teacher.state_dict().items())
    assert all(weight.grad is None for weight in teacher.parameters())


def test_steps_that_are_not_taken_are_not_aligned():
    model, teacher, x = lively(tiny(rd.naive, rd.Layout(0, 1, 3, 0))).eval(), dense(), torch.randint(23, (2, 5))
    objective = rd.DistilledLoss(teacher, logits=0.5, states=2.0, align={1: 1, 3: 3})
    said = rd.taught(teacher, x)
    for steps in (1, 2, 3):
        trajectory = model.trajectory(x, steps, every_step=True)
        pairs = [(trajectory.states[i - 1].h, said.states[i - 1]) for i in (1, 3) if i <= steps]
        expected = rd.next_token_loss(model(x, steps), x) + 0.5 * rd.distillation_loss(model(x, steps), said.logits)
        expected = expected + 2.0 * rd.aligned_state_loss(*zip(*pairs, strict=True))
        assert_close(objective(trajectory, x), expected, **close)


def test_padding_teaches_nothing():
    model, teacher, x = lively(tiny(rd.naive, rd.Layout(0, 1, 3, 0))).eval(), dense(), torch.randint(23, (2, 5))
    objective, other = rd.DistilledLoss(teacher, states=1.0, align={1: 1}), x.clone()
    other[0, :2] = (x[0, :2] + 1) % 23
    losses = [rd.WithObjective(model, objective, every_step=True)(tokens, mask=MASK) for tokens in (x, other)]
    assert_close(*losses, **close)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"temperature": 0.0}, "temperature"),
        ({"logits": math.nan}, "logits"),
        ({"logits": -0.1}, "logits is -0.1, but must be a finite number of at least 0"),
        ({"states": -1.0, "align": {1: 1}}, "states is -1.0, but must be a finite number of at least 0"),
        ({"states": 1.0}, "aligned where they weigh"),
        ({"align": {1: 1}}, "aligned where they weigh"),
        ({"states": 1.0, "align": {1: 4}}, "one of the teacher's 3 blocks"),
        ({"states": 1.0, "align": {0: 1}}, "a step from 1"),
        ({"states": 1.0, "align": {"1": 1}}, "a step in align is '1', but must be a whole number"),
        ({"states": 1.0, "align": {1: None}}, "a block in align is None, but must be a whole number"),
        ({"states": 1.0, "align": [(1, 1)]}, "align is .*, but must map steps to the teacher's blocks"),
    ],
    ids=str,
)
def test_impossible_arguments_are_refused(as_a_user_runs_it, arguments, message):
    with pytest.raises(ValueError, match=message):
        rd.DistilledLoss(dense(), **arguments)


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match=r"teacher must be \(2, 5, 7\) like logits, got \(2, 5, 8\)"):
        rd.distillation_loss(torch.randn(2, 5, 7), torch.randn(2, 5, 8))
    with pytest.raises(ValueError, match="teacher holds 1 states"):
        rd.aligned_state_loss(list(torch.randn(2, 1, 5, 7)), list(torch.randn(1, 1, 5, 7)))
    model, x = tiny(rd.naive), torch.randint(23, (2, 5))
    with pytest.raises(ValueError, match="every_step=True"):
        rd.WithObjective(model, rd.DistilledLoss(dense(), states=1.0, align={1: 1}))(x)


def test_a_teacher_in_training_mode_is_warned_of():
    model, x = tiny(), torch.randint(23, (2, 6))
    objective = rd.DistilledLoss(tiny(rd.dense, 3))
    with pytest.warns(UserWarning, match=r"teacher is in training mode.*teacher.eval\(\)"):
        rd.WithObjective(model, objective)(x)


def test_a_teacher_that_is_no_model_is_refused(as_a_user_runs_it):
    for call in (lambda x: rd.DistilledLoss(nn.Linear(2, 2)), lambda x: rd.taught(nn.Linear(2, 2), x)):
        with pytest.raises(ValueError, match=r"teacher is .*Linear.*, but must be a RecurrentTransformer"):
            call(torch.randint(23, (2, 5)))


@pytest.mark.parametrize("width", [1, 16])
def test_states_of_another_width_are_refused(as_a_user_runs_it, width):
    ours, theirs = [torch.randn(2, 4, 8)] * 2, [torch.randn(2, 4, 8), torch.randn(2, 4, width)]
    with pytest.raises(ValueError, match=rf"teacher's state 1 must be \(2, 4, 8\) like ours, got \(2, 4, {width}\)"):
        rd.aligned_state_loss(ours, theirs)


def test_a_mask_of_another_shape_is_refused(as_a_user_runs_it):
    states, mask = [torch.randn(2, 4, 8)], torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"mask must be \(2, 4\) like the tokens, got \(2, 3\)"):
        rd.aligned_state_loss(states, states, mask)
    with pytest.raises(ValueError, match=r"mask must be \(2, 4\) like the tokens, got \(2, 3\)"):
        rd.distillation_loss(states[0], states[0], mask)


def test_states_aligned_with_steps_that_are_never_taken_warn():
    model, x = tiny(rd.naive), torch.randint(23, (2, 5))
    objective = rd.WithObjective(model, rd.DistilledLoss(dense(), states=1.0, align={9: 1}), every_step=True)
    with pytest.warns(UserWarning, match=r"align names the steps \[9\], but this forward takes none of them"):
        objective(x)
