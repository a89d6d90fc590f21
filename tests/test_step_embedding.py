"""An embedding per step: against the equations of Gemma 3n written out, and its limits."""

import warnings
from functools import partial

import pytest
import torch
from agreement import assert_all_agree, assert_slopes_agree
from battery import close, gradients, lively, tiny
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode
from transcription_parts import arrays
from transcription_steps import ple as written

import recurrent_depth as rd

LAYOUT = rd.Layout(1, 2, 3, 1)
SIZE = 4
X = torch.randint(23, (2, 7), generator=torch.Generator().manual_seed(0))
gates = {"state_noise": 0.0, "gate_noise": 0.0}


def ple(layout=LAYOUT, size=SIZE, **changes) -> rd.RecurrentTransformer:
    return tiny(partial(rd.ple, size=size), layout, **changes)


@pytest.mark.parametrize("dtype, accuracy", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_it_is_what_the_equations_say(dtype, accuracy):
    model = lively(ple()).to(dtype).eval()
    expected = written(arrays(model.state_dict()), X.numpy(), LAYOUT, 2)
    assert_all_agree(model.trajectory(X, every_step=True), *expected, accuracy)


def test_its_gradients_are_those_of_the_equations():
    model = lively(ple(), 0.1).double().eval()
    assert_slopes_agree(model, model(X).square().sum(), lambda w: (written(w, X.numpy(), LAYOUT, 2)[0] ** 2).sum())


@pytest.mark.parametrize("update", [rd.plain, partial(rd.gated, bias=0.0, **gates)])
def test_a_norm_of_zero_leaves_the_update_within(update):
    model, bare = lively(ple(update=update)).eval(), tiny(rd.grt, LAYOUT, update=update).eval()
    torch.nn.init.zeros_(model.core.update.norm.weight)
    bare.core.stack, bare.core.update = model.core.stack, model.core.update.inner
    bare.load_state_dict(model.state_dict(), strict=False)
    assert_close(model(X), bare(X))


@pytest.mark.parametrize("step", range(3))
def test_the_slice_of_a_step_changes_that_step_and_those_behind_it_alone(step):
    model = lively(ple()).eval()
    before = model.trajectory(X, every_step=True).states
    with torch.no_grad():
        model.core.update.embedding.table.weight[:, step * SIZE : (step + 1) * SIZE] += 1.0
    after = model.trajectory(X, every_step=True).states
    for place, (old, new) in enumerate(zip(before, after, strict=True)):
        assert torch.equal(old.h, new.h) == (place < step)


def test_two_tokens_of_one_embedding_differ_by_their_entries_alone():
    model = lively(ple(layout=rd.Layout(0, 1, 2, 0))).eval()
    with torch.no_grad():
        model.embed.token.weight[1] = model.embed.token.weight[2]
    one, other = torch.tensor([[1, 5]]), torch.tensor([[2, 5]])
    assert not torch.allclose(model(one), model(other), atol=1e-3)
    with torch.no_grad():
        model.core.update.embedding.table.weight[1] = model.core.update.embedding.table.weight[2]
    assert torch.equal(model(one), model(other))


def test_gradients_reach_the_slices_of_the_steps_taken_and_are_zero_elsewhere():
    model = lively(ple()).eval()
    for num_steps in (1, 2, 3):
        model(X, num_steps).square().sum().backward()
        for name in ("table", "context"):
            weight = model.core.update.embedding.get_submodule(name).weight
            rows = weight.grad if name == "context" else weight.grad.T
            used = rows.unflatten(0, (3, SIZE)).flatten(1).norm(dim=1) > 0
            assert used.tolist() == [step < num_steps for step in range(3)]
        gradients(model)


def test_the_embeddings_are_counted_once_and_the_maps_at_each_step():
    bare, model = (rd.accounting.flops_breakdown(one, tokens=7) for one in (tiny(rd.naive, LAYOUT), ple()))
    assert model.begin == 7 * 2 * 16 * 3 * SIZE
    assert model.update == 3 * 7 * 2 * 2 * 16 * SIZE
    assert model._replace(begin=0, update=0) == bare


@pytest.mark.parametrize("update", [rd.plain, rd.gated])
@pytest.mark.parametrize("form", [rd.GPT2Form, rd.LlamaForm])
def test_the_flops_are_those_that_torch_counts(form, update):
    with torch.device("meta"):
        model, tokens = ple(form=form, update=update).eval(), torch.zeros(1, 7, dtype=torch.long)
    for num_steps in (1, 3):
        with FlopCounterMode(display=False) as counter:
            model(tokens, num_steps)
        assert counter.get_total_flops() == rd.accounting.flops(model, 7, num_steps)


@pytest.mark.parametrize("update", [rd.plain, partial(rd.gated, bias=0.0)])
def test_decoding_through_a_cache_is_the_parallel_pass(update):
    model = lively(ple(update=update)).eval()
    cache = rd.DepthCache(rd.KeepAll())
    with torch.no_grad():
        parts = [rd.extend(model, part, cache) for part in X.split([3, 1, 2, 1], dim=1)]
    assert_close(torch.cat(parts, dim=1), model(X), **close)


def test_bad_input_is_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="4 steps asked for, but there are embeddings for 3"):
            ple()(X, 4)
    with pytest.raises(ValueError, match="size is 0"):
        ple(size=0)
    with pytest.raises(ValueError, match="needs the token ids"):
        ple().core(torch.randn(1, 2, 16), 1)
