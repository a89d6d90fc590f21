"""Ouro: its equations, and the objectives that read every step against their written forms."""

import copy
import math
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transcription_relatives as slow
from battery import close, lively, tiny
from hypothesis import given
from hypothesis import strategies as st
from strategies import few
from torch.testing import assert_close
from user_parts import Answering, Confidence

import recurrent_depth as rd
from recurrent_depth.norms import RMSNorm

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from live_bytes import LiveBytes

LAYOUT = rd.Layout(0, 2, 4, 0)
MASK = torch.tensor([[False, False, True, True, True, True, True], [True] * 7])


def some(build=rd.ouro, layout=LAYOUT, scale=0.2, **changes) -> tuple[rd.RecurrentTransformer, torch.Tensor]:
    return lively(tiny(build, layout, **changes), scale).eval(), torch.randint(23, (2, 7))


def lively_exit(dim: int = 16) -> rd.LearnedExit:
    rule = rd.LearnedExit(dim, bias=-0.5)
    torch.nn.init.normal_(rule.linear.weight, std=0.5)
    return rule


def by_hand(model, rule, x):
    """The hazards and the losses (step, token) of one row, in NumPy."""
    states, logits = slow.ouro(slow.arrays(model.state_dict()), x.tolist(), 2, model.num_steps)
    weight, bias = rule.linear.weight.detach().double().numpy()[0], rule.bias.item()
    return np.array([slow.sigmoid(h @ weight + bias) for h in states])[:, :-1], slow.losses(logits, x.tolist())


class Fixed(rd.ExitRule):
    """The same hazard everywhere; what it could learn changes nothing."""

    def __init__(self, value: float):
        super().__init__()
        self.value, self.unused = value, torch.nn.Parameter(torch.zeros(()))

    def hazard(self, carry, state, readout, step):
        return carry, torch.full_like(state.write, self.value)


# The equations


@few
@given(st.integers(1, 3), st.integers(1, 4))
def test_the_model_is_the_published_equations(core, num_steps):
    model, x = some(layout=rd.Layout(0, core, num_steps, 0))
    trajectory = model.trajectory(x, every_step=True)
    for row, tokens in enumerate(x):
        states, logits = slow.ouro(slow.arrays(model.state_dict()), tokens.tolist(), 2, num_steps)
        for step in range(num_steps):
            assert_close(trajectory.states[step].h[row], torch.from_numpy(states[step]).float(), **close)
            assert_close(trajectory.after(step + 1)[row], torch.from_numpy(logits[step]).float(), **close)


def test_the_exit_reads_exactly_what_the_head_reads():
    model, x = some()
    trajectory = model.trajectory(x, every_step=True)
    for step, state in enumerate(trajectory.states):
        assert_close(state.h @ model.embed.token.weight.T, trajectory.after(step + 1))


@pytest.mark.parametrize("num_coda", [0, 1])
def test_the_loop_owns_its_norm_and_only_a_coda_has_another_one_behind_it(num_coda):
    model, x = some(layout=rd.Layout(0, 2, 4, num_coda))
    names = [name for name in model.state_dict() if name.endswith(".norm.weight") or name == "norm.weight"]
    assert names == ["core.update.norm.weight", "norm.weight"][: 1 + num_coda]
    state = model.trajectory(x).states[-1]
    h = model.coda(state.h, rd.At(torch.arange(7)[None]))
    assert_close(model(x), model.head(model.norm(h), model.embed.token.weight))


def test_one_loop_is_the_dense_model():
    model, x = some()
    dense = tiny(partial(rd.naive, form=partial(rd.LlamaForm, arrangement=rd.BranchSandwich)), LAYOUT).eval()
    dense.load_state_dict({name.replace("core.update.norm", "norm"): w for name, w in model.state_dict().items()})
    assert_close(model(x, 1), dense(x, 1))
    assert not torch.allclose(model(x, 2), dense(x, 2), rtol=1e-2)


def test_the_norm_behind_each_step_wraps_any_update():
    model, x = some(partial(rd.grt, update=partial(norm_each, inner=rd.gated)))
    update, begun = model.core.update, model.begin(x)
    state = begun.state
    for step, after in enumerate(model.trajectory(x, every_step=True).states):
        bare = rd.RecurrentCore(model.core.stack, update.inner).step(state, begun.at, step)
        state = bare._replace(h=update.norm(bare.h))
        assert_close(after.h, state.h)
        assert torch.equal(update.read(after), after.h)
    assert "core.update.norm.weight" in model.state_dict()


# What wraps it has its say


def norm_each(dim: int, inner=rd.plain) -> rd.DepthUpdate:
    return rd.NormEachStep(inner(dim), RMSNorm(dim))


halting_norm = partial(rd.halted, inner=norm_each)
WRAPPED = {
    "halted": partial(rd.grt, update=partial(halting_norm, bias=-3.0)),
    "expert choice": partial(rd.mor, update=norm_each),
    "token choice": partial(rd.mor, update=norm_each, router=rd.token_choice, combine=rd.Interpolate),
    "ple": partial(rd.ple, size=8, update=norm_each),
}
UNITS = {
    "halted": "unit.linear.weight",
    "expert choice": "choose.scores.weight",
    "token choice": "router.scores.weight",
}


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_and_a_router_around_it_learn_from_the_text(name):
    model, x = some(WRAPPED[name])
    rd.next_token_loss(model.train()(x), x).backward()
    (grad,) = (weight.grad for at, weight in model.named_parameters() if at.endswith(UNITS[name]))
    assert (grad.abs().amax(-1) > 1e-6).all()  # of the last step's router too


@pytest.mark.parametrize("build", WRAPPED.values(), ids=WRAPPED)
def test_what_is_read_is_what_the_wrapper_made_of_the_state(build):
    model, x = some(build)
    state = model.trajectory(x).states[-1]
    there, elsewhere = (model.core.update.read(state._replace(h=h)) for h in (state.h, state.h + 1))
    assert not torch.allclose(there, elsewhere)


class Weighing(rd.Router):
    """Picks the even tokens, all of them where `everyone`, and gives them a weight."""

    def __init__(self, weight: float, *, everyone: bool):
        super().__init__()
        self.weight, self.everyone = weight, everyone

    def begin(self, h, call):
        return rd.RouterState()

    def forward(self, h, state, real, step, *, causal):
        even = torch.arange(0, h.shape[1], 2).expand(len(h), -1)
        weight = torch.full(h.shape[:2], self.weight)
        return rd.Routing(real, None if self.everyone else rd.Pick(even), weight)

    def cost(self, num_steps):
        return rd.UpdateCost(shares=(1.0,) * num_steps)


def routed_core(weight: float, *, everyone: bool) -> rd.RecurrentCore:
    update = rd.RoutedUpdate(norm_each(16), Weighing(weight, everyone=everyone), rd.Interpolate())
    return lively(rd.RecurrentCore([rd.LlamaForm(16, 2).block()], update))


def test_a_token_with_weight_0_or_not_picked_reads_as_the_anchor():
    x = torch.randn(2, 7, 16)
    assert_close(routed_core(0.0, everyone=True)(x, 3), x)
    picked = routed_core(1.0, everyone=False)(x, 3)
    assert torch.equal(picked[:, 1::2], x[:, 1::2])
    assert not torch.allclose(picked[:, ::2], x[:, ::2])


def test_weight_1_for_everyone_is_the_norm_at_each_step():
    core, x = routed_core(1.0, everyone=True), torch.randn(2, 7, 16)
    assert_close(core(x, 3), rd.RecurrentCore(core.stack, core.update.inner)(x, 3), **close)


def test_halting_around_it_weighs_normed_states():
    model, x = some(partial(rd.grt, update=partial(halting_norm, bias=-1.0)))
    states = model.trajectory(x, every_step=True).states
    mixed = [states[0].carry.weight[..., None] * states[0].h]
    mixed += [mixed[0] + (1 - states[0].carry.mass)[..., None] * states[0].h]
    assert_close(model.core.update.read(states[0]), mixed[1], **close)
    assert_close(states[1].carry.mixture, mixed[0], **close)


def test_the_last_steps_embedding_around_it_matters():
    model, x = some(WRAPPED["ple"])
    rd.next_token_loss(model(x), x).backward()
    slices = model.core.update.embedding.table.weight.grad.unflatten(-1, (-1, 8))
    assert (slices.abs().amax(dim=(0, 2)) > 1e-6).all()


@pytest.mark.parametrize("inner", [rd.halted, lambda dim: tiny(rd.mor).core.update], ids=["halted", "mor"])
def test_around_tokens_that_take_no_step_it_is_refused(inner):
    with pytest.raises(ValueError, match=r"put this inside, (Halting|Routed)Update\(NormEachStep\("):
        norm_each(16, inner)
    with pytest.raises(ValueError, match=r"put this inside, (Halting|Routed)Update\(AddStepEmbedding\("):
        tiny(rd.ple, update=inner)


def test_a_published_size():
    with torch.device("meta"):
        model = rd.ouro(
            rd.Layout(0, 24, 4, 0),
            dim=2048,
            num_heads=16,
            vocab_size=49152,
            context_length=4096,
            form=partial(rd.LlamaForm, hidden=5632, arrangement=rd.BranchSandwich, tied=False),
        )
    assert rd.accounting.num_parameters(model) / 1e9 == pytest.approx(1.4, abs=0.05)


# All exits alike


@pytest.mark.parametrize("build", [rd.ouro, rd.grt, rd.huginn])
@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "padded"])
def test_the_loss_of_every_step_is_the_mean_of_the_losses_after_each(build, mask):
    model, x = some(build, rd.Layout(1, 1, 3, 1))
    found = rd.WithObjective(model, rd.every_step_loss, every_step=True)(x, mask=mask)
    expected = torch.stack([rd.next_token_loss(model(x, steps, mask=mask), x, mask) for steps in (1, 2, 3)]).mean()
    assert_close(found, expected, **close)


def test_its_gradients_are_those_of_the_losses_after_each():
    model, x = some(rd.grt, rd.Layout(1, 1, 3, 1))
    found = []
    for step in (0, 1):
        if step:
            torch.stack([rd.next_token_loss(model(x, steps), x) for steps in (1, 2, 3)]).mean().backward()
        else:
            rd.every_step_loss(model.trajectory(x, every_step=True), x).backward()
        found.append({name: weight.grad.clone() for name, weight in model.named_parameters()})
        model.zero_grad()
    for name in found[0]:
        assert_close(found[0][name], found[1][name], **close)


# The first stage


@few
@given(st.integers(2, 5), st.sampled_from([0.0, 0.05, 0.1]))
def test_the_first_stage_is_its_formula(num_steps, entropy):
    model, x = some(layout=rd.Layout(0, 1, num_steps, 0))
    rule = lively_exit()
    trajectory = model.trajectory(x[:1], every_step=True)
    expected = slow.stage_one(*by_hand(model, rule, x[0]), entropy)
    found = rd.ExpectedExitLoss(rule, entropy=entropy)(trajectory, x[:1])
    assert found.item() == pytest.approx(expected, rel=1e-4)


def test_the_law_that_it_uses_sums_to_one_and_ends_with_what_is_left():
    model, x = some()
    hazards = rd.exit_hazards(lively_exit(), model.trajectory(x, every_step=True))
    law = rd.exit_law(hazards)
    assert hazards.shape == law.shape == (4, 2, 7)
    assert_close(law.sum(0), torch.ones(2, 7))
    assert_close(law[-1], (1 - hazards[:-1]).prod(0))


def test_padding_counts_in_neither_stage():
    model, x = some()
    rule = lively_exit()
    for objective in (rd.ExpectedExitLoss(rule), rd.ExitGainLoss(rule)):
        together = rd.WithObjective(model, objective, every_step=True)(x, mask=MASK)
        alone = [rd.WithObjective(model, objective, every_step=True)(row) for row in (x[:1, 2:], x[1:])]
        assert_close(together, (4 * alone[0] + 6 * alone[1]) / 10, **close)


@pytest.mark.parametrize("hazard, step", [(0.0, 4), (1.0, 1)])
def test_certain_exits_are_the_loss_after_one_step(hazard, step):
    model, x = some()
    trajectory = model.trajectory(x, every_step=True)
    expected = rd.next_token_loss(model(x, step), x)
    assert_close(rd.ExpectedExitLoss(Fixed(hazard), entropy=0.0)(trajectory, x), expected, **close)
    assert_close(rd.ExpectedExitLoss(Fixed(hazard), entropy=0.1)(trajectory, x), expected, **close)
    assert_close(rd.SampledExitLoss(Fixed(hazard))(trajectory, x), expected, **close)


def test_an_even_law_is_the_loss_of_every_step_less_its_entropy():
    class Even(Fixed):
        def hazard(self, carry, state, readout, step):
            return carry, torch.full_like(state.write, 1 / (4 - step))

    model, x = some()
    trajectory = model.trajectory(x, every_step=True)
    found = rd.ExpectedExitLoss(Even(0), entropy=0.1)(trajectory, x)
    assert_close(found, rd.every_step_loss(trajectory, x) - 0.1 * math.log(4), **close)


def test_exits_that_are_certain_keep_gradients_finite():
    model, x = some()
    rule = rd.LearnedExit(16, bias=200.0)
    rd.ExpectedExitLoss(rule)(model.trajectory(x, every_step=True), x).backward()
    assert rule.bias.grad.isfinite().all()
    assert all(weight.grad.isfinite().all() for weight in model.parameters())


@few
@given(st.lists(st.integers(1, 4), min_size=2, max_size=2))
@pytest.mark.parametrize(
    "make", [rd.ExpectedExitLoss, rd.ExitGainLoss, lambda rule: rd.every_step_loss], ids=["expected", "gain", "every"]
)
def test_rows_that_left_early_count_as_if_they_ended_there(make, depths):
    model, x = some()
    rule = lively_exit()
    objective = make(rule)

    def loss(rows, steps):
        return objective(model.trajectory(rows, steps, every_step=True), rows)

    together, alone = loss(x, depths), [loss(x[i : i + 1], depths[i]) for i in (0, 1)]
    assert_close(together, torch.stack(alone).mean(), **close)
    assert_close(gradient_of(rule, together), gradient_of(rule, torch.stack(alone).mean()), **close)


def gradient_of(rule, loss):
    rule.zero_grad()
    if loss.requires_grad:
        loss.backward()
    return torch.zeros(1) if rule.bias.grad is None else rule.bias.grad.clone()


def test_a_sampled_exit_comes_no_later_than_its_rows_last_step():
    model, x = some()
    trajectory = model.trajectory(x, [1, 4], every_step=True)
    expected = rd.next_token_loss(model(x, [1, 4]), x)
    assert_close(rd.SampledExitLoss(Fixed(0.0))(trajectory, x), expected, **close)


def test_one_step_leaves_the_exit_a_gradient_of_zero_rather_than_none():
    model, x = some(rd.grt, rd.Layout(1, 1, 3, 1))
    rule = lively_exit()
    rd.WithObjective(model, rd.ExpectedExitLoss(rule), every_step=True)(x, 1).backward()
    for weight in rule.parameters():
        assert_close(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("build", [rd.ouro, rd.grt], ids=["ouro", "gate and learned exit"])
def test_exit_and_model_learn_together(build):
    torch.manual_seed(0)
    model = tiny(build, rd.Layout(1, 1, 3, 1))
    trained = rd.WithObjective(model, rd.ExpectedExitLoss(rd.LearnedExit(16)), every_step=True)
    assert "objective.rule.linear.weight" in dict(trained.named_parameters())
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    x, losses = torch.randint(23, (4, 9)), []
    for _ in range(25):
        loss = trained(x)
        optimizer.zero_grad()
        loss.backward()
        assert all(weight.grad is not None for weight in trained.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


# The second stage


@few
@given(st.integers(2, 5))
def test_the_second_stage_is_its_formula(num_steps):
    model, x = some(layout=rd.Layout(0, 1, num_steps, 0))
    rule = lively_exit()
    found = rd.ExitGainLoss(rule)(model.trajectory(x[:1], every_step=True), x[:1])
    assert found.item() == pytest.approx(slow.stage_two(*by_hand(model, rule, x[0])), rel=1e-3)


def test_the_second_stage_teaches_the_exit_alone():
    model, x = some()
    rule = lively_exit()
    rd.ExitGainLoss(rule)(model.trajectory(x, every_step=True), x).backward()
    assert all(weight.grad is None for weight in model.parameters())
    assert all(weight.grad.abs().sum() > 0 for weight in rule.parameters())


def test_the_second_stage_of_an_exit_that_reads_logits_teaches_the_exit_alone():
    model, x = some(layout=rd.Layout(1, 1, 4, 1))
    rule = Confidence()
    rd.WithObjective(model, rd.ExitGainLoss(rule), every_step=True)(x).backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in rule.parameters())
    assert all(weight.grad is None for weight in model.parameters())


def test_a_norm_of_the_model_is_lent_to_the_exit_and_never_its_own():
    model, x = some(rd.grt)
    with pytest.raises(ValueError, match=r"objective holds norm.weight of the model.*rd.Borrowed\(model.norm\)"):
        rd.WithObjective(model, rd.ExitGainLoss(rd.LearnedExit(16, norm=model.norm)), every_step=True)
    rule = rd.LearnedExit(16, norm=rd.Borrowed(model.norm))
    assert {name for name, _ in rule.named_parameters()} == {"linear.weight", "bias"}
    own = rd.LearnedExit(16, norm=copy.deepcopy(model.norm))
    own.load_state_dict(rule.state_dict(), strict=False)
    states = model.trajectory(x, every_step=True)
    assert_close(rd.exit_hazards(rule, states), rd.exit_hazards(own, states))


def test_a_frozen_model_will_do_and_one_step_costs_nothing():
    model, x = some()
    model.requires_grad_(False)
    rule = lively_exit()
    rd.WithObjective(model, rd.ExitGainLoss(rule), every_step=True)(x).backward()
    assert rule.bias.grad is not None
    assert rd.ExitGainLoss(rule)(model.trajectory(x, 1), x) == 0


def test_the_second_stage_wants_to_go_on_where_the_next_step_helps():
    rule, x = rd.LearnedExit(4), torch.zeros(1, 2, dtype=torch.long)
    for gains, sign in ((True, 1), (False, -1)):
        logits = [torch.tensor([0.0, 0.0]), torch.tensor([4.0, 0.0])]
        states = [rd.initial_state(torch.full((1, 2, 4), float(i))) for i in (0, 1)]
        order = logits if gains else logits[::-1]
        trajectory = rd.Trajectory(
            tuple(states), 2, lambda state, order=order: order[int(state.h[0, 0, 0])].expand(1, 2, 2), rd.Notes(), x
        )
        rule.zero_grad()
        rd.ExitGainLoss(rule)(trajectory, x).backward()
        assert sign * rule.bias.grad > 0  # descending lowers the chance to leave where a step helps


# A sampled exit


def test_the_sampled_exit_averages_what_is_expected():
    model, x = some(scale=0.3)
    rule = lively_exit()
    trajectory = model.trajectory(x, every_step=True)
    objective = rd.SampledExitLoss(rule)
    with torch.no_grad():
        drawn = torch.stack([objective(trajectory, x) for _ in range(400)])
        expected = rd.ExpectedExitLoss(rule, entropy=0.0)(trajectory, x)
    assert drawn.std() > 0
    assert abs(drawn.mean() - expected) < 4 * drawn.std() / 400**0.5


def test_the_sampled_exit_reads_once_whatever_the_coda():
    model, x = some(rd.huginn, rd.Layout(1, 1, 3, 1))
    reads = []
    model.head.register_forward_hook(lambda *_: reads.append(1))
    rd.SampledExitLoss(lively_exit())(model.trajectory(x, every_step=True), x).backward()
    assert len(reads) == 1


# Memory


def peak(objective, num_steps: int) -> int:
    model = tiny(rd.grt, rd.Layout(0, 1, num_steps, 0), dim=8, vocab_size=6000)
    x = torch.randint(6000, (2, 16))
    objective(model.trajectory(x, every_step=True), x).backward()  # makes the gradients, which stay
    with LiveBytes() as live:
        objective(model.trajectory(x, every_step=True), x).backward()
    return live.peak


HELD = {
    "every": rd.every_step_loss,
    "law": rd.ExpectedExitLoss(rd.LearnedExit(8)),
    "law of logits": rd.ExpectedExitLoss(Confidence()),
    "gain": rd.ExitGainLoss(rd.LearnedExit(8)),
    "gain of logits": rd.ExitGainLoss(Confidence()),
}


@pytest.mark.parametrize("objective", HELD.values(), ids=HELD)
def test_no_more_than_one_steps_logits_are_held_forward_and_backward(objective):
    logits = 2 * 16 * 6000 * 4
    few, many = (peak(objective, num_steps) for num_steps in (2, 10))
    assert few > logits
    assert many - few < logits  # eight more steps hold eight more states, and not one more step's logits


def test_live_logits_are_counted_by_the_test_above():
    def greedy(trajectory, tokens):
        return torch.stack(
            [rd.next_token_loss(trajectory.after(i + 1), tokens) for i in range(trajectory.num_steps)]
        ).mean()

    logits = 2 * 16 * 6000 * 4
    assert peak(greedy, 10) - peak(greedy, 2) > 7 * logits


# In decoding


def test_a_token_leaves_where_the_law_reaches_the_quantile():
    model, x = some(layout=rd.Layout(0, 1, 4, 0))
    rule = lively_exit()
    law = rd.exit_law(rd.exit_hazards(rule, model.trajectory(x, every_step=True)))[..., -1]
    for rule.quantile in (0.2, 0.5, 0.8, 0.95):
        cache = rd.DepthCache(rd.KeepAll())
        with torch.no_grad():
            rd.extend(model, x[:, :-1], cache)
            left = rd.extend_until(model, x[:, -1:], cache, rule)
        expected = (law.cumsum(0) < rule.quantile).sum(0).clamp(max=3) + 1
        assert left.num_steps.tolist() == expected.tolist()
        for row, steps in enumerate(expected.tolist()):
            assert_close(left.logits[row], exited(model, x[row : row + 1], steps), **close)
    assert rd.generate(model, x, max_new_tokens=3, exit=rule).shape == (2, 10)


def exited(model, x, steps):
    """The last token's logits where it alone leaves early: earlier tokens took all steps."""
    cache = rd.DepthCache(rd.KeepAll())
    with torch.no_grad():
        rd.extend(model, x[:, :-1], cache)
        return rd.extend(model, x[:, -1:], cache, steps)[0, -1]


# Bad input


@pytest.mark.parametrize("rule", [rd.GateClosed(0.1), rd.AtLeast(2, rd.ExitAfter(3))], ids=["gate", "fixed"])
def test_the_objective_by_which_an_exit_alone_learns_refuses_one_that_cannot(rule):
    with pytest.raises(ValueError, match=r"rule is of .*, which has no parameters.* take LearnedExit\(dim\)"):
        rd.ExitGainLoss(rule)


@pytest.mark.parametrize(
    "objective",
    [rd.every_step_loss, rd.ExpectedExitLoss(Fixed(0.5)), rd.ExitGainLoss(Fixed(0.5)), rd.SampledExitLoss(Fixed(0.5))],
    ids=["every", "first stage", "second stage", "sampled"],
)
def test_an_objective_refuses_a_trajectory_without_its_steps(objective):
    model, x = some()
    with pytest.raises(ValueError, match=r"each of 4 steps, but the trajectory kept 1: give every_step=True"):
        rd.WithObjective(model, objective)(x)


STAGES = {
    "every": rd.every_step_loss,
    "first stage": rd.ExpectedExitLoss(rd.LearnedExit(16)),
    "second stage": rd.ExitGainLoss(rd.LearnedExit(16)),
}


@pytest.mark.usefixtures("as_a_user_runs_it")
@pytest.mark.parametrize("objective", STAGES.values(), ids=STAGES)
def test_tokens_that_are_not_those_of_the_trajectory_are_refused(objective):
    model, x = some()
    trajectory = model.trajectory(x, every_step=True)
    for other in (x.T, x.reshape(1, -1), x[:, :-1], x[:1]):
        with pytest.raises(ValueError, match=r"tokens must be \(2, 7\) like those of the trajectory, got"):
            objective(trajectory, other)
    with pytest.raises(ValueError, match=r"tokens must lie in 0 to 22, the vocabulary; got \d to 23"):
        objective(trajectory, x.index_fill(1, torch.tensor(3), 23))


@pytest.mark.usefixtures("as_a_user_runs_it")
@pytest.mark.parametrize("make", [rd.ExpectedExitLoss, rd.ExitGainLoss, rd.SampledExitLoss])
def test_an_objective_asks_a_rule_for_one_chance_per_token(make):
    model, x = some()
    trajectory = model.trajectory(x, every_step=True)
    wrong = (torch.full((2, 7), 0.5), (None, torch.full((2, 7, 1), 0.5)), (None, torch.full((2, 7), -0.1)), (None, 0.5))
    for answer in wrong:
        rule = Answering(answer)
        rule.weight = torch.nn.Parameter(torch.zeros(()))
        with pytest.raises(ValueError, match=r"hazard of Answering must return .* tensor \(2, 7\), one chance per"):
            make(rule)(trajectory, x)


@pytest.mark.parametrize(
    "make, name",
    [
        (partial(rd.ExpectedExitLoss, entropy=math.nan), "entropy"),
        (partial(rd.ExpectedExitLoss, entropy=-1.0), "entropy is -1.0, but must be a finite number of at least 0"),
        (partial(rd.ExitGainLoss, sharpness=-50), "sharpness is -50, but must be a finite number above 0"),
        (partial(rd.ExitGainLoss, sharpness=math.inf), "sharpness"),
        (partial(rd.ExitGainLoss, threshold=math.nan), "threshold"),
    ],
    ids=["entropy", "negative entropy", "negative sharpness", "sharpness", "threshold"],
)
def test_numbers_that_are_none_are_refused(make, name):
    with pytest.raises(ValueError, match=name):
        make(Fixed(0.5))
