"""Loops whose steps differ, written down slowly, in NumPy: nothing here comes from the library.

Relaxed Recursive Transformers, whose steps have corrections; LoopFormer, whose steps know the time; and Gemma 3n's
embeddings of the token, one slice for each step.
"""

from collections.abc import Sequence

import numpy as np
from transcription_parts import (
    Array,
    Weights,
    attention,
    blocks,
    embedded,
    gelu_tanh,
    logits,
    mlp,
    rms_norm,
    silu,
)

Layout = tuple[int, int, int, int]
CORRECTIONS = "core.stack.corrections."


def of_step(w: Weights, step: int) -> dict[str, Array]:
    """`W' = W + B A` for each tied matrix, with the factors of this step; below 0 the tied weights."""
    corrected = dict(w)
    for name in w:
        if name.startswith(CORRECTIONS) and name.endswith(".A") and step >= 0:
            layer = name.removeprefix(CORRECTIONS).removesuffix(".A")
            b, a = w[f"{CORRECTIONS}{layer}.B"][step], w[name][step]
            corrected[f"core.stack.{layer}.weight"] = w[f"core.stack.{layer}.weight"] + b @ a
    return corrected


def rrt(
    w: Weights, tokens: Array, layout: Layout, num_heads: int, *, skip_first: bool = False
) -> tuple[Array, list[Array]]:
    """Logits, and the state after each step; with `skip_first` step 0 runs the tied weights alone."""
    h, states = blocks(w, "prelude.", embedded(w, tokens), num_heads, layout[0]), []
    for step in range(layout[2]):
        h = blocks(of_step(w, step - int(skip_first)), "core.stack.", h, num_heads, layout[1])
        states.append(h)
    return logits(w, h, num_heads, layout[3]), states


def time_embedding(w: Weights, name: str, t: float) -> Array:
    """`W_2 silu(W_1 [cos(t f); sin(t f)] + b_1) + b_2`, with `f_i = 10000^(-i / half)`."""
    half = w[name + "first.weight"].shape[1] // 2
    angles = t * 10000.0 ** (-np.arange(half) / half)
    waves = np.concatenate([np.cos(angles), np.sin(angles)])
    hidden = silu(w[name + "first.weight"] @ waves + w[name + "first.bias"])
    return w[name + "second.weight"] @ hidden + w[name + "second.bias"]


def conditioned_block(w: Weights, name: str, x: Array, condition: Array, num_heads: int) -> Array:
    """`x + gate * branch(norm(x) * (1 + scale))` around attention, then around the MLP."""
    modulation = w[name + "modulation.weight"] @ silu(condition) + w[name + "modulation.bias"]
    attention_gate, mlp_gate, attention_scale, mlp_scale = np.split(modulation, 4)
    x = x + attention_gate * attention(w, name + "attention.", rms_norm(x) * (1 + attention_scale), num_heads)
    return x + mlp_gate * mlp(w, name + "mlp.", rms_norm(x) * (1 + mlp_scale))


def loopformer(
    w: Weights, tokens: Array, layout: Layout, num_heads: int, lengths: Sequence[float]
) -> tuple[Array, list[Array]]:
    """Logits, and the state after each step; the steps last as long as `lengths` say, which sum to 1."""
    h, states, t = blocks(w, "prelude.", embedded(w, tokens), num_heads, layout[0]), [], 0.0
    for dt in lengths:
        condition = time_embedding(w, "core.update.time.", t) + time_embedding(w, "core.update.length.", dt)
        for i in range(layout[1]):
            h = conditioned_block(w, f"core.stack.blocks.{i}.", h, condition, num_heads)
        states.append(h)
        t += dt
    return logits(w, h, num_heads, layout[3], norm=rms_norm), states


def per_layer_inputs(w: Weights, tokens: Array, embedding: Array, num_layers: int) -> Array:
    """Gemma 3n's: a table's entry and a projection of the embedding, both cut into one slice per layer."""
    name, dim = "core.update.embedding.", embedding.shape[-1]
    shape = (*tokens.shape, num_layers, -1)
    token = w[name + "table.weight"][tokens].reshape(shape)
    context = (embedding @ w[name + "context.weight"].T * dim**-0.5).reshape(shape)
    return (rms_norm(context, w[name + "norm.weight"]) + token * token.shape[-1] ** 0.5) * 2**-0.5


def ple(w: Weights, tokens: Array, layout: Layout, num_heads: int) -> tuple[Array, list[Array]]:
    """Logits, and the state after each step: what its blocks give, and what the step's slice adds."""
    inputs = per_layer_inputs(w, tokens, embedded(w, tokens), layout[2])
    h, states = blocks(w, "prelude.", embedded(w, tokens), num_heads, layout[0]), []
    for step in range(layout[2]):
        x = blocks(w, "core.stack.", h, num_heads, layout[1])
        narrow = gelu_tanh(x @ w["core.update.narrow.weight"].T) * inputs[..., step, :]
        h = x + rms_norm(narrow @ w["core.update.widen.weight"].T, w["core.update.norm.weight"])
        states.append(h)
    return logits(w, h, num_heads, layout[3]), states
