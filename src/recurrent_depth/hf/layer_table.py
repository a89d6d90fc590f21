"""What a layer report holds, and how it prints."""

from pathlib import Path
from typing import NamedTuple

from recurrent_depth.extras import require_extra


class LayerLine(NamedTuple):
    """What one layer does.

    Attributes:
        layer: its place in the host, from 0.
        influence: block influence: the mean over tokens of 1 - cos(state before, state behind); 0 changes nothing.
        angle: the mean angle between the two states, in half turns, 0 to 1.
        skipped: the host's loss without the layer, in nats.
        looped: the host's loss when the layer runs again, in nats.
    """

    layer: int
    influence: float
    angle: float
    skipped: float
    looped: float


class WindowLine(NamedTuple):
    """What consecutive layers do together.

    Attributes:
        core: their places, as `graft` takes them.
        angle: the mean angle between the states before and behind all of them, in half turns, 0 to 1.
        looped: the host's loss when they run again, one after the other, in nats.
    """

    core: range
    angle: float
    looped: float


class LayerReport(NamedTuple):
    """What `layer_report` found; prints as a table.

    Attributes:
        loss: the host's own, in nats.
        num_steps: how often looped layers ran in all.
        layers: a line for each layer.
        windows: a line for each run of as many consecutive layers as a core was to have.
    """

    loss: float
    num_steps: int
    layers: tuple[LayerLine, ...]
    windows: tuple[WindowLine, ...]

    @property
    def suggested(self) -> range:
        """A core to start with: the window that bears plain repetition best, of those with a layer on either side.

        Where the host is too short for a layer on either side, it is the best of all windows. What training makes of a
        core, no untrained forward can tell.
        """
        last = len(self.layers)
        inner = [line for line in self.windows if line.core.start > 0 and line.core.stop < last]
        return min(inner or self.windows, key=lambda line: line.looped).core

    def plot(self, path: str | Path) -> None:
        """Draws influence and losses of the layers, and the losses of looped windows, to a file.

        Raises:
            ModuleNotFoundError: without matplotlib, which the extra `train` brings.
        """
        require_extra("matplotlib", "train", "The plot of a layer report")
        from recurrent_depth.hf.layer_plot import plot

        plot(self, Path(path))

    def table(self) -> str:
        """One row for each layer, with the window that starts there."""
        windows = {line.core.start: line for line in self.windows}
        rows = [self._row(line, windows.get(line.layer)) for line in self.layers]
        header = _COLUMNS.format("layer", "influence", "angle", "skipped", "looped", "window", "angle", "looped")
        return "\n".join([header, "-" * len(header), *rows, self._legend()])

    def __str__(self) -> str:
        return self.table()

    __repr__ = __str__

    def _row(self, line: LayerLine, window: WindowLine | None) -> str:
        own = (line.layer, f"{line.influence:.4f}", f"{line.angle:.4f}", *map(self._added, (line.skipped, line.looped)))
        if window is None:
            return _COLUMNS.format(*own, "", "", "").rstrip()
        mark = " <" if window.core == self.suggested else ""
        return _COLUMNS.format(*own, _short(window.core), f"{window.angle:.4f}", self._added(window.looped)) + mark

    def _added(self, loss: float) -> str:
        return f"{loss - self.loss:+.4f}"

    def _legend(self) -> str:
        core = self.suggested
        return (
            f"loss of the host: {self.loss:.4f} nats.\nskipped, looped: what is added to it by layers left out or run "
            f"{self.num_steps} times.\nangle: in half turns. Suggested: core=range({core.start}, {core.stop})."
        )


_COLUMNS = "{:>5} {:>9} {:>7} {:>9} {:>9}   {:>8} {:>7} {:>9}"


def _short(core: range) -> str:
    return f"{core.start} to {core.stop - 1}"
