"""Mistakes that a user can make are named where they are made, not deep inside torch."""

from functools import partial

import jaxtyping
import pytest
import torch
from beartype.roar import BeartypeCallHintParamViolation

import recurrent_depth as rd

sizes = {"dim": 16, "num_heads": 2, "vocab_size": 23, "context_length": 16}
tokens = torch.arange(8).reshape(2, 4)


def model() -> rd.RecurrentTransformer:
    return rd.grt(rd.Layout(1, 1, 3, 1), **sizes)


def loop() -> rd.RecurrentCore:
    return rd.RecurrentCore([rd.PlainBlock(torch.nn.Linear(8, 8))], rd.gated(8))


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
}


@pytest.fixture
def as_a_user_runs_it(monkeypatch: pytest.MonkeyPatch):
    """Without the hook of the tests, which would name a wrong shape before the library does."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.usefixtures("as_a_user_runs_it")
@pytest.mark.parametrize("message", WRONG)
def test_a_mistake_is_refused_by_name(message: str):
    with pytest.raises(ValueError, match=message):
        WRONG[message]()


@pytest.mark.parametrize("options", [{"bias": "4"}, {"state_noise": None}, {"temperature": [1.0]}])
def test_an_update_refuses_wrong_types(options: dict):
    with pytest.raises((BeartypeCallHintParamViolation, jaxtyping.TypeCheckError), match=next(iter(options))):
        rd.gated(8, **options)


def test_an_unknown_word_is_never_ignored():
    for call in (partial(rd.gated, 8, gate_bias=1.0), partial(model(), tokens, num_step=2), partial(loop(), maks=None)):
        with pytest.raises(TypeError, match=r"unexpected keyword|missing"):
            call()
