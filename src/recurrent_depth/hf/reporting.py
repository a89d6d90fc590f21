"""Which layers of a pretrained model bear being looped: what each one does, and what it costs to skip or repeat it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from beartype import beartype
from jaxtyping import Float
from torch import Tensor, nn

from recurrent_depth.depth import require_whole
from recurrent_depth.hf.grafting import is_graft
from recurrent_depth.hf.host_inputs import Batch, HostInputs, Mean, next_token_losses, real, require_decoder, run
from recurrent_depth.hf.host_layers import find_layers
from recurrent_depth.hf.layer_probe import Change, LayerCall, Loop, evaluating, nothing, skip, watched
from recurrent_depth.hf.layer_table import LayerLine, LayerReport, WindowLine

Losses = Callable[[Any, Batch], Float[Tensor, " item"]]
"""Makes the losses of all that shall count, in nats, of a host's output and its inputs."""


@beartype
def layer_report(
    model: nn.Module,
    tokens: Tensor | Mapping[str, Any],
    mask: Tensor | None = None,
    *,
    core_length: int | None = None,
    num_steps: int = 2,
    layers: nn.ModuleList | str | None = None,
    batch_size: int | None = None,
    losses: Losses | None = None,
) -> LayerReport:
    """Measures, without training, what each layer of a host does, and suggests a core for `graft`.

    Block influence and the angular distance compare the states before and behind a layer, over all real tokens. Losses
    are those of whole forwards in which layers are left out, or run again with the arguments that they had: the plain
    repetition, which is hardest on a pretrained model. For L layers that takes fewer than 3 L + 1 forwards. The host is
    in evaluation mode meanwhile, and afterwards what it was before.

    Args:
        model: the host, without a graft.
        tokens: what it reads: token ids (or pixels), or a dictionary of what its forward takes.
        mask: 1 or True at real tokens; padding counts nowhere. In a dictionary it is called `attention_mask`.
        core_length: how many layers a window has; by default a third of the host's.
        num_steps: how often looped layers run in all.
        layers: the host's layers or their dotted name, where they are not found by themselves.
        batch_size: how many rows are read at once, by default all. It changes the memory taken, not the outcome.
        losses: makes the losses of all that shall count, in nats, of the host's output and its inputs for these rows;
            the report takes their mean. By default the losses of the next tokens, which only a decoder has.

    Raises:
        ValueError: if the layers are not found, or do not run once each and in order, without a cache; there is nothing
            to read; `core_length` or `num_steps` does not fit; the host is a graft; it has no next tokens and there is
            no `losses`.

    Reference: block influence is that of Men et al., 2024, arXiv 2403.03853; the angular distance that of Gromov et
    al., 2024, arXiv 2403.17887, who take it at the last token alone.
    """
    if any(is_graft(part) for part in model.modules()):
        raise ValueError("model has a graft; the report is on hosts without one: ungraft(model) first.")
    inputs = HostInputs.of(model, tokens, mask, batch_size)
    found = list(find_layers(model, layers))
    length = _core_length(core_length, len(found))
    loop = Loop(require_whole("num_steps", num_steps, at_least=2))
    if losses is None:
        require_decoder(model, inputs.by_name)
    meter = _Meter(model, inputs, found, losses or next_token_losses)
    singles, windows = _spans(1, len(found)), _spans(length, len(found))
    with torch.no_grad(), evaluating(model):
        loss, moves = meter.look([*singles, *windows])
        lines = tuple(
            LayerLine(span.start, *moves[span], skipped=meter.loss(span, skip), looped=meter.loss(span, loop))
            for span in singles
        )
        groups = tuple(WindowLine(span, moves[span].angle, meter.loss(span, loop)) for span in windows)
    return LayerReport(loss, num_steps, lines, groups)


class _Moves(NamedTuple):
    influence: float
    angle: float


class _Meter(NamedTuple):
    model: nn.Module
    inputs: HostInputs
    layers: list[nn.Module]
    losses: Losses

    def loss(self, span: range, change: Change) -> float:
        """The host's loss while these layers are changed."""
        mean = Mean()
        for batch in self.inputs.batches():
            with watched(self.layers[span.start : span.stop], change):
                mean.add(self.losses(run(self.model, batch), batch))
        return mean.value

    def look(self, spans: Sequence[range]) -> tuple[float, dict[range, _Moves]]:
        """The host's own loss, and how far each of these runs of layers moves the state."""
        loss, means = Mean(), {span: (Mean(), Mean()) for span in spans}
        for batch in self.inputs.batches():
            with watched(self.layers, nothing) as calls:
                loss.add(self.losses(run(self.model, batch), batch))
            _check_order(calls, self.layers)
            for span, (influence, angle) in means.items():
                before, after = (real(batch, h) for h in (calls[span.start].before, calls[span.stop - 1].after))
                influence.add(block_influence(before, after))
                angle.add(angular_distance(before, after))
        return loss.value, {span: _Moves(*(mean.value for mean in pair)) for span, pair in means.items()}


def block_influence(before: Float[Tensor, "token dim"], after: Float[Tensor, "token dim"]) -> Float[Tensor, " token"]:
    """`1 - cos(before, after)` as half the squared distance of unit vectors, which is 0 where nothing changes."""
    first, second = _unit(before), _unit(after)
    return (first - second).square().sum(-1) / 2


def angular_distance(before: Float[Tensor, "token dim"], after: Float[Tensor, "token dim"]) -> Float[Tensor, " token"]:
    """`arccos(cos(before, after)) / pi`, by a formula that keeps small angles: `2 atan2(|u - v|, |u + v|) / pi`."""
    first, second = _unit(before), _unit(after)
    return 2 / torch.pi * torch.atan2((first - second).norm(dim=-1), (first + second).norm(dim=-1))


def _unit(h: Tensor) -> Tensor:
    return F.normalize(h.float(), dim=-1)


def _spans(length: int, num_layers: int) -> list[range]:
    return [range(first, first + length) for first in range(num_layers - length + 1)]


def _core_length(asked: int | None, num_layers: int) -> int:
    if asked is None:
        return max(1, round(num_layers / 3))
    if require_whole("core_length", asked, at_least=1) > num_layers:
        raise ValueError(f"core_length is {asked}, but the host has {num_layers} layers.")
    return asked


def _check_order(calls: Sequence[LayerCall], layers: Sequence[nn.Module]) -> None:
    places = {layer: place for place, layer in enumerate(layers)}
    order = [places[call.layer] for call in calls]
    if order != list(range(len(layers))):
        raise ValueError(f"{len(layers)} layers must run once each, in order; in a forward of the host ran {order}.")
    if any(call.again.cache is not None for call in calls):
        raise ValueError("The host's layers got a cache, which a layer that runs again would fill twice: turn it off.")
