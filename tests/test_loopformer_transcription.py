"""LoopFormer beside its transcription, from tokens to logits, in evaluation and under the random times of training."""

import numpy as np
import pytest
import torch
from agreement import assert_all_agree, assert_slopes_agree
from battery import lively, tiny
from hypothesis import given
from hypothesis import strategies as st
from strategies import few, loops, recipes, tokens
from transcription_parts import arrays
from transcription_steps import loopformer

import recurrent_depth as rd

LAYOUT = rd.Layout(1, 2, 8, 1)
SEED = 5


def transcribe(model, x, lengths, weights=None):
    num_heads = model.core.stack.blocks[0].attention.num_heads
    return loopformer(weights or arrays(model.state_dict()), x.numpy(), model.layout, num_heads, lengths)


def in_training() -> tuple[rd.RecurrentTransformer, np.ndarray]:
    """A model, and the uneven lengths of the steps that a run of three takes from `SEED` on."""
    model = lively(tiny(rd.loopformer, LAYOUT), 0.1).double().train()
    torch.manual_seed(SEED)
    lengths = np.diff(model.core.update.times(3))
    assert len(set(lengths)) > 1
    return model, lengths


@pytest.mark.parametrize("dtype, accuracy", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@few
@given(recipes(loops), tokens(), st.data())
def test_a_run_of_any_depth_is_the_published_loop(dtype, accuracy, recipe, x, data):
    model = recipe._replace(dtype=dtype).model(rd.loopformer)
    num_steps = data.draw(st.integers(1, model.num_steps))
    expected = transcribe(model, x, [1 / num_steps] * num_steps)
    assert_all_agree(model.trajectory(x, num_steps, every_step=True), *expected, accuracy)


def test_deeper_than_trained_takes_shorter_steps():
    model, x = lively(tiny(rd.loopformer)).double().eval(), torch.randint(23, (2, 6))
    with pytest.warns(UserWarning, match="deeper than trained"):
        found = model.trajectory(x, 7, every_step=True)
    assert_all_agree(found, *transcribe(model, x, [1 / 7] * 7))


def test_a_training_run_follows_its_random_times():
    (model, lengths), x = in_training(), torch.randint(23, (2, 6))
    torch.manual_seed(SEED)
    assert_all_agree(model.trajectory(x, 3, every_step=True), *transcribe(model, x, lengths))


def test_its_gradients_are_those_of_the_published_loop():
    (model, lengths), x = in_training(), torch.randint(23, (2, 6))
    torch.manual_seed(SEED)
    loss = model(x, 3).square().sum()
    assert_slopes_agree(model, loss, lambda w: (transcribe(model, x, lengths, w)[0] ** 2).sum())
