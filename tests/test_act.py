"""Adaptive computation time: its weights in closed form, its limits, the published loop in NumPy, and its traps."""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from battery import close, gradients, lively, tiny
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

import recurrent_depth as rd

DOUBLE = torch.float64


class Scripted(nn.Module):
    """A halting unit that says at step n what the script says for it: the step stands in feature 0."""

    def __init__(self, script: list[float]):
        super().__init__()
        self.register_buffer("script", torch.tensor([*script, script[-1]], dtype=DOUBLE))

    def forward(self, x):
        return self.script[x[..., 0].long().clamp(max=len(self.script) - 1)]


class Counting(nn.Module):
    """Counts its calls in feature 0, and changes the others from call to call."""

    def forward(self, x, at):
        return torch.cat([x[..., :1] + 1, torch.sin(3 * x[..., 1:]) + x[..., :1]], dim=-1)


def core_of(script: list[float], **changes) -> rd.RecurrentCore:
    update = rd.HaltingUpdate(rd.ReplaceState(rd.KeepState()), Scripted(script), rd.KeepState(), **changes)
    return rd.RecurrentCore([Counting()], update)


def run(core: rd.RecurrentCore, x: torch.Tensor, num_steps: int, mask=None) -> list[rd.DepthState]:
    call = rd.Call(num_steps, positions=torch.arange(x.shape[1])[None], mask=mask)
    return list(core.states(x, rd.Depth(num_steps), call, rd.At(call.positions)))


def some(batch: int = 2, num_tokens: int = 3, dim: int = 4) -> torch.Tensor:
    x = torch.randn(batch, num_tokens, dim, dtype=DOUBLE)
    x[..., 0] = 0
    return x


def plain_states(x: torch.Tensor, num_steps: int) -> list[torch.Tensor]:
    block, states = Counting(), [x]
    for _ in range(num_steps):
        states.append(block(states[-1], rd.At()))
    return states[1:]


def weighted(states: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    return sum(weight * state for weight, state in zip(weights, states, strict=True))


# Closed forms on probabilities made by hand


@pytest.mark.parametrize(
    "script, num_steps, weights, ponder",
    [
        ([0.5, 0.3, 0.4], 3, [0.5, 0.3, 0.2], 3.2),
        ([0.5, 0.3, 0.4], 4, [0.5, 0.3, 0.2], 3.2),  # halted: a fourth step changes nothing
        ([0.5, 0.3, 0.4], 2, [0.5, 0.5], 2.5),  # not halted: what is left goes to the last step
        ([0.6, 0.6], 2, [0.6, 0.4], 2.4),
        ([0.2, 0.795], 5, [0.2, 0.8], 2.8),  # within epsilon of 1
        ([0.995], 3, [1.0], 2.0),
        ([0.1, 0.1, 0.1, 0.1], 4, [0.1, 0.1, 0.1, 0.7], 4.7),
    ],
)
def test_weights_are_the_probabilities_and_the_remainder(script, num_steps, weights, ponder):
    x, core = some(), core_of(script, ponder=1.0)
    last = run(core, x, num_steps)[-1]
    assert sum(weights) == pytest.approx(1)
    # Never divided by the number of steps.
    assert_close(core.update.read(last), weighted(plain_states(x, len(weights)), weights))
    assert_close(last.carry.num_updates, torch.full((2, 3), float(len(weights)), dtype=DOUBLE))
    assert last.losses["ponder"].item() == pytest.approx(ponder)


def test_instant_halting_is_one_step():
    x = some()
    assert_close(core_of([1.0])(x, 5), plain_states(x, 1)[0])


def test_never_halting_gives_the_last_state():
    x = some()
    for mix in (rd.sum_states, rd.blend_states):
        for num_steps in (1, 2, 5):
            assert_close(core_of([0.0], mix=mix)(x, num_steps), plain_states(x, num_steps)[-1])


def test_a_halted_state_never_changes():
    x = some(num_tokens=4)
    x[:, :, 0] = torch.tensor([0.0, 1.0, 2.0, 3.0])  # each token starts elsewhere in the script
    states = run(core_of([0.1, 0.2, 0.3, 0.9, 0.99]), x, 6)
    for before, after in pairwise(states):
        halted = before.carry.mass == 1
        assert torch.equal(after.h[halted], before.h[halted])
        assert (after.carry.weight[halted] == 0).all()
        assert ((after.h != before.h).any(-1) == ~halted).all()
    assert len({tuple(state.carry.mass[0].tolist()) for state in states}) > 2


def test_the_update_within_is_frozen_as_well():
    class Counted(rd.ReplaceState):
        def begin(self, anchor, call):
            return rd.initial_state(anchor, carry={"steps": torch.zeros(anchor.shape[:2], dtype=torch.long)})

        def forward(self, state, blocks, step):
            return state._replace(h=blocks(state.h), carry={"steps": state.carry["steps"] + 1})

    core = rd.RecurrentCore(
        [Counting()], rd.HaltingUpdate(Counted(rd.KeepState()), Scripted([0.5, 0.5]), rd.KeepState())
    )
    last = run(core, some(), 4)[-1]
    assert (last.carry.inner["steps"] == 2).all()


# The published loop, line by line, in NumPy


def published(p, states, *, epsilon=0.01, basic=False):
    """Tensor2Tensor's loop over given probabilities and states (step, token, ...); the last step takes what is left."""
    num_steps, num_tokens = p.shape
    halting, remainders, n_updates = (np.zeros(num_tokens) for _ in range(3))
    output, weights = np.zeros_like(states[0]), []
    for step in range(num_steps):
        still_running = (halting < 1.0).astype(float)
        new_halted = (halting + p[step] * still_running > 1 - epsilon) * still_running
        still_running = (halting + p[step] * still_running <= 1 - epsilon) * still_running
        before = halting.copy()
        halting = halting + p[step] * still_running
        remainders = remainders + new_halted * (1 - halting)
        halting = halting + new_halted * remainders
        n_updates = n_updates + still_running + new_halted
        w = p[step] * still_running + new_halted * remainders
        if step == num_steps - 1:
            w = np.where(still_running > 0, 1 - before, w)
            remainders = np.where(still_running > 0, 1 - before, remainders)
        weights.append(w)
        kept = (1 - w[:, None]) if basic else 1
        output = states[step] * w[:, None] + output * kept
    return output, np.stack(weights), n_updates, remainders


class ByState(nn.Module):
    """Halting probabilities made of the state."""

    def forward(self, x):
        return torch.sigmoid(2 * x[..., 1] - 0.5)


@given(st.integers(1, 6), st.booleans(), st.integers(0, 1000), st.sampled_from([0.01, 0.3]))
def test_the_update_is_the_published_loop(num_steps, basic, seed, epsilon):
    torch.manual_seed(seed)
    x = some(1, 5)
    mix = rd.blend_states if basic else rd.sum_states
    inner = rd.ReplaceState(rd.KeepState())
    update = rd.HaltingUpdate(inner, ByState(), rd.KeepState(), epsilon=epsilon, ponder=1.0, mix=mix)
    core = rd.RecurrentCore([Counting()], update)
    states = plain_states(x, num_steps)
    p = torch.stack([ByState()(state) for state in [x, *states[:-1]]])[:, 0].numpy()
    output, weights, num_updates, remainders = published(
        p, [state[0].numpy() for state in states], epsilon=epsilon, basic=basic
    )
    last = run(core, x, num_steps)[-1]
    assert_close(core.update.read(last)[0], torch.from_numpy(output))
    assert_close(last.carry.num_updates[0], torch.from_numpy(num_updates))
    assert last.losses["ponder"].item() == pytest.approx((num_updates + remainders).mean())
    np.testing.assert_allclose(weights.sum(0), 1)


def test_the_blend_is_that_with_parentheses():
    mixture, h, weight = (torch.rand(2, 3, 4, dtype=DOUBLE) for _ in range(3))
    assert_close(rd.blend_states(mixture, h, weight), h * weight + mixture * (1 - weight))
    assert (rd.blend_states(mixture, h, weight) - (h * weight + (mixture * 1 - weight))).abs().max() > 0.01


def test_sinusoids_are_those_of_the_paper():
    dim, step = 6, 3
    x = torch.zeros(1, 5, dim, dtype=DOUBLE)
    inject = rd.StepEncoding()
    found = inject(x, inject.begin(x, rd.Call(4)), step)[0]
    for i in range(5):
        for feature in range(dim):
            rate = 10000 ** (2 * (feature // 2) / dim)
            wave = np.cos if feature % 2 else np.sin
            assert found[i, feature].item() == pytest.approx(wave(i / rate) + wave(step / rate))
    late = inject.begin(x[:, :2], rd.Call(4, positions=torch.tensor([[3, 4]])))
    assert_close(inject(x[:, :2], late, step)[0], found[3:])


# Padding, rows, traps


def universal(bias: float = -1.0, **changes) -> rd.RecurrentTransformer:
    update = partial(rd.halted, bias=bias, **changes)
    return lively(tiny(rd.universal, update=update), 0.1).eval()


def test_padding_leaves_the_ponder_cost():
    model = universal(ponder=1.0)
    x = torch.randint(23, (2, 7))
    mask = torch.ones_like(x).bool()
    mask[0, :3] = False
    found = model.trajectory(x, mask=mask).losses["ponder"]
    rows = [model.trajectory(x[:1, 3:]).losses["ponder"] * 4, model.trajectory(x[1:]).losses["ponder"] * 7]
    assert_close(found, sum(rows) / 11)
    nothing = model.trajectory(x, mask=torch.zeros_like(mask)).losses["ponder"]
    assert nothing == 0


def test_the_ponder_cost_of_rows_of_any_depths_is_the_mean_over_all():
    model = universal(bias=-2.0, ponder=1.0)
    x, rows = torch.randint(23, (3, 7)), [3, 1, 2]
    found = model.trajectory(x, rows).losses["ponder"]
    alone = [model.trajectory(x[i : i + 1], rows[i]).losses["ponder"] for i in range(3)]
    assert_close(found, sum(alone) / 3)


def test_the_ponder_cost_leaves_out_the_padding_of_picks():
    class Routed(rd.HaltingUpdate):
        def forward(self, state, blocks, step):
            return super().forward(state, blocks.picked(pick), step)

    x = some(1, 3)
    pick = rd.Pick(torch.tensor([[0, 1, 2]]), torch.tensor([[True, True, False]]))
    update = Routed(rd.ReplaceState(rd.KeepState()), Scripted([0.25, 1.0]), rd.KeepState(), ponder=1.0)
    last = run(rd.RecurrentCore([Counting()], update), x, 3)[-1]
    assert last.losses["ponder"].item() == pytest.approx((2.75 + 2.75) / 3)


def test_the_gradient_of_the_ponder_cost_flows_through_the_remainder_alone():
    p = torch.tensor([0.25, 0.5, 0.5], dtype=DOUBLE, requires_grad=True)

    class Given(Scripted):
        def forward(self, x):
            return p[x[..., 0].long().clamp(max=2)]

    update = rd.HaltingUpdate(rd.ReplaceState(rd.KeepState()), Given([0.0]), rd.KeepState(), ponder=1.0)
    core = rd.RecurrentCore([Counting()], update)
    run(core, some(), 4)[-1].losses["ponder"].backward()
    assert_close(p.grad, torch.tensor([-1.0, -1.0, 0.0], dtype=DOUBLE))


def test_last_step_loss_adds_the_ponder_cost_by_its_weight():
    x = torch.randint(23, (2, 7))
    losses = []
    for ponder in (0.0, 0.5):
        torch.manual_seed(0)
        model = universal(ponder=ponder)
        trajectory = model.trajectory(x)
        losses.append(rd.last_step_loss(trajectory, x))
    ponder = trajectory.losses["ponder"]
    assert 0.5 * 1 < ponder < 0.5 * 4
    assert_close(losses[1] - losses[0], ponder, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_two_forwards_are_identical(training):
    model = universal().train(training)
    x = torch.randint(23, (2, 7))
    first, second = (model.trajectory(x) for _ in range(2))
    assert torch.equal(first.output, second.output)
    for here, there in zip(first.states[-1].carry[1:], second.states[-1].carry[1:], strict=True):
        assert torch.equal(here, there)
    assert first.losses["ponder"] == second.losses["ponder"]


def mean_steps(bias: float) -> float:
    update = partial(rd.halted, bias=bias)
    model = tiny(rd.universal, rd.Layout(0, 1, 12, 0), dim=64, update=update)
    return model.trajectory(torch.randint(23, (4, 16))).states[-1].carry.num_updates.mean().item()


def test_a_fresh_model_is_shallow_with_the_bias_of_the_source_and_deep_with_another():
    assert mean_steps(1.0) == pytest.approx(2, abs=0.2)
    assert mean_steps(-3.0) == pytest.approx(12, abs=0.5)


def test_the_bias_is_kept_through_initialisation():
    model = tiny(rd.universal, update=partial(rd.halted, bias=-3.0))
    rd.initialise(lively(model))
    assert model.core.update.unit.bias.item() == -3.0
    assert tiny(rd.universal).core.update.unit.bias.item() == 1.0


def test_the_unit_is_as_fine_in_half_precision():
    unit = rd.HaltingUnit(16, bias=-8.0)
    x = torch.randn(1, 3, 16)
    assert_close(unit.bfloat16()(x.bfloat16()), unit.float()(x.bfloat16().float()))
    assert unit.bfloat16()(x.bfloat16()).dtype == torch.float32


# Compositions


halting_gate = partial(rd.grt, update=partial(rd.halted, inner=partial(rd.gated, bias=0.0), bias=-1.0))


@pytest.mark.parametrize("build", [halting_gate, rd.universal], ids=["gated", "universal"])
def test_a_loop_whose_tokens_halt_trains(build):
    model = tiny(build)
    x = torch.randint(23, (4, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, found = [], {}
    for _ in range(40):
        loss = rd.WithObjective(model)(x)
        loss.backward()
        found = gradients_of(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1
    for name, gradient in found.items():
        assert gradient.isfinite().all(), name
        assert gradient.abs().max() > 0, name


def gradients_of(model):
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


def test_a_gate_that_never_halts_is_the_gated_loop():
    model = lively(tiny(update=partial(rd.halted, inner=rd.gated))).eval()
    with torch.no_grad():
        model.core.update.unit.linear.weight.zero_()
        model.core.update.unit.bias.fill_(-60)
    x = torch.randint(23, (2, 7))
    found = model(x)
    model.core.update = model.core.update.inner
    assert_close(found, model(x), **close)


def test_a_halting_update_may_be_routed():
    class Half(rd.DepthUpdate):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def begin(self, anchor, call):
            return self.inner.begin(anchor, call)

        def forward(self, state, blocks, step):
            pick = rd.Pick(torch.arange(step % 2, state.h.shape[1], 2).expand(len(state.h), -1))
            parts = (state.h, state.write, state.context, state.carry)
            h, write, context, carry = rd.map_tensors(pick.gather, parts)
            part = state._replace(h=h, write=write, context=context, carry=carry)
            after = self.inner(part, blocks.picked(pick), step)
            h, write, carry = rd.map_tensors(
                pick.scatter, (state.h, state.write, state.carry), (after.h, after.write, after.carry)
            )
            return state._replace(h=h, write=write, carry=carry, losses=after.losses)

        def read(self, state):
            return self.inner.read(state)

        def cost(self, num_steps):
            return self.inner.cost(num_steps)

    model = lively(tiny(rd.universal, update=lambda dim: Half(rd.halted(dim, bias=-9.0, ponder=1.0))), 0.1).eval()
    trajectory = model.trajectory(torch.randint(23, (2, 6)))
    assert (trajectory.states[-1].carry.num_updates == torch.tensor([2.0, 1.0] * 3)).all()
    remainders = 1 - (trajectory.states[-1].carry.mass - trajectory.states[-1].carry.weight)
    assert_close(trajectory.losses["ponder"], (trajectory.states[-1].carry.num_updates + remainders).mean())
    rd.last_step_loss(trajectory, torch.randint(23, (2, 6))).backward()
    assert gradients(model)["core.update.inner.unit.bias"].abs() > 0


# Cost and decoding


def test_halting_saves_no_computation_in_a_forward_and_the_cost_says_so():
    halting, never = (tiny(rd.universal, update=u) for u in (rd.halted, rd.step_encoded))
    assert rd.accounting.flops(halting, 16) == rd.accounting.flops(never, 16)
    calls = []
    halting.core.stack.register_forward_hook(lambda module, inputs, out: calls.append(out.shape[1]))
    halting(torch.randint(23, (2, 7)))
    assert calls == [7] * 3


def test_rows_leave_in_decoding_when_their_token_has_halted():
    model = universal(bias=1.0)
    prompt, calls = torch.randint(23, (2, 4)), []
    left = rd.generate(model, prompt, max_new_tokens=5, exit=rd.TokenHalted())
    model.core.stack.register_forward_hook(lambda module, inputs, out: calls.append(tuple(out.shape[:2])))
    assert torch.equal(rd.generate(model, prompt, max_new_tokens=5, exit=rd.TokenHalted()), left)
    assert [call for call in calls if call[1] == 1] == [(2, 1)] * 2 * 4  # two steps of three for each new token


def test_the_exit_finds_a_halting_update_that_is_routed():
    update = partial(rd.halted, inner=rd.gated, bias=1.0)
    model = lively(tiny(rd.mor, update=update, combine=rd.Interpolate), 0.1).eval()
    x, rule = torch.randint(23, (2, 7)), rd.TokenHalted()
    trajectory = model.trajectory(x, every_step=True)
    found = rd.exit_hazards(rule, trajectory)
    assert_close(found, torch.stack([(state.carry.inner.mass >= 1).float() for state in trajectory.states]))
    assert found.mean() not in (0, 1)
    assert rd.generate(model, x, max_new_tokens=3, exit=rule).shape == (2, 10)


def test_decoding_with_keep_all_is_the_forward_without_a_cache_where_tokens_halt_apart():
    model = universal(bias=0.0).double()
    x = torch.randint(23, (2, 9))
    assert len(model.trajectory(x).states[-1].carry.num_updates.unique()) > 1
    cache = rd.DepthCache()
    found = torch.cat([rd.extend(model, part, cache) for part in x.split([4, 1, 1, 3], dim=1)], dim=1)
    assert_close(found, model(x))


# Bad input


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"ponder": -0.1}, "ponder"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": 1}, "epsilon"),
        ({"epsilon": float("nan")}, "epsilon"),
        ({"bias": float("inf")}, "bias"),
    ],
)
def test_what_cannot_be_is_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        rd.halted(8, **changes)


@pytest.mark.parametrize(
    "build, carries",
    [(rd.grt, "nothing"), (rd.mesh, "Tensor"), (rd.mor, "Routed"), (partial(rd.grt, update=rd.damped), "FirstPass")],
    ids=["grt", "mesh", "mor", "damped"],
)
def test_the_exit_is_refused_where_tokens_do_not_halt(build, carries):
    model, x = tiny(build).eval(), torch.randint(23, (2, 7))
    says = rf"TokenHalted reads .*, but this update carries {carries}: build the model with update=rd.halted"
    with pytest.raises(ValueError, match=says):
        rd.generate(model, x, max_new_tokens=2, exit=rd.TokenHalted())
    with pytest.raises(ValueError, match=says):
        rd.ExpectedExitLoss(rd.TokenHalted())(model.trajectory(x, every_step=True), x)


def test_sizes_that_cannot_be_are_refused():
    x = torch.randn(1, 3, 6)
    for says, build in (
        ("dim", lambda: rd.HaltingUnit(0)),
        ("num_heads", lambda: tiny(rd.universal, num_heads=3)),
        ("num_heads", lambda: rd.UniversalForm(8, 3)),
        ("x is 6 wide", lambda: rd.RecurrentCore([Counting()], rd.halted(8))(x, num_steps=1)),
    ):
        with pytest.raises(ValueError, match=says):
            build()


def test_a_width_may_be_odd():
    x = torch.randn(2, 3, 5)
    inject = rd.StepEncoding()
    assert inject(x, inject.begin(x, rd.Call(1)), 0).shape == x.shape
