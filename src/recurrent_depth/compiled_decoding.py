"""The whole forward of one token as one compiled graph, which serves every length of the text."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recurrent_depth.arguments import require_instance
from recurrent_depth.cache import DepthCache
from recurrent_depth.checks import checked_tokens
from recurrent_depth.kv_policy import KVStepPolicy
from recurrent_depth.model import RecurrentTransformer
from recurrent_depth.settling import settle
from recurrent_depth.slots import Key, Places, Slot
from recurrent_depth.turn import Turn
from recurrent_depth.views import views_of


def decode(
    model: RecurrentTransformer,
    tokens: Tensor,
    num_steps: int,
    mask: Tensor,
    positions: Tensor,
    place: Tensor,
    slots: dict[Key, Slot],
    valid: dict[int, Tensor],
    policy: KVStepPolicy,
) -> Tensor:
    """A whole forward of one token per row, in which only values of tensors change with the length of the text."""
    shape = (tokens.shape[0], tokens.shape[1])
    # Some tokens were seen, how many is no number here: it would be compiled anew for each.
    turn = Turn(slots, valid, policy, Places(place), shape=shape, length=1, capacity=mask.shape[-1])
    logits = model(tokens, num_steps, mask=mask, positions=positions, kv=views_of(turn))
    settle(turn)
    return logits


def compile_decoding(model: RecurrentTransformer, **arguments: Any) -> None:
    """Compiles the whole forward of one token per row with `torch.compile(**arguments)`.

    `extend`, `generate` and `stream` then use it wherever a cache of fixed capacity holds a prompt and all rows take
    the same number of steps. It compiles anew for another batch, capacity, depth or policy, never for a longer text.
    """
    require_instance("model", model, RecurrentTransformer)
    model.decode = torch.compile(decode, **arguments)


def is_fixed(cache: DepthCache, turn: Turn, num_steps: int) -> bool:
    """Whether nothing but values of tensors changes from this token to the next: what a compiled step is for."""
    begun, fixed = cache.length > 0, cache.max_tokens is not None and turn.span.in_place
    enough = cache.policy.num_copies(num_steps) <= cache.num_copies
    return turn.shape[1] == 1 and begun and fixed and enough


def check_positions_fit(learned: int | None, length: int, padding: Tensor | None) -> None:
    """Raises a ValueError where the next token stands at no learned position; padding is looked at on CPU only."""
    if learned is None or length < learned:
        return
    if padding is None or (padding.device.type == "cpu" and int(padding.sum(1).max()) > learned):
        raise ValueError(f"The model learned positions 0 to {learned - 1}, and the cache has filled them.")


def compiled_logits(
    model: RecurrentTransformer, tokens: Tensor, cache: DepthCache, turn: Turn, padding: Tensor | None, num_steps: int
) -> Tensor:
    """Logits of one token per row by the compiled forward."""
    assert model.decode is not None
    tokens = checked_tokens(tokens, model.embed.token.num_embeddings)  # the graph itself looks at no values
    check_positions_fit(model.embed.num_positions, cache.length, padding)
    length, room, batch, device = cache.length, cache.capacity, len(tokens), tokens.device
    mask = (torch.arange(room, device=device) <= length).expand(batch, 1, room)
    positions = torch.full((batch, 1), length, device=device)
    if padding is not None:
        mask = mask & F.pad(padding, (0, room - length - 1))[:, None]
        positions = (padding.sum(1, keepdim=True) - 1).clamp(min=0)
    # The same strides every time, which are guarded too.
    where = mask.contiguous(), positions, torch.tensor([length], device=device)
    return model.decode(model, tokens.clone(), num_steps, *where, turn.slots, turn.valid, turn.policy)
