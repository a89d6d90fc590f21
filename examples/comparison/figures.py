"""The plots of a comparison on text."""

from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from plots import COLORS

from comparison.collecting import Row, Table
from comparison.parts import Comparison
from comparison.statistics import mean

STYLE = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3}
MARKERS = "osD^vPX<>*"


def draw(comparison: Comparison, table: Table, folder: Path) -> None:
    """Loss against training FLOPs, against parameters, by exit; and the ablations as bars."""
    rows = [row for row in table.rows.values() if row.longest]
    plots: dict[str, Callable[[Axes, list[Row]], None]] = {
        "training-flops": _against_flops,
        "parameters": _against_parameters,
        "exits": _by_exit,
        "ablations": lambda axes, rows: _bars(axes, rows, comparison, table),
    }
    for name, plot in plots.items():
        with mpl.rc_context(STYLE):
            figure = Figure(figsize=(8.5, 5.2), layout="constrained")
            axes = figure.subplots()
            plot(axes, rows)
            figure.savefig(folder / f"{name}.png", dpi=130)


def _against_flops(axes: Axes, rows: list[Row]) -> None:
    for number, row in enumerate(rows):
        done = [group for group in row.budgets if group]
        flops = [mean(group, lambda result: result["training"]["flops"]) for group in done]
        axes.plot(flops, [mean(group) for group in done], label=row.label, **_look(number))
    axes.set(xscale="log", xlabel="training FLOPs, as executed", title="One line a method, one point a budget")
    _finish(axes)


def _against_parameters(axes: Axes, rows: list[Row]) -> None:
    for number, row in enumerate(rows):
        axes.plot([row.longest[0]["parameters"]], [mean(row.longest)], label=row.label, **_look(number))
    axes.set(xscale="log", xlabel="parameters", title="Longest budget done")
    _finish(axes)


def _by_exit(axes: Axes, rows: list[Row]) -> None:
    for number, row in enumerate(rows):
        exits = row.longest[0]["measured"]["exits"]
        if len(exits) == 1:
            axes.axhline(exits[0], color=_look(number)["color"], linestyle=":", label=row.label)
        else:
            axes.plot(range(1, len(exits) + 1), exits, label=row.label, **_look(number))
    axes.set(xlabel="steps of the loop taken", title="Loss by exit, first seed")
    best = min((mean(row.longest) for row in rows), default=1.0)
    axes.set_ylim(best * 0.985, best * 1.3)
    _finish(axes)


def _bars(axes: Axes, rows: list[Row], comparison: Comparison, table: Table) -> None:
    rows = [row for row in rows if row.name != comparison.baseline]
    budgets, thick = comparison.protocol.budgets, 0.8 / len(comparison.protocol.budgets)
    for number, budget in enumerate(budgets):
        found = [(at, table.difference(row.name, comparison.baseline, number)) for at, row in enumerate(rows)]
        done = [(at + (number - (len(budgets) - 1) / 2) * thick, less) for at, less in found if less is not None]
        axes.barh(
            [at for at, _ in done],
            [less.value for _, less in done],
            height=thick,
            xerr=[2 * (less.error or 0.0) for _, less in done],
            color=COLORS[number],
            label=f"{budget * comparison.data.batch_tokens() / 1e6:.3g} M tokens",
        )
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.invert_yaxis()
    axes.legend(edgecolor="none")
    axes.set(xlabel="bits per byte more than the dense model; bars of error are two standard errors")


def _look(number: int) -> dict[str, str]:
    return {"color": COLORS[number % len(COLORS)], "marker": MARKERS[number // len(COLORS) % len(MARKERS)]}


def _finish(axes: Axes) -> None:
    axes.set_ylabel("held-out loss (bits per byte)")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small", edgecolor="none", loc="center left", bbox_to_anchor=(1, 0.5))
