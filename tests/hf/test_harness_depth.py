"""The depth at which the harness evaluates a model that is in memory already."""

from collections.abc import Callable
from pathlib import Path

import hosts
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import recurrent_depth as rd

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # the harness's own and its dependencies'


@pytest.mark.parametrize("num_steps", [4, rd.Depth(4, grad_steps=1)])
def test_a_depth_that_was_set_on_the_model_is_the_one_it_is_evaluated_at(
    num_steps: int | rd.Depth, installed: Callable[[str, str], Path]
) -> None:
    installed("lm_eval", "-c constraints.txt -e '.[eval]'")
    from recurrent_depth.hf.harness import RecurrentLM

    model = hosts.grafted("llama")  # of three steps
    model.recurrence.num_steps = num_steps
    words = Tokenizer(WordLevel({"<pad>": 0, "<bos>": 1, "<eos>": 2}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    evaluated = RecurrentLM(model, tokenizer=tokenizer)  # pyright: ignore[reportAbstractUsage]
    assert evaluated.num_steps == 4
