"""Cached decoding of a llama with a loop in it, written down slowly, token by token, in NumPy.

Nothing here comes from the library or from transformers. Of every past token, each run of each layer keeps its key and
value; a policy of `decoding_reference` says which of them a later token finds. The first step is the host's pass; what
the later ones see and write is said by the update's equations.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from decoding_reference import KV, Policy, attend, keep_all
from transcription import gate, projection
from transcription_parts import Array, Weights, rms_norm, rotated, silu

NUM_HEADS, NUM_KV_HEADS, CORE, NUM_LAYERS = 4, 2, range(1, 4), 5
"""Those of `hosts.grafted("llama")`."""


def divided(x: Array) -> Array:
    """A state divided by its root mean square."""
    return x / np.sqrt((x**2).mean() + 1e-12)


class Text:
    """One text, and of each layer and token the keys and values of every run.

    Args:
        weights: the graft's, by the names of its state dict.
        policy: what a later token finds of an earlier one.
        update: `gated`, `corrected` or `plain`.
    """

    def __init__(self, weights: Weights, policy: Policy, update: str):
        self.policy, self.update, self.length = policy, update, 0
        self.w = {name.replace("recurrence.core.update.inner.", "core.update."): x for name, x in weights.items()}
        self.taken: dict[tuple[int, int], list[KV]] = defaultdict(list)  # by layer and position; one for each step

    def read(self, tokens: Sequence[int], num_steps: int) -> Array:
        """The logits of new tokens, which find each other's exact keys and values of the same run."""
        hs = [self.w["model.embed_tokens.weight"][token] for token in tokens]
        for layer in range(CORE.start):
            hs = self.run(layer, hs, 0)
        anchors = hs
        for step in range(num_steps):
            candidates = hs if step == 0 else self.see(hs, anchors)
            for layer in CORE:
                candidates = self.run(layer, candidates, step)
            hs = candidates if step == 0 else self.write(hs, candidates, anchors)
        for layer in range(CORE.stop, NUM_LAYERS):
            hs = self.run(layer, hs, 0)
        self.length += len(tokens)
        return np.stack([self.w["lm_head.weight"] @ rms_norm(h, self.w["model.norm.weight"]) for h in hs])

    def see(self, hs: list[Array], anchors: list[Array]) -> list[Array]:
        """What a later step sees: the state; `W [h; anchor] + b`; or, both divided, that beside the anchor."""
        pairs = list(zip(hs, anchors, strict=True))
        if self.update == "plain":
            return hs
        if self.update == "gated":
            return [projection(self.w, h, anchor, 0.0) for h, anchor in pairs]
        return [anchor + projection(self.w, divided(h), divided(anchor), 0.0) for h, anchor in pairs]

    def write(self, hs: list[Array], candidates: list[Array], anchors: list[Array]) -> list[Array]:
        """The states after a later step: the candidates; or `g h + (1 - g) candidate`."""
        if self.update == "plain":
            return candidates
        gates = [gate(self.w, h, anchor, 0.0, 1.0) for h, anchor in zip(hs, anchors, strict=True)]
        return [g * h + (1 - g) * o for g, h, o in zip(gates, hs, candidates, strict=True)]

    def run(self, layer: int, xs: list[Array], step: int) -> list[Array]:
        """New tokens through one layer at one step: each finds the past by the policy, and the new up to itself."""
        name, core = f"model.layers.{layer}.", layer in CORE
        policy = self.policy if core else keep_all
        seen = [policy(self.taken[layer, past], step, layer - CORE.start) for past in range(self.length)]
        out = []
        for position, x in enumerate(xs, start=self.length):
            query, kv = self.project(name, rms_norm(x, self.w[name + "input_layernorm.weight"]), position)
            self.taken[layer, position].append(kv)
            seen.append(kv)
            x = x + self.w[name + "self_attn.o_proj.weight"] @ attend(query, seen)
            out.append(x + self.mlp(name + "mlp.", rms_norm(x, self.w[name + "post_attention_layernorm.weight"])))
        return out

    def project(self, name: str, x: Array, position: int) -> tuple[Array, KV]:
        """Rotated query (head, size), and rotated key and value (kv head, size)."""
        q, k, v = (self.w[f"{name}self_attn.{which}_proj.weight"] @ x for which in "qkv")
        key, value = (part.reshape(NUM_KV_HEADS, -1) for part in (k, v))
        return rotated(q.reshape(NUM_HEADS, -1), position), KV(rotated(key, position), value)

    def mlp(self, name: str, x: Array) -> Array:
        gated = silu(self.w[name + "gate_proj.weight"] @ x) * (self.w[name + "up_proj.weight"] @ x)
        return self.w[name + "down_proj.weight"] @ gated
