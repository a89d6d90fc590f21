"""Mistakes that a user can make are named where they are made, not deep inside torch."""

import subprocess
import sys
from functools import partial

import jaxtyping
import pytest
import torch

import recurrent_depth as rd

sizes = {"dim": 16, "num_heads": 2, "vocab_size": 23, "context_length": 16}
tokens = torch.arange(8).reshape(2, 4)


def model() -> rd.RecurrentTransformer:
    return rd.grt(rd.Layout(1, 1, 3, 1), **sizes)


def loop() -> rd.RecurrentCore:
    return rd.RecurrentCore([rd.PlainBlock(torch.nn.Linear(8, 8))], rd.gated(8))


def timed(dim: int) -> rd.RecurrentTransformer:
    """LoopFormer, whose blocks are told the time in another width than theirs."""
    changed = rd.loopformer(rd.Layout(0, 1, 2, 0), **sizes)
    changed.core.update = rd.TimeConditionedUpdate(rd.plain(16), dim, rd.CoarseTimes(2))
    return changed


def embedded(vocab_size: int, dim: int) -> rd.RecurrentTransformer:
    """A model whose embedding per step is of other sizes."""
    changed = model()
    changed.core.update = rd.AddStepEmbedding(rd.plain(16), rd.StepEmbedding(vocab_size, dim, 4, 4), 16)
    return changed


def rebuilt(of: rd.RecurrentTransformer, num_steps: int) -> rd.RecurrentTransformer:
    return rd.RecurrentTransformer(
        of.embed, of.prelude, of.core, of.coda, norm=of.norm, head=of.head, num_steps=num_steps
    )


WRONG = {
    "x is 9 wide, but the update was built for 8": lambda: loop()(torch.randn(1, 2, 9), 3),
    "blocks is empty": lambda: rd.RecurrentCore([], rd.gated(8)),
    "If it takes only x: rd.PlainBlock": lambda: rd.RecurrentCore([torch.nn.Linear(8, 8)], rd.gated(8)),
    "start must be": lambda: model()(tokens, start=torch.zeros(2, 5, 16)),
    "positions must be": lambda: model()(tokens, positions=torch.zeros(1, 3, dtype=torch.long)),
    "the sequence has -1 to 3": lambda: model()(tokens, positions=torch.full((1, 4), -1)),
    "the sequence has 0 to 16": lambda: model()(tokens, positions=torch.full((1, 4), 16)),
    "logits must be for tokens of shape": lambda: rd.next_token_loss(torch.zeros(2, 3, 5), tokens),
    "mask must be": lambda: rd.next_token_loss(torch.zeros(2, 4, 23), tokens, torch.ones(2, 3, dtype=torch.bool)),
    "std is -1": lambda: rd.initialise(model(), std=-1.0),
    "residual_std is 0": lambda: rd.initialise(model(), residual_std=0.0),
    "std of the noise": lambda: rd.gated(8, state_noise=-0.1),
    "temperature of the gate": lambda: rd.gated(8, temperature=0.0),
    "bias of the gate": lambda: rd.gated(8, bias=float("nan")),
    "noise is inf, but must be a finite": lambda: rd.gated(8, gate_noise=float("inf")),
    "a stack must be callable": lambda: rd.RecurrentCore(torch.nn.Linear(8, 8), rd.gated(8)),
    "mask must be boolean": lambda: loop()(torch.randn(1, 2, 8), 3, mask=torch.ones(1, 2)),
    "positions must be integers": lambda: loop()(torch.randn(2, 3, 8), 3, positions=torch.zeros(1, 1)),
    "x must be": lambda: loop()(torch.zeros(1, 2, 8, dtype=torch.long), 3),
    "dim is 0": lambda: rd.gated(0),
    "model is 'grt', but must be a RecurrentTransformer": lambda: rd.initialise("grt"),
    "embedding is of RecurrentTransformer, but must be an Embedding, such as model.embed": lambda: rd.scaled_embedding(
        model(), 8.0
    ),
    "embedding is multiplied by 4 already": lambda: rd.scaled_embedding(
        rd.huginn(rd.Layout(1, 1, 2, 1), **sizes).embed, 2.0
    ),
    "x is 8 wide, but the update was built for 16": lambda: rd.RecurrentCore(
        [rd.PlainBlock(torch.nn.Linear(8, 8))], rd.GatedDepthUpdate(rd.KeepState(), rd.AnchoredGate(16))
    )(torch.randn(1, 2, 8), 2),
    "times is Identity": lambda: rd.TimeConditionedUpdate(rd.plain(8), 8, torch.nn.Identity()),
    "at.condition is 8 wide, but the block was built for 16": lambda: timed(8)(tokens),
    "tokens must lie in 0 to 4, the vocabulary": lambda: embedded(vocab_size=5, dim=16)(tokens),
    "embedding is 16 wide, but that of the steps was built for 8": lambda: embedded(vocab_size=23, dim=8)(tokens),
    "num_steps is 0, but must be a whole": lambda: rebuilt(model(), num_steps=0),
    "start is .*, but must be a Tensor": lambda: model()(tokens, start=[0.0]),
    r"positions must be integers.*got list": lambda: model()(tokens, positions=[0, 1, 2, 3]),
    "num_steps is '4', but must be a whole number": lambda: model().trajectory(tokens).after("4"),
    "scale is -1, but must be a finite number above 0": lambda: rd.scaled_embedding(model().embed, -1),
    "dim is 0, but must be a whole number": lambda: rd.ConcatProjection(0),
    "dim is 4.5": lambda: rd.DiagonalInjection(4.5),
    "x is 9 wide, but the update was built for 16": lambda: rd.RecurrentCore(
        [rd.PlainBlock(torch.nn.Linear(9, 9))], rd.ReplaceState(rd.DiagonalInjection(16))
    )(torch.randn(1, 2, 9), 2),
    "mix is 'sum', but must be a function": lambda: rd.HaltingUpdate(
        rd.plain(8), rd.HaltingUnit(8), rd.KeepState(), mix="sum"
    ),
    r"unit is a Linear, which must give one chance for each token, \(1, 2\); got \(1, 2, 1\)": lambda: rd.RecurrentCore(
        [rd.PlainBlock(torch.nn.Linear(8, 8))],
        rd.HaltingUpdate(rd.plain(8), torch.nn.Linear(8, 1), rd.KeepState()),
    )(torch.randn(1, 2, 8), 2),
    "last must lie in 0 to 2, got 0 to 7": lambda: rd.BalanceBias(3).update(tokens),
    "last must hold the number": lambda: rd.BalanceBias(3).update(tokens.float()),
    r"mask must be \(2, 4\) like last, got \(2, 3\)": lambda: rd.BalanceBias(8).update(tokens, tokens[:, :3] > 0),
    "make must be what makes the part for these sizes.*missing": lambda: rd.RampedDepth(
        rd.PoissonLogNormalDepth, max_depth=3, num_draws=5
    ),
    "stack is of RecurrentTransformer, but must hold its blocks": lambda: rd.RelaxedStack(model(), 2, 2),
    "stack is of list": lambda: rd.RelaxedStack([1], 2, 2),
    "step 0 has no correction": lambda: rd.StepCorrections(torch.nn.Sequential(torch.nn.Linear(8, 8)), 2, 1).at(
        torch.nn.Sequential(torch.nn.Linear(8, 8)), -1
    ),
    "teacher is of tuple|teacher is": lambda: rd.distillation_loss(torch.zeros(1, 2, 3), (1,)),
    "rule is None, but must be an ExitRule": lambda: rd.exit_hazards(None, model().trajectory(tokens)),
    "dense has a GatedDepthUpdate, whose step is more": lambda: rd.relax(rd.grt(rd.Layout(1, 4, 1, 1), **sizes), 2, 2),
    "dense has a RoutedUpdate": lambda: rd.relax(rd.mor(rd.Layout(1, 4, 1, 1), **sizes), 2, 2),
    "dense has a BehindLoop": lambda: rd.relax(rd.huginn(rd.Layout(1, 4, 1, 1), **sizes), 2, 2),
}


@pytest.mark.usefixtures("as_a_user_runs_it")
@pytest.mark.parametrize("message", WRONG)
def test_a_mistake_is_refused_by_name(message: str):
    with pytest.raises(ValueError, match=message):
        WRONG[message]()


@pytest.mark.parametrize("options", [{"bias": "4"}, {"state_noise": None}, {"temperature": [1.0]}])
def test_an_update_refuses_wrong_types(options: dict):
    with pytest.raises((ValueError, jaxtyping.TypeCheckError), match=next(iter(options))):
        rd.gated(8, **options)


WRONG_TYPES = """
import torch
import recurrent_depth as rd
sizes = {"dim": 16, "num_heads": 2, "vocab_size": 23, "context_length": 16}
layout = rd.Layout(1, 1, 4, 1)
for call in (
    lambda: rd.grt((1, 1, 4, 1), **sizes),
    lambda: rd.naive(layout, **{**sizes, "dim": 16.0}),
    lambda: rd.grt(layout, update="gated", **sizes),
    lambda: rd.dense(3, form="llama", **sizes),
    lambda: rd.RecurrentCore([], "gated"),
    lambda: rd.accounting.flops(torch.nn.Sequential(torch.nn.Linear(2, 2)), 4),
):
    try:
        call()
    except ValueError as error:
        print(error)
"""


def test_a_wrong_type_is_a_value_error_of_one_line():
    """In a process of its own: under the hook of the tests, its errors come first."""
    said = subprocess.run([sys.executable, "-c", WRONG_TYPES], capture_output=True, text=True, check=True).stdout
    wanted = [
        "layout=(1, 1, 4, 1)",
        "dim=16.0",
        "update='gated'",
        "form='llama'",
        "update='gated'",
        'model="Sequential(',
    ]
    lines = said.splitlines()
    assert len(lines) == len(wanted)
    for line, start in zip(lines, wanted, strict=True):
        assert f"parameter {start}" in line
        assert " violates type hint " in line


def test_an_unknown_word_is_never_ignored():
    for call in (partial(rd.gated, 8, gate_bias=1.0), partial(model(), tokens, num_step=2), partial(loop(), maks=None)):
        with pytest.raises(TypeError, match=r"unexpected keyword|missing"):
            call()
