"""Precision: what a bfloat16 model still computes in float32."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32, or in its own dtype where that is finer."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Products inside are computed in the dtype of their operands."""
    available = torch.amp.autocast_mode.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if available else nullcontext()
