"""What the loop tells: the call to updates, the caller's arguments to blocks; and what it refuses of either."""

from functools import partial

import jaxtyping
import pytest
import torch
from battery import blocks_of, lively, tiny
from hypothesis import given
from hypothesis import strategies as st
from strategies import few
from torch import nn
from torch.testing import assert_close
from user_parts import Mixing, Recorded, Scaled, Stepwise

import recurrent_depth as rd

X = torch.randint(23, (2, 7), generator=torch.Generator().manual_seed(0))


def test_the_plain_loop_is_its_unrolled_stack():
    looped = lively(tiny(rd.naive, rd.Layout(0, 2, 3, 0))).eval()
    unrolled = rd.dense(6, dim=16, num_heads=2, vocab_size=23, context_length=16)
    for part in ("embed", "norm"):
        getattr(unrolled, part).load_state_dict(getattr(looped, part).state_dict())
    for i, block in enumerate(blocks_of(unrolled.core)):
        block.load_state_dict(blocks_of(looped.core)[i % 2].state_dict())
    assert torch.equal(looped(X), unrolled(X))


def test_every_step_uses_the_core_weights():
    model = tiny().eval()
    before = model.trajectory(X, every_step=True)
    candidates = [[], []]
    for seen in candidates:
        hook = model.core.stack.register_forward_hook(lambda *call, seen=seen: seen.append(call[2]))
        model.core.update.forward(before.states[0], steps(model), 0)
        hook.remove()
        lively(model.core.stack)
    assert not torch.allclose(*(seen[0] for seen in candidates))
    for old, new in zip(before.states, model.trajectory(X, every_step=True).states, strict=True):
        assert (old.h - new.h).abs().max() > 1e-3


def steps(model: rd.RecurrentTransformer) -> rd.StepBlocks:
    return rd.StepBlocks(model.core.stack, rd.At(torch.arange(7)[None]), 0, None, rd.Notes())


def test_a_model_tells_its_update_all_that_a_forward_knows():
    update = Recorded()
    model = tiny(update=lambda dim: update)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    start = torch.randn(2, 7, 16)
    model(X, 2, mask=mask, start=start)
    (call,) = update.calls
    assert call.num_steps == 2
    assert call.tokens is X
    assert call.positions.tolist() == [[0, 0, 0, 1, 2, 3, 4], list(range(7))]
    assert_close(call.embedding, model.embed(X, call.positions))
    assert call.mask.dtype == torch.bool
    assert torch.equal(call.mask, mask.bool())
    assert call.start is start
    model(X, [1, 3])
    assert update.calls[-1].num_steps == 3
    assert update.calls[-1].mask is None


def test_a_core_tells_its_update_what_it_was_given():
    core = rd.RecurrentCore([Mixing()], update := Recorded())
    x, mask, positions = torch.randn(2, 7, 8), torch.ones(2, 7, dtype=torch.bool), torch.arange(3, 10)[None]
    core(x, 2)
    core(x, 2, mask=mask, positions=positions, start=x)
    core(x, 2, mask=mask[:, None].expand(2, 7, 7))
    bare, full, complete = update.calls
    assert bare == (2, None, None, bare.positions, None, None)
    assert bare.positions.tolist() == [list(range(7))]
    assert full == (2, None, None, positions, mask, x)
    assert complete.mask is None


def test_a_start_takes_the_place_of_the_anchor():
    start = torch.randn(2, 7, 16)
    for update in (rd.gated, rd.plain):
        model = lively(tiny(update=update)).eval()
        assert not torch.allclose(model(X, start=start), model(X))
        anchor = model.prelude(model.embed(X, torch.arange(7)[None]), rd.At(torch.arange(7)[None]))
        assert torch.equal(model(X, start=anchor), model(X))


def test_what_an_update_reads_is_what_the_coda_sees():
    class ReadsDouble(Recorded):
        def read(self, state):
            return 2 * state.h

    model = lively(tiny(update=lambda dim: ReadsDouble()))
    seen = []
    model.coda.register_forward_hook(lambda m, inputs, out: seen.append(inputs[0]))
    trajectory = model.trajectory(X)
    assert seen == []
    assert trajectory.output.shape == (2, 7, 23)
    assert torch.equal(seen[0], 2 * trajectory.states[-1].h)
    core = rd.RecurrentCore([Mixing()], ReadsDouble())
    assert_close(core(torch.ones(1, 2, 8), 1), 2 * core.stack(torch.ones(1, 2, 8), rd.At()))


def test_further_arguments_reach_the_blocks_untouched():
    core, x = rd.RecurrentCore([Scaled()], Recorded()), torch.randn(2, 3, 8)
    scale = torch.tensor([0.0, 1.0])[:, None, None]
    found = core(x, 3, extra={"scale": scale})
    assert (found[0] == 0).all()
    assert_close(found[1:], core(x[1:], 3, extra={"scale": 1.0}))
    with pytest.raises(KeyError, match="scale"):
        core(x, 3)


def test_a_condition_reaches_the_blocks_of_its_step():
    class Telling(Recorded):
        def forward(self, state, blocks, step):
            return state._replace(h=blocks(state.h, condition={"step": step}))

    core, x = rd.RecurrentCore([Stepwise(), Stepwise()], Telling()), torch.randn(1, 2, 8)
    expected = x
    for step in range(3):
        for block in blocks_of(core):
            expected = Mixing.forward(block, expected, rd.At()) + step
    assert_close(core(x, 3), expected)


def test_a_stack_of_ones_own_knows_the_step():
    class Corrected(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack, self.correction = rd.Stack([Mixing()]), nn.Parameter(torch.randn(3, 8))

        def forward(self, x, at, step, kv):
            return self.stack(x, at, step, kv) + self.correction[step]

    core, x = rd.RecurrentCore(Corrected(), Recorded()), torch.randn(1, 2, 8)
    expected = x
    for step in range(3):
        expected = core.stack.stack(expected, rd.At()) + core.stack.correction[step]
    assert_close(core(x, 3), expected)


@pytest.mark.parametrize("update", [rd.gated(8), rd.plain(8), rd.ReplaceState(rd.AddAnchor())])
def test_a_module_that_knows_only_x_serves_as_a_block(update):
    class Plain(nn.Module):
        def forward(self, x, at, step, kv):
            return layer(x)

    layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    core, x = rd.RecurrentCore([rd.PlainBlock(layer)], update).eval(), torch.randn(2, 3, 8)
    assert_close(core(x, 2), rd.RecurrentCore(Plain(), update).eval()(x, 2))
    core(x, 2).sum().backward()
    assert layer[0].weight.grad.abs().max() > 0


@few
@given(num_steps=st.integers(1, 6), seed=st.integers(0, 9))
def test_what_goes_around_a_step_is_added_to_what_it_makes(num_steps, seed):
    torch.manual_seed(seed)
    layer, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(2, 3, 8)
    residual = repeated = x
    for _ in range(num_steps):
        residual, repeated = layer(residual) + residual, layer(repeated) + x
    for skip, expected in ((rd.KeepState(), residual), (rd.KeepAnchor(), repeated)):
        assert_close(rd.RecurrentCore([rd.PlainBlock(layer)], rd.SkipUpdate(skip))(x, num_steps), expected)


@pytest.mark.parametrize("skip", [8, rd.KeepState, nn.Identity()])
def test_what_is_no_part_cannot_go_around_a_step(as_a_user_runs_it, skip):
    with pytest.raises(ValueError, match=r"skip is .*, but must be an Injection"):
        rd.SkipUpdate(skip)


def test_an_update_that_returns_another_shape_or_dtype_or_no_state_is_refused():
    class Shrinks(Recorded):
        def forward(self, state, blocks, step):
            return state._replace(h=state.h[:, :1])

    class Narrows(Recorded):
        def forward(self, state, blocks, step):
            return state._replace(h=state.h.bfloat16())

    class Forgets(Recorded):
        def forward(self, state, blocks, step):
            return state.h

    for update, message in ((Shrinks, r"Shrinks returns.* must be \(1, 3, 8\)"), (Narrows, "bfloat16")):
        with pytest.raises(ValueError, match=message):
            rd.RecurrentCore([Mixing()], update())(torch.randn(1, 3, 8), 2)
    with pytest.raises(Exception, match=r"Forgets must return a DepthState|return"):
        rd.RecurrentCore([Mixing()], Forgets())(torch.randn(1, 3, 8), 2)


def test_what_an_update_begins_with_reads_and_costs_is_of_the_kind_that_is_wanted(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as a user runs it

    class Bare(Recorded):
        def begin(self, anchor, call):
            return anchor

    class Whole(Recorded):
        def read(self, state):
            return state

    class Free(Recorded):
        def cost(self, num_steps):
            return 0

    bare = r"begin of Bare must return a DepthState, got Tensor: rd.initial_state\(h, context, carry\) makes one"
    whole = r"read of Whole must return a tensor .* for \(2, 7\) tokens, such as state.h; got DepthState"
    free = r"cost of Free must return an rd.UpdateCost, got int: .*UpdateCost\(\) where it spends nothing"
    makes = (lambda update: lambda dim: update(), lambda update: partial(rd.halted, inner=lambda dim: update()))
    for make in makes:
        with pytest.raises(ValueError, match=bare):
            tiny(update=make(Bare))(X)
        with pytest.raises(ValueError, match=free):
            rd.accounting.flops(tiny(update=make(Free)))
    model = tiny(update=makes[0](Whole)).eval()
    for call in (model, rd.WithObjective(model), partial(rd.generate, max_new_tokens=2)):
        with pytest.raises(ValueError, match=whole):
            call(*([model, X] if isinstance(call, partial) else [X]))
    with pytest.raises(ValueError, match=r"read of Whole must .* for \(1, 3\) tokens"):
        rd.RecurrentCore([Mixing()], Whole())(torch.randn(1, 3, 8), 2)


def test_a_user_s_part_keeps_the_start_that_it_gives_itself():
    class Anchored(Recorded):
        def __init__(self):
            super().__init__()
            self.out = nn.LayerNorm(16)
            self.mix = nn.Linear(16, 16)
            self.strength = nn.Parameter(torch.empty(1))
            self.reset_parameters()

        def reset_parameters(self):
            nn.init.zeros_(self.mix.weight)
            nn.init.constant_(self.strength, 0.5)

    with torch.device("meta"):
        model = tiny(update=lambda dim: Anchored())
    model = model.to_empty(device="cpu")
    rd.initialise(model)
    update = model.core.update
    for weight, start in ((update.out.weight, 1.0), (update.mix.weight, 0.0), (update.strength, 0.5)):
        assert (weight == start).all()


def test_an_update_made_already_is_refused_where_a_factory_is_wanted():
    with pytest.raises(ValueError, match="GatedDepthUpdate, which is made already"):
        tiny(update=rd.gated(16))
