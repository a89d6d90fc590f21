"""The plot of a run: how the loss fell, and what each step of the loop adds."""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes

matplotlib.use("Agg")  # a file, no window
import matplotlib.pyplot as plt  # noqa: E402

COLORS = ["#0b6e99", "#c8553d", "#588157", "#6d597a"]


def plot(metrics: dict[str, Any], logs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draws the losses over training, and the loss at every exit depth, as a PNG."""
    colors = dict(zip(metrics["models"], COLORS * 3, strict=False))
    with plt.rc_context({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3}):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
        for name, records in logs.items():
            _draw_training(left, _label(name, metrics), records, colors[name])
        for name, model in metrics["models"].items():
            _draw_depth(right, _label(name, metrics), model["loss_by_depth"], colors[name])
        for axes in (left, right):
            if metrics["trigram_loss"] is not None:
                axes.axhline(metrics["trigram_loss"], color="gray", linestyle=":", label="trigram count")
            axes.set_ylabel(f"loss ({metrics['unit']})")
            axes.legend(frameon=False)
        left.set(title="Training", xlabel="optimizer steps")
        right.set(title="Held-out loss by exit depth", xlabel="steps of the loop taken")
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _label(name: str, metrics: dict[str, Any]) -> str:
    return f"{name} {metrics['models'][name]['layout']}"


def _draw_training(axes: Axes, label: str, records: list[dict[str, Any]], color: str) -> None:
    taken = [record for record in records if "loss" in record]
    looked = [record for record in records if "validation_loss" in record]
    axes.plot([r["step"] for r in taken], [r["loss"] for r in taken], color=color, alpha=0.25, linewidth=0.7)
    label = f"{label}, held out"
    axes.plot([r["step"] for r in looked], [r["validation_loss"] for r in looked], color=color, label=label, linewidth=2)
    # The first steps fall from ln(vocabulary) within moments and would squeeze all else.
    later = [r["loss"] for r in taken[len(taken) // 20 :]] or [1.0]
    axes.set_ylim(top=max(max(later) * 1.02, axes.get_ylim()[0] + 0.1), bottom=None)


def _draw_depth(axes: Axes, label: str, losses: list[float], color: str) -> None:
    if len(losses) == 1:
        axes.axhline(losses[0], color=color, label=label, linewidth=2)
        return
    axes.plot(range(1, len(losses) + 1), losses, color=color, label=label, linewidth=2, marker="o")
    axes.set_xticks(range(1, len(losses) + 1))
