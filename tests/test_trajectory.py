"""What a forward leaves behind: the trajectory, nothing else; also deeper than trained and in double precision."""

import copy
import gc
import weakref

import pytest
import torch
from battery import gradients, lively, tiny
from user_parts import Mixing

import recurrent_depth as rd

X = torch.randint(23, (2, 7), generator=torch.Generator().manual_seed(0))


def test_a_trajectory_keeps_the_last_state_unless_asked_for_all():
    model = tiny().eval()
    assert len(model.trajectory(X).states) == 1
    trajectory = model.trajectory(X, every_step=True)
    assert torch.equal(trajectory.after(3), trajectory.output)
    for num_steps in (0, 4):
        with pytest.raises(ValueError, match=f"num_steps is {num_steps}, .* after 1 to 3"):
            trajectory.after(num_steps)
    last = model.trajectory(X)
    assert torch.equal(last.after(3), last.output)
    with pytest.raises(ValueError, match=r"num_steps is 1, .* after 3 alone"):
        last.after(1)


def test_deeper_than_trained_works_and_warns():
    model = tiny().eval()
    with pytest.warns(UserWarning, match="5 steps asked for, but full depth is 3"):
        trajectory = model.trajectory(X, 5, every_step=True)
    assert len(trajectory.states) == 5
    assert torch.equal(trajectory.after(3), model(X))


def test_training_at_depths_beyond_the_layout_warns_of_nothing():
    model, sampler = tiny().train(), rd.PoissonLogNormalDepth(mean=2, grad_steps=2)
    deep = next(draw for draw in range(100) if sampler(draw).num_steps > model.num_steps)
    rd.WithObjective(model)(X, sampler(deep)).backward()  # a warning is an error here
    rd.WithObjective(model)(X, [model.num_steps + 1, 1]).backward()


def test_sixty_four_steps_run_and_learn():
    model = tiny(layout=rd.Layout(1, 1, 64, 1))
    rd.next_token_loss(model(X), X).backward()
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


def test_a_copy_is_a_model_of_its_own():
    model = lively(tiny()).eval()
    twin = copy.deepcopy(model)
    assert torch.equal(model(X), twin(X))
    lively(twin)
    assert not torch.allclose(model(X), twin(X))


def test_a_state_is_forgotten_once_nobody_asked_for_it():
    core, x = rd.RecurrentCore([Mixing()], rd.gated(8)).eval(), torch.randn(1, 2, 8)
    call, at = rd.Call(4, positions=torch.arange(2)[None]), rd.At(torch.arange(2)[None])
    alive: list[weakref.ref] = []
    with torch.no_grad():
        for state in core.states(x, rd.Depth(4), call, at):
            alive.append(weakref.ref(state.h))
            del state
            gc.collect()
            assert sum(one() is not None for one in alive) <= 2  # the one before, from which the step was taken


@pytest.mark.parametrize("form", [rd.GPT2Form, rd.LlamaForm])
def test_a_double_model_computes_in_double(form):
    model = lively(tiny(form=form)).double().eval()
    anchor = torch.randn(1, 3, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: model.core(x, 2), anchor)
