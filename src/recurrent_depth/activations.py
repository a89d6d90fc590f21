"""The most that activations take in a forward without gradients, in closed form."""

import torch

from recurrent_depth.contracts import BlockCost
from recurrent_depth.kv_policy import KeysValues, KVStepPolicy
from recurrent_depth.moments import Moment
from recurrent_depth.outline import Outline


def activation_bytes(
    of: Outline, num_tokens: int, num_steps: int, *, kv: KVStepPolicy, dtype: torch.dtype, capacity: int
) -> int:
    """Bytes per row beyond weights and the full cache: the most that is alive at once in a forward of so many tokens.

    Args:
        of: the outline of the model.
        num_tokens: the new tokens.
        num_steps: steps taken.
        kv: what is stored of the steps.
        dtype: of the model and the cache.
        capacity: of a new cache, whose blocks make room when they first write; 0 for one that has its room.
    """

    def num_bytes(moment: Moment) -> int:
        return num_tokens * moment.num_bytes(of.dim, dtype) - capacity * moment.unmade * dtype.itemsize

    held = _held(of, num_steps, _aside(kv, num_steps, dtype))
    behind = held.plus(Moment(states=1 + min(of.layout.coda, 1)))
    logits = num_bytes(behind) + (of.dim + of.vocab_size) * dtype.itemsize
    return max(logits, *map(num_bytes, _moments(of, num_steps, held, kv)))


def _moments(of: Outline, num_steps: int, held: Moment, kv: KVStepPolicy) -> list[Moment]:
    """When most may be alive: in blocks before, in and behind the loop, and where its last step is blended."""
    update, copies = of.update(num_steps), kv.num_copies(num_steps)
    learned = update.step + update.picked > 0
    grows = num_steps == 1 or copies > kv.num_copies(num_steps - 1)
    before_coda = Moment(unmade=of.coda.cached)
    before_loop = before_coda.plus(Moment(unmade=copies * of.core.cached))
    begun = held.plus(Moment(states=min(num_steps, 2) - 1)).plus(before_coda)  # the first state is held to the end
    # What the blocks see is the state itself, unless an update with weights makes it.
    around = begun.plus(Moment(states=learned - 1))
    core = [moment.under(folds=held.wide > 0, grows=grows) for moment in _inside(of.core, of.layout.core)]
    return [
        *(moment.plus(before_loop) for moment in _inside(of.prelude, of.layout.prelude)),
        *(moment.plus(around) for moment in core),
        begun.plus(Moment(states=1, wide=4 * of.dim * learned)),
        *(moment.plus(held) for moment in _inside(of.coda, of.layout.coda)),
    ]


def _held(of: Outline, num_steps: int, aside: Moment) -> Moment:
    """What is held from the loop on: a state, what the update made of the anchor, and keys and values put aside.

    A linear layer leaves a number for every `2 * dim` FLOPs.
    """
    context = of.update(num_steps).begin // (2 * of.dim)
    return Moment(states=1, numbers=context + aside.numbers * of.core.cached, wide=aside.wide * of.core.cached)


def _inside(blocks: BlockCost, num_blocks: int) -> list[Moment]:
    """The moments of a stack; the input of its first block is held throughout."""
    first = Moment(states=min(num_blocks, 2) - 1)
    return [moment.plus(first) for moment in blocks.live or (Moment(states=1),)] if num_blocks else []


def _aside(kv: KVStepPolicy, num_steps: int, dtype: torch.dtype) -> Moment:
    """What is put aside for each number that a core block stores, while the newest step's stands in the cache."""
    if num_steps == 1:
        return Moment()
    device = next((weight.device for weight in kv.parameters()), None)
    old, new = (KeysValues(x, x) for x in torch.zeros(2, 1, 1, 1, 1, dtype=dtype, device=device))
    merged = kv.merge(old, new, 1, 0)
    if merged is new:
        return Moment()
    return Moment(numbers=1) if merged is old else Moment(wide=1)
