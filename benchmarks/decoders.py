"""What the decoding benchmark runs: models that go on behind a prompt, again and again from the same cache."""

import copy
import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel
from x_transformers import Decoder, TransformerWrapper

import recurrent_depth as rd

Run = Callable[[], object]


@torch.no_grad()
def filled(
    model: rd.RecurrentTransformer, prompt: Tensor, room: int, kv: rd.KVStepPolicy | None = None, batch: int = 1
) -> rd.DepthCache:
    """A cache of fixed capacity that holds a prompt, and room behind it; all rows hold the same."""
    cache = rd.DepthCache(kv, max_tokens=prompt.shape[1] + room)
    rd.extend(model, prompt, cache, logits_to_keep=1)
    cache.repeat(batch)
    return cache


def ours(
    model: rd.RecurrentTransformer, cache: rd.DepthCache, new: Tensor, num_steps: int | list[int] | None = None
) -> Run:
    """Decodes given tokens, one by one, behind what the cache holds now."""
    return _again(cache, new, lambda token: rd.extend(model, token, cache, num_steps))


def ours_until(model: rd.RecurrentTransformer, cache: rd.DepthCache, new: Tensor, rule: rd.ExitRule) -> Run:
    """The same under an exit rule."""
    return _again(cache, new, lambda token: rd.extend_until(model, token, cache, rule))


def _again(cache: rd.DepthCache, new: Tensor, take: Callable[[Tensor], object]) -> Run:
    begin, tokens = cache.length, new.expand(cache.batch, -1).split(1, dim=1)

    @torch.no_grad()
    def run() -> None:
        cache.crop(begin)
        for token in tokens:
            take(token)

    return run


def compiled(model: rd.RecurrentTransformer) -> rd.RecurrentTransformer:
    """The model with its decoding compiled; it shares the weights, and the one given stays as it is."""
    twin = copy.copy(model)
    rd.compile_decoding(twin, dynamic=False)
    return twin


def hugging_face_model(dim: int, num_heads: int, vocab_size: int, context_length: int) -> GPT2LMHeadModel:
    """GPT-2 of 12 blocks."""
    config = GPT2Config(
        vocab_size=vocab_size, n_positions=context_length, n_embd=dim, n_head=num_heads, n_layer=12,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, attn_implementation="sdpa",
    )  # fmt: skip
    return GPT2LMHeadModel(config)


@torch.no_grad()
def hugging_face(model: GPT2LMHeadModel, prompt: Tensor, new: Tensor, batch: int) -> Run:
    """Decodes with the cache that Hugging Face's own `generate` takes."""
    # The argument was renamed in 5.24.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache = DynamicCache(config=model.config)
    held = {name: cache, "use_cache": True}
    model(prompt, **held, logits_to_keep=1)
    cache.batch_repeat_interleave(batch)
    tokens = new.expand(batch, -1).split(1, dim=1)

    @torch.no_grad()
    def run() -> None:
        for token in tokens:
            model(token, **held)
        cache.crop(-len(tokens))

    return run


def x_transformers_model(dim: int, num_heads: int, vocab_size: int, context_length: int) -> nn.Module:
    """x-transformers' looped language model, three blocks taken four times: the counterpart of naive `0+3×4+0`."""
    blocks = Decoder(
        dim=dim, depth=3, heads=num_heads, attn_dim_head=dim // num_heads, attn_flash=True, pre_and_post_norm=True
    )
    return TransformerWrapper(
        num_tokens=vocab_size,
        max_seq_len=context_length,
        looped=True,
        max_looped_steps=4,
        tie_embedding=True,
        attn_layers=blocks,
    )


@torch.no_grad()
def x_transformers(model: nn.Module, prompt: Tensor, new: Tensor) -> Run:
    """Decodes with its own cache; it refuses more than one row."""
    asked = {"looped_inference": True, "looped_steps": 4, "return_intermediates": True, "input_not_include_cache": True}
    _, begin = model(prompt, **asked)

    @torch.no_grad()
    def run() -> None:
        cache = begin
        for token in new.split(1, dim=1):
            _, cache = model(token, cache=cache, **asked)

    return run


def token_flops(model: rd.RecurrentTransformer, context: int, num_steps: int | None = None) -> float:
    """FLOPs of one token that attends to so many, the head included."""
    counting = rd.accounting.Counting(attention=lambda _: context)
    return rd.accounting.flops(model, 1, num_steps, counting=counting)


def bytes_from_memory(
    model: rd.RecurrentTransformer, context: int, batch: int, dtype: torch.dtype, kv: rd.KVStepPolicy
) -> float:
    """Bytes of weights and cache that one token per row needs, each once: what is read where the loop stays close."""
    of = rd.accounting.outline(model)
    weights = (of.num_parameters - of.num_position_parameters) * dtype.itemsize
    return weights + rd.accounting.cache_bytes(model, context, batch=batch, dtype=dtype, kv=kv)


def bytes_read(model: rd.RecurrentTransformer, context: int, batch: int, dtype: torch.dtype) -> float:
    """Bytes of weights and cache that one token per row reads, each as often as it is used."""
    # A matrix is read for every two FLOPs of a token, and some copy of keys and values at each step.
    weights = token_flops(model, 0) / 2 * dtype.itemsize
    return weights + rd.accounting.cache_bytes(model, context, batch=batch, dtype=dtype, kv=rd.KeepAll())
