"""Mixture-of-Recursions and Mixture-of-Depths written down slowly, in NumPy, one text at a time.

Nothing here comes from the library. Texts are (token, dim) without padding, in the GPT-2 form, whose positions are in
the embedding: so the tokens that take a step run the shared blocks as if they were the whole text.
"""

import math
from collections.abc import Sequence

import numpy as np
from transcription_parts import Array, Weights, blocks, embedded, logits, sigmoid, softmax

Layout = tuple[int, int, int, int]


def largest(scores: dict[int, float], count: int) -> list[int]:
    """The tokens with the largest scores, in the order of the text."""
    return sorted(sorted(scores, key=lambda token: -scores[token])[:count])


def bce(score: float, taken: bool) -> float:
    return -math.log(sigmoid(score) if taken else 1 - sigmoid(score))


def mor_expert_choice(
    w: Weights,
    tokens: Array,
    layout: Layout,
    num_heads: int,
    capacities: Sequence[float],
    alpha: float,
    *,
    causal: bool,
) -> tuple[Array, list[list[int]], float]:
    """Logits, the tokens that take each step, and the cross-entropies summed over the steps."""
    h = blocks(w, "prelude.", embedded(w, tokens), num_heads, layout[0])
    kept, taken, loss = list(range(len(tokens))), [], 0.0
    for r, capacity in enumerate(capacities):
        u = h @ w["core.update.router.choose.scores.weight"][r, 0]
        if capacity == 1:
            chosen = kept
        elif causal:
            chosen = [token for token in kept if u[token] > 0]
        else:
            chosen = largest({token: u[token] for token in kept}, max(1, int(capacity * len(tokens))))
        loss += sum(bce(u[token], token in chosen) for token in kept) / max(len(kept), 1)
        if chosen:
            out = blocks(w, "core.stack.", h[chosen], num_heads, layout[1])
            h = h.copy()
            for i, token in enumerate(chosen):
                h[token] = h[token] + alpha * sigmoid(u[token]) * out[i]
        taken.append(chosen)
        kept = chosen
    return logits(w, h, num_heads, layout[3]), taken, loss


def mor_token_choice(
    w: Weights, tokens: Array, layout: Layout, num_heads: int
) -> tuple[Array, list[int], dict[str, float]]:
    """Logits, the last step of each token, and the balance loss and z-loss without coefficients."""
    start = x = blocks(w, "prelude.", embedded(w, tokens), num_heads, layout[0])
    u = x @ w["core.update.router.scores.weight"][0].T
    p, depths = softmax(u), [int(np.argmax(row)) for row in u]
    final = start.copy()
    for r in range(layout[2]):
        chosen = [token for token, depth in enumerate(depths) if depth >= r]
        if not chosen:
            continue
        out = blocks(w, "core.stack.", x[chosen], num_heads, layout[1])
        x = x.copy()
        for i, token in enumerate(chosen):
            if depths[token] == r:
                final[token] = start[token] + p[token, r] * out[i]
            else:
                x[token] = out[i]
    shares = [depths.count(i) / len(depths) for i in range(layout[2])]
    balance = sum(p[:, i].mean() * layout[2] * share for i, share in enumerate(shares))
    z = (np.log(np.exp(u).sum(-1)) ** 2).mean()
    return logits(w, final, num_heads, layout[3]), depths, {"balance": balance, "router_z": z}


def mod(w: Weights, tokens: Array, layout: Layout, num_heads: int, capacity: float, *, causal: bool) -> Array:
    """Logits."""
    h = blocks(w, "prelude.", embedded(w, tokens), num_heads, layout[0])
    for step in range(layout[2]):
        if step % 2 == 0:
            h = blocks(w, "core.stack.", h, num_heads, layout[1])
            continue
        r = h @ w["core.update.router.choose.scores.weight"][step // 2, 0]
        chosen = [token for token, score in enumerate(r) if score > 0]
        if not causal:
            chosen = largest(dict(enumerate(r)), math.ceil(capacity * len(tokens)))
        if chosen:
            f = blocks(w, "core.stack.", h[chosen], num_heads, layout[1]) - h[chosen]
            h = h.copy()
            for i, token in enumerate(chosen):
                h[token] = r[token] * f[i] + h[token]
    return logits(w, h, num_heads, layout[3])
