"""The rows of text that decoding writes, how their next tokens are chosen, and what a prompt must be."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from recurrent_depth.arguments import require_instance, require_whole
from recurrent_depth.checks import checked_padding, checked_tokens
from recurrent_depth.choice import Greedy, NextTokenRule, check_logits
from recurrent_depth.draw import RowStreams
from recurrent_depth.model import RecurrentTransformer


class Draws(NamedTuple):
    """How tokens are chosen, and which of them end a row.

    Attributes:
        choose: makes a distribution of logits.
        streams: the random numbers of each row.
        stop_tokens: end a row.
    """

    choose: NextTokenRule
    streams: RowStreams
    stop_tokens: frozenset[int]

    def next(self, logits: Tensor, rows: "Rows") -> Tensor:
        """The next token of each row."""
        check_logits(logits, rows.numbers)
        new = self.choose.choose(logits, rows.seen, rows.mask, lambda: self.streams.uniforms(rows.numbers))
        if new.shape != logits.shape[:1] or new.is_floating_point():
            name, got = type(self.choose).__name__, f"{tuple(new.shape)} of {new.dtype}"
            raise ValueError(f"choose of {name} must return one token id per row, {len(logits)} in all; got {got}.")
        return new


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


def checked_request(
    model: RecurrentTransformer, prompt: Tensor, mask: Tensor | None, max_new_tokens: int
) -> tuple[Tensor, Tensor | None]:
    """The prompt and its mask, where they can be continued by so many tokens.

    Raises:
        ValueError: for what `generate` refuses of these four.
    """
    require_instance("model", model, RecurrentTransformer)
    require_whole("max_new_tokens", max_new_tokens, at_least=1)
    prompt = checked_tokens(prompt, model.embed.token.num_embeddings)
    mask = checked_prompt_mask(mask, prompt)
    check_positions_left(model, prompt, mask, max_new_tokens)
    return prompt, mask


def draws_of(
    choose: NextTokenRule | None, num_rows: int, stop_tokens: Sequence[int], seed: int | None, *, vocab_size: int
) -> Draws:
    """How so many rows choose their tokens; greedily by default."""
    choose = Greedy() if choose is None else choose
    require_instance("choose", choose, NextTokenRule)
    return Draws(choose, RowStreams(num_rows, seed), checked_stop_tokens(stop_tokens, vocab_size))


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
    if learned is not None and longest > learned:
        raise ValueError(f"The prompt has {longest} tokens, but the model learned {learned} positions.")
    if learned is not None and longest + max_new - 1 > learned:
        raise ValueError(
            f"A prompt of {longest} tokens and max_new_tokens={max_new} need {longest + max_new - 1} positions, but "
            f"the model learned {learned}; ask for {learned - longest + 1} at most."
        )


def checked_stop_tokens(stop_tokens: object, vocab_size: int) -> frozenset[int]:
    """The tokens that end a row.

    Raises:
        ValueError: if they are no list, tuple or set of whole numbers, or one is beyond the vocabulary.
    """
    if not isinstance(stop_tokens, list | tuple | set | frozenset | range):
        raise ValueError(f"stop_tokens is {stop_tokens!r}, but must be a list of token ids.")
    found = frozenset(require_whole("a stop token", token) for token in stop_tokens)
    beyond = sorted(token for token in found if not 0 <= token < vocab_size)
    if beyond:
        raise ValueError(f"stop_tokens holds {beyond}, but must lie in 0 to {vocab_size - 1}, the vocabulary.")
    return found
