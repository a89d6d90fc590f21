"""Decoding: prompts are continued token by token, through a cache."""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Bool, Int, Integer
from torch import Tensor

from recurrent_depth.arguments import require_instance
from recurrent_depth.cache import DepthCache
from recurrent_depth.cached_forward import open_forward
from recurrent_depth.checks import warn_in_training_mode
from recurrent_depth.choice import NextTokenRule
from recurrent_depth.convergence import warn_if_misread
from recurrent_depth.decoding import logits_until
from recurrent_depth.depth import as_depth
from recurrent_depth.exits import ExitRule
from recurrent_depth.kv_policy import KVStepPolicy
from recurrent_depth.model import RecurrentTransformer
from recurrent_depth.writing import Draws, Rows, checked_request, draws_of


def generate(
    model: RecurrentTransformer,
    prompt: Integer[Tensor, "batch token"],
    *,
    max_new_tokens: int,
    num_steps: int | Sequence[int] | None = None,
    mask: Bool[Tensor, "batch token"] | Int[Tensor, "batch token"] | None = None,
    kv: KVStepPolicy | None = None,
    exit: ExitRule | None = None,  # noqa: A002
    choose: NextTokenRule | None = None,
    stop_tokens: Sequence[int] = (),
    seed: int | None = None,
) -> Int[Tensor, "batch text"]:
    """Prompt and continuation of each row.

    Under `KeepAll`, the default, and greedy choice the continuation is token for token what the model without a cache
    would choose. A row depends on its own prompt, depth and number alone, never on its neighbours. The prompt is read
    at `num_steps`; an exit rule is asked at the tokens that follow it. The global RNG is neither read nor changed,
    but by noise of a model in training mode: call `model.eval()` first.

    Args:
        model: the model.
        prompt: token ids; shorter prompts are padded on the left.
        max_new_tokens: tokens to add at most.
        num_steps: one number for all rows, or one for each; full depth by default.
        mask: True at real tokens of the prompt, False at padding.
        kv: what the cache stores of the loop's steps.
        exit: lets a row leave the loop before `num_steps`, at each token anew.
        choose: how a token is chosen, for example `Sampling(temperature=0.8, top_p=0.95)`; `Greedy()` by default.
        stop_tokens: a row ends behind the first of these, and costs nothing more; its rest repeats that token.
        seed: of `Sampling`; by default a fresh one at each call.

    Returns:
        Rows of equal length; shorter than asked for where all rows have ended.

    Raises:
        ValueError: for an empty prompt, a mask of another shape or with padding on the right, a depth that is
            impossible or not one per row, depths that differ under an exit rule, more tokens than learned positions,
            stop tokens beyond the vocabulary, and logits from which nothing can be chosen.

    Warns:
        UserWarning: if the model is in training mode; if the exit reads a gate and the model has none, so that no token
            would leave early; if it looks for convergence, and a router lets tokens rest.
    """
    new = stream(
        model,
        prompt,
        max_new_tokens=max_new_tokens,
        num_steps=num_steps,
        mask=mask,
        kv=kv,
        exit=exit,
        choose=choose,
        stop_tokens=stop_tokens,
        seed=seed,
    )
    # Joining promotes: a prompt of bytes cannot hold every token of a vocabulary.
    return torch.cat([prompt, *(tokens[:, None] for tokens in new)], dim=1)


def stream(
    model: RecurrentTransformer,
    prompt: Integer[Tensor, "batch token"],
    *,
    max_new_tokens: int,
    num_steps: int | Sequence[int] | None = None,
    mask: Bool[Tensor, "batch token"] | Int[Tensor, "batch token"] | None = None,
    kv: KVStepPolicy | None = None,
    exit: ExitRule | None = None,  # noqa: A002
    choose: NextTokenRule | None = None,
    stop_tokens: Sequence[int] = (),
    seed: int | None = None,
) -> Iterator[Int[Tensor, " batch"]]:
    """Yields the new token of each row as soon as it is chosen; arguments and errors are those of `generate`.

    Errors in the arguments are raised by the call itself, not by the first token.
    """
    prompt, mask = checked_request(model, prompt, mask, max_new_tokens)
    warn_in_training_mode("model", model)
    depth = as_depth(model.num_steps if num_steps is None else num_steps, batch=len(prompt))
    depths = [depth.num_steps] * len(prompt) if depth.rows is None else list(depth.rows)
    if exit is not None and len(set(depths)) > 1:
        raise ValueError(f"num_steps is {num_steps!r}, but must be one number for all rows where an exit rule decides.")
    if exit is not None:
        require_instance("exit", exit, ExitRule)
        warn_if_misread(exit, model.core.update, stacklevel=3)
    cache = DepthCache(kv, max_tokens=prompt.shape[1] + max_new_tokens - 1)
    draws = draws_of(choose, len(prompt), stop_tokens, seed, vocab_size=model.embed.token.num_embeddings)
    return _stream(model, cache, Rows.sorted_by_depth(prompt, mask, depths), draws, exit, max_new_tokens)


def _stream(
    model: RecurrentTransformer,
    cache: DepthCache,
    rows: Rows,
    draws: Draws,
    exit: ExitRule | None,  # noqa: A002
    max_new_tokens: int,
) -> Iterator[Tensor]:
    written = rows.seen.new_zeros(len(rows.numbers))
    new = _next(model, cache, rows, draws, None, rows.seen)
    for left in reversed(range(max_new_tokens)):
        written = written.index_copy(0, torch.tensor(rows.numbers, device=written.device), new.to(written.dtype))
        yield written.clone()  # the caller's, to change as they like: rows that have ended are repeated from ours
        stay = [row for row, token in enumerate(new.tolist()) if token not in draws.stop_tokens]
        if not stay or left == 0:
            return
        rows = rows.grown(new)
        if len(stay) < len(rows.numbers):
            cache.select(torch.tensor(stay))
            rows = rows.pick(stay)
        new = _next(model, cache, rows, draws, exit, rows.seen[:, -1:])


@torch.no_grad()
def _next(
    model: RecurrentTransformer,
    cache: DepthCache,
    rows: Rows,
    draws: Draws,
    exit: ExitRule | None,  # noqa: A002
    tokens: Tensor,
) -> Tensor:
    """One forward over the tokens that the cache does not hold yet, and the tokens that it leads to."""
    opened = open_forward(tokens, cache, rows.mask)
    if exit is None:
        logits = opened.logits(model, tokens, rows.num_steps, logits_to_keep=1)[:, -1]
    else:
        logits = logits_until(opened, model, tokens, exit, rows.depths[0]).logits
    new = draws.next(logits, rows)
    opened.finish()
    return new
