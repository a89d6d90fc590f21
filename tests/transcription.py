"""The paper's equations written down slowly, in NumPy: nothing here comes from the library.

`W_proj` is one matrix (2d -> d) and the gate's first layer another, both on concatenations: the library's halves are
joined.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from transcription_parts import Array, Weights, blocks, embedded, layer_norm, logits, sigmoid, silu


def projection(w: Weights, h: Array, h_pre: Array, eps_x: Array | float) -> Array:
    """`h~ = W_proj [h + eps_x ; h_pre]`."""
    name = "core.update.inject."
    w_proj = np.concatenate([w[name + "state.weight"], w[name + "anchor.weight"]], axis=1)
    return np.concatenate([h + eps_x, h_pre], axis=-1) @ w_proj.T + w[name + "anchor.bias"]


def gate(w: Weights, h: Array, h_pre: Array, eps_g: Array | float, tau: float) -> Array:
    """`g = sigmoid(f_g([LN(h) ; LN(h_pre)]) / tau + eps_g)`, with one LayerNorm over both where the weights say so."""
    name = "core.update.gate."
    if name + "norm.weight" in w:
        normed = layer_norm(np.concatenate([h, h_pre], axis=-1), w[name + "norm.weight"])
    else:
        norms = layer_norm(h, w[name + "state_norm.weight"]), layer_norm(h_pre, w[name + "anchor_norm.weight"])
        normed = np.concatenate(norms, axis=-1)
    first = np.concatenate([w[name + "state.weight"], w[name + "anchor.weight"]], axis=1)
    hidden = silu(normed @ first.T + w[name + "anchor.bias"])
    return sigmoid((hidden @ w[name + "write.linear.weight"].T + w[name + "write.bias"]) / tau + eps_g)


def grt(
    w: Weights,
    tokens: Array,
    *,
    layout: tuple[int, int, int, int],
    num_heads: int,
    tau: float = 1.0,
    noise: Sequence[tuple[Array, Array]] | None = None,
    entering: Mapping[int, Array] | None = None,
) -> tuple[Array, list[Array]]:
    """Logits, and the state after each step.

    `noise` holds `eps_x` and `eps_g` of each step; `entering` the states that enter some steps whatever the weights,
    which is what a detached state is to a derivative.
    """
    num_prelude, num_core, num_steps, num_coda = layout
    h_pre = h = blocks(w, "prelude.", embedded(w, tokens), num_heads, num_prelude)
    states = []
    for r in range(num_steps):
        h = (entering or {}).get(r, h)
        eps_x, eps_g = noise[r] if noise else (0.0, 0.0)
        o = blocks(w, "core.stack.", projection(w, h, h_pre, eps_x), num_heads, num_core)
        g = gate(w, h, h_pre, eps_g, tau)
        h = g * h + (1 - g) * o
        states.append(h)
    return logits(w, h, num_heads, num_coda), states
