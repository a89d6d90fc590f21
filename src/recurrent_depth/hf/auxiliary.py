"""The auxiliary losses of a loop, in the loss of the model around it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from recurrent_depth.objective import IGNORED


def with_auxiliary(
    loss: Tensor, losses: Mapping[str, Tensor], labels: Tensor | None, num_items: int | Tensor | None
) -> Tensor:
    """The loss and the auxiliary ones, means over tokens, of which each batch counts by its share of the targets.

    Args:
        loss: the model's own, which is divided by `num_items` already.
        losses: by name.
        labels: the targets of this batch.
        num_items: the targets of all batches whose gradients are added up; None for those of this one.
    """
    share = 1.0 if num_items is None or labels is None else _num_targets(labels) / num_items
    return torch.stack([loss, *(share * auxiliary for auxiliary in losses.values())]).sum()


def _num_targets(labels: Tensor) -> Tensor:
    """Of next tokens the first is none; labels of whole texts are one for each."""
    return ((labels[:, 1:] if labels.ndim > 1 else labels) != IGNORED).sum()


def add_to_output(output: Any, losses: Mapping[str, Tensor], given: Mapping[str, Any]) -> Any:
    """What a host gives, with a loop's auxiliary losses in its loss; as it is where either has none.

    Args:
        output: of the host's forward.
        losses: of the loop.
        given: the arguments of the forward, by name.
    """
    labels, num_items = given.get("labels"), given.get("num_items_in_batch")
    loss = output[0] if isinstance(output, tuple) and labels is not None else getattr(output, "loss", None)
    if not losses or not isinstance(loss, Tensor) or loss.ndim > 0:
        return output
    total = with_auxiliary(loss, losses, labels, num_items)
    if isinstance(output, tuple):
        return total, *output[1:]
    output.loss = total
    return output
