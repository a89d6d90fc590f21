"""What tests of decoding share: every policy beside its transcription, and texts that are read in chunks."""

from functools import partial
from itertools import pairwise
from typing import NamedTuple

import decoding_reference as reference
import numpy as np
import pytest
import torch
from battery import lively
from hypothesis import strategies as st
from strategies import depths, shares, tokens
from torch import Tensor
from transcription_parts import arrays

import recurrent_depth as rd


def grouped(dim: int, num_heads: int) -> rd.Form:
    """Llama, two queries to a group where that goes."""
    return rd.LlamaForm(dim, num_heads, num_kv_heads=num_heads // 2 if num_heads % 2 == 0 else 1)


BUILDS = {
    "grt-gpt2": rd.grt,
    "grt-llama": partial(rd.grt, form=grouped),
    "naive-gpt2": rd.naive,
    "naive-llama": partial(rd.naive, form=partial(rd.LlamaForm, tied=False)),
}
every_build = pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)


def attention(model: rd.RecurrentTransformer) -> rd.Attention:
    return model.core.stack.blocks[0].attention


def uneven_blend(model: rd.RecurrentTransformer) -> rd.KeepBlend:
    sizes = {"num_kv_heads": attention(model).num_kv_heads, "head_size": attention(model).head_size}
    policy = rd.KeepBlend(num_layers=model.layout.core, num_steps=model.num_steps, **sizes)
    return lively(policy, scale=1.0).double().requires_grad_(False)


def written_blend(policy: rd.KeepBlend) -> reference.Policy:
    """Where the library holds one weight for two features that turn together, the reference holds it twice."""
    keys, values = policy.keys.repeat(1, 1, 1, 1, 2).squeeze(3), policy.values.squeeze(3)
    return reference.keep_blend(keys.numpy(), values.numpy())


class OneStepBehind(rd.KVStepPolicy):
    """As a user may write one: later tokens find the K/V of the step before theirs, so that all steps are stored."""

    def num_copies(self, num_steps):
        return num_steps

    def reads(self, step):
        return max(step - 1, 0)

    def writes(self, step):
        return step

    def merge(self, old, new, step, layer):
        return new


def one_step_behind(taken: list[reference.KV], step: int, layer: int) -> reference.KV:
    return reference.keep_all(taken, max(step - 1, 0), layer)


class Case(NamedTuple):
    """How a policy is made for a model, how the reference writes it, and how many copies so many steps leave."""

    make: object
    write: object
    copies: object


POLICIES = {
    "all": Case(lambda model: rd.KeepAll(), lambda policy: reference.keep_all, lambda num_steps: num_steps),
    "first": Case(lambda model: rd.KeepFirst(), lambda policy: reference.keep_first, lambda num_steps: 1),
    "last": Case(lambda model: rd.KeepLast(), lambda policy: reference.keep_last, lambda num_steps: 1),
    "mean": Case(lambda model: rd.KeepMean(), lambda policy: reference.keep_mean, lambda num_steps: 1),
    "blend": Case(uneven_blend, written_blend, lambda num_steps: 1),
    "two-in-turn": Case(lambda model: rd.KeepCyclic(2), lambda policy: reference.keep_cyclic(2), partial(min, 2)),
    "three-in-turn": Case(lambda model: rd.KeepCyclic(3), lambda policy: reference.keep_cyclic(3), partial(min, 3)),
    "one-behind": Case(lambda model: OneStepBehind(), lambda policy: one_step_behind, lambda num_steps: num_steps),
}
every_policy = pytest.mark.parametrize("case", POLICIES.values(), ids=POLICIES)


class Script(NamedTuple):
    """Texts padded on the left, and how they are read: where chunks end, and in each the depth of each row."""

    tokens: Tensor
    mask: Tensor | None
    ends: list[int]
    num_steps: list[list[int]]

    @property
    def chunks(self) -> list[tuple[int, int, list[int]]]:
        return [(*ends, steps) for ends, steps in zip(pairwise([0, *self.ends]), self.num_steps, strict=True)]

    def alone(self, row: int) -> "Script":
        """One row without its padding, read in the same chunks: those that still hold a token."""
        real = torch.ones_like(self.tokens[row]).bool() if self.mask is None else self.mask[row]
        kept = [(int(real[:end].sum()), [steps[row]]) for start, end, steps in self.chunks if real[start:end].any()]
        ends, num_steps = zip(*kept, strict=True)
        return Script(self.tokens[row : row + 1, real], None, list(ends), list(num_steps))


class Drawn(NamedTuple):
    """A script for a model that is not yet built: depths are shares of its full depth."""

    tokens: Tensor
    padding: list[int]
    cuts: set[int]
    shares: list[list[float]]

    def script(self, model: rd.RecurrentTransformer) -> Script:
        length = self.tokens.shape[1]
        mask = torch.arange(length)[None] >= torch.tensor(self.padding)[:, None]
        ends = [*sorted(self.cuts), length]
        return Script(self.tokens, mask, ends, [depths(row, model) for row in self.shares[: len(ends)]])


@st.composite
def scripts(draw, num_rows=st.integers(1, 3), padded: bool = True) -> Drawn:
    """Up to eight tokens in up to four chunks; of each row some may be padding, but not all."""
    x = draw(tokens(num_rows, st.integers(2, 8)))
    batch, length = x.shape
    padding = draw(st.lists(st.integers(0, length - 1 if padded else 0), min_size=batch, max_size=batch))
    cuts = draw(st.sets(st.integers(1, length - 1), max_size=3))
    return Drawn(x, padding, cuts, [draw(shares(batch)) for _ in range(4)])


def read(model: rd.RecurrentTransformer, script: Script, cache: rd.DepthCache, differentiable: bool = False) -> Tensor:
    """The logits of all tokens, read chunk by chunk with a cache."""
    logits = []
    for start, end, steps in script.chunks:
        mask = None if script.mask is None else script.mask[:, :end]
        num_steps = steps[0] if len(set(steps)) == 1 else steps
        with torch.set_grad_enabled(differentiable):
            logits.append(rd.extend(model, script.tokens[:, start:end], cache, num_steps, mask=mask))
    return torch.cat(logits, dim=1)


def read_slowly(model: rd.RecurrentTransformer, script: Script, policy: reference.Policy) -> Tensor:
    """The logits of a script of one row, by the reference."""
    prelude, core, _, coda = model.layout
    sizes = reference.Sizes(prelude, core, coda, attention(model).num_heads, attention(model).num_kv_heads)
    row = reference.Row(arrays(model.state_dict()), sizes, policy)
    logits = []
    for start, end, steps in script.chunks:
        logits += row.extend(script.tokens[0, start:end].tolist(), steps[0])
    return torch.from_numpy(np.stack(logits))[None]
