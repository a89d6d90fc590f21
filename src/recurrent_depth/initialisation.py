"""How weights start."""

import math

from torch import nn

from recurrent_depth.model import RecurrentTransformer


def initialise(model: RecurrentTransformer, *, std: float = 0.02, residual_std: float | None = None) -> None:
    """Gives every weight its start, as nanoGPT does, also for a model that comes from the meta device.

    Matrices are drawn from N(0, std²), biases are 0, norms 1; parts with a start of their own, such as the bias of the
    gate, set it themselves. The projections that end a residual branch are narrower.

    Args:
        model: the model, changed in place.
        std: standard deviation of linear layers and embeddings.
        residual_std: standard deviation of the last projection of attention and MLP. By default
            `std / sqrt(2 * executed blocks)`: the residual stream inside the core meets that many additions.

    Raises:
        ValueError: if a standard deviation is not above 0.
    """
    for name, value in (("std", std), ("residual_std", residual_std)):
        if value is not None and not value > 0:
            raise ValueError(f"{name} is {value}, but must be above 0.")
    for module in reversed(list(model.modules())):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
        elif callable(getattr(module, "reset_parameters", None)):
            module.reset_parameters()
    narrow = std / math.sqrt(2 * model.layout.executed) if residual_std is None else residual_std
    for name, weight in model.named_parameters():
        if name.endswith(".out.weight"):
            nn.init.normal_(weight, std=narrow)
