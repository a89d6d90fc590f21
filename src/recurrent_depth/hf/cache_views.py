"""A transformers cache as the forward of a native model sees it."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from recurrent_depth.contracts import KeyValues, ModelKeyValues
from recurrent_depth.hf.cache import StepSlots
from recurrent_depth.kv_policy import KeysValues


def model_views(slots: StepSlots) -> ModelKeyValues:
    """What a native model's forward is given of a cache, to be closed by `slots.close()` when it is done.

    What a block gets back of a static cache is its whole buffer, in which the newest tokens are not the last: the
    forward then needs a complete mask (batch, query, key), over as many keys as `cache.get_mask_sizes` tells.

    Raises:
        ValueError: in a forward, if rows have depths of their own, or a router picks tokens.
    """
    layout = slots.layout
    after = layout.first + layout.num_core

    def outside(begin: int, end: int, **rows: Any) -> Sequence[KeyValues]:
        _refuse(rows)
        return [OutsideView(slots, layer) for layer in range(begin, end)]

    def core(step: int, **rows: Any) -> Sequence[KeyValues]:
        _refuse(rows)
        slots.view(step)
        return [CoreView(slots, step, block) for block in range(layout.num_core)]

    return ModelKeyValues(
        prelude=lambda **rows: outside(0, layout.first, **rows),
        core=core,
        coda=lambda **rows: outside(after, layout.num_layers, **rows),
    )


class OutsideView(KeyValues):
    """What a block outside of the core sees of a cache."""

    def __init__(self, slots: StepSlots, layer: int):
        self.slots, self.layer = slots, layer

    def update(
        self, keys: Float[Tensor, "batch head token size"], values: Float[Tensor, "batch head token size"]
    ) -> tuple[Float[Tensor, "batch head key size"], Float[Tensor, "batch head key size"]]:
        """Those of the tokens seen, and the new ones."""
        return self.slots.cache.update(keys, values, self.layer)


class CoreView(KeyValues):
    """What a block of the core sees of a cache at one step."""

    def __init__(self, slots: StepSlots, step: int, block: int):
        self.slots, self.step, self.block = slots, step, block

    def update(
        self, keys: Float[Tensor, "batch head token size"], values: Float[Tensor, "batch head token size"]
    ) -> tuple[Float[Tensor, "batch head key size"], Float[Tensor, "batch head key size"]]:
        """Those of the tokens seen, and the new ones."""
        return self.slots.update(self.step, self.block, KeysValues(keys, values))


def _refuse(rows: dict[str, Any]) -> None:
    if any(value is not None for value in rows.values()):
        raise ValueError(
            "In a transformers cache all rows take the same steps, and all tokens each step: a depth for each row, or "
            "an update that picks tokens, goes without a cache (use_cache=False) or with rd.DepthCache."
        )
