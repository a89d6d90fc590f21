"""One round of speculative decoding: a few steps draft tokens one by one, the other steps verify them together."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from recurrent_depth.attention import causal_mask
from recurrent_depth.cache import DepthCache
from recurrent_depth.cached_forward import open_forward
from recurrent_depth.choice import check_logits
from recurrent_depth.contracts import At, ModelKeyValues
from recurrent_depth.depth import Depth
from recurrent_depth.draw import draw
from recurrent_depth.model import RecurrentTransformer
from recurrent_depth.trees import map_tensors
from recurrent_depth.update import DepthState
from recurrent_depth.views import views_of
from recurrent_depth.writing import Draws, Rows


class Place(NamedTuple):
    """Inputs somewhere in the loop: their state, where the blocks are called, and what the cache shows."""

    state: DepthState
    at: At
    kv: ModelKeyValues


class Speculator(NamedTuple):
    """Drafts with the first steps of a model, and verifies with the others.

    The cache is never settled: a draft leaves its steps' keys and values behind the tokens that count as seen, where
    the other steps find them, and together they write every copy.

    Attributes:
        model: the model.
        cache: keeps all; it holds the rows' tokens but the last.
        draws: how tokens are chosen.
        num_steps: full depth.
        draft_steps: steps after which a draft is read.
    """

    model: RecurrentTransformer
    cache: DepthCache
    draws: Draws
    num_steps: int
    draft_steps: int

    def round(self, rows: Rows, num_drafts: int) -> tuple[Int[Tensor, "row new"], Int[Tensor, " row"]]:
        """The next tokens of each row, and how many of its drafts were accepted, be they among those or not."""
        begin = self.cache.length
        longer, guesses, places = self.draft(rows, num_drafts)
        self.cache.crop(begin)
        chances = self.verify(longer, places)
        # Behind the last draft nothing was guessed, and so all of the distribution remains.
        guessed = torch.stack([*guesses, torch.zeros_like(chances[:, -1])], dim=1)
        tokens = longer.seen[:, begin + 1 :]
        uniforms = torch.stack([self._uniforms(rows) for _ in range(num_drafts + 1)], dim=1)
        accepted = num_accepted(tokens, guessed, chances, uniforms)
        kept = int(accepted.min())
        drawn = draw(remainder(guessed[:, kept], chances[:, kept]), uniforms[:, -1])
        last = torch.where(accepted > kept, F.pad(tokens, (0, 1))[:, kept], drawn)
        self.cache.crop(begin + kept + 1)
        return torch.cat([tokens[:, :kept], last[:, None]], dim=1), accepted

    def draft(self, rows: Rows, num_drafts: int) -> tuple[Rows, list[Float[Tensor, "row vocab"]], list[Place]]:
        """The rows with their drafts, the distributions of these, and the inputs behind their first steps.

        There is one input more than drafts: the token that the first draft follows.
        """
        guesses, places = [], [self._first_steps(rows)]
        for _ in range(num_drafts):
            guesses.append(self._chances(self._read(places[-1])[:, -1], rows))
            rows = rows.grown(draw(guesses[-1], self._uniforms(rows)))
            places.append(self._first_steps(rows))
        return rows, guesses, places

    def verify(self, rows: Rows, places: Sequence[Place]) -> Float[Tensor, "row input vocab"]:
        """The distributions of the tokens behind the inputs, by the steps that the draft has left."""
        begin = self.cache.length
        opened = open_forward(rows.seen[:, begin:], self.cache)
        kv = views_of(opened.turn)
        state, at = joined(places)
        if opened.padding is not None:
            at = at._replace(mask=causal_mask(opened.padding, len(places)))
        steps = self.model.core.steps(state, Depth(self.num_steps), at, kv.core, first=self.draft_steps)
        logits = self._read(Place(*deque(steps, maxlen=1), at, kv))
        opened.finish()
        chances = [self._chances(x, _until(rows, begin + i)) for i, x in enumerate(logits.unbind(1), start=1)]
        return torch.stack(chances, dim=1)

    def _first_steps(self, rows: Rows) -> Place:
        token = rows.seen[:, -1:]
        opened = open_forward(token, self.cache)
        kv = views_of(opened.turn)
        begun = self.model.begin(token, self.num_steps, **opened.where(), kv=kv)
        (state,) = deque(self.model.core.steps(begun.state, Depth(self.draft_steps), begun.at, kv.core), maxlen=1)
        opened.finish()
        return Place(state, begun.at, kv)

    def _read(self, place: Place) -> Float[Tensor, "row input vocab"]:
        return self.model.readout(self.model.core.read(place.state), place.at, place.kv)

    def _chances(self, logits: Float[Tensor, "row vocab"], rows: Rows) -> Float[Tensor, "row vocab"]:
        check_logits(logits, rows.numbers)
        return self.draws.choose.probabilities(logits, rows.seen, rows.mask)

    def _uniforms(self, rows: Rows) -> Float[Tensor, " row"]:
        return self.draws.streams.uniforms(rows.numbers).to(rows.seen.device)


def joined(places: Sequence[Place]) -> tuple[DepthState, At]:
    """The inputs as one chunk, which has no mask yet."""
    parts = [(tuple(place.state[:-1]), place.at.positions, place.at.valid) for place in places]
    state, positions, valid = map_tensors(lambda *tokens: torch.cat(tokens, dim=1), *parts)
    return DepthState(*state), places[0].at._replace(positions=positions, mask=None, valid=valid)


def _until(rows: Rows, length: int) -> Rows:
    return rows._replace(seen=rows.seen[:, :length], mask=None if rows.mask is None else rows.mask[:, :length])


def num_accepted(
    tokens: Int[Tensor, "row draft"],
    guessed: Float[Tensor, "row input vocab"],
    chances: Float[Tensor, "row input vocab"],
    uniforms: Float[Tensor, "row input"],
) -> Int[Tensor, " row"]:
    """How many of a row's drafts come before the first refused: a draft is accepted with probability `chance / guess`.

    Reference: Leviathan et al., 2023, arXiv 2211.17192.
    """
    num_drafts = tokens.shape[1]
    guess, chance = (x[:, :num_drafts].take_along_dim(tokens[..., None], 2)[..., 0] for x in (guessed, chances))
    return (uniforms[:, :num_drafts] * guess < chance).long().cumprod(1).sum(1)


def remainder(guess: Float[Tensor, "row vocab"], chance: Float[Tensor, "row vocab"]) -> Float[Tensor, "row vocab"]:
    """What a refused draft leaves to draw from, unnormalised: `max(chance - guess, 0)`."""
    rest = (chance - guess).clamp(min=0)
    # Rounding can leave nothing where both are the same.
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, chance)
