"""Mixture-of-Recursions and Mixture-of-Depths written down slowly, one text at a time: nothing here is the library's.

Texts are (1, token, dim) without padding, in the GPT-2 form, whose positions are in the embedding: so the tokens that
take a step run the shared blocks as if they were the whole text.
"""

import math

import torch
from torch import Tensor
from transcription import Weights, blocks, layer_norm, sigmoid


def embedded(w: Weights, tokens: Tensor, num_prelude: int, num_heads: int) -> Tensor:
    h = w["embed.token.weight"][tokens] + w["embed.position.weight"][: tokens.shape[1]]
    return blocks(w, "prelude.", h, num_heads, num_prelude)


def logits(w: Weights, h: Tensor, num_coda: int, num_heads: int) -> Tensor:
    out = layer_norm(blocks(w, "coda.", h, num_heads, num_coda), w["norm.weight"])
    return out @ w["embed.token.weight"].T


def largest(scores: dict[int, float], count: int) -> list[int]:
    """The tokens with the largest scores, in the order of the text."""
    return sorted(sorted(scores, key=lambda token: -scores[token])[:count])


def bce(score: float, taken: bool) -> float:
    return -math.log(sigmoid(torch.tensor(score)).item() if taken else 1 - sigmoid(torch.tensor(score)).item())


def mor_expert_choice(
    w: Weights, tokens: Tensor, layout, num_heads: int, capacities, alpha: float, *, causal: bool
) -> tuple[Tensor, list[list[int]], float]:
    """Logits, the tokens that take each step, and the cross-entropies summed over the steps."""
    h = embedded(w, tokens, layout[0], num_heads)
    kept, taken, loss = list(range(tokens.shape[1])), [], 0.0
    for r, capacity in enumerate(capacities):
        u = (h[0] @ w["core.update.router.choose.scores.weight"][r, 0]).tolist()
        scores = {token: u[token] for token in kept}
        if capacity == 1:
            chosen = kept
        elif causal:
            chosen = [token for token in kept if u[token] > 0]
        else:
            chosen = largest(scores, max(1, int(capacity * tokens.shape[1])))
        loss += sum(bce(u[token], token in chosen) for token in kept) / max(len(kept), 1)
        if chosen:
            out = blocks(w, "core.stack.", h[:, chosen], num_heads, layout[1])
            h = h.clone()
            for i, token in enumerate(chosen):
                g = alpha * sigmoid(torch.tensor(u[token], dtype=h.dtype))
                h[0, token] = h[0, token] + g * out[0, i]
        taken.append(chosen)
        kept = chosen
    return logits(w, h, layout[3], num_heads), taken, loss


def mor_token_choice(w: Weights, tokens: Tensor, layout, num_heads: int) -> tuple[Tensor, list[int], dict[str, float]]:
    """Logits, the last step of each token, and the balance loss and z-loss without coefficients."""
    start = x = embedded(w, tokens, layout[0], num_heads)
    u = x[0] @ w["core.update.router.scores.weight"][0].T
    p = u.exp() / u.exp().sum(-1, keepdim=True)
    depths = [max(range(layout[2]), key=lambda i, row=row: row[i]) for row in p.tolist()]
    final = start.clone()
    for r in range(layout[2]):
        chosen = [token for token, depth in enumerate(depths) if depth >= r]
        if not chosen:
            continue
        out = blocks(w, "core.stack.", x[:, chosen], num_heads, layout[1])
        x = x.clone()
        for i, token in enumerate(chosen):
            if depths[token] == r:
                final[0, token] = start[0, token] + p[token, r] * out[0, i]
            else:
                x[0, token] = out[0, i]
    shares = [depths.count(i) / len(depths) for i in range(layout[2])]
    balance = sum(p[:, i].mean().item() * layout[2] * share for i, share in enumerate(shares))
    z = u.exp().sum(-1).log().square().mean().item()
    return logits(w, final, layout[3], num_heads), depths, {"balance": balance, "router_z": z}


def mod(w: Weights, tokens: Tensor, layout, num_heads: int, capacity: float, *, causal: bool) -> Tensor:
    h = embedded(w, tokens, layout[0], num_heads)
    for step in range(layout[2]):
        if step % 2 == 0:
            h = blocks(w, "core.stack.", h, num_heads, layout[1])
            continue
        r = (h[0] @ w["core.update.router.choose.scores.weight"][step // 2, 0]).tolist()
        chosen = [token for token, score in enumerate(r) if score > 0]
        if not causal:
            chosen = largest(dict(enumerate(r)), math.ceil(capacity * tokens.shape[1]))
        if chosen:
            f = blocks(w, "core.stack.", h[:, chosen], num_heads, layout[1]) - h[:, chosen]
            h = h.clone()
            for i, token in enumerate(chosen):
                h[0, token] = r[token] * f[0, i] + h[0, token]
    return logits(w, h, layout[3], num_heads)
