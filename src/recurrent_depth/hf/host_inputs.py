"""What a host reads, split by rows, and the losses of what it says."""

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recurrent_depth.arguments import require_instance, require_whole
from recurrent_depth.checks import checked_padding, checked_tokens
from recurrent_depth.objective import IGNORED, next_token_targets, token_losses

Batch = Mapping[str, Any]
"""What a host's forward takes, by name; tensors lead with the rows."""


class HostInputs(NamedTuple):
    """All rows that a host is to read, and how many at once."""

    by_name: Batch
    num_rows: int
    batch_size: int

    @classmethod
    def of(cls, model: nn.Module, tokens: Tensor | Batch, mask: Tensor | None, batch_size: int | None) -> "HostInputs":
        """Tokens under the name that the host has for them, or a dictionary as it is.

        Raises:
            ValueError: if they are neither a tensor nor a dictionary, token ids are not (batch, token) of integers in
                the vocabulary, there is no row, the tensors have different numbers of rows, the mask does not belong to
                the tokens or is given twice, or `batch_size` is below 1.
        """
        if not isinstance(tokens, Tensor | Mapping):
            raise ValueError(
                f"tokens must be a tensor (batch, token), or a dictionary of what the host's forward takes, got "
                f"{_said(tokens)}. Batches are put into one tensor by torch.cat; batch_size is how many rows are read "
                "at once."
            )
        by_name: dict[str, Any] = dict(tokens) if isinstance(tokens, Mapping) else {_main_name(model): tokens}
        if "input_ids" in by_name:
            by_name["input_ids"] = _checked_ids(model, by_name["input_ids"])
        if mask is not None:
            if isinstance(tokens, Mapping):
                raise ValueError("With a dictionary of inputs the mask belongs into it, as attention_mask.")
            by_name["attention_mask"] = checked_padding(mask, *tokens.shape[:2], cached=False)
        sizes = {name: len(value) for name, value in by_name.items() if isinstance(value, Tensor)}
        if not sizes or 0 in sizes.values() or len(set(sizes.values())) > 1:
            raise ValueError(f"tokens must have one row or more, and all inputs as many; got {sizes}.")
        num_rows = next(iter(sizes.values()))
        size = num_rows if batch_size is None else require_whole("batch_size", batch_size, at_least=1)
        return cls(by_name, num_rows, size)

    @property
    def num_batches(self) -> int:
        """How often the host is run to read all rows once."""
        return -(-self.num_rows // self.batch_size)

    def batches(self) -> Iterator[dict[str, Any]]:
        """The inputs of so many rows after the others."""
        for first in range(0, self.num_rows, self.batch_size):
            rows = slice(first, first + self.batch_size)
            yield {name: value[rows] if isinstance(value, Tensor) else value for name, value in self.by_name.items()}


NOT_ASKED = ("use_cache", "output_router_logits")
"""What a host computes beside its outcome if its configuration says so: a cache, and losses of all routers' logits."""


def run(model: nn.Module, batch: Batch) -> Any:
    """The host's output, computed without a cache."""
    parameters, config = inspect.signature(model.forward).parameters, getattr(model, "config", None)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    off = [name for name in NOT_ASKED if name in parameters or (takes_any and hasattr(config, name))]
    return model(**{**dict.fromkeys(off, False), **batch})


def real(batch: Batch, values: Tensor) -> Tensor:
    """The values (batch, token, ...) of real tokens; all of them where there is no padding mask of this shape."""
    mask = batch.get("attention_mask")
    if mask is None or mask.shape != values.shape[:2]:
        return values.flatten(0, 1)
    return values[mask.bool()]


def next_token_losses(output: Any, batch: Batch) -> Tensor:
    """The loss of each next token, in nats, as a decoder says it; padding is no target."""
    mask = batch.get("attention_mask")
    targets = next_token_targets(batch["input_ids"], None if mask is None else mask.bool())
    return token_losses(output.logits, targets)[targets != IGNORED]


def require_model(model: object) -> None:
    """Raises a ValueError for what is no module; of a name or a folder says how to load it."""
    if isinstance(model, str | Path):
        raise ValueError(
            f"model is {str(model)!r}, but must be a model: load it first, such as by "
            f"AutoModelForCausalLM.from_pretrained({str(model)!r})."
        )
    require_instance("model", model, nn.Module)


def require_decoder(model: nn.Module, batch: Batch) -> None:
    """Raises a ValueError for a host whose losses are not those of next tokens."""
    if "input_ids" in batch and getattr(model, "can_generate", lambda: False)():
        return
    raise ValueError(
        f"{type(model).__name__} says no next tokens, so its losses have to be given: losses=, a function of its "
        "output and its inputs, such as `lambda output, batch: F.cross_entropy(output.logits, batch['labels'], "
        "reduction='none')`."
    )


def _main_name(model: nn.Module) -> str:
    name = getattr(model, "main_input_name", None)
    return name if isinstance(name, str) else next(iter(inspect.signature(model.forward).parameters))


def _checked_ids(model: nn.Module, ids: object) -> Tensor:
    """Token ids, whose values are looked at on every device: a report is made once."""
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    vocab_size = getattr(embedding, "num_embeddings", torch.iinfo(torch.int64).max)
    if not isinstance(ids, Tensor):
        return checked_tokens(ids, vocab_size)
    return checked_tokens(ids.cpu(), vocab_size).to(ids.device)


def _said(given: object) -> str:
    return repr(given) if isinstance(given, str) and len(given) < 60 else f"a {type(given).__name__}"


class Mean:
    """The mean of what is added, weighed alike however it is split."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, values: Tensor) -> None:
        """Adds all values of a tensor."""
        self.total += float(torch.sum(values.float(), dtype=torch.float64 if values.device.type == "cpu" else None))
        self.count += values.numel()

    @property
    def value(self) -> float:
        """The mean.

        Raises:
            ValueError: if nothing was added.
        """
        if self.count == 0:
            raise ValueError("Nothing counts: every token is padding, or no row has a next token.")
        return self.total / self.count
