"""ALBERT: one block in a loop, and a vocabulary in two factors."""

from functools import partial

import pytest
import torch
from battery import close, lively, tiny
from hypothesis import given
from hypothesis import strategies as st
from strategies import few
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

import recurrent_depth as rd

SIZES = {"dim": 16, "num_heads": 2, "vocab_size": 23, "context_length": 16}
FORMS = {"gpt2": rd.GPT2Form, "llama": rd.LlamaForm, "grouped": partial(rd.LlamaForm, num_kv_heads=1)}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def albert(num_layers: int = 3, **changes) -> rd.RecurrentTransformer:
    return rd.albert(num_layers, **{**SIZES, "inner_dim": 6, **changes})


@every_form
@few
@given(st.integers(1, 5))
def test_it_is_one_block_in_a_loop_with_its_tables_multiplied_out(form, num_layers):
    model = lively(albert(num_layers, form=form)).eval()
    naive = rd.naive(rd.Layout(0, 1, num_layers, 0), **SIZES, form=form).eval()
    up = model.embed.project.weight
    with torch.no_grad():
        model.head.project.weight.copy_(up.T)  # then the head is the product of the tables too
    weights = {name: weight for name, weight in model.state_dict().items() if "project" not in name}
    for table in ("embed.token.weight", "embed.position.weight"):
        if table in weights:
            weights[table] = weights[table] @ up.T
    naive.load_state_dict(weights)
    x = torch.randint(23, (2, 7))
    assert_close(model(x), naive(x), **close)


def test_it_is_the_block_written_out():
    model = lively(albert(4)).eval()
    x = torch.randint(23, (2, 7))
    block, at = model.core.stack.blocks[0], rd.At(torch.arange(7)[None])
    h = (model.embed.token.weight[x] + model.embed.position.weight[:7]) @ model.embed.project.weight.T
    for _ in range(4):
        h = block(h, at)
    expected = model.norm(h) @ model.head.project.weight.T @ model.embed.token.weight.T
    assert_close(model(x), expected, **close)


@pytest.mark.parametrize("num_layers", [1, 12])
def test_more_layers_are_no_more_parameters(num_layers):
    model = albert(num_layers)
    block = 12 * 16**2 + 2 * 16
    assert rd.accounting.num_parameters(model) == block + 16 + (23 + 16) * 6 + 2 * 16 * 6
    assert rd.accounting.num_parameters(model) == rd.accounting.outline(model).num_parameters
    assert model.layout == rd.Layout(0, 1, num_layers, 0)


def test_factors_save_what_the_source_says():
    with torch.device("meta"):
        model = rd.albert(12, dim=768, num_heads=12, vocab_size=30000, context_length=512)
    vocabulary = model.embed.token.weight.numel() + model.embed.project.weight.numel()
    assert vocabulary == 30000 * 128 + 128 * 768 < 30000 * 768 / 5
    assert rd.accounting.num_parameters(model) / 1e6 == pytest.approx(11, abs=1)


@every_form
def test_the_closed_form_of_its_flops_is_what_torch_counts(form):
    with torch.device("meta"):
        model, x = albert(form=form), torch.zeros(1, 7, dtype=torch.long)
    for steps in (1, 3):
        with FlopCounterMode(display=False) as counter:
            model(x, steps)
        assert rd.accounting.flops(model, 7, steps) == counter.get_total_flops()
    parts = rd.accounting.flops_breakdown(model, 7)
    assert parts.prelude == 7 * 2 * 6 * 16
    assert parts.head == 7 * 2 * (6 * 16 + 6 * 23)


def test_its_outline_knows_width_and_vocabulary():
    of = rd.accounting.outline(albert())
    assert (of.dim, of.vocab_size, of.context_length) == (16, 23, 16)
    assert of.num_position_parameters == 16 * 6


def test_it_decodes():
    model = lively(albert()).eval()
    x = torch.randint(23, (2, 5))
    text = rd.generate(model, x, max_new_tokens=4)
    assert torch.equal(text[:, 5:6], model(x)[:, -1:].argmax(-1))


def test_post_norm_is_the_sources_block():
    names = albert(form=partial(rd.GPT2Form, arrangement=rd.PostNorm, bias=True)).state_dict()
    assert "core.stack.blocks.0.around_mlp.norm.bias" in names


def test_tokens_beyond_the_learned_positions_are_refused():
    with pytest.raises(ValueError, match="learned positions 0 to 15, but the sequence has 0 to 16"):
        albert()(torch.zeros(1, 17, dtype=torch.long))


@pytest.mark.parametrize("name", ["num_layers", "inner_dim", "vocab_size", "context_length", "dim"])
def test_impossible_sizes_are_refused(name):
    with pytest.raises(ValueError, match=name):
        albert(**{name: 0})


def test_the_tiny_model_of_the_battery_is_this_one():
    assert tiny(lambda layout, **sizes: albert(layout.num_steps, **sizes)).layout == rd.Layout(0, 1, 3, 0)
