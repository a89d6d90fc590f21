"""Precision: what a bfloat16 model still computes in float32."""

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32, or in its own dtype where that is finer."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
