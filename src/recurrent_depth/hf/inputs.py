"""What callers of transformers give a looped model, in the native model's terms."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

import recurrent_depth as rd


def where(
    tokens: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cache: Cache | None
) -> dict[str, Tensor | None]:
    """Mask and positions as the native model takes them.

    Without `position_ids`, positions count from a row's first real token.

    Raises:
        ValueError: if the mask is none of (batch, key) and (batch, 1, query, key).
    """
    mask = _mask(attention_mask)
    if mask is not None and mask.ndim == 2:
        _check_width(mask, tokens, cache)
    if cache is not None and cache.is_compileable and (mask is None or mask.ndim == 2):
        position_ids = _counted(tokens, mask, cache) if position_ids is None else position_ids
        mask = complete_mask(mask, cache, tokens.shape)[:, 0]
    elif mask is not None and mask.ndim == 2 and not torch.compiler.is_compiling() and bool(mask.all()):
        mask = None  # as transformers does: kernels are faster without
    if position_ids is None and (mask is None or mask.ndim == 3):
        position_ids = _counted(tokens, None, cache)
    return {"mask": mask, "positions": position_ids}


def complete_mask(padding: Tensor | None, cache: Cache, shape: torch.Size | tuple[int, int]) -> Tensor:
    """Where each new token may look among all that a cache has room for: (batch, 1, query, key), True where it may.

    A padded token sees itself alone, since a softmax over nothing is not a number.
    """
    batch, num_new = shape
    num_keys, _ = cache.get_mask_sizes(num_new, 0)
    seen = cache.get_seq_length()
    device = seen.device if isinstance(seen, Tensor) else None if padding is None else padding.device
    queries = (torch.arange(num_new, device=device) + seen)[:, None]
    keys = torch.arange(num_keys, device=device)
    look = (keys <= queries).expand(batch, 1, num_new, num_keys)
    if padding is not None:
        real = torch.nn.functional.pad(padding.bool(), (0, num_keys - padding.shape[1]))
        look = look & real[:, None, None] | (keys == queries)
    return look


def require_tokens(input_ids: Tensor | None, unknown: dict[str, Any]) -> Tensor:
    """The token ids.

    Raises:
        ValueError: if there are none, or there are arguments that mean nothing here, and would be passed over.
    """
    given = sorted(name for name, value in unknown.items() if value is not None and value is not False)
    if given and given != ["inputs_embeds"]:
        raise ValueError(f"a recurrent_depth model takes no {', '.join(given)}.")
    if given or input_ids is None:
        raise ValueError("input_ids must be given, and no inputs_embeds: updates of a loop may look at the tokens.")
    return input_ids


def require_together(native: rd.RecurrentTransformer, tokens: Tensor) -> None:
    """Raises a ValueError where accelerate has put the weights of a model on several devices, or on the disk.

    Its hooks bring inputs to the weights of one module, or these from the disk, when that module is called. A loop also
    reads weights beside calls: those of its head, of injections and gates.
    """
    token, spread = native.embed.token, getattr(native.embed.token, "_hf_hook", None) is not None
    if not spread and (tokens.is_meta or not token.weight.is_meta):  # each module has a hook where a model was spread
        return
    places = sorted({str(weight.device) for weight in native.parameters()})
    if len(places) > 1 or places == ["meta"]:
        raise ValueError(
            f"The weights of this model lie on {' and '.join(places).replace('meta', 'the disk')}, but the loop needs "
            "them all on one device: load it with device_map={'': device}, or in bfloat16 where it does not fit."
        )


def kept_tokens(logits_to_keep: int | Tensor) -> slice | Tensor:
    """Which tokens get logits: so many last ones, all for 0, or those at the indices given."""
    return slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep


def _mask(given: Tensor | None) -> Tensor | None:
    if given is None or (isinstance(given, Tensor) and given.ndim == 2):
        return None if given is None else given.bool()
    if not isinstance(given, Tensor) or given.ndim != 4 or given.shape[1] != 1:
        got = f"of shape {tuple(given.shape)}" if isinstance(given, Tensor) else f"a {type(given).__name__}"
        raise ValueError(f"attention_mask is {got}, but must be (batch, key), or (batch, 1, query, key).")
    complete = given[:, 0]
    return complete == 0 if complete.is_floating_point() else complete.bool()


def _check_width(mask: Tensor, tokens: Tensor, cache: Cache | None) -> None:
    batch, num_new = tokens.shape
    seen = 0 if cache is None else cache.get_seq_length()
    if isinstance(seen, Tensor):  # its value is not looked at, which would cost a synchronisation
        fits = cache is not None and num_new <= mask.shape[1] <= cache.get_mask_sizes(num_new, 0)[0]
    else:
        fits = mask.shape[1] == seen + num_new
    if len(mask) != batch or not fits:
        wanted = f"{(batch, num_new)} like input_ids" if cache is None else "over all keys, those of the cache too"
        raise ValueError(f"attention_mask is of shape {tuple(mask.shape)}, but must be {wanted}.")


def _counted(tokens: Tensor, padding: Tensor | None, cache: Cache | None) -> Tensor:
    if padding is not None:
        return (padding.long().cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
    seen = 0 if cache is None else cache.get_seq_length()
    return (torch.arange(tokens.shape[1], device=tokens.device) + seen)[None]
