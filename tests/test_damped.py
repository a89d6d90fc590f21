"""The training-free damped loop: its equations, its limits, and what its source stores while decoding."""

from functools import partial

import pytest
import torch
from battery import lively, tiny
from hypothesis import given
from hypothesis import strategies as st
from strategies import few, recipes
from torch import Tensor, nn
from torch.testing import assert_close

import recurrent_depth as rd
from recurrent_depth.contracts import At


def window_of(update: rd.DepthUpdate, window: nn.Module) -> rd.RecurrentCore:
    """A loop over a window of layers that know only their input."""
    return rd.RecurrentCore([rd.PlainBlock(window)], update)


def written(window, x0: Tensor, num_steps: int, share: float) -> Tensor:
    """The source's equations: F^K by damped Euler steps, and the blend with one plain pass."""
    x = x0
    for _ in range(num_steps):
        x = (1 - 1 / num_steps) * x + (1 / num_steps) * window(x)
    return share * window(x0) + (1 - share) * x


class Store(rd.KeyValues):
    """Keys and values of one block, stored as the source does: a snapshot of the length, and a crop back to it."""

    def __init__(self):
        self.keys, self.values = torch.empty(0), torch.empty(0)

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if len(self.keys):
            keys, values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
        self.keys, self.values = keys, values
        return keys, values

    def __len__(self) -> int:
        return self.keys.shape[2] if len(self.keys) else 0

    def crop(self, length: int) -> None:
        self.keys, self.values = self.keys[:, :, :length], self.values[:, :, :length]


class SourceDecoding:
    """Decoding of the source over a model's blocks: each iteration reads and is cropped away, a stash pass stores."""

    def __init__(self, model: rd.RecurrentTransformer, share: float):
        self.model, self.share = model, share
        self.stores = {part: [Store() for _ in blocks] for part, blocks in self.parts().items()}
        self.length = 0

    def parts(self) -> dict[str, list[nn.Module]]:
        model = self.model
        return {
            "prelude": list(model.prelude.blocks),
            "core": list(model.core.stack.blocks),
            "coda": list(model.coda.blocks),
        }

    def run(self, part: str, x: Tensor) -> Tensor:
        positions = torch.arange(self.length, self.length + x.shape[1])[None]
        for block, store in zip(self.parts()[part], self.stores[part], strict=True):
            x = block(x, At(positions, kv=store))
        return x

    def unstored(self, x: Tensor) -> Tensor:
        lengths = [len(store) for store in self.stores["core"]]
        out = self.run("core", x)
        for store, length in zip(self.stores["core"], lengths, strict=True):
            store.crop(length)
        return out

    def extend(self, tokens: Tensor, num_steps: int) -> Tensor:
        model = self.model
        positions = torch.arange(self.length, self.length + tokens.shape[1])[None]
        x0 = self.run("prelude", model.embed(tokens, positions))
        looped = written(self.unstored, x0, num_steps, self.share)
        self.run("core", x0)  # the stash, from the state before the loop
        out = self.run("coda", looped)
        self.length += tokens.shape[1]
        return model.head(model.norm(out), model.embed.token.weight)


# Equations


@given(st.integers(1, 6), st.floats(0, 1))
def test_it_is_the_published_equations(num_steps, share):
    window = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    core = window_of(rd.damped(8, share=share), window)
    assert_close(core(x, num_steps), written(window, x, num_steps, share))


def test_a_start_of_the_callers_takes_the_place_of_the_anchor():
    window = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double()
    x, start = torch.randn(2, 2, 5, 8, dtype=torch.float64)
    core = window_of(rd.damped(8), window)
    assert_close(core(x, 3, start=start), written(window, start, 3, 0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("share", [0, 0.3, 0.5, 1])
def test_one_step_is_the_plain_pass_to_the_last_bit(dtype, share):
    window, x = nn.Linear(8, 8).to(dtype), torch.randn(2, 5, 8).to(dtype)
    assert torch.equal(window_of(rd.damped(8, share=share), window)(x, 1), window(x))


@given(st.integers(1, 5))
def test_at_share_1_it_is_the_plain_pass_at_every_depth(num_steps):
    window, x = nn.Linear(8, 8), torch.randn(2, 5, 8)
    assert torch.equal(window_of(rd.damped(8, share=1), window)(x, num_steps), window(x))


def test_in_a_model_one_step_is_the_dense_model():
    torch.manual_seed(0)
    damped = lively(tiny(partial(rd.grt, update=rd.damped))).eval()
    dense = tiny(rd.naive).eval()
    dense.load_state_dict(damped.state_dict())  # it has no weights of its own
    x = torch.randint(23, (2, 7))
    assert torch.equal(damped(x, 1), dense(x, 1))
    assert not torch.equal(damped(x, 3), dense(x, 1))


def test_a_step_writes_its_length():
    model = tiny(partial(rd.grt, update=rd.damped))
    for num_steps in (1, 2, 3):
        states = model.trajectory(torch.randint(23, (2, 4)), num_steps, every_step=True).states
        for state in states:
            assert_close(state.write, torch.full((2, 4), 1 / num_steps))


def test_rows_of_different_depths_share_the_length_of_the_deepest_rows_steps():
    window = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    core = window_of(rd.damped(8, share=0), window)
    found = core(x, [4, 2])
    assert_close(found[:1], written(window, x[:1], 4, 0))
    half = x[1:]
    for _ in range(2):
        half = 0.75 * half + 0.25 * window(half)
    assert_close(found[1:], half)


# Decoding


@few
@given(recipes(st.builds(rd.Layout, st.integers(0, 1), st.integers(1, 2), st.just(4), st.integers(0, 1))), st.data())
def test_keeping_the_first_is_the_stash_from_before_the_loop(recipe, data):
    share, num_steps = data.draw(st.sampled_from([0.0, 0.5, 0.8])), data.draw(st.integers(1, 4))
    model = recipe.model(partial(rd.grt, update=partial(rd.damped, share=share))).double()
    tokens, source, cache = torch.randint(23, (2, 9)), SourceDecoding(model, share), rd.DepthCache(rd.KeepFirst())
    with torch.no_grad():
        for chunk in tokens.split([5, 1, 2, 1], dim=1):
            found = rd.extend(model, chunk, cache, num_steps=num_steps)
            assert_close(found, source.extend(chunk, num_steps), atol=1e-9, rtol=1e-9)


def test_it_generates_under_the_policies_that_keep_one_copy():
    model = lively(tiny(partial(rd.grt, update=rd.damped))).eval()
    prompt = torch.randint(23, (2, 4))
    for policy in (rd.KeepFirst(), rd.KeepLast()):
        assert rd.generate(model, prompt, max_new_tokens=5, kv=policy, num_steps=3).shape == (2, 9)


# Bad input


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_outside_of_0_to_1_is_refused(share):
    with pytest.raises(ValueError, match=r"share is .*, but must be a finite number of at least 0 and at most 1"):
        rd.damped(8, share=share)


def test_a_width_below_1_is_refused():
    with pytest.raises(ValueError, match="dim"):
        rd.damped(0)
