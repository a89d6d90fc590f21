"""The plot of all methods of a folder: how the loss fell, and what is left at each depth."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from plots import COLORS

from grafting.table import Row, rows


def draw(summaries: dict[str, dict[str, Any]], logs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Held-out loss while training, and after it by steps of the loop with the controls as lines, as a PNG."""
    colors, found = dict(zip(summaries, COLORS, strict=False)), rows(summaries)
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3}):
        figure = Figure(figsize=(11, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        for name, records in logs.items():
            looked = [record for record in records if "validation_loss" in record]
            tokens = summaries[name]["tokens"] / max(record["step"] for record in records)
            seen = [record["step"] * tokens for record in looked]
            left.plot(seen, [r["validation_loss"] for r in looked], color=colors[name], label=name, marker=".")
        _draw_depths(right, found, colors)
        left.set(title="While training", xlabel="tokens trained on", ylabel="held-out loss, some windows")
        right.set(title="Left after training", xlabel="steps of the loop", ylabel="held-out loss (nats per token)")
        for axes in (left, right):
            axes.legend(edgecolor="none", framealpha=0.9)
        figure.savefig(path, dpi=120)


def _draw_depths(axes: Axes, found: list[Row], colors: dict[str, str]) -> None:
    axes.axhline(found[0].losses.mean().item(), color="gray", linestyle=":", label="host")
    after = [row for row in found if row.trained]
    depths = [row for row in after if row.method == "graft"]
    for row in after:
        if row.method != "graft":
            axes.axhline(row.losses.mean().item(), color=colors[row.method], linestyle="--", label=row.method)
    if depths:
        steps = [row.num_steps for row in depths]
        axes.plot(steps, [row.losses.mean().item() for row in depths], color=colors["graft"], marker="o", label="graft")
        axes.set_xticks(steps)
