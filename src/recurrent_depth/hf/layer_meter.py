"""Measures what a host's layers do, over all that it reads."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from tqdm import tqdm

from recurrent_depth.hf.host_inputs import Batch, HostInputs, Mean, real, run
from recurrent_depth.hf.layer_probe import Change, LayerCall, replayed, watched, write_aside

Losses = Callable[[Any, Batch], Float[Tensor, " item"]]
"""Makes the losses of all that counts, in nats, of a host's output and its inputs."""


class Probe(NamedTuple):
    """A forward of the host in which the state behind some of its layers is another one."""

    span: range
    change: Change


class Moves(NamedTuple):
    """How far layers move the state."""

    influence: float
    angle: float


class Measured(NamedTuple):
    """The host's own loss, what each run of layers does to the state, and the loss of each probe."""

    loss: float
    moves: dict[range, Moves]
    losses: dict[Probe, float]


class LayerMeter(NamedTuple):
    """A host, what it reads, its layers, and what its losses are."""

    model: nn.Module
    inputs: HostInputs
    layers: list[nn.Module]
    losses: Losses

    def measure(self, spans: Sequence[range], probes: Iterable[Probe], *, progress: bool) -> Measured:
        """All of it, batch by batch: the layers up to a probe's run once for all probes, where they can."""
        loss, moves = Mean(), {span: (Mean(), Mean()) for span in spans}
        losses = {probe: Mean() for probe in probes}
        with _bar(self.inputs.num_batches * (1 + len(losses)), progress) as bar:
            for batch in self.inputs.batches():
                calls = self._look(batch, loss)
                bar.update()
                for span, means in moves.items():
                    _add_moves(means, batch, calls[span.start : span.stop])
                for probe, mean in losses.items():
                    mean.add(self._changed(batch, calls, probe))
                    bar.update()
        return Measured(
            loss.value,
            {span: Moves(influence.value, angle.value) for span, (influence, angle) in moves.items()},
            {probe: mean.value for probe, mean in losses.items()},
        )

    def _look(self, batch: Batch, loss: Mean) -> list[LayerCall]:
        with watched(self.layers) as calls:
            loss.add(self.losses(run(self.model, batch), batch))
        _check_order(calls, self.layers)
        return calls

    def _changed(self, batch: Batch, calls: Sequence[LayerCall], probe: Probe) -> Tensor:
        first, end = probe.span.start, probe.span.stop
        if write_aside(calls):
            changed = watched(self.layers[first:end], probe.change)
        else:
            changed = replayed(calls[:end], probe.change(calls[first:end]))
        with changed:
            return self.losses(run(self.model, batch), batch)


def block_influence(before: Float[Tensor, "token dim"], after: Float[Tensor, "token dim"]) -> Float[Tensor, " token"]:
    """`1 - cos(before, after)` as half the squared distance of unit vectors, which is 0 where nothing changes."""
    first, second = _unit(before), _unit(after)
    return (first - second).square().sum(-1) / 2


def angular_distance(before: Float[Tensor, "token dim"], after: Float[Tensor, "token dim"]) -> Float[Tensor, " token"]:
    """`arccos(cos(before, after)) / pi`, by a formula that keeps small angles: `2 atan2(|u - v|, |u + v|) / pi`."""
    first, second = _unit(before), _unit(after)
    return 2 / torch.pi * torch.atan2((first - second).norm(dim=-1), (first + second).norm(dim=-1))


def _add_moves(means: tuple[Mean, Mean], batch: Batch, calls: Sequence[LayerCall]) -> None:
    before, after = real(batch, calls[0].before), real(batch, calls[-1].after)
    means[0].add(block_influence(before, after))
    means[1].add(angular_distance(before, after))


def _bar(total: int, progress: bool) -> tqdm:
    # None: no bar where standard error is no terminal.
    return tqdm(total=total, desc="layer report", unit="forward", leave=False, disable=None if progress else True)


def _unit(h: Tensor) -> Tensor:
    return F.normalize(h.float(), dim=-1)


def _check_order(calls: Sequence[LayerCall], layers: Sequence[nn.Module]) -> None:
    places = {layer: place for place, layer in enumerate(layers)}
    order = [places[call.layer] for call in calls]
    if order != list(range(len(layers))):
        raise ValueError(f"{len(layers)} layers must run once each, in order; in a forward of the host ran {order}.")
    if any(call.again.cache is not None for call in calls):
        raise ValueError("The host's layers got a cache, which a layer that runs again would fill twice: turn it off.")
