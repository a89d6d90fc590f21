"""The plot of a layer report."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recurrent_depth.hf.layer_table import LayerReport


def plot(report: LayerReport, path: Path) -> None:
    """Three panels: how far each layer moves the state, what it costs to skip or loop it, and to loop each window."""
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3}):
        figure = Figure(figsize=(13, 4), layout="constrained")
        moved, lost, looped = figure.subplots(1, 3)
        _draw_moves(moved, report)
        _draw_losses(lost, report)
        _draw_windows(looped, report)
        figure.savefig(path, dpi=150)


def _draw_moves(axes: Axes, report: LayerReport) -> None:
    places = [line.layer for line in report.layers]
    axes.plot(places, [line.influence for line in report.layers], marker="o", label="block influence")
    axes.plot(places, [line.angle for line in report.layers], marker="s", label="angle, half turns")
    _finish(axes, report, "How far a layer moves the state", "layer", "0: not at all")


def _draw_losses(axes: Axes, report: LayerReport) -> None:
    places = [line.layer for line in report.layers]
    axes.plot(places, [line.skipped for line in report.layers], marker="o", label="skipped")
    axes.plot(places, [line.looped for line in report.layers], marker="s", label=f"run {report.num_steps} times")
    _draw_own(axes, report)
    _finish(axes, report, "Loss with one layer changed", "layer", "loss (nats)")


def _draw_windows(axes: Axes, report: LayerReport) -> None:
    starts = [line.core.start for line in report.windows]
    axes.plot(starts, [line.looped for line in report.windows], marker="o", label=f"run {report.num_steps} times")
    _draw_own(axes, report)
    title = f"Loss with {len(report.suggested)} layers looped"
    _finish(axes, report, title, "first layer of the window", "loss (nats)")


def _draw_own(axes: Axes, report: LayerReport) -> None:
    axes.axhline(report.loss, color="gray", linestyle=":", label="as it is")


def _finish(axes: Axes, report: LayerReport, title: str, xlabel: str, ylabel: str) -> None:
    core = report.suggested
    axes.axvspan(core.start - 0.5, core.stop - 0.5, alpha=0.12, color="#588157", linewidth=0, label="suggested core")
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(edgecolor="none", framealpha=0.9)
