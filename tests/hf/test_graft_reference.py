"""A graft's cached decoding, token by token, beside a reference that shares no code with the library."""

import decoding_reference as reference
import hosts
import numpy as np
import pytest
import torch
from graft_reference import Text
from torch import Tensor
from transcription_parts import arrays

import recurrent_depth as rd
from recurrent_depth.hf import corrected
from recurrent_depth.hf.versions import CACHE

UPDATES = {"corrected": corrected, "gated": rd.gated, "plain": rd.plain}
POLICIES = {
    "KeepAll": (rd.KeepAll(), reference.keep_all),
    "KeepFirst": (rd.KeepFirst(), reference.keep_first),
    "KeepLast": (rd.KeepLast(), reference.keep_last),
    "KeepMean": (rd.KeepMean(), reference.keep_mean),
    "KeepCyclic": (rd.KeepCyclic(2), reference.keep_cyclic(2)),
}
# A prompt, then tokens one by one, a chunk, and tokens again, in which the depth changes.
READ = [(4, 3), (1, 3), (1, 3), (2, 3), (1, 2), (1, 4), (1, 3)]


@torch.no_grad()
def by_the_graft(model, tokens: Tensor) -> Tensor:
    cache, found, at = {}, [], 0
    for num, num_steps in READ:
        out = model(tokens[:, at : at + num], num_steps=num_steps, use_cache=True, **cache)
        cache, at = {CACHE: hosts.cache_of(out)}, at + num
        found.append(out.logits)
    return torch.cat(found, dim=1)


def by_hand(model, tokens: Tensor, policy: reference.Policy, update: str) -> Tensor:
    weights, rows = arrays(model.state_dict()), []
    for row in tokens.tolist():
        text, found, at = Text(weights, policy, update), [], 0
        for num, num_steps in READ:
            found.append(text.read(row[at : at + num], num_steps))
            at += num
        rows.append(np.concatenate(found))
    return torch.from_numpy(np.stack(rows)).float()


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("policy", POLICIES)
def test_cached_decoding_is_the_reference_of_its_policy(policy, update):
    ours, theirs = POLICIES[policy]
    model, tokens = hosts.grafted("llama", update=UPDATES[update], kv=ours), hosts.tokens(length=11)
    found = by_the_graft(model, tokens)
    torch.testing.assert_close(found, by_hand(model, tokens, theirs, update), atol=2e-4, rtol=2e-4)


def test_the_references_of_two_policies_differ_by_more_than_is_let_pass():
    model, tokens = hosts.grafted("llama"), hosts.tokens(rows=1, length=11)
    found = [by_hand(model, tokens, policy, "corrected") for _, policy in POLICIES.values()]
    for number, one in enumerate(found):
        assert all((one - other).abs().max() > 0.05 for other in found[:number])
