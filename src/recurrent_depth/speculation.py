"""Self-speculative decoding: a text is drafted by the first steps of the loop, and verified by the others."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int, Integer
from torch import Tensor

from recurrent_depth.arguments import require_whole
from recurrent_depth.cache import DepthCache
from recurrent_depth.choice import NextTokenRule
from recurrent_depth.decoding import extend
from recurrent_depth.drafting import Speculator
from recurrent_depth.model import RecurrentTransformer
from recurrent_depth.writing import Rows, checked_request, draws_of


class Speculation(NamedTuple):
    """What `speculate` wrote.

    Attributes:
        tokens: prompt and continuation of each row, as `generate` gives them.
        num_drafted: tokens drafted, over all rows.
        num_accepted: those of them that stand in the continuation.
    """

    tokens: Int[Tensor, "batch token"]
    num_drafted: int
    num_accepted: int

    @property
    def acceptance_rate(self) -> float:
        """The share of the drafts that stand in the continuation; not a number where nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else math.nan


def speculate(
    model: RecurrentTransformer,
    prompt: Integer[Tensor, "batch token"],
    *,
    max_new_tokens: int,
    draft_steps: int,
    draft_tokens: int = 4,
    num_steps: int | None = None,
    mask: Bool[Tensor, "batch token"] | Int[Tensor, "batch token"] | None = None,
    choose: NextTokenRule | None = None,
    stop_tokens: Sequence[int] = (),
    seed: int | None = None,
) -> Speculation:
    """Prompt and continuation of each row at full depth, from drafts of the model's own first steps.

    In each round `draft_tokens` tokens are drafted one by one from the state after `draft_steps` steps. The remaining
    steps then run over all of them at once, from the draft's own states, keys and values, and one more token comes
    from the last of them: no block of the loop runs twice for a token that is not refused. Greedy tokens are those of
    `generate`, but for ties within rounding, since chunks are summed in another order; random ones follow exactly the
    same distribution, though a seed leads to others.

    It needs every step's keys and values, so the cache is always one that keeps all (`KeepAll`): under any other policy
    later tokens find what deeper steps wrote, which a draft does not know. It needs steps without chance too: call
    `model.eval()` first. Rows advance together, by as many tokens as the row with the fewest accepted drafts. What a
    row had accepted beyond is drafted again, which costs time and changes no distribution.

    Args:
        model: the model.
        prompt: token ids; shorter prompts are padded on the left.
        max_new_tokens: tokens to add at most.
        draft_steps: steps after which a draft is read, fewer than `num_steps`.
        draft_tokens: tokens drafted in each round; fewer where fewer are left to write.
        num_steps: the depth whose continuation is wanted, the same for all rows; full depth by default.
        mask: True at real tokens of the prompt, False at padding.
        choose: how a token is chosen, in drafts too; `Greedy()` by default.
        stop_tokens: a row ends behind the first of these, and costs nothing more; its rest repeats that token.
        seed: of `Sampling`; by default a fresh one at each call.

    Raises:
        ValueError: for what `generate` refuses, for `draft_steps` not in 1 to `num_steps - 1`, for `draft_tokens`
            below 1, and for a model in training mode.

    References: Leviathan et al., 2023, arXiv 2211.17192 (accepting drafts); Elhoushi et al., 2024, arXiv 2404.16710
    (drafts of a model's own first layers).
    """
    prompt, mask = checked_request(model, prompt, mask, max_new_tokens)
    if model.training:
        raise ValueError("The model is in training mode, where steps may draw noise: call model.eval() first.")
    require_whole("draft_tokens", draft_tokens, at_least=1)
    num_steps = require_whole("num_steps", model.num_steps if num_steps is None else num_steps, at_least=1)
    if require_whole("draft_steps", draft_steps, at_least=1) >= num_steps:
        raise ValueError(f"draft_steps is {draft_steps}, but must be fewer than the {num_steps} steps that verify.")
    draws = draws_of(choose, len(prompt), stop_tokens, seed, vocab_size=model.embed.token.num_embeddings)
    cache = DepthCache(max_tokens=prompt.shape[1] + max_new_tokens - 1)
    rows = Rows.sorted_by_depth(prompt, mask, [num_steps] * len(prompt))
    return _continue(Speculator(model, cache, draws, num_steps, draft_steps), rows, max_new_tokens, draft_tokens)


@torch.no_grad()
def _continue(speculator: Speculator, rows: Rows, max_new_tokens: int, draft_tokens: int) -> Speculation:
    model, cache, draws, num_steps, _ = speculator
    prompt, num_drafted, num_accepted = rows.seen, 0, 0
    written: list[list[int]] = [[] for _ in rows.numbers]
    logits = extend(model, prompt, cache, num_steps, mask=rows.mask, logits_to_keep=1)
    new, accepted = draws.next(logits[:, -1], rows)[:, None], torch.zeros(len(prompt), dtype=torch.long)
    while True:
        got = [_until_stop(tokens, draws.stop_tokens) for tokens in new.tolist()]
        num_accepted += sum(map(min, accepted.tolist(), map(len, got)))
        for number, tokens in zip(rows.numbers, got, strict=True):
            written[number] += tokens
        stay = [row for row, tokens in enumerate(got) if tokens[-1] not in draws.stop_tokens]
        left = max_new_tokens - max(map(len, written))
        if not stay or left == 0:
            return Speculation(_joined(prompt, written), num_drafted, num_accepted)
        for token in new.unbind(1):
            rows = rows.grown(token)
        if len(stay) < len(rows.numbers):
            cache.select(torch.tensor(stay))
            rows = rows.pick(stay)
        num_drafts = min(draft_tokens, left - 1)
        new, accepted = speculator.round(rows, num_drafts)
        num_drafted += num_drafts * len(stay)


def _until_stop(tokens: list[int], stop_tokens: frozenset[int]) -> list[int]:
    ends = [place for place, token in enumerate(tokens, start=1) if token in stop_tokens]
    return tokens[: min(ends, default=len(tokens))]


def _joined(prompt: Tensor, written: list[list[int]]) -> Tensor:
    """Prompts and what was written behind them; a row that ended early repeats its last token."""
    longest = max(map(len, written))
    new = [tokens + tokens[-1:] * (longest - len(tokens)) for tokens in written]
    return torch.cat([prompt, prompt.new_tensor(new)], dim=1)
