"""MeSH: the slots against the paper's equations in NumPy, in closed form and at its limits."""

import numpy as np
import pytest
import torch
from battery import close, lively, tiny
from hypothesis import given
from strategies import few, layouts, seeds
from torch import nn
from torch.testing import assert_close

import recurrent_depth as rd

DOUBLE = torch.float64


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def published(w, embedding, prelude_out, core, num_steps):
    """Equations 2 to 5 for one sequence, slot by slot; returns the states h^(0) to h^(K) and the slots."""
    num_slots = w["writer.weight"].shape[1]
    slots = [embedding.copy()] + [np.zeros_like(embedding) for _ in range(num_slots - 1)]
    h, out, states = embedding, prelude_out, []
    for cycle in range(num_steps + 1):
        if cycle > 0:
            out = core(h)
        write = softmax(h @ w["writer.weight"][cycle].T + w["writer.bias"][cycle])
        read = softmax(h @ w["reader.weight"][cycle].T + w["reader.bias"][cycle])
        for b in range(num_slots):
            slots[b] = slots[b] + out * write[:, b : b + 1]
        h = sum(slots[b] * read[:, b : b + 1] for b in range(num_slots))
        states.append(h)
    return states, slots


@few
@given(layouts, seeds)
def test_slots_and_states_are_those_of_the_equations(layout, seed):
    torch.manual_seed(seed)
    model = lively(tiny(rd.mesh, layout)).double().eval()
    x = torch.randint(23, (1, 6))
    at = rd.At(torch.arange(6)[None])
    w = {name: weight.detach().numpy() for name, weight in model.core.update.named_parameters()}
    embedding = model.embed(x, at.positions)
    prelude_out = model.prelude(embedding, at)

    def core(h):
        return model.core.stack(torch.from_numpy(h)[None], at)[0].detach().numpy()

    states, slots = published(w, embedding[0].detach().numpy(), prelude_out[0].detach().numpy(), core, layout.num_steps)
    trajectory = model.trajectory(x, every_step=True)
    for found, expected in zip(trajectory.states, states[1:], strict=True):
        assert_close(found.h[0], torch.from_numpy(expected))
    for b, slot in enumerate(slots):
        assert_close(trajectory.states[-1].carry[0, :, b], torch.from_numpy(slot))
    assert_close(model.core.update.read(trajectory.states[-1])[0], torch.from_numpy(states[-1]))


def core_of(num_slots: int, num_steps: int, dim: int = 8) -> rd.RecurrentCore:
    update = rd.MemorySlotsUpdate(rd.KeepState(), dim, num_slots=num_slots, num_steps=num_steps)
    return rd.RecurrentCore([rd.PlainBlock(nn.Linear(dim, dim))], update)


def test_one_slot_adds_up_all_outputs():
    core, x = core_of(1, 3), torch.randn(2, 5, 8)
    total = x + x  # the embedding's place is taken by the anchor, which is then written as the prelude's output
    for _ in range(3):
        total = total + core.stack.blocks[0](total, rd.At())
    assert_close(core(x, num_steps=3), total)


def test_routers_that_pick_one_slot_simulate_the_anchor():
    # Written to slot 1 + cycle and read from there and from slot 0, which holds the embedding: h <- (out + emb) / 2.
    core, x, far = core_of(5, 3), torch.randn(2, 5, 8), 40.0
    update = core.update
    with torch.no_grad():
        for router in (update.writer, update.reader):
            router.weight.zero_()
        for cycle in range(4):
            update.writer.bias[cycle, 1 + cycle] = far
            update.reader.bias[cycle, [0, 1 + cycle]] = far
    h = (x + x) / 2
    for _ in range(3):
        h = (core.stack.blocks[0](h, rd.At()) + x) / 2
    assert_close(core(x, num_steps=3), h)


def test_shares_sum_to_one():
    router = rd.StepRouter(8, 4, 3, std=3.0)
    shares = router(torch.randn(2, 5, 8), 1)
    assert_close(shares.sum(-1), torch.ones(2, 5))
    assert not torch.allclose(shares, router(torch.randn(2, 5, 8), 2))
    assert router.bfloat16()(torch.randn(2, 5, 8).bfloat16(), 1).dtype == torch.float32


def test_the_parameters_are_as_many_as_the_paper_counts():
    # Table 5: 4+8R2+4 at a width of 2048 with B = 5 adds 61,470.
    with torch.device("meta"):
        update = rd.MemorySlotsUpdate(rd.KeepState(), 2048, num_slots=5, num_steps=2)
    assert rd.accounting.num_parameters(update) == 61470


def test_slots_are_three_more_than_steps_by_default():
    assert tiny(rd.mesh).core.update.num_slots == 6
    assert tiny(rd.mesh, num_slots=2).core.update.num_slots == 2


def test_each_step_has_routers_of_its_own():
    model = lively(tiny(rd.mesh)).eval()
    x = torch.randint(23, (2, 5))
    before = model.trajectory(x, every_step=True)
    with torch.no_grad():
        model.core.update.reader.weight[2] += 1  # of the second step
    after = model.trajectory(x, every_step=True)
    changed = [not torch.equal(a.h, b.h) for a, b in zip(before.states, after.states, strict=True)]
    assert changed == [False, True, True]


def test_more_steps_than_routers_are_refused():
    model = tiny(rd.mesh).eval()
    with pytest.warns(UserWarning, match="deeper"), pytest.raises(ValueError, match=r"num_steps is 4, .* at most 3"):
        model(torch.randint(23, (1, 5)), 4)


def test_the_cost_is_that_of_two_routers_and_of_what_is_read():
    model = tiny(rd.mesh, num_slots=5)
    parts = rd.accounting.flops_breakdown(model, 10)
    assert parts.begin == 10 * 3 * 2 * 5 * 16
    assert parts.update == 3 * parts.begin


def test_the_cost_is_what_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    model = tiny(rd.mesh).to("meta")
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 10, dtype=torch.long, device="meta"))
    assert counter.get_total_flops() == rd.accounting.flops(model, 10)


def test_slots_are_left_alone_by_steps_that_a_row_does_not_take():
    model = lively(tiny(rd.mesh)).eval()
    x = torch.randint(23, (2, 5))
    rows = model.trajectory(x, [1, 3]).states[-1].carry
    assert_close(rows[:1], model.trajectory(x[:1], 1).states[-1].carry, **close)
    assert_close(rows[1:], model.trajectory(x[1:], 3).states[-1].carry, **close)


@pytest.mark.parametrize("name, value", [("num_slots", 0), ("num_slots", -1), ("num_heads", 3)])
def test_sizes_that_cannot_be_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        tiny(rd.mesh, **{name: value})


def test_a_width_that_differs_is_refused():
    with pytest.raises(ValueError, match="x is 6 wide"):
        core_of(3, 2)(torch.randn(1, 4, 6), num_steps=1)
