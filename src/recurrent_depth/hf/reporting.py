"""Which layers of a pretrained model bear being looped: what each one does, and what it costs to skip or repeat it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from recurrent_depth.arguments import require_whole
from recurrent_depth.hf.grafting import is_graft
from recurrent_depth.hf.host_inputs import HostInputs, next_token_losses, require_decoder, require_model
from recurrent_depth.hf.host_layers import find_layers
from recurrent_depth.hf.layer_meter import LayerMeter, Losses, Probe
from recurrent_depth.hf.layer_probe import Loop, evaluating, skip
from recurrent_depth.hf.layer_table import LayerLine, LayerReport, WindowLine


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
    progress: bool = True,
) -> LayerReport:
    """Measures, without training, what each layer of a host does, and suggests a core for `graft`.

    Block influence and the angular distance compare the states before and behind a layer, over all real tokens. Losses
    are those of whole forwards in which layers are left out, or run again with the arguments that they had: the plain
    repetition, which is hardest on a pretrained model. The host is in evaluation mode meanwhile, and afterwards what it
    was before.

    What it costs: for L layers, windows of W > 1 and R steps the embedding, the head and the losses run 3 L - W + 2
    times. Layers in front of a change are not run again, so that layers run as often as in

        L + R - 1 + (L - W + 1) ((L - W) / 2 + (R - 1) W) / L

    forwards: 45 for 30 layers, windows of 10 and 2 steps. Where layers write for later ones to read, as gemma4's do
    with keys and values, all run each time. Of `batch_size` rows the states behind all layers are kept.

    Args:
        model: the host, without a graft.
        tokens: what it reads: token ids (or pixels), or a dictionary of what its forward takes.
        mask: 1 or True at real tokens; padding counts nowhere. In a dictionary it is called `attention_mask`.
        core_length: how many layers a window has; by default a third of the host's.
        num_steps: how often looped layers run in all.
        layers: the host's layers or their dotted name, where they are not found by themselves.
        batch_size: how many rows are read at once, by default all. It changes the memory taken, not the outcome.
        losses: makes the losses of all that counts, in nats, of the host's output and its inputs for these rows;
            the report takes their mean. By default the losses of the next tokens, which only a decoder has.
        progress: whether a bar shows it, on standard error, if that is a terminal.

    Raises:
        ValueError: if `model` is no module, or a graft; tokens are neither a tensor of ids of the vocabulary, (batch,
            token), nor a dictionary; there is nothing to read; the layers are not found, or do not run once each and in
            order, without a cache; `core_length` or `num_steps` does not fit; the host has no next tokens and there is
            no `losses`.

    Reference: block influence is that of Men et al., 2024, arXiv 2403.03853; the angular distance that of Gromov et
    al., 2024, arXiv 2403.17887, who take it at the last token alone.
    """
    require_model(model)
    if any(is_graft(part) for part in model.modules()):
        raise ValueError("model has a graft; the report is on hosts without one: ungraft(model) first.")
    inputs = HostInputs.of(model, tokens, mask, batch_size)
    found = list(find_layers(model, layers))
    length = _core_length(core_length, len(found))
    loop = Loop(require_whole("num_steps", num_steps, at_least=2))
    if losses is None:
        require_decoder(model, inputs.by_name)
    meter = LayerMeter(model, inputs, found, losses or next_token_losses)
    singles, windows = _spans(1, len(found)), _spans(length, len(found))
    probes = [Probe(span, skip) for span in singles] + [Probe(span, loop) for span in (*singles, *windows)]
    with torch.no_grad(), evaluating(model):
        loss, moves, lost = meter.measure([*singles, *windows], probes, progress=progress)
    lines = tuple(
        LayerLine(span.start, *moves[span], skipped=lost[Probe(span, skip)], looped=lost[Probe(span, loop)])
        for span in singles
    )
    groups = tuple(WindowLine(span, moves[span].angle, lost[Probe(span, loop)]) for span in windows)
    return LayerReport(loss, num_steps, lines, groups)


def _spans(length: int, num_layers: int) -> list[range]:
    return [range(first, first + length) for first in range(num_layers - length + 1)]


def _core_length(asked: int | None, num_layers: int) -> int:
    if asked is None:
        return max(1, round(num_layers / 3))
    if require_whole("core_length", asked, at_least=1) > num_layers:
        raise ValueError(f"core_length is {asked}, but the host has {num_layers} layers.")
    return asked
