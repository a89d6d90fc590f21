"""Laws of gradients: true ones, at every depth, truncated, checkpointed, and under autocast."""

import gc
from contextlib import nullcontext

import pytest
import torch
from battery import IDENTITY, NO_PREFIX, SKIPS, every_method, every_method_but, gradients, lively, tiny
from hypothesis import given
from hypothesis import strategies as st
from strategies import depths, few, loops, recipes, shares, tokens

import recurrent_depth as rd


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Equal up to rounding, measured against the parameter's own gradient and, faintly, against the largest."""
    largest = max(gradient.norm() for gradient in expected.values())
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-3 * gradient.norm() + 1e-5 * largest, name


def logits_by_hand(model: rd.RecurrentTransformer, x: torch.Tensor, num_steps: int, grad_steps: int) -> torch.Tensor:
    """The loop written out, its first steps under no_grad."""
    at, blocks = rd.At(torch.arange(x.shape[1])[None]), model.core.stack
    anchor = model.prelude(model.embed(x, at.positions), at)
    state = model.core.update.begin(anchor, rd.Call(num_steps, x, model.embed(x, at.positions), at.positions))
    for step in range(num_steps):
        with torch.no_grad() if step < num_steps - grad_steps else nullcontext():
            state = model.core.update(state, rd.StepBlocks(blocks, at, step, None, rd.Notes()), step)
    return model.readout(model.core.update.read(state), at)


def gradients_of(model: rd.RecurrentTransformer, x: torch.Tensor, depth, seed: int = 0, **call) -> dict:
    """Gradients of a loss that is a sum over rows, so that those of single rows add up to those of the batch."""
    torch.manual_seed(seed)
    model(x, depth, **call).square().sum().backward()
    return gradients(model)


@every_method_but(IDENTITY)
def test_gradients_reach_every_parameter(build):
    model = tiny(build)
    x = torch.randint(23, (2, 16))
    rd.next_token_loss(model(x), x).backward()
    for name, gradient in gradients(model).items():
        assert gradient.isfinite().all(), name
        assert gradient.abs().max() > 0, name


@every_method
@few
@given(recipes(loops), tokens(), st.integers(1, 6))
def test_truncation_differentiates_the_last_steps_and_no_other(build, recipe, x, grad_steps):
    model = recipe.model(build)
    found = gradients_of(model, x, rd.Depth(model.num_steps, grad_steps))
    logits_by_hand(model, x, model.num_steps, grad_steps).square().sum().backward()
    assert_same(found, gradients(model))


def test_truncation_changes_the_gradients_of_core_and_prelude():
    model = lively(tiny())
    x = torch.randint(23, (2, 6))
    full, cut = (gradients_of(model.eval(), x, rd.Depth(3, grad_steps)) for grad_steps in (None, 1))
    for name in ("core.stack.blocks.0.mlp.up.weight", "core.update.inject.anchor.weight", "embed.token.weight"):
        assert not torch.allclose(full[name], cut[name], rtol=1e-2)


@every_method_but(NO_PREFIX)
@few
@given(recipes(loops), tokens(st.integers(2, 3)), shares(3), st.none() | st.integers(1, 3))
def test_gradients_of_rows_add_up_whatever_their_depths(build, recipe, x, shares, grad_steps):
    model = recipe.model(build)
    rows = depths(shares, model)[: len(x)]
    together = gradients_of(model, x, rd.Depth(max(rows), grad_steps, tuple(rows)))
    alone = [gradients_of(model, x[i : i + 1], rd.Depth(rows[i], grad_steps)) for i in range(len(x))]
    assert_same(together, {name: sum(one[name] for one in alone) for name in together})


@every_method
@few
@given(recipes(loops), tokens(st.just(2), st.integers(3, 6)), st.integers(1, 2))
def test_gradients_of_a_left_padded_row_are_those_of_the_row_alone(build, recipe, x, padding):
    model = recipe.model(build)
    mask = torch.ones_like(x, dtype=torch.bool)
    mask[0, :padding] = False
    (model(x, mask=mask).square() * mask[..., None]).sum().backward()
    together = gradients(model)
    alone = [gradients_of(model, x[:1, padding:], None), gradients_of(model, x[1:], None)]
    assert_same(together, {name: alone[0][name] + alone[1][name] for name in together})


def in_bf16():
    return torch.autocast("cpu", torch.bfloat16)


@every_method
@pytest.mark.parametrize(
    "depth, context",
    [
        (lambda full: rd.Depth(full), nullcontext),
        (lambda full: rd.Depth(full, 2), in_bf16),
        (lambda full: rd.Depth(full, 2, (full, 1, full)), nullcontext),
    ],
    ids=["all steps", "last steps, autocast", "by row"],
)
def test_checkpointing_gives_the_same_gradients_to_the_bit_with_noise_on(build, depth, context):
    model = lively(tiny(build))
    x = torch.randint(23, (3, 6))
    found = []
    for checkpointing in (True, False):
        model.core.checkpointing = checkpointing
        with context():
            found.append(gradients_of(model, x, depth(model.num_steps)))
    checkpointed, plain = found
    for name in plain:
        assert torch.equal(checkpointed[name], plain[name]), name


def test_noise_changes_the_gradients_so_that_the_law_above_says_something():
    model = lively(tiny())
    x = torch.randint(23, (2, 6))
    here, there = (gradients_of(model, x, None, seed) for seed in (0, 1))
    assert not torch.equal(here["core.update.gate.state.weight"], there["core.update.gate.state.weight"])


@every_method_but(SKIPS)
@pytest.mark.parametrize("grad_steps", [1, 2, None])
def test_autocast_keeps_the_gradients_of_the_core(build, grad_steps):
    # Frozen steps come first and would fill autocast's cache of weights with copies that know no gradient.
    model = lively(tiny(build), 0.1).eval()
    x = torch.randint(23, (2, 8))
    depth = rd.Depth(model.num_steps, grad_steps)
    exact = gradients_of(model, x, depth)
    with in_bf16():
        found = gradients_of(model, x, depth)
    for name, gradient in found.items():
        # The last step of a token weighs what is left, whatever its halting probability.
        if name.startswith("core") and not (grad_steps == 1 and name.startswith("core.update.unit")):
            assert gradient.norm() > 0, name
            # bfloat16's own rounding leaves 0.986 where every step is normed.
            assert torch.cosine_similarity(gradient.flatten(), exact[name].flatten(), dim=0) > 0.98, name


def test_training_twice_in_a_row_with_another_depth_needs_nothing_in_between():
    model = tiny()
    x = torch.randint(23, (2, 6))
    for depth in (3, rd.Depth(3, 1), [1, 3], 2):
        gradients_of(model, x, depth)
        assert all(weight.grad is None for weight in model.parameters())


def bytes_alive(model: rd.RecurrentTransformer, x: torch.Tensor, num_steps: int) -> int:
    """What a forward keeps for its backward: all that autograd saves or a checkpoint holds."""
    gc.collect()
    before = {id(one) for one in gc.get_objects() if issubclass(type(one), torch.Tensor)}
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        out = model(x, num_steps)
    gc.collect()
    kept = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and id(one) not in before]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in kept}
    assert out.requires_grad
    return sum(storages.values())


def test_a_further_checkpointed_step_keeps_hardly_more_than_its_state():
    model = tiny(layout=rd.Layout(1, 2, 10, 1), dim=32, context_length=64)
    x = torch.randint(23, (8, 64))
    state = 8 * 64 * 32 * 4
    model.core.checkpointing = True
    growth = (bytes_alive(model, x, 10) - bytes_alive(model, x, 2)) / 8
    model.core.checkpointing = False
    plain = (bytes_alive(model, x, 10) - bytes_alive(model, x, 2)) / 8
    assert state <= growth <= 1.2 * state
    assert plain > 20 * state
