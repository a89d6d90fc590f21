"""Attention, MLPs, norms and their four arrangements, against their equations."""

from functools import partial

import pytest
import torch
from agreement import assert_agrees
from battery import lively
from hypothesis import given
from hypothesis import strategies as st
from strategies import few, seeds, widths
from torch import nn
from torch.testing import assert_close
from transcription_parts import arrays, rms_norm, silu
from transcription_parts import block as written_block

import recurrent_depth as rd

close = {"atol": 1e-5, "rtol": 1e-4}
ARRANGEMENTS = [rd.PreNorm, rd.PostNorm, rd.ResidualSandwich, rd.BranchSandwich]
FORMS = {
    "gpt2": rd.GPT2Form,
    "gpt2-bias": partial(rd.GPT2Form, bias=True),
    "llama": rd.LlamaForm,
    "llama-grouped": partial(rd.LlamaForm, num_kv_heads=1),
}


def positions(num_tokens: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + num_tokens)[None]


def attend(attention: rd.Attention, x: torch.Tensor, at: rd.At) -> torch.Tensor:
    """Attention spelt out head by head, with rotation by complex numbers."""
    size, groups = attention.head_size, attention.num_heads // attention.num_kv_heads
    heads = attention.qkv(x).unflatten(-1, (-1, size))
    out = []
    for head in range(attention.num_heads):
        kv_head = attention.num_heads + head // groups
        q, k, v = heads[:, :, head], heads[:, :, kv_head], heads[:, :, kv_head + attention.num_kv_heads]
        if isinstance(attention.rotary, rd.Rotary):
            q, k = (rotate(one, at.positions, attention.rotary.base) for one in (q, k))
        scores = (q @ k.transpose(1, 2)) / size**0.5
        if attention.causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        out.append(scores.softmax(-1) @ v)
    return attention.out(torch.cat(out, dim=-1))


def rotate(x: torch.Tensor, positions: torch.Tensor, base: float) -> torch.Tensor:
    half = x.shape[-1] // 2
    angles = positions[..., None] * base ** (-torch.arange(half) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


@few
@given(widths, st.sampled_from([1, None]), st.booleans(), st.booleans(), st.booleans(), st.integers(1, 6), seeds)
def test_attention_is_the_softmax_of_scaled_products(width, num_kv_heads, bias, rotary, causal, num_tokens, seed):
    torch.manual_seed(seed)
    dim, num_heads = width
    attention = lively(
        rd.Attention(
            dim,
            num_heads,
            num_kv_heads=num_kv_heads,
            bias=bias,
            causal=causal,
            rotary=rd.Rotary(100.0) if rotary else None,
        )
    )
    x, at = torch.randn(2, num_tokens, dim), rd.At(positions(num_tokens, start=3))
    assert_close(attention(x, at), attend(attention, x, at), **close)


@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=3), st.integers(1, 6))
def test_a_query_looks_at_real_tokens_up_to_itself_and_always_at_itself(padding, num_queries):
    mask = rd.causal_mask(torch.tensor(padding), num_queries)
    for row, real in enumerate(padding):
        for query in range(num_queries):
            itself = 6 - num_queries + query
            expected = [key == itself or (key < itself and real[key]) for key in range(6)]
            assert mask[row, query].tolist() == expected


def test_attention_without_a_direction_leaves_out_padding_alone():
    attention = rd.Attention(8, 2, causal=False)
    x, mask = torch.randn(1, 4, 8), torch.tensor([[True, False, True, True]])
    kept = attention(x[:, mask[0]], rd.At())
    assert_close(attention(x, rd.At(mask=mask))[:, mask[0]], kept, **close)


def test_a_complete_mask_is_taken_as_it_is():
    attention = rd.Attention(8, 2)
    x = torch.randn(1, 3, 8)
    band = torch.tensor([[[True, False, False], [True, True, False], [False, True, True]]])
    found = attention(x, rd.At(mask=band))
    assert_close(found[:, 2], attention(x[:, 1:], rd.At())[:, 1], **close)


def test_rotation_keeps_lengths_and_depends_on_distance_alone():
    rotary = rd.Rotary()
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    here = rotary(q, positions(5)), rotary(k, positions(5))
    there = rotary(q, positions(5, 100)), rotary(k, positions(5, 100))
    assert_close(here[0].norm(dim=-1), q.norm(dim=-1))
    assert_close(here[0] @ here[1].transpose(2, 3), there[0] @ there[1].transpose(2, 3), atol=1e-4, rtol=1e-4)
    assert_close(here[0][:, :, 0], q[:, :, 0])
    assert not torch.allclose(here[0][:, :, 1], q[:, :, 1])


def test_the_gpt2_block_is_that_of_the_transcription():
    block, x = lively(rd.GPT2Form(12, 3).block()).double(), torch.randn(2, 5, 12, dtype=torch.float64)
    assert_agrees(block(x, rd.At()), written_block(arrays(block.state_dict()), "", x.numpy(), 3))


def test_the_llama_mlp_and_norm_are_those_of_their_papers():
    mlp, norm, x = lively(rd.SwiGLU(6, 8)), lively(rd.LlamaForm(6, 1).norm()), torch.randn(2, 3, 6)
    w, z = arrays(mlp.state_dict()), x.double().numpy()
    hidden = silu(z @ w["gate.weight"].T) * (z @ w["up.weight"].T)
    assert_agrees(mlp(x), hidden @ w["out.weight"].T, 1e-5)
    assert_agrees(norm(x), rms_norm(z, **arrays(norm.state_dict())), 1e-5)
    assert norm(x.bfloat16()).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(x).dtype == torch.float32


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_an_arrangement_is_its_equation(arrangement):
    made = iter(norms := [lively(nn.LayerNorm(6)) for _ in range(2)])
    residual = arrangement(lambda: next(made))
    branch, x = torch.sin, torch.randn(2, 3, 6)
    before, after = norms
    expected = {
        rd.PreNorm: lambda: x + branch(before(x)),
        rd.PostNorm: lambda: before(x + branch(x)),
        rd.ResidualSandwich: lambda: after(x + branch(before(x))),
        rd.BranchSandwich: lambda: x + after(branch(before(x))),
    }[arrangement]()
    assert_close(residual(x, branch), expected)
    assert len(list(residual.parameters())) == (4 if "Sandwich" in arrangement.__name__ else 2)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_block_is_attention_then_mlp_each_on_its_residual(form, arrangement):
    block = lively(form(12, 2, arrangement=arrangement).block())
    x, at = torch.randn(2, 4, 12), rd.At(positions(4))
    middle = block.around_attention(x, lambda inner: attend(block.attention, inner, at))
    assert_close(block(x, at), block.around_mlp(middle, block.mlp), **close)
    assert block.around_attention is not block.around_mlp


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_form_shares_no_module_between_what_it_makes(form):
    made = form(12, 2)
    parts = [made.block(), made.block(), made.norm(), made.norm(), made.embedding(5, 6), made.embedding(5, 6)]
    modules = [module for part in parts for module in part.modules()]
    assert len(modules) == len({id(module) for module in modules})


def test_what_the_llama_form_leaves_open_is_filled_in():
    for dim, hidden in [(12, 32), (24, 64), (128, 344), (64, 176)]:  # 8/3 of the width, rounded up to a multiple of 8
        block = rd.LlamaForm(dim, 2).block()
        assert block.mlp.up.weight.shape == (hidden, dim)
        assert block.attention.num_kv_heads == 2
    assert rd.LlamaForm(12, 2, hidden=20).block().mlp.up.weight.shape == (20, 12)
    grouped = rd.LlamaForm(16, 4, num_kv_heads=2, rotary_base=5.0).block()
    assert grouped.attention.qkv.weight.shape == (32, 16)
    assert grouped.attention.rotary.base == 5.0


def test_a_stack_runs_blocks_in_order_and_tells_each_its_place():
    seen = []

    class Noted(nn.Module):
        def __init__(self, add):
            super().__init__()
            self.add = add

        def forward(self, x, at):
            seen.append((at.layer, at.positions))
            return 2 * x + self.add

    here = positions(1)
    x = torch.ones(1, 1, 1)
    assert rd.Stack([Noted(1), Noted(5)])(x, rd.At(here)).item() == 11
    assert seen == [(0, here), (1, here)]
    assert rd.Stack([])(x, rd.At()) is x
