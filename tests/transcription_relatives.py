"""The equations of Huginn, Ouro and Parcae written down slowly, in NumPy: nothing here comes from the library.

One sequence at a time, (token, dim).
"""

import numpy as np
from transcription_parts import Array, Weights, attention, sigmoid, silu, softmax
from transcription_parts import arrays as arrays
from transcription_parts import rms_norm as rms


def mlp(w, name, x):
    return (silu(x @ w[name + "gate.weight"].T) * (x @ w[name + "up.weight"].T)) @ w[name + "out.weight"].T


def branches(w, name, num_heads, base):
    """Both branches of a block, each with the beginning of its norms' names."""
    yield f"{name}around_attention.", lambda x: attention(w, f"{name}attention.", x, num_heads, base)
    yield f"{name}around_mlp.", lambda x: mlp(w, f"{name}mlp.", x)


def residual_sandwich(w, name, x, num_heads, base):
    for norms, branch in branches(w, name, num_heads, base):
        x = rms(branch(rms(x, w[norms + "before.weight"])) + x, w[norms + "after.weight"])
    return x


def branch_sandwich(w, name, x, num_heads, base):
    for norms, branch in branches(w, name, num_heads, base):
        x = x + rms(branch(rms(x, w[norms + "before.weight"])), w[norms + "after.weight"])
    return x


def pre_norm(w, name, x, num_heads, base):
    for norms, branch in branches(w, name, num_heads, base):
        x = x + branch(rms(x, w[norms + "norm.weight"]))
    return x


def stack(block, w, name, x, num_heads, base):
    layer = 0
    while f"{name}.blocks.{layer}.attention.qkv.weight" in w:
        x = block(w, f"{name}.blocks.{layer}.", x, num_heads, base)
        layer += 1
    return x


def huginn(w: Weights, tokens, num_heads: int, num_steps: int, start: Array) -> Array:
    """Logits of one sequence."""
    table, inject = w["embed.token.weight"], "core.update.inner.inject."
    adapter = np.concatenate([w[inject + "state.weight"], w[inject + "anchor.weight"]], axis=1)
    e = stack(residual_sandwich, w, "prelude", np.sqrt(table.shape[1]) * table[tokens], num_heads, 50000.0)
    s = start
    for _ in range(num_steps):
        s = stack(residual_sandwich, w, "core.stack", np.concatenate([s, e], -1) @ adapter.T, num_heads, 50000.0)
    x = stack(residual_sandwich, w, "coda", rms(s, w["norm.weight"]), num_heads, 50000.0)
    return rms(x, w["norm.weight"]) @ table.T


def ouro(w: Weights, tokens, num_heads: int, num_steps: int) -> tuple[list[Array], list[Array]]:
    """The normed state after each loop, and the logits after each."""
    h, states = w["embed.token.weight"][tokens], []
    for _ in range(num_steps):
        h = rms(stack(branch_sandwich, w, "core.stack", h, num_heads, 10000.0), w["core.update.norm.weight"])
        states.append(h)
    return states, [h @ w["embed.token.weight"].T for h in states]


def parcae(w: Weights, tokens, num_heads: int, num_steps: int) -> Array:
    """Logits of one sequence that starts from zeros."""
    inject = "core.update.inner.inject."
    e = stack(pre_norm, w, "prelude", w["embed.token.weight"][tokens], num_heads, 10000.0)
    e = rms(e, w[inject + "norm.weight"])
    dt, rate = np.log(1 + np.exp(w[inject + "dt_bias"])), np.exp(w[inject + "log_rate"])
    x = np.zeros_like(e)
    for _ in range(num_steps):
        x = np.exp(-dt * rate) * x + dt * (e @ w[inject + "input.linear.weight"].T)
        x = stack(pre_norm, w, "core.stack", x, num_heads, 10000.0)
    x = stack(pre_norm, w, "coda", x @ w["core.update.module.linear.weight"].T, num_heads, 10000.0)
    return rms(x, w["norm.weight"]) @ w["embed.token.weight"].T


def losses(logits: list[Array], tokens) -> Array:
    """The surprise (step, token) of each next token."""
    return np.array([[-np.log(softmax(one[t]))[tokens[t + 1]] for t in range(len(tokens) - 1)] for one in logits])


def exit_chances(hazards: Array) -> Array:
    """`p(t) = lambda_t S_{t-1}` before the last step, and what is left there."""
    chances, survival = [], np.ones(hazards.shape[1])
    for step, hazard in enumerate(hazards):
        chances.append(hazard * survival if step < len(hazards) - 1 else survival)
        survival = survival * (1 - hazard)
    return np.array(chances)


def stage_one(hazards: Array, losses: Array, beta: float) -> float:
    """`mean_i sum_t p_i(t) CE_i(t) - beta H(p_i)`."""
    p = exit_chances(hazards)
    return float(((p * losses).sum(0) - beta * -(p * np.log(p)).sum(0)).mean())


def stage_two(hazards: Array, losses: Array, k: float = 50.0, gamma: float = 0.005) -> float:
    """`1/T sum_{t=2..T} mean_i BCE(w_i, 1 - lambda_i)`."""
    total = 0.0
    for t in range(1, len(losses)):
        w = sigmoid(k * (np.maximum(0, losses[t - 1] - losses[t]) - gamma))
        total += (-(w * np.log(1 - hazards[t]) + (1 - w) * np.log(hazards[t]))).mean()
    return float(total / len(losses))
