"""The training loss: which tokens count, and one `forward` for model and loss."""

from functools import partial

import jaxtyping
import pytest
import torch
from battery import close, lively, tiny
from hypothesis import given
from hypothesis import strategies as st
from strategies import tokens
from torch.testing import assert_close

import recurrent_depth as rd


@given(tokens(num_tokens=st.integers(2, 6)))
def test_the_loss_is_the_mean_surprise_of_each_token_given_those_before(x):
    logits = torch.randn(*x.shape, 23)
    surprise = [-logits[row, t].log_softmax(-1)[x[row, t + 1]] for row in range(len(x)) for t in range(x.shape[1] - 1)]
    assert_close(rd.next_token_loss(logits, x), torch.stack(surprise).mean())


@given(tokens(st.just(2), st.integers(4, 6)), st.integers(0, 2), st.booleans())
def test_padding_is_neither_a_target_nor_what_one_is_predicted_from(x, padding, left):
    logits, mask = torch.randn(*x.shape, 23), torch.ones_like(x, dtype=torch.bool)
    real = slice(padding, None) if left else slice(0, x.shape[1] - padding)
    mask[0] = False
    mask[0, real] = True
    rows = [(logits[:1, real], x[:1, real]), (logits[1:], x[1:])]
    counts = [row.shape[1] - 1 for _, row in rows]
    expected = sum(n * rd.next_token_loss(*row) for n, row in zip(counts, rows, strict=True)) / sum(counts)
    assert_close(rd.next_token_loss(logits, x, mask), expected)
    assert_close(rd.next_token_loss(logits, x, mask.long()), expected)


def test_the_loss_of_a_left_padded_batch_is_that_of_its_rows():
    model = lively(tiny()).eval()
    x = torch.randint(23, (2, 6))
    mask = torch.tensor([[False, False, True, True, True, True], [True] * 6])
    expected = (3 * rd.next_token_loss(model(x[:1, 2:]), x[:1, 2:]) + 5 * rd.next_token_loss(model(x[1:]), x[1:])) / 8
    assert_close(rd.WithObjective(model)(x, mask=mask), expected, **close)


def test_a_batch_without_targets_costs_nothing():
    logits = torch.randn(2, 3, 23, requires_grad=True)
    loss = rd.next_token_loss(logits, torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3, dtype=torch.bool))
    loss.backward()
    assert loss == 0
    assert (logits.grad == 0).all()


def test_the_loss_is_float32_and_takes_any_integers():
    logits, x = torch.randn(2, 5, 23, dtype=torch.bfloat16), torch.randint(23, (2, 5))
    assert rd.next_token_loss(logits, x).dtype == torch.float32
    mask = torch.tensor([[False, True, True, True, True], [True] * 5])
    for dtype in (torch.uint8, torch.int16, torch.int32):
        assert_close(rd.next_token_loss(logits, x.to(dtype), mask), rd.next_token_loss(logits, x, mask))


@pytest.mark.parametrize("depth", [None, 2, rd.Depth(3, 1), [1, 3]], ids=str)
def test_one_forward_holds_model_and_loss(depth):
    model = lively(tiny()).eval()
    x = torch.randint(23, (2, 6))
    assert_close(rd.WithObjective(model)(x, depth), rd.next_token_loss(model(x, depth), x))
    assert dict(rd.WithObjective(model).named_parameters()).keys() == {
        f"model.{n}" for n, _ in model.named_parameters()
    }


def test_an_objective_may_read_every_step():
    model = lively(tiny()).eval()
    x = torch.randint(23, (2, 6))

    def every_exit(trajectory, tokens, mask):
        return torch.stack([rd.next_token_loss(trajectory.after(i), tokens, mask) for i in (1, 2, 3)]).mean()

    expected = sum(rd.next_token_loss(model(x, n), x) for n in (1, 2, 3)) / 3
    assert_close(rd.WithObjective(model, every_exit, every_step=True)(x), expected)


OBJECTIVES = {
    "last": lambda: rd.last_step_loss,
    "every": lambda: rd.every_step_loss,
    "expected": lambda: rd.ExpectedExitLoss(rd.LearnedExit(16)),
    "sampled": lambda: rd.SampledExitLoss(rd.ExitAfter(2)),
    "distilled": lambda: rd.DistilledLoss(tiny(rd.naive).eval()),
}


@pytest.mark.parametrize("build", [rd.mor, rd.universal], ids=["router", "ponder"])
@pytest.mark.parametrize("make", OBJECTIVES.values(), ids=OBJECTIVES)
def test_the_losses_of_routers_and_of_pondering_are_part_of_every_objective_that_trains_the_model(make, build):
    model, x, objective = tiny(build), torch.randint(23, (2, 6)), make()
    trajectory = model.trajectory(x, every_step=True)
    without = trajectory._replace(states=tuple(state._replace(losses={}) for state in trajectory.states))
    extra = torch.stack(list(trajectory.losses.values())).sum()
    assert extra > 1e-4
    assert_close(objective(trajectory, x) - objective(without, x), extra, atol=1e-6, rtol=1e-3)


def test_logits_in_place_of_a_trajectory_are_refused_with_what_to_give(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as a user runs it
    model, x, rule = tiny(), torch.randint(23, (2, 6)), rd.LearnedExit(16)
    objectives = (rd.last_step_loss, rd.every_step_loss, rd.ExpectedExitLoss(rule), rd.ExitGainLoss(rule))
    for objective in (*objectives, rd.SampledExitLoss(rule), rd.DistilledLoss(tiny())):
        with pytest.raises(
            ValueError, match=r"trajectory is a tensor of shape \(2, 6, 23\).* model.trajectory\(tokens"
        ):
            objective(model(x), x)
        with pytest.raises(ValueError, match="trajectory is NoneType, but must be a Trajectory"):
            objective(None, x)


def test_a_trajectory_in_place_of_logits_is_refused_with_what_to_give(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    model, x = tiny(), torch.randint(23, (2, 6))
    with pytest.raises(ValueError, match=r"logits is a Trajectory.* last_step_loss\(trajectory, tokens, mask\)"):
        rd.WithObjective(model, rd.next_token_loss)(x)
    with pytest.raises(ValueError, match=r"logits must be a tensor .* got tuple"):
        rd.next_token_loss((model(x),), x)
    with pytest.raises(ValueError, match=r"logits must be for tokens of shape \(2, 6\).* got \(2, 6\)"):
        rd.next_token_loss(x, x)


@pytest.mark.parametrize(
    "objective, message",
    [
        (rd.ExpectedExitLoss, r"the class ExpectedExitLoss, .* give an instance of it, ExpectedExitLoss\(...\)"),
        ("next_token", r"objective is 'next_token', but must be callable as objective\(trajectory, tokens, mask\)"),
        (None, "objective is None, .* give last_step_loss"),
    ],
    ids=str,
)
def test_what_is_no_objective_is_refused_before_any_forward(objective, message, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=message):
        rd.WithObjective(tiny(), objective, every_step=True)


@pytest.mark.parametrize("tokens", [torch.zeros(2, 6), torch.zeros(2, 6, dtype=torch.bool), [[1, 2]]], ids=type)
def test_targets_are_integers(tokens, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    model, x = tiny(), torch.randint(23, (2, 6))
    for call in (partial(rd.next_token_loss, model(x)), partial(rd.last_step_loss, model.trajectory(x))):
        with pytest.raises(ValueError, match="tokens must be"):
            call(tokens)


def test_a_token_of_minus_100_is_no_target():
    model, x = lively(tiny()).eval(), torch.randint(23, (2, 6))
    trajectory, completions = model.trajectory(x, every_step=True), x.clone()
    completions[:, :3] = -100
    by_hand = torch.nn.functional.cross_entropy(trajectory.output[:, 2:-1].flatten(0, 1), x[:, 3:].flatten())
    assert_close(rd.last_step_loss(trajectory, completions), by_hand)
    law = rd.ExpectedExitLoss(rd.LearnedExit(16), entropy=0.0)
    later = rd.every_step_loss(trajectory, completions), law(trajectory, completions)
    assert_close(torch.stack(later).isfinite().all(), torch.tensor(True))
    nothing = torch.full_like(x, -100)
    assert rd.last_step_loss(trajectory, nothing) == 0


@pytest.mark.usefixtures("as_a_user_runs_it")
@pytest.mark.parametrize("token", [-1, 23, 10**6])
def test_targets_that_the_logits_do_not_know_are_refused(token):
    model, x = tiny(), torch.randint(23, (2, 6))
    logits = model(x)
    x[0, 3] = token
    with pytest.raises(ValueError, match=rf"tokens must lie in 0 to 22, the vocabulary; got .*{abs(token)}"):
        rd.next_token_loss(logits, x)


@pytest.mark.usefixtures("as_a_user_runs_it")
@pytest.mark.parametrize("model", [torch.nn.Linear(2, 2), None, "grt"], ids=type)
def test_what_has_no_trajectory_is_refused_with_what_to_give(model):
    with pytest.raises(ValueError, match=rf"model is of {type(model).__name__}, which has no trajectory.*model.native"):
        rd.WithObjective(model)


def test_a_single_token_has_no_next_one():
    with pytest.raises(ValueError, match="at least 2 long"):
        rd.next_token_loss(torch.randn(1, 1, 23), torch.zeros(1, 1, dtype=torch.long))


@pytest.mark.parametrize("objective", [rd.ExpectedExitLoss, rd.ExitGainLoss, rd.SampledExitLoss])
def test_an_objective_of_exits_refuses_what_is_no_rule(objective, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as a user runs it
    with pytest.raises(ValueError, match=r"rule is the class LearnedExit, but must be an ExitRule: give an instance"):
        objective(rd.LearnedExit)
    with pytest.raises(ValueError, match="rule is None, but must be an ExitRule"):
        objective(None)
