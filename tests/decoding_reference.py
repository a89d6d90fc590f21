"""Cached decoding written down slowly, token by token, in NumPy: nothing here comes from the library.

Of every past token the reference remembers the keys and values of all steps that it took, at every block; nothing is
compressed when it is stored. A policy is a function that says what a later token finds of them. One `Row` is one text:
rows of a batch know nothing of each other, and padding is left out of a row.

A later token at step r finds of a past token, in each block of the loop,
- keep all: the K/V of step r; of its last step, where it took fewer;
- keep first, keep last: those of its first or of its last step;
- keep mean: the mean over the steps that it took; keep blend: a weighted mean over them;
- keep cyclic: of the steps that it took, the latest that is r modulo the period; its last, where there is none.
Tokens of one chunk find each other's exact K/V of the same step, as in a forward without a cache. Every token of a
chunk takes the same number of steps; chunks may differ.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from transcription import gate, projection
from transcription_parts import Array, Weights, gelu, layer_norm, rms_norm, rotated, silu


class KV(NamedTuple):
    """Key and value of one token at one step."""

    key: Array  # (kv head, size)
    value: Array


Policy = Callable[[list[KV], int, int], KV]
"""Called as `policy(taken, step, layer)`: what a token at `step` finds of a past one, in the loop's block `layer`."""


def keep_all(taken: list[KV], step: int, layer: int) -> KV:
    return taken[min(step, len(taken) - 1)]


def keep_first(taken: list[KV], step: int, layer: int) -> KV:
    return taken[0]


def keep_last(taken: list[KV], step: int, layer: int) -> KV:
    return taken[-1]


def keep_mean(taken: list[KV], step: int, layer: int) -> KV:
    return KV(*(sum(parts) / len(taken) for parts in zip(*taken, strict=True)))


def keep_cyclic(period: int) -> Policy:
    def found(taken: list[KV], step: int, layer: int) -> KV:
        same = [one for taken_at, one in enumerate(taken) if taken_at % period == step % period]
        return same[-1] if same else taken[-1]

    return found


def keep_blend(keys: Array, values: Array) -> Policy:
    """By the softmax, over the steps taken, of weights (layer, step, kv head, size)."""

    def found(taken: list[KV], step: int, layer: int) -> KV:
        shares = [np.exp(weights[layer, : len(taken)]) for weights in (keys, values)]
        parts = [np.stack(part) for part in zip(*taken, strict=True)]
        return KV(*((share * part).sum(0) / share.sum(0) for share, part in zip(shares, parts, strict=True)))

    return found


class Sizes(NamedTuple):
    """What the weights do not say."""

    num_prelude: int
    num_core: int
    num_coda: int
    num_heads: int
    num_kv_heads: int


def attend(query: Array, seen: list[KV]) -> Array:
    """What one token's query (head, size) gathers of the tokens that it sees: a softmax for each head."""
    group, gathered = len(query) // len(seen[0].key), []
    for head, q in enumerate(query):
        shares = [np.exp(q @ token.key[head // group] / math.sqrt(len(q))) for token in seen]
        gathered.append(
            sum(s * token.value[head // group] for s, token in zip(shares, seen, strict=True)) / sum(shares)
        )
    return np.concatenate(gathered)


class Row:
    """One text, its weights, and of each block and token the keys and values of every step."""

    def __init__(self, w: Weights, sizes: Sizes, policy: Policy):
        self.w, self.sizes, self.policy, self.length = w, sizes, policy, 0
        self.learned_positions = "embed.position.weight" in w  # GPT-2, otherwise Llama
        self.gated = "core.update.inject.state.weight" in w
        self.taken: dict[tuple[str, int], list[KV]] = defaultdict(list)  # by block and position; one for each step

    def extend(self, tokens: Sequence[int], num_steps: int) -> list[Array]:
        """The logits of a chunk of new tokens."""
        hs = [self.embed(token, self.length + i) for i, token in enumerate(tokens)]
        for i in range(self.sizes.num_prelude):
            hs = self.block(f"prelude.blocks.{i}.", hs, keep_all, 0, 0)
        anchors = hs
        for step in range(num_steps):
            candidates = self.inject(hs, anchors)
            for i in range(self.sizes.num_core):
                candidates = self.block(f"core.stack.blocks.{i}.", candidates, self.policy, step, i)
            hs = self.write(hs, candidates, anchors)
        for i in range(self.sizes.num_coda):
            hs = self.block(f"coda.blocks.{i}.", hs, keep_all, 0, 0)
        self.length += len(tokens)
        head = self.w.get("head.linear.weight", self.w["embed.token.weight"])
        return [head @ self.norm("norm.", h) for h in hs]

    def embed(self, token: int, position: int) -> Array:
        x = self.w["embed.token.weight"][token]
        return x + self.w["embed.position.weight"][position] if self.learned_positions else x

    def inject(self, hs: list[Array], anchors: list[Array]) -> list[Array]:
        """What the loop's blocks see of the states."""
        if not self.gated:
            return hs
        return [projection(self.w, h, anchor, 0.0) for h, anchor in zip(hs, anchors, strict=True)]

    def write(self, hs: list[Array], candidates: list[Array], anchors: list[Array]) -> list[Array]:
        """The states after a step."""
        if not self.gated:
            return candidates
        gates = [gate(self.w, h, anchor, 0.0, 1.0) for h, anchor in zip(hs, anchors, strict=True)]
        return [g * h + (1 - g) * o for g, h, o in zip(gates, hs, candidates, strict=True)]

    def block(self, name: str, xs: list[Array], policy: Policy, step: int, layer: int) -> list[Array]:
        """The chunk through one block: each token attends to the past by the policy, and to the chunk up to itself."""
        seen = [policy(self.taken[name, past], step, layer) for past in range(self.length)]
        out = []
        for position, x in enumerate(xs, start=self.length):
            query, kv = self.project(name, self.norm(name + "around_attention.norm.", x), position)
            self.taken[name, position].append(kv)
            seen.append(kv)
            x = x + self.w[name + "attention.out.weight"] @ attend(query, seen)
            out.append(x + self.mlp(name + "mlp.", self.norm(name + "around_mlp.norm.", x)))
        return out

    def project(self, name: str, x: Array, position: int) -> tuple[Array, KV]:
        """Query (head, size), and key and value; query and key are rotated in the Llama form."""
        size, num_heads, num_kv_heads = len(x) // self.sizes.num_heads, self.sizes.num_heads, self.sizes.num_kv_heads
        heads = (self.w[name + "attention.qkv.weight"] @ x).reshape(-1, size)
        query, key, value = np.split(heads, [num_heads, num_heads + num_kv_heads])
        if self.learned_positions:
            return query, KV(key, value)
        return rotated(query, position), KV(rotated(key, position), value)

    def norm(self, name: str, x: Array) -> Array:
        return (layer_norm if self.learned_positions else rms_norm)(x, self.w[name + "weight"])

    def mlp(self, name: str, x: Array) -> Array:
        up, out = self.w[name + "up.weight"] @ x, self.w[name + "out.weight"]
        return out @ gelu(up) if self.learned_positions else out @ (silu(self.w[name + "gate.weight"] @ x) * up)
