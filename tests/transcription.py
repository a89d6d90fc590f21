"""The paper's equations written down slowly, in plain torch: nothing here comes from the library.

`W_proj` is one matrix (2d -> d) and the gate's first layer another, both on concatenations; attention, MLP, LayerNorm
and the softmax are spelt out. Weights are read from a state dict, the library's halves joined.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


def layer_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return weight * centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def attention(w: Weights, name: str, x: Tensor, num_heads: int) -> Tensor:
    q, k, v = (x @ w[name + "qkv.weight"].T).chunk(3, dim=-1)
    size, out = x.shape[-1] // num_heads, []
    for head in range(num_heads):
        part = slice(head * size, (head + 1) * size)
        scores = q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(size)
        future = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        weights = scores.masked_fill(future, -math.inf).exp()
        out.append(weights / weights.sum(-1, keepdim=True) @ v[..., part])
    return torch.cat(out, dim=-1) @ w[name + "out.weight"].T


def block(w: Weights, name: str, x: Tensor, num_heads: int) -> Tensor:
    normed = layer_norm(x, w[name + "around_attention.norm.weight"])
    x = x + attention(w, name + "attention.", normed, num_heads)
    normed = layer_norm(x, w[name + "around_mlp.norm.weight"])
    return x + gelu(normed @ w[name + "mlp.up.weight"].T) @ w[name + "mlp.out.weight"].T


def blocks(w: Weights, name: str, x: Tensor, num_heads: int, count: int) -> Tensor:
    for i in range(count):
        x = block(w, f"{name}blocks.{i}.", x, num_heads)
    return x


def projection(w: Weights, h: Tensor, h_pre: Tensor, eps_x: Tensor) -> Tensor:
    """`h~ = W_proj [h + eps_x ; h_pre]`."""
    name = "core.update.inject."
    w_proj = torch.cat([w[name + "state.weight"], w[name + "anchor.weight"]], dim=1)
    return torch.cat([h + eps_x, h_pre], dim=-1) @ w_proj.T + w[name + "anchor.bias"]


def gate(w: Weights, h: Tensor, h_pre: Tensor, eps_g: Tensor, tau: float) -> Tensor:
    """`g = sigmoid(f_g([LN(h) ; LN(h_pre)]) / tau + eps_g)`, with one LayerNorm over both where the weights say so."""
    name = "core.update.gate."
    if name + "norm.weight" in w:
        normed = layer_norm(torch.cat([h, h_pre], dim=-1), w[name + "norm.weight"])
    else:
        norms = layer_norm(h, w[name + "state_norm.weight"]), layer_norm(h_pre, w[name + "anchor_norm.weight"])
        normed = torch.cat(norms, dim=-1)
    first = torch.cat([w[name + "state.weight"], w[name + "anchor.weight"]], dim=1)
    hidden = silu(normed @ first.T + w[name + "anchor.bias"])
    return sigmoid((hidden @ w[name + "write.linear.weight"].T + w[name + "write.bias"]) / tau + eps_g)


def grt(
    w: Weights,
    tokens: Tensor,
    *,
    layout: tuple[int, int, int, int],
    num_heads: int,
    tau: float = 1.0,
    noise: list[tuple[Tensor, Tensor]] | None = None,
    grad_steps: int | None = None,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Logits, the state after each step, and the candidate of each. `noise` holds `eps_x` and `eps_g` of each step."""
    num_prelude, num_core, num_steps, num_coda = layout
    h = w["embed.token.weight"][tokens] + w["embed.position.weight"][: tokens.shape[1]]
    h_pre = h = blocks(w, "prelude.", h, num_heads, num_prelude)
    states, candidates = [], []
    for r in range(num_steps):
        if r == num_steps - (grad_steps or num_steps):
            h = h.detach() if r else h
        eps_x, eps_g = noise[r] if noise else (torch.zeros(()), torch.zeros(()))
        o = blocks(w, "core.stack.", projection(w, h, h_pre, eps_x), num_heads, num_core)
        g = gate(w, h, h_pre, eps_g, tau)
        h = g * h + (1 - g) * o
        states.append(h)
        candidates.append(o)
    out = layer_norm(blocks(w, "coda.", h, num_heads, num_coda), w["norm.weight"])
    return out @ w["embed.token.weight"].T, states, candidates
