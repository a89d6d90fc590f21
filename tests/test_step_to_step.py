"""What goes from step to step beside the state: carry, memory and losses, at any depth, by row and checkpointed."""

import pytest
import torch
from battery import blocks_of, gradients, lively, tiny
from hypothesis import given
from hypothesis import strategies as st
from strategies import few, seeds
from torch.testing import assert_close
from user_parts import Balanced, LateBlocks, Mixing, Momentum, Recorded, Remembering

import recurrent_depth as rd

X = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))
rows = st.lists(st.integers(1, 4), min_size=3, max_size=3)


def make_remembering() -> rd.RecurrentCore:
    return rd.RecurrentCore([Remembering(), Remembering()], Recorded())


def make_momentum() -> rd.RecurrentCore:
    return rd.RecurrentCore([Mixing()], Momentum())


def make_late() -> rd.RecurrentCore:
    return rd.RecurrentCore([Remembering()], LateBlocks())


every_core = pytest.mark.parametrize("make", [make_remembering, make_momentum, make_late])


def test_a_carry_is_handed_to_the_next_step():
    core = make_momentum()
    h, velocity = X, torch.zeros_like(X)
    for _ in range(3):
        velocity = velocity / 2 + core.stack(h, rd.At()) - h
        h = h + velocity
    assert_close(core(X, 3), h + velocity)


def test_each_block_reads_what_it_remembered_at_the_step_before():
    core = make_remembering()
    h, seen = X, ([], [])
    for _ in range(3):
        for block, earlier in zip(blocks_of(core), seen, strict=True):
            past = torch.stack(earlier).mean(0) if earlier else 0
            earlier.append(h)
            h = Mixing.forward(block, h, rd.At()) + past
    assert_close(core(X, 3), h)


def test_memory_lies_in_the_state_and_nowhere_else():
    core = make_remembering()
    last = last_state(core, 2)
    assert sorted(last.memory) == [0, 1]
    assert (last.memory[1][0] == 2).all()
    assert_close(core(X, 3), core(X, 3))


def last_state(core: rd.RecurrentCore, num_steps: int, mask: torch.Tensor | None = None) -> rd.DepthState:
    at = rd.At(torch.arange(X.shape[1])[None], mask, mask)
    return list(core.states(X, rd.Depth(num_steps), rd.Call(num_steps), at))[-1]


@every_core
@few
@given(rows, seeds)
def test_by_row_each_row_is_as_if_it_ran_alone(make, rows, seed):
    torch.manual_seed(seed)
    core = make()
    together = core(X, rows)
    for row, num_steps in enumerate(rows):
        assert_close(together[row : row + 1], core(X[row : row + 1], num_steps))


@every_core
@few
@given(rows, st.none() | st.integers(1, 3), seeds)
def test_by_row_gradients_add_up(make, rows, grad_steps, seed):
    torch.manual_seed(seed)
    core = make()
    start = X.clone().requires_grad_()  # rows that take no step that learns have a gradient too
    core(start, rd.Depth(max(rows), grad_steps, tuple(rows))).square().sum().backward()
    together, start.grad = {**gradients(core), "start": zero_if_none(start.grad)}, None
    for row, num_steps in enumerate(rows):
        out = core(start[row : row + 1], rd.Depth(num_steps, grad_steps))
        if out.requires_grad:
            out.square().sum().backward()
    for name, gradient in {**gradients(core), "start": zero_if_none(start.grad)}.items():
        assert_close(together[name], gradient, atol=1e-3, rtol=1e-3)


@every_core
@pytest.mark.parametrize("depth", [4, rd.Depth(4, 1), [4, 1, 2], rd.Depth(4, 1, (4, 1, 2))], ids=str)
def test_checkpointing_hands_on_the_same(make, depth):
    core = lively(make())
    found = []
    for core.checkpointing in (True, False):
        out = core(X, depth)
        out.square().sum().backward()
        found.append({"out": out.detach(), **gradients(core)})
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


class Odd(Recorded):
    """Begins, or goes on, with something that is not for each token."""

    def __init__(self, begun=None, after=None):
        super().__init__()
        self.begun, self.after = begun or {}, after or {}

    def begin(self, anchor, call):
        return rd.initial_state(anchor)._replace(**self.begun)

    def forward(self, state, blocks, step):
        return state._replace(h=blocks(state.h), **self.after)


@pytest.mark.usefixtures("as_a_user_runs_it")
@pytest.mark.parametrize(
    "given, said",
    [
        ({"carry": torch.zeros(2, 8)}, r"carry of shape \(2, 8\)"),
        ({"carry": {"sum": (torch.zeros(()), None)}}, r"carry of shape \(\)"),
        ({"context": torch.zeros(1, 5, 8)}, r"context of shape \(1, 5, 8\)"),
        ({"write": torch.zeros(2, 5, 8)}, r"write of shape \(2, 5, 8\)"),
        ({"write": torch.tensor(1.0)}, r"write of shape \(\)"),
    ],
)
def test_what_is_not_for_each_token_is_refused_since_no_row_could_be_picked(given, said):
    x = torch.randn(2, 5, 8)
    places = [(Odd(begun=given), "begin of Odd"), (Odd(after=given), "A step of Odd")]
    for update, where in places[: 1 if "context" in given else 2]:  # no step makes a context
        with pytest.raises(ValueError, match=rf"{where} gives a {said}, .* \(batch, token\), here \(2, 5\)"):
            rd.RecurrentCore([Mixing()], update)(x, 2)


def test_losses_add_up_over_blocks_and_steps():
    core = rd.RecurrentCore([Balanced(), Balanced()], Recorded())
    expected, h = 0, X
    for _ in range(3):
        for block in blocks_of(core):
            expected = expected + h.square().sum()
            h = Mixing.forward(block, h, rd.At())
    losses = last_state(core, 3).losses
    assert list(losses) == ["balance"]
    assert_close(losses["balance"], expected)


def test_losses_leave_padding_out():
    core = rd.RecurrentCore([Balanced()], Recorded())
    mask = torch.tensor([[False, True, True, True], [True] * 4, [False] * 4])
    assert_close(last_state(core, 1, mask).losses["balance"], X[mask].square().sum())


def test_losses_of_rows_are_those_of_the_rows_alone():
    core = rd.RecurrentCore([Balanced()], Recorded())
    at, depth = rd.At(torch.arange(4)[None]), rd.Depth(3, rows=(2, 1, 3))
    together = list(core.states(X, depth, rd.Call(3), at))[-1].losses["balance"]
    alone = [list(core.states(X[i : i + 1], rd.Depth(n), rd.Call(n), at))[-1].losses for i, n in enumerate(depth.rows)]
    assert_close(together, sum(losses["balance"] for losses in alone))


def with_balance(model: rd.RecurrentTransformer, *parts: str) -> rd.RecurrentTransformer:
    for part in parts:
        setattr(model, part, rd.Stack([Balanced(16)]))
    model.core.stack = rd.Stack([Balanced(16)])
    return model


def test_losses_of_prelude_loop_and_coda_are_one_sum_however_often_the_output_is_read():
    x = torch.randint(23, (2, 5))
    model = with_balance(tiny(), "prelude", "coda").eval()
    seen = []
    for module in model.modules():
        if isinstance(module, Balanced):
            module.register_forward_hook(lambda m, inputs, out: seen.append(inputs[0].square().sum()))
    trajectory = model.trajectory(x)
    for _ in range(2):
        assert trajectory.output.isfinite().all()
    assert len(seen) == 1 + 3 + 2
    assert_close(trajectory.losses["balance"], sum(seen[:5]))


def test_the_training_loss_takes_auxiliary_losses_along():
    x = torch.randint(23, (2, 5))
    model = with_balance(tiny(update=rd.plain), "coda")
    trajectory = model.trajectory(x, 2)
    expected = rd.next_token_loss(trajectory.output, x) + trajectory.losses["balance"]
    assert_close(rd.last_step_loss(trajectory, x), expected)
    assert_close(rd.WithObjective(model)(x, 2), expected)
    assert trajectory.losses["balance"] > 0


def test_outside_of_a_loop_a_block_that_remembers_or_adds_losses_runs_alone():
    assert Remembering()(X, rd.At()).shape == X.shape
    assert Balanced()(X, rd.At()).shape == X.shape


def zero_if_none(gradient: torch.Tensor | None) -> torch.Tensor:
    return torch.zeros_like(X) if gradient is None else gradient
