"""What hypothesis draws: recipes of models of any layout and width, tokens and depths for them."""

from typing import NamedTuple

import torch
from battery import Build, lively, tiny
from hypothesis import Phase, settings
from hypothesis import strategies as st

import recurrent_depth as rd

VOCAB_SIZE = 23

layouts = st.builds(rd.Layout, st.integers(0, 2), st.integers(1, 2), st.integers(1, 4), st.integers(0, 2))
loops = st.builds(rd.Layout, st.integers(0, 1), st.integers(1, 2), st.integers(2, 4), st.integers(0, 1))
widths = st.sampled_from([(8, 1), (8, 2), (12, 2), (16, 4), (24, 3)])
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
seeds = st.integers(0, 2**31)

# Models are slow to build: fewer examples than elsewhere, and no search for an explanation once one has failed.
few = settings(max_examples=settings().max_examples // 4, phases=set(Phase) - {Phase.explain})


class Recipe(NamedTuple):
    """A model to be built; not in the strategy, where nothing may touch Python's random numbers, as beartype does."""

    layout: rd.Layout
    width: tuple[int, int]
    dtype: torch.dtype
    seed: int

    def model(self, build: Build) -> rd.RecurrentTransformer:
        """A lively model of a method, in evaluation mode."""
        torch.manual_seed(self.seed)
        dim, num_heads = self.width
        return lively(tiny(build, self.layout, dim=dim, num_heads=num_heads)).to(self.dtype).eval()


def recipes(layouts: st.SearchStrategy = layouts, dtypes: st.SearchStrategy = st.just(torch.float32)):
    """Models of any method."""
    return st.builds(Recipe, layouts, widths, dtypes, seeds)


@st.composite
def tokens(draw, batch=st.integers(1, 3), num_tokens=st.integers(1, 8)) -> torch.Tensor:
    """Token ids (batch, token)."""
    generator = torch.Generator().manual_seed(draw(seeds))
    return torch.randint(VOCAB_SIZE, (draw(batch), draw(num_tokens)), generator=generator)


def shares(count: int):
    """Numbers between 0 and 1, which `depths` makes depths of."""
    return st.lists(st.floats(0, 1), min_size=count, max_size=count)


def depths(shares: list[float], model: rd.RecurrentTransformer) -> list[int]:
    """A depth from 1 to the model's full depth for each share."""
    return [1 + round(share * (model.num_steps - 1)) for share in shares]
