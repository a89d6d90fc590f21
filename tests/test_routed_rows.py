"""A depth for each row under routers: their losses are the mean of what each row loses alone."""

from functools import partial

import pytest
import torch
from battery import gradients, lively, tiny
from hypothesis import given
from hypothesis import strategies as st
from strategies import few, seeds
from torch import Tensor
from torch.testing import assert_close

import recurrent_depth as rd

ROUTED = {
    "expert choice": partial(rd.mor, router=partial(rd.expert_choice, capacities=(1, 0.7, 0.4, 0.2), z_loss=0.1)),
    "token choice": partial(rd.mor, router=rd.token_choice),
    "mixture of depths": partial(rd.mod, router=partial(rd.every_other, capacity=0.4, every=1)),
}
every_routed = pytest.mark.parametrize("build", ROUTED.values(), ids=ROUTED)
NUM_STEPS, NUM_TOKENS = 4, 7


def losses_of(model: rd.RecurrentTransformer, x: Tensor, mask: Tensor, depth: rd.Depth) -> dict[str, Tensor]:
    return model.trajectory(x, depth, mask=mask).losses


@st.composite
def batches(draw):
    """A depth and so much padding for each row, and perhaps how many steps learn."""
    row = st.tuples(st.integers(1, NUM_STEPS), st.integers(0, NUM_TOKENS - 1))
    rows = draw(st.lists(row, min_size=1, max_size=4))
    return rows, draw(st.none() | st.integers(1, NUM_STEPS))


@every_routed
@few
@given(batches(), seeds)
def test_the_losses_of_a_router_are_the_mean_over_rows_whatever_the_depth_of_each(build, batch, seed):
    rows, grad_steps = batch
    torch.manual_seed(seed)
    model = lively(tiny(build, rd.Layout(0, 1, NUM_STEPS, 0))).double()
    x, depths = torch.randint(23, (len(rows), NUM_TOKENS)), tuple(depth for depth, _ in rows)
    mask = torch.arange(NUM_TOKENS) >= torch.tensor([[padding] for _, padding in rows])
    together = losses_of(model, x, mask, rd.Depth(max(depths), grad_steps and min(grad_steps, max(depths)), depths))
    means: dict[str, Tensor] = {}
    for row, depth in enumerate(depths):
        one = slice(row, row + 1)
        alone = losses_of(model, x[one], mask[one], rd.Depth(depth, grad_steps and min(grad_steps, depth)))
        means = {name: means.get(name, 0) + loss / len(rows) for name, loss in alone.items()}
    assert together.keys() == means.keys()
    for name, loss in together.items():
        assert_close(loss, means[name])
    assert_close(slopes(model, together), slopes(model, means))


def slopes(model: rd.RecurrentTransformer, losses: dict[str, Tensor]) -> dict[str, Tensor]:
    total = sum(losses.values())
    if isinstance(total, Tensor) and total.requires_grad:
        total.backward()
    return gradients(model)


def test_steps_that_nobody_takes_are_routed_once_more_in_training():
    """Token choice may leave no token for a step; the router within then chooses among none."""

    def within(dim: int) -> rd.DepthUpdate:
        return rd.RoutedUpdate(rd.plain(dim), rd.expert_choice(dim, 3, capacities=(0.9, 0.5, 0.3)), rd.Interpolate())

    build = partial(rd.mor, update=within, router=rd.token_choice, combine=rd.Interpolate)
    model, x = tiny(build), torch.randint(23, (2, 5))
    with torch.no_grad():
        model.core.update.router.scores.weight.zero_()  # all tokens choose the first depth
    losses = model.trajectory(x).losses
    assert all(loss.isfinite() for loss in losses.values())
