"""The plot of a run: how the loss fell, and what each step of the loop adds."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLORS = ["#0b6e99", "#c8553d", "#588157", "#6d597a"]


def plot(metrics: dict[str, Any], logs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draws the losses over training, and the loss at every exit depth, as a PNG."""
    colors = dict(zip(metrics["models"], COLORS * 3, strict=False))
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3}):
        figure = Figure(figsize=(11, 4.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        for name, model in metrics["models"].items():
            _draw_training(left, model["label"], logs[name], colors[name])
            _draw_depth(right, model["label"], model["loss_by_depth"], colors[name])
        for axes in (left, right):
            if metrics["trigram_loss"] is not None:
                axes.axhline(metrics["trigram_loss"], color="gray", linestyle=":", label="trigram count")
            axes.set_ylabel(f"loss ({metrics['unit']})")
            axes.legend(edgecolor="none", framealpha=0.9)
        # The first steps fall from ln(vocabulary) within moments and would squeeze all else.
        left.set_ylim(top=max(max(losses[len(losses) // 20 :]) for losses in map(_losses, logs.values())))
        left.set(title="Training (thin) and held-out loss", xlabel="optimizer steps")
        right.set(title="Held-out loss by exit depth", xlabel="steps of the loop taken")
        figure.savefig(path, dpi=150)


def _losses(records: list[dict[str, Any]]) -> list[float]:
    return [record["loss"] for record in records if "loss" in record]


def _draw_training(axes: Axes, label: str, records: list[dict[str, Any]], color: str) -> None:
    taken = [record for record in records if "loss" in record]
    looked = [record for record in records if "validation_loss" in record]
    axes.plot([r["step"] for r in taken], [r["loss"] for r in taken], color=color, alpha=0.3, linewidth=0.7)
    losses = [r["validation_loss"] for r in looked]
    axes.plot([r["step"] for r in looked], losses, color=color, label=label, linewidth=2)


def _draw_depth(axes: Axes, label: str, losses: list[float], color: str) -> None:
    if len(losses) == 1:
        axes.axhline(losses[0], color=color, label=label, linewidth=2)
        return
    axes.plot(range(1, len(losses) + 1), losses, color=color, label=label, linewidth=2, marker="o")
    axes.set_xticks(range(1, len(losses) + 1))
