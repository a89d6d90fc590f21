"""What the launcher of lm-evaluation-harness adds to the arguments; without the harness itself."""

import pytest

from recurrent_depth.hf.lm_eval import with_model


@pytest.mark.parametrize(
    "given, taken",
    [
        ("--tasks a", "run --model recurrent-depth --tasks a"),
        ("run --tasks a", "run --model recurrent-depth --tasks a"),
        ("--model hf --tasks a", "run --model hf --tasks a"),
        ("run --model=hf --tasks a", "run --model=hf --tasks a"),
        ("--config a.yaml", "run --config a.yaml"),
        ("--model_args pretrained=a", "run --model recurrent-depth --model_args pretrained=a"),
        ("ls tasks", "ls tasks"),
        ("validate --tasks a", "validate --tasks a"),
        ("--help", "--help"),
        ("", ""),
    ],
)
def test_the_command_adds_the_model_alone(given, taken):
    assert with_model(given.split()) == taken.split()
