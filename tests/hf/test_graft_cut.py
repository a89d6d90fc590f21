"""A graft whose host no longer reaches the end of the core says so, where the loop would be left out in silence."""

import hosts
import pytest
import torch

from recurrent_depth.hf import graft


def cut_list(model):
    model.base_model.layers = model.base_model.layers[:3]


def cut_configuration(model):
    model.config.num_hidden_layers = 3


WAYS = {"the list": cut_list, "the configuration": cut_configuration}


@pytest.mark.parametrize("cut", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("asked", [{}, {"num_steps": 1}, {"use_cache": False}])
def test_a_host_cut_within_the_core_is_refused(cut, asked):
    model, tokens = graft(hosts.host("llama"), range(2, 4), 2), hosts.tokens()
    cut(model)
    with pytest.raises(ValueError, match=r"did not call layer 3, the last one of the core.*behind layer 2"):
        model(tokens, **asked)
    with pytest.raises(ValueError, match="the loop did not run"), model.recurrence.at_depth(2):
        model.base_model(tokens)
    with pytest.raises(ValueError, match="the loop did not run"):
        model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=2)


def test_a_host_cut_behind_the_core_loops():
    model, tokens = hosts.grafted("llama"), hosts.tokens()
    model.base_model.layers = model.base_model.layers[:4]
    assert not torch.allclose(model(tokens).logits, model(tokens, num_steps=1).logits, atol=1e-3)


class Enough(Exception):  # noqa: N818
    """Raised by whoever has seen enough."""


def enough(*_):
    raise Enough


@pytest.mark.parametrize("layer", range(5))
def test_an_exception_within_the_host_arrives_as_it_was_raised(layer):
    model, tokens = hosts.grafted("llama"), hosts.tokens()
    expected = model(tokens).logits
    handle = model.base_model.layers[layer].mlp.register_forward_hook(enough)
    with pytest.raises(Enough):
        model(tokens)
    with pytest.raises(Enough), model.recurrence.at_depth(2):
        model.base_model(tokens)
    handle.remove()
    assert torch.equal(model(tokens).logits, expected)


def test_a_layer_called_by_itself_is_no_matter_to_the_next_forward():
    model, tokens = hosts.grafted("llama"), hosts.tokens()
    expected = model(tokens, num_steps=2).logits
    model.base_model.layers[1](torch.zeros(2, 9, 32))
    with model.recurrence.at_depth(2):
        pass
    with model.recurrence.at_depth(2):
        assert torch.equal(model(tokens).logits, expected)
