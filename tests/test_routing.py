"""Gate and routing combined by a routed update that is written here: it wraps another, and the loop is not edited."""

import pytest
import torch
from battery import close, gradients, lively, tiny
from torch.testing import assert_close

import recurrent_depth as rd


class RoutedUpdate(rd.DepthUpdate):
    """Only the tokens that a rule picks take a step of the update that it wraps; the others stay as they are."""

    def __init__(self, inner: rd.DepthUpdate, rule):
        super().__init__()
        self.inner, self.rule = inner, rule

    def begin(self, anchor, call):
        return self.inner.begin(anchor, call)

    def forward(self, state, blocks, step):
        pick = self.rule(state.h, step)
        part = rd.map_tensors(pick.gather, (state.h, state.write, state.context, state.carry))
        h, write, context, carry = part
        after = self.inner(state._replace(h=h, write=write, context=context, carry=carry), blocks.picked(pick), step)
        back = rd.map_tensors(pick.scatter, (state.h, state.write, state.carry), (after.h, after.write, after.carry))
        return state._replace(h=back[0], write=back[1], carry=back[2], losses=after.losses)

    def read(self, state):
        return self.inner.read(state)

    def cost(self, num_steps):
        return self.inner.cost(num_steps)


def everybody(h, step):
    return rd.Pick(torch.arange(h.shape[1]).expand(len(h), -1))


def every_other(h, step):
    """Ragged: even rows pick one token less, which is padding."""
    index = torch.arange(step % 2, h.shape[1], 2).expand(len(h), -1)
    valid = torch.ones_like(index, dtype=torch.bool)
    valid[::2, -1] = False
    return rd.Pick(index, valid)


def alternating(h, step):
    return rd.Pick(torch.arange(step % 2, h.shape[1], 2).expand(len(h), -1))


def routed(rule):
    return lambda dim: RoutedUpdate(rd.gated(dim, bias=0.0), rule)


def test_routing_everybody_is_the_update_itself():
    model = lively(tiny(update=routed(everybody))).eval()
    x = torch.randint(23, (2, 7))
    expected = model(x)
    model.core.update = model.core.update.inner
    assert_close(model(x), expected, **close)


@pytest.mark.parametrize("form", [rd.GPT2Form, rd.LlamaForm])
def test_a_routed_gate_leaves_the_others_alone_and_is_causal(form):
    model = lively(tiny(update=routed(every_other), form=form)).eval()
    x = torch.randint(23, (2, 7))
    states = model.trajectory(x, every_step=True).states
    moved = (states[1].h - states[0].h).abs().amax(-1) > 0
    assert moved.tolist() == [[False, True, False, True, False, False, False], [False, True] * 3 + [False]]
    changed = x.clone()
    changed[:, 4] = (x[:, 4] + 1) % 23
    assert_close(model(changed)[:, :4], model(x)[:, :4], **close)


def test_a_routed_gate_takes_a_depth_for_each_row_and_learns():
    model = lively(tiny(update=routed(alternating))).eval()
    x, rows = torch.randint(23, (4, 7)), [3, 1, 2, 3]
    together = model(x, rows)
    for row, num_steps in enumerate(rows):
        assert_close(together[row : row + 1], model(x[row : row + 1], num_steps), **close)
    rd.next_token_loss(together, x).backward()
    for name, gradient in gradients(model).items():
        assert gradient.abs().max() > 0, name
