"""What the transcriptions share, in NumPy: norms, activations, attention and the GPT-2 block, as their papers say.

States are (..., token, dim) in float64. Weights are those of a state dict, by its names. Nothing here comes from the
library, nor from torch.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy import ndarray as Array

Weights = Mapping[str, Array]


def arrays(state) -> dict[str, Array]:
    return {name: weight.detach().double().numpy() for name, weight in state.items()}


def layer_norm(x: Array, weight: Array, eps: float = 1e-5) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return weight * centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)


def rms_norm(x: Array, weight: Array | float = 1.0, eps: float = 1e-6) -> Array:
    return weight * x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


def gelu(x: Array) -> Array:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rotated(x: Array, position: int, base: float = 10000.0) -> Array:
    """Each pair (i, i + size / 2) of features of a head (..., size), turned by `position * base^(-2i / size)`."""
    first, second = np.split(x, 2, axis=-1)
    angle = position * base ** (-2 * np.arange(x.shape[-1] // 2) / x.shape[-1])
    turned = first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)
    return np.concatenate(turned, axis=-1)


def all_rotated(x: Array, base: float) -> Array:
    return np.stack([rotated(x[..., position, :], position, base) for position in range(x.shape[-2])], axis=-2)


def attention(w: Weights, name: str, x: Array, num_heads: int, base: float | None = None) -> Array:
    """Causal attention, head by head; with a `base`, queries and keys are rotated."""
    size, out = x.shape[-1] // num_heads, []
    future = np.triu(np.ones((x.shape[-2], x.shape[-2]), dtype=bool), 1)
    for head in range(num_heads):
        parts = np.split(x @ w[name + "qkv.weight"].T, 3, axis=-1)
        q, k, v = (part[..., head * size : (head + 1) * size] for part in parts)
        if base is not None:
            q, k = all_rotated(q, base), all_rotated(k, base)
        scores = q @ k.swapaxes(-1, -2) / math.sqrt(size)
        out.append(softmax(np.where(future, -np.inf, scores)) @ v)
    return np.concatenate(out, axis=-1) @ w[name + "out.weight"].T


def mlp(w: Weights, name: str, x: Array) -> Array:
    return gelu(x @ w[name + "up.weight"].T) @ w[name + "out.weight"].T


def block(w: Weights, name: str, x: Array, num_heads: int) -> Array:
    x = x + attention(w, name + "attention.", layer_norm(x, w[name + "around_attention.norm.weight"]), num_heads)
    return x + mlp(w, name + "mlp.", layer_norm(x, w[name + "around_mlp.norm.weight"]))


def blocks(w: Weights, name: str, x: Array, num_heads: int, count: int) -> Array:
    for i in range(count):
        x = block(w, f"{name}blocks.{i}.", x, num_heads)
    return x


def embedded(w: Weights, tokens: Array) -> Array:
    return w["embed.token.weight"][tokens] + w["embed.position.weight"][: tokens.shape[-1]]


def logits(w: Weights, h: Array, num_heads: int, num_coda: int, norm: Callable[..., Array] = layer_norm) -> Array:
    """The coda, the final norm and the tied head."""
    return norm(blocks(w, "coda.", h, num_heads, num_coda), w["norm.weight"]) @ w["embed.token.weight"].T
