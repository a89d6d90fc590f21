"""The published models, one function each; every one calls a builder.

Vocabulary 50,304 (GPT-2's, padded) and 1,024 learned positions. `grt_small`, `grt_medium` and `grt_large` are matched
to their dense model in compute (isoFLOPS), the others in parameters (isoPARAMS).

Reference: Hegazy et al., 2026, arXiv 2608.15062.
"""

from recurrent_depth.builders import dense, grt
from recurrent_depth.depth import Layout
from recurrent_depth.model import RecurrentTransformer

VOCAB_SIZE = 50304
CONTEXT_LENGTH = 1024


def gpt2_small() -> RecurrentTransformer:
    """GPT-2 Small: 12 blocks, width 768."""
    return _dense(12, dim=768, num_heads=12)


def gpt2_medium() -> RecurrentTransformer:
    """GPT-2 Medium: 24 blocks, width 1,024."""
    return _dense(24, dim=1024, num_heads=16)


def gpt2_large() -> RecurrentTransformer:
    """GPT-2 Large: 36 blocks, width 1,280."""
    return _dense(36, dim=1280, num_heads=20)


def grt_small() -> RecurrentTransformer:
    """GRT Small, isoFLOPS: `1+1×10+1`, width 768."""
    return _grt(Layout(1, 1, 10, 1), dim=768, num_heads=12)


def grt_medium() -> RecurrentTransformer:
    """GRT Medium, isoFLOPS: `2+5×4+2`, width 1,024, 171,073,536 parameters."""
    return _grt(Layout(2, 5, 4, 2), dim=1024, num_heads=16)


def grt_large() -> RecurrentTransformer:
    """GRT Large, isoFLOPS: `1+5×6+5`, width 1,280, 290,196,480 parameters."""
    return _grt(Layout(1, 5, 6, 5), dim=1280, num_heads=20)


def grt_medium_isoparams() -> RecurrentTransformer:
    """GRT Medium, isoPARAMS: `2+20×4+2`, width 1,024, 359,847,936 parameters."""
    return _grt(Layout(2, 20, 4, 2), dim=1024, num_heads=16)


def grt_large_isoparams() -> RecurrentTransformer:
    """GRT Large, isoPARAMS: `3+30×6+3`, width 1,280, 781,780,480 parameters."""
    return _grt(Layout(3, 30, 6, 3), dim=1280, num_heads=20)


def _dense(num_blocks: int, *, dim: int, num_heads: int) -> RecurrentTransformer:
    return dense(num_blocks, dim=dim, num_heads=num_heads, vocab_size=VOCAB_SIZE, context_length=CONTEXT_LENGTH)


def _grt(layout: Layout, *, dim: int, num_heads: int) -> RecurrentTransformer:
    return grt(layout, dim=dim, num_heads=num_heads, vocab_size=VOCAB_SIZE, context_length=CONTEXT_LENGTH)
