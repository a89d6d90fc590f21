"""Laws that every method obeys, whatever its layout, width and shapes."""

import torch
from battery import NO_PREFIX, SKIPS, close, every_method, every_method_but, lively, tiny
from hypothesis import given
from hypothesis import strategies as st
from strategies import VOCAB_SIZE, depths, dtypes, few, loops, recipes, shares, tokens
from torch.testing import assert_close

import recurrent_depth as rd


def pad_left(rows: list[torch.Tensor], fill: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of any lengths as one batch, and its mask."""
    longest = max(len(row) for row in rows)
    padded = [torch.cat([row.new_full((longest - len(row),), fill), row]) for row in rows]
    mask = torch.tensor([[False] * (longest - len(row)) + [True] * len(row) for row in rows])
    return torch.stack(padded), mask


@every_method
@few
@given(recipes(dtypes=dtypes), tokens())
def test_shape_and_dtype_are_kept(build, recipe, x):
    model = recipe.model(build)
    trajectory = model.trajectory(x, every_step=True)
    assert trajectory.output.shape == (*x.shape, VOCAB_SIZE)
    assert trajectory.output.dtype == recipe.dtype
    assert trajectory.output.isfinite().all()
    assert len(trajectory.states) == model.num_steps
    for state in trajectory.states:
        assert state.h.shape == (*x.shape, recipe.width[0])
        assert state.h.dtype == recipe.dtype
        assert state.write.shape == x.shape
        assert state.write.dtype == torch.promote_types(recipe.dtype, torch.float32)
        assert ((state.write > 0) & (state.write <= 1)).all()


@every_method_but(NO_PREFIX)
@few
@given(recipes(dtypes=dtypes), tokens())
def test_a_shallower_run_is_a_prefix(build, recipe, x):
    model = recipe.model(build)
    trajectory = model.trajectory(x, every_step=True)
    for num_steps in range(1, model.num_steps + 1):
        shallow = model.trajectory(x, num_steps)
        assert len(shallow.states) == 1
        assert torch.equal(shallow.states[0].h, trajectory.states[num_steps - 1].h)
        assert torch.equal(shallow.states[0].write, trajectory.states[num_steps - 1].write)
        assert torch.equal(shallow.output, trajectory.after(num_steps))
    assert torch.equal(model(x), trajectory.output)
    assert torch.equal(model(x, 1), trajectory.after(1))


@every_method_but(SKIPS)
@few
@given(recipes(loops), tokens())
def test_each_step_changes_the_output(build, recipe, x):
    trajectory = recipe.model(build).trajectory(x, every_step=True)
    for step in range(1, len(trajectory.states)):
        assert (trajectory.after(step + 1) - trajectory.after(step)).abs().max() > 1e-6


@every_method
@few
@given(recipes(), tokens(num_tokens=st.integers(2, 8)), st.integers(1, 7), st.integers(1, VOCAB_SIZE - 1))
def test_a_token_never_changes_earlier_outputs(build, recipe, x, place, shift):
    model = recipe.model(build)
    at = min(place, x.shape[1] - 1)
    changed = x.clone()
    changed[:, at] = (x[:, at] + shift) % VOCAB_SIZE
    before, after = model(x), model(changed)
    assert_close(after[:, :at], before[:, :at], **close)
    assert ((after[:, at:] - before[:, at:]).abs().amax(-1) > 1e-4).all()


@every_method_but(NO_PREFIX)
@few
@given(recipes(loops), tokens(), shares(3))
def test_each_row_leaves_at_its_own_depth(build, recipe, x, shares):
    model = recipe.model(build)
    rows = depths(shares, model)[: len(x)]
    together = model.trajectory(x, rows)
    for row, num_steps in enumerate(rows):
        alone = model.trajectory(x[row : row + 1], num_steps)
        assert_close(together.output[row : row + 1], alone.output, **close)
        assert_close(together.states[-1].write[row : row + 1], alone.states[-1].write, **close)


@every_method_but(NO_PREFIX)
@few
@given(recipes(), st.lists(tokens(st.just(1)), min_size=2, max_size=3), shares(3), st.integers(0, VOCAB_SIZE - 1))
def test_a_left_padded_row_equals_the_row_alone(build, recipe, rows, shares, fill):
    model = recipe.model(build)
    padded, mask = pad_left([row[0] for row in rows], fill)
    shallow = depths(shares, model)[: len(rows)]
    full, by_row = model(padded, mask=mask), model(padded, shallow, mask=mask)
    assert full.isfinite().all()
    assert by_row.isfinite().all()
    for row, alone in enumerate(rows):
        place = slice(row, row + 1), slice(-alone.shape[1], None)
        assert_close(full[place], model(alone), **close)
        assert_close(by_row[place], model(alone, shallow[row]), **close)


@every_method
@few
@given(recipes(), tokens())
def test_no_mask_is_a_mask_of_ones(build, recipe, x):
    model = recipe.model(build)
    expected = model(x)
    assert_close(model(x, mask=torch.ones_like(x, dtype=torch.bool)), expected, **close)
    assert_close(model(x, mask=torch.ones_like(x)), expected, **close)


@every_method
def test_a_row_of_nothing_but_padding_stays_finite_with_its_gradients(build):
    model = lively(tiny(build))
    x = torch.randint(23, (2, 5))
    logits = model(x, mask=torch.tensor([[False] * 5, [False, False, True, True, True]]))
    logits.sum().backward()
    assert logits.isfinite().all()
    assert all(weight.grad.isfinite().all() for weight in model.parameters() if weight.grad is not None)


@every_method
def test_evaluation_is_deterministic_and_leaves_the_rng_alone(build):
    model = tiny(build).eval()
    x = torch.randint(23, (2, 5))
    before = torch.get_rng_state()
    assert torch.equal(model(x), model(x))
    assert torch.equal(torch.get_rng_state(), before)


@every_method
def test_forwards_leave_nothing_on_the_modules(build):
    model = tiny(build)
    x = torch.randint(23, (2, 5))
    names = {name: set(vars(module)) for name, module in model.named_modules()}
    for training in (True, False, True):
        model.train(training)
        model(x).sum().backward()
        model(x, rd.Depth(model.num_steps, grad_steps=1)).sum().backward()
        model(x, [1, model.num_steps]).sum().backward()
    for name, module in model.named_modules():
        assert set(vars(module)) == names[name]
        assert not any(isinstance(value, torch.Tensor) for value in vars(module).values())
