"""How weights start."""

import math

from torch import nn

from recurrent_depth.arguments import require_instance, require_number
from recurrent_depth.model import RecurrentTransformer
from recurrent_depth.residual import ResidualProjection
from recurrent_depth.weight_start import WeightStart


def initialise(model: RecurrentTransformer, *, std: float | None = None, residual_std: float | None = None) -> None:
    """Gives every weight its start, as nanoGPT does, also for a model that comes from the meta device.

    Linear layers and embeddings are drawn from N(0, std²), or as `model.weight_start` says, their biases are 0, norms
    1; each `ResidualProjection`, which ends a residual branch, is narrower. A part with a start of its own, such as the
    bias of the gate, sets it in `reset_parameters`, which is called after its children had theirs; without that method
    its own parameters stay as they are.

    Args:
        model: the model, changed in place.
        std: standard deviation of linear layers and embeddings; that of `model.weight_start` by default, 0.02 where a
            builder says nothing else.
        residual_std: standard deviation of the last projection of attention and MLP. By default
            `std / sqrt(2 * executed blocks)`: the residual stream inside the core meets that many additions.

    Raises:
        ValueError: if a standard deviation is not above 0, or `model` is none.
    """
    require_instance("model", model, RecurrentTransformer, "rd.grt(...)")
    for name, value in (("std", std), ("residual_std", residual_std)):
        if value is not None:
            require_number(name, value, above=0)
    start = model.weight_start if std is None else model.weight_start._replace(std=std)
    start_weights(model, start)
    narrow = start.std / math.sqrt(2 * model.layout.executed) if residual_std is None else residual_std
    for module in model.modules():
        if isinstance(module, ResidualProjection):
            start.draw(module.weight, narrow)


def start_weights(part: nn.Module, start: WeightStart | None = None) -> None:
    """Gives every weight of a part its start: that of `initialise`, which may end residual branches otherwise."""
    start = start or WeightStart()
    for module in reversed(list(part.modules())):
        if isinstance(module, nn.Linear | nn.Embedding):
            start.draw(module.weight, start.std)
            bias = getattr(module, "bias", None)
            if bias is not None:
                nn.init.zeros_(bias)
        elif callable(getattr(module, "reset_parameters", None)):
            module.reset_parameters()
