"""The Universal Transformer as a whole: transcribed in NumPy, and what its blocks hear at the start."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from battery import lively, tiny
from hypothesis import given
from hypothesis import strategies as st
from strategies import few, seeds
from torch.testing import assert_close

import recurrent_depth as rd

EPSILON, HEADS = 0.01, 2


# The whole model, from tokens to logits, in NumPy


class Transcribed:
    """Every step of every token of one sequence, by hand, from the weights and the scale of the embedding alone."""

    def __init__(self, weights: dict[str, np.ndarray], num_blocks: int, scale: float):
        self.weights, self.num_blocks, self.scale = weights, num_blocks, scale

    def linear(self, name: str, x):
        return x @ self.weights[name + ".weight"].T + self.weights[name + ".bias"]

    def norm(self, name: str, x):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
        return x * self.weights[name + ".weight"] + self.weights[name + ".bias"]

    def attention(self, name: str, x):
        out, size = [], x.shape[-1] // HEADS
        queries, keys, values = np.split(self.linear(name + ".qkv", x), 3, axis=-1)
        for head in range(HEADS):
            q, k, v = (part[:, head * size : (head + 1) * size] for part in (queries, keys, values))
            scores = q @ k.T / math.sqrt(size)
            scores[np.triu_indices(len(x), 1)] = -np.inf
            chances = np.exp(scores - scores.max(-1, keepdims=True))
            out.append(chances / chances.sum(-1, keepdims=True) @ v)
        return self.linear(name + ".out", np.concatenate(out, axis=-1))

    def mlp(self, name: str, x):
        x = self.linear(name + ".up", x)
        return self.linear(name + ".out", x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2)

    def blocks(self, x):
        for i in range(self.num_blocks):
            name = f"core.stack.blocks.{i}"
            x = self.norm(name + ".around_attention.norm", x + self.attention(name + ".attention", x))
            x = self.norm(name + ".around_mlp.norm", x + self.mlp(name + ".mlp", x))
        return x

    def chance_to_halt(self, x):
        w, bias = self.weights["core.update.unit.linear.weight"][0], self.weights["core.update.unit.bias"][0]
        return 1 / (1 + np.exp(-(x @ w + bias)))

    def __call__(self, tokens, num_steps: int):
        """Logits, and `N + R` of each token."""
        table = self.weights["embed.token.weight"]
        h = self.scale * table[tokens]
        halted, passed, remainder, num_updates = (np.zeros(len(tokens)) for _ in range(4))
        output = np.zeros_like(h)
        for t in range(num_steps):
            x = h + wave(np.arange(len(tokens))[:, None], h.shape[-1]) + wave(t, h.shape[-1])
            p, moved = self.chance_to_halt(x), self.blocks(x)
            for i in np.flatnonzero(halted == 0):
                num_updates[i] += 1
                last = passed[i] + p[i] > 1 - EPSILON
                if last or t == num_steps - 1:
                    halted[i], remainder[i] = 1, 1 - passed[i]
                weight = remainder[i] if halted[i] else p[i]
                passed[i] += p[i]
                h[i] = moved[i]
                output[i] += weight * moved[i]
        return self.norm("norm", output) @ table.T, num_updates + remainder


def wave(place, dim: int):
    """`sin(place / 10000^(2j/d))` at feature 2j, its cosine at feature 2j + 1."""
    feature = np.arange(dim)
    angle = place / 10000.0 ** ((feature - feature % 2) / dim)
    return np.where(feature % 2 == 0, np.sin(angle), np.cos(angle))


@few
@given(st.integers(1, 2), st.integers(1, 6), st.sampled_from([-3.0, -1.5, 0.0, 1.0]), seeds)
def test_the_whole_model_is_the_transcribed_one(num_blocks, num_steps, bias, seed):
    torch.manual_seed(seed)
    update = partial(rd.halted, bias=bias, ponder=1.0)
    model = lively(tiny(rd.universal, rd.Layout(0, num_blocks, num_steps, 0), update=update), 0.1).double().eval()
    x = torch.randint(23, (1, 7))
    weights = {name: weight.numpy() for name, weight in model.state_dict().items()}
    logits, ponder = Transcribed(weights, num_blocks, scale=2 * 16**0.5)(x[0].numpy(), num_steps)
    trajectory = model.trajectory(x)
    assert_close(trajectory.output[0].detach(), torch.from_numpy(logits))
    assert trajectory.losses["ponder"].item() == pytest.approx(ponder.mean())


def test_tokens_of_the_transcribed_one_halt_apart():
    # Without this the test above might never see a token that waits for others.
    model = lively(tiny(rd.universal, rd.Layout(0, 1, 6, 0), update=partial(rd.halted, bias=-1.5)), 0.1).double().eval()
    x = torch.randint(23, (1, 7))
    weights = {name: weight.numpy() for name, weight in model.state_dict().items()}
    _, ponder = Transcribed(weights, 1, scale=2 * 16**0.5)(x[0].numpy(), 6)
    assert len(set(np.floor(ponder))) > 2


# The start


def rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


@pytest.mark.parametrize("form", [rd.UniversalForm, rd.GPT2Form, rd.LlamaForm], ids=["own", "GPT-2", "Llama"])
@pytest.mark.parametrize("dim", [32, 256])
def test_tokens_are_heard_beside_positions_and_steps(form, dim):
    model = tiny(rd.universal, dim=dim, vocab_size=200, form=form)
    token = model.embed.token(torch.arange(200)[None])
    inject, silent = rd.StepEncoding(), torch.zeros(1, 16, dim)
    encoding = inject(silent, inject.begin(silent, rd.Call(6)), 3)
    assert rms(token) == pytest.approx(1, rel=0.1)
    assert rms(token) > rms(encoding) / 2


@pytest.mark.parametrize("dim", [32, 64, 256])
@pytest.mark.parametrize("bias", [1.0, -3.0])
def test_the_first_loss_is_near_that_of_no_knowledge(dim, bias):
    update, x = partial(rd.halted, bias=bias), torch.randint(200, (8, 16))
    model = tiny(rd.universal, rd.Layout(0, 1, 6, 0), dim=dim, vocab_size=200, update=update)
    # A wide token that halts at once still shows in the tied head; with the source's deviation by several nats.
    assert rd.next_token_loss(model(x), x).item() == pytest.approx(math.log(200), abs=1.0)


def test_the_tied_head_reads_the_table_as_it_is_stored():
    model = tiny(rd.universal)
    h = torch.randn(2, 5, 16)
    assert_close(model.head(h, model.embed.token.weight), h @ model.embed.token.weight.T)
    assert [name for name in model.state_dict() if name.startswith("embed")] == ["embed.token.weight"]
