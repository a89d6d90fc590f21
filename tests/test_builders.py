"""What the arguments of builders are: functions that make parts, not parts."""

import inspect
from functools import partial

import pytest
import torch
from battery import tiny
from user_parts import Recorded

import recurrent_depth as rd

PUBLISHED = [
    (rd.gated, {"bias": 4.0, "state_noise": 0.1, "gate_noise": 0.1, "temperature": 1.0}),
    (rd.halted, {"bias": 1.0, "ponder": 0.01, "epsilon": 0.01}),
    (rd.HaltingUpdate, {"ponder": 0.01, "epsilon": 0.01}),
    (rd.ExpectedExitLoss, {"entropy": 0.05}),
    (rd.ExitGainLoss, {"sharpness": 50.0, "threshold": 0.005}),
    (rd.expert_choice, {"alpha": 0.1, "loss": 0.001, "z_loss": 0.0}),
    (rd.token_choice, {"alpha": 1.0, "balance": 0.1, "z_loss": 1e-5}),
    (rd.every_other, {"capacity": 0.125, "every": 2}),
    (rd.WithConsistency, {"short": 0.1, "consistency": 0.1}),
    (rd.LatentConverged, {"below": 0.03}),
    (rd.KLConverged, {"below": 5e-4}),
    (rd.ArgmaxStable, {"times": 5}),
]
"""Of the sources, GRT to Huginn; Tensor2Tensor's for halting."""


@pytest.mark.parametrize("make, published", PUBLISHED, ids=[make.__name__ for make, _ in PUBLISHED])
def test_defaults_are_published(make, published):
    arguments = inspect.signature(make).parameters
    assert {name: arguments[name].default for name in published} == published


TAKE_AN_UPDATE = {
    "grt": rd.grt,
    "rrt": partial(rd.rrt, rank=2),
    "ple": partial(rd.ple, size=8),
    "mor": rd.mor,
    "mod": rd.mod,
    "universal": rd.universal,
    "loopformer": rd.loopformer,
}


@pytest.mark.parametrize("build", TAKE_AN_UPDATE.values(), ids=TAKE_AN_UPDATE)
def test_an_update_that_is_made_already_is_refused(build):
    with pytest.raises(ValueError, match=r"update must be what makes the part.* GatedDepthUpdate, which is made"):
        tiny(build, update=rd.gated(16))


def test_an_inner_update_that_is_made_already_is_refused():
    with pytest.raises(ValueError, match=r"inner must be what makes the part.* GatedDepthUpdate, which is made"):
        rd.halted(16, inner=rd.gated(16))


@pytest.mark.parametrize("build", [rd.mor, rd.mod], ids=["mor", "mod"])
def test_a_router_that_is_made_already_is_refused(build):
    with pytest.raises(ValueError, match=r"router must be .*rd.expert_choice.* got ExpertChoice, which is made"):
        tiny(build, router=rd.expert_choice(16, 3))


def test_a_combination_that_is_made_already_is_refused():
    with pytest.raises(ValueError, match=r"combine must be .*rd.Interpolate; got AddWeighted, which is made"):
        tiny(rd.mor, combine=rd.AddWeighted())


class Own(Recorded):
    """A user's, which is made of the width."""

    def __init__(self, dim: int, share: float = 0.5):
        super().__init__()
        if share > 1:
            raise ValueError("share is too large")


NO_MAKERS = {
    "update": [
        (rd.ReplaceState, r"it was called as ReplaceState\(16\), which failed: inject is 16, but must be an Injection"),
        (rd.GatedDepthUpdate, r"GatedDepthUpdate\(16\), which failed: .* missing .* 'gate'"),
        (partial(rd.GatedDepthUpdate, gate=rd.AnchoredGate(16)), "which failed: inject is 16"),
        (lambda: rd.plain(16), r"<lambda>\(16\), which failed: .* takes 0 positional arguments"),
        (lambda dim: rd.ReplaceState, r"^What update makes is the class ReplaceState, .*must be a DepthUpdate"),
        (lambda dim: None, "^What update makes is None, but must be a DepthUpdate, such as what rd.gated"),
        (partial(Own, share=2), r"Own\(16\), which failed: share is too large"),
    ],
    "router": [
        (rd.ExpertChoice, r"rd.expert_choice .*; it was called as ExpertChoice\(16, 3\), which failed: choose is 16"),
        (rd.TokenChoice, r"TokenChoice\(16, 3\), which failed: .*missing .* 'balance'"),
        (rd.gated, r"gated\(16, 3\), which failed: "),
        (lambda dim, num_steps: 3, "^What router makes is 3, but must be a Router"),
    ],
    "combine": [(rd.gated, r"gated\(\), which failed"), (dict, "^What combine makes is {}, but must be a Combination")],
}


@pytest.mark.parametrize("name, maker, says", [(name, *case) for name, cases in NO_MAKERS.items() for case in cases])
def test_what_makes_no_such_part_is_named_with_its_call_and_what_is_wanted(name, maker, says, as_a_user_runs_it):
    with pytest.raises(ValueError, match=says) as error:
        tiny(rd.mor, **{name: maker})
    assert name in str(error.value)


def test_a_class_of_the_width_makes_an_update_and_an_error_of_a_user_s_function_is_its_own():
    assert isinstance(tiny(update=Own).core.update, Own)

    def broken(dim):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        tiny(update=broken)


def test_what_is_no_form_is_refused(as_a_user_runs_it):
    with pytest.raises(ValueError, match=r"form is Linear.*, but must be a Form, such as"):
        tiny(form=torch.nn.Linear)


PARTS = {
    "inject": [
        lambda part: rd.ReplaceState(part),
        lambda part: rd.GatedDepthUpdate(part, rd.AnchoredGate(8)),
        lambda part: rd.MemorySlotsUpdate(part, 8, num_slots=3, num_steps=2),
    ],
    "gate": [lambda part: rd.GatedDepthUpdate(rd.KeepState(), part)],
    "start": [
        lambda part: rd.ReplaceState(rd.KeepState(), start=part),
        lambda part: rd.GatedDepthUpdate(rd.KeepState(), rd.AnchoredGate(8), start=part),
    ],
    "noise": [
        lambda part: rd.ConcatProjection(8, part),
        lambda part: rd.AnchoredGate(8, noise=part),
        lambda part: rd.JointNormGate(8, noise=part),
    ],
    "inner": [
        lambda part: rd.BehindLoop(part, torch.nn.Identity()),
        lambda part: rd.NormEachStep(part, torch.nn.Identity()),
        lambda part: rd.HaltingUpdate(part, rd.HaltingUnit(8), rd.KeepState()),
        lambda part: rd.TimeConditionedUpdate(part, 8, rd.CoarseTimes(2)),
        lambda part: rd.AddStepEmbedding(part, rd.StepEmbedding(23, 8, 2, 4), 8),
    ],
    "norm": [lambda part: rd.NormEachStep(rd.plain(8), part), lambda part: rd.DiagonalInjection(8, norm=part)],
    "unit": [lambda part: rd.HaltingUpdate(rd.plain(8), part, rd.KeepState())],
    "sees": [lambda part: rd.HaltingUpdate(rd.plain(8), rd.HaltingUnit(8), part)],
    "choose": [lambda part: rd.ExpertChoice(part, (1,)), lambda part: rd.MixtureOfDepths(part)],
    "scores": [
        lambda part: rd.TopTokens(part, rd.RawWeight()),
        lambda part: rd.TokenChoice(part, rd.SoftmaxWeight(), rd.BalanceLoss()),
    ],
    "weight": [
        lambda part: rd.TopTokens(rd.LinearScores(8), part),
        lambda part: rd.TokenChoice(rd.LinearScores(8, num_outputs=2), part, rd.BalanceLoss()),
    ],
    "balance": [lambda part: rd.TokenChoice(rd.LinearScores(8, num_outputs=2), rd.SoftmaxWeight(), part)],
    "capacities": [lambda part: rd.expert_choice(8, 2).__setattr__("capacities", part)],
}


@pytest.mark.parametrize("part", [0.1, 8, rd.KeepMean], ids=str)
@pytest.mark.parametrize("name, make", [(name, make) for name, makes in PARTS.items() for make in makes])
def test_a_number_or_a_class_in_place_of_a_part_is_refused_by_the_constructor(name, make, part, as_a_user_runs_it):
    with pytest.raises(ValueError, match=f"^{name} is .*{getattr(part, '__name__', part)}.*, but must be"):
        make(part)
