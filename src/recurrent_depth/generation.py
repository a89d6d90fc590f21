"""Decoding: prompts are continued token by token, through a cache."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int, Integer
from torch import Tensor

from recurrent_depth.cache import DepthCache
from recurrent_depth.checks import checked_padding, checked_tokens
from recurrent_depth.choice import Greedy, TokenChoice, check_logits
from recurrent_depth.decoding import open_forward
from recurrent_depth.depth import as_depth, require_whole
from recurrent_depth.draw import RowStreams
from recurrent_depth.exits import ExitRule
from recurrent_depth.kv_policy import KVStepPolicy
from recurrent_depth.model import RecurrentTransformer


def generate(
    model: RecurrentTransformer,
    prompt: Integer[Tensor, "batch token"],
    *,
    max_new_tokens: int,
    num_steps: int | Sequence[int] | None = None,
    mask: Bool[Tensor, "batch token"] | Int[Tensor, "batch token"] | None = None,
    kv: KVStepPolicy | None = None,
    exit: ExitRule | None = None,  # noqa: A002
    choose: TokenChoice | None = None,
    stop_tokens: Sequence[int] = (),
    seed: int | None = None,
) -> Int[Tensor, "batch text"]:
    """Prompt and continuation of each row.

    Under `KeepAll`, the default, and greedy choice the continuation is token for token what the model without a cache
    would choose. A row depends on its own prompt, depth and number alone, never on its neighbours. The prompt is read
    at `num_steps`; an exit rule is asked at the tokens that follow it. The global RNG is neither read nor changed, and
    noise that the model adds in training mode is up to the caller: call `model.eval()` first.

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
            impossible or not one per row, more tokens than learned positions, and logits from which nothing can be
            chosen.
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
    choose: TokenChoice | None = None,
    stop_tokens: Sequence[int] = (),
    seed: int | None = None,
) -> Iterator[Int[Tensor, " batch"]]:
    """Yields the new token of each row as soon as it is chosen; arguments and errors are those of `generate`.

    Errors in the arguments are raised by the call itself, not by the first token.
    """
    require_whole("max_new_tokens", max_new_tokens, at_least=1)
    prompt = checked_tokens(prompt, model.embed.token.num_embeddings)
    mask = checked_prompt_mask(mask, prompt)
    check_positions_left(model, prompt, mask, max_new_tokens)
    depth = as_depth(model.num_steps if num_steps is None else num_steps, batch=len(prompt))
    depths = [depth.num_steps] * len(prompt) if depth.rows is None else list(depth.rows)
    if exit is not None and len(set(depths)) > 1:
        raise ValueError(f"num_steps is {num_steps!r}, but must be one number for all rows where an exit rule decides.")
    choose = Greedy() if choose is None else choose
    cache = DepthCache(kv, max_tokens=prompt.shape[1] + max_new_tokens - 1)
    draws = Draws(choose, RowStreams(len(prompt), seed), frozenset(stop_tokens))
    return _stream(model, cache, Rows.sorted_by_depth(prompt, mask, depths), draws, exit, max_new_tokens)


class Draws(NamedTuple):
    """How tokens are chosen, and which of them end a row.

    Attributes:
        choose: makes a distribution of logits.
        streams: the random numbers of each row.
        stop_tokens: end a row.
    """

    choose: TokenChoice
    streams: RowStreams
    stop_tokens: frozenset[int]

    def next(self, logits: Tensor, rows: "Rows") -> Tensor:
        """The next token of each row."""
        check_logits(logits)
        return self.choose.choose(logits, rows.seen, rows.mask, lambda: self.streams.uniforms(rows.numbers))


class Rows(NamedTuple):
    """The rows that are still being written, deepest first.

    Attributes:
        numbers: which rows of the prompt they are.
        seen: prompt and continuation so far.
        mask: which of that is real; None where all is.
        depths: the steps that each takes.
    """

    numbers: list[int]
    seen: Int[Tensor, "row token"]
    mask: Bool[Tensor, "row token"] | None
    depths: list[int]

    @classmethod
    def sorted_by_depth(cls, prompt: Tensor, mask: Tensor | None, depths: list[int]) -> "Rows":
        """All rows; sorted, so that those at work at a step are the first, and nothing need be gathered."""
        order = sorted(range(len(depths)), key=lambda row: -depths[row])
        return cls(list(range(len(depths))), prompt, mask, depths).pick(order)

    def pick(self, which: list[int]) -> "Rows":
        """These of them."""
        numbers, depths = ([values[row] for row in which] for values in (self.numbers, self.depths))
        return Rows(numbers, self.seen[which], None if self.mask is None else self.mask[which], depths)

    def grown(self, new: Tensor) -> "Rows":
        """With one more token each."""
        mask = None if self.mask is None else torch.cat([self.mask, self.mask.new_ones(len(new), 1)], dim=1)
        return self._replace(seen=torch.cat([self.seen, new[:, None].to(self.seen.dtype)], dim=1), mask=mask)

    @property
    def num_steps(self) -> int | list[int]:
        """The depth as a forward takes it."""
        return self.depths[0] if len(set(self.depths)) == 1 else self.depths


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
        logits = opened.left(model, tokens, exit, rows.depths[0]).logits
    new = draws.next(logits, rows)
    opened.finish()
    return new


def checked_prompt_mask(mask: Tensor | None, prompt: Tensor) -> Tensor | None:
    """The mask of a prompt as booleans.

    Raises:
        ValueError: if it has another shape, or padding stands on the right.
    """
    mask = checked_padding(mask, *prompt.shape, cached=False)
    if mask is not None and not bool(mask[:, -1].all()):
        rows = (~mask[:, -1]).nonzero()[:, 0].tolist()
        raise ValueError(f"mask has padding at the end of rows {rows}, but prompts are padded on the left.")
    return mask


def check_positions_left(model: RecurrentTransformer, prompt: Tensor, mask: Tensor | None, max_new: int) -> None:
    """Raises a ValueError where prompt and continuation need more positions than the model has learned."""
    longest = prompt.shape[1] if mask is None else int(mask.sum(1).max())
    learned = model.embed.num_positions
    if learned is not None and longest + max_new - 1 > learned:
        raise ValueError(
            f"A prompt of {longest} tokens and max_new_tokens={max_new} need {longest + max_new - 1} positions, but "
            f"the model learned {learned}; ask for {max(learned - longest + 1, 0)} at most."
        )
