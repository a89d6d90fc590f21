"""The plots of a comparison on text."""

import io
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

from comparison.collecting import Row, Table
from comparison.parts import Comparison
from comparison.statistics import Estimate, Result, errors_needed, mean

STYLE = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3}
COLORS = ["#0b6e99", "#c8553d", "#588157", "#6d597a", "#d99a00", "#17a398", "#8c5e3c", "#c2185b", "#5f6b73"]
MARKERS = "osD^vPX<>*"
LINES = ["-", "--", ":", "-."]
FILLS = ["full", "none", "left", "top"]
SCORE = "held-out loss (bits per byte)"


def look(number: int) -> dict[str, Any]:
    """Colour, marker and line of the method of this number: no two of ninety are alike, nor neighbours in colour."""
    color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
    return {"color": color, "marker": marker, "linestyle": LINES[number // len(COLORS) % len(LINES)]}


def mark(number: int) -> dict[str, Any]:
    """Marker and its filling, where colours say something else: no two of forty are alike."""
    return {"marker": MARKERS[number % len(MARKERS)], "fillstyle": FILLS[number // len(MARKERS) % len(FILLS)]}


def draw(comparison: Comparison, table: Table) -> dict[str, bytes]:
    """PNGs by their names."""
    return {f"{name}.png": as_png(figure) for name, figure in drawn(comparison, table).items()}


def as_png(figure: Figure) -> bytes:
    """What a file of it holds."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=130)
    return file.getvalue()


def drawn(comparison: Comparison, table: Table) -> dict[str, Figure]:
    """Loss against training FLOPs, against parameters, by exit; and what each method has more than the baseline."""
    rows = [row for row in table.rows.values() if row.longest]
    batch = comparison.data.batch_tokens()
    budgets = [f"{budget * batch / 1e6:.3g} M tokens" for budget in comparison.protocol.budgets]
    with mpl.rc_context(STYLE):
        return {
            "training-flops": _against_flops(rows),
            "parameters": _against_parameters(rows, budgets),
            "exits": _by_exit(comparison, rows, budgets),
            "ablations": _differences(comparison, table, rows, budgets),
        }


def _against_flops(rows: list[Row]) -> Figure:
    figure, [axes] = _figure(rows)
    for number, row in enumerate(rows):
        done = [group for group in row.budgets if group]
        flops = [mean(group, lambda result: result["training"]["flops"]) for group in done]
        axes.plot(flops, [mean(group) for group in done], label=row.label, **look(number))
    _leave_out_far(axes, rows)
    axes.set(xlabel="training FLOPs, as executed", title="One line a method, one point a budget", ylabel=SCORE)
    _logarithmic(axes)
    _legend(axes, axes.get_legend_handles_labels()[0])
    return figure


def _against_parameters(rows: list[Row], budgets: list[str]) -> Figure:
    figure, [axes] = _figure(rows)
    for number, row in enumerate(rows):
        for color, group in zip(_colors(budgets), row.budgets, strict=True):
            if group:
                axes.plot([group[0]["parameters"]], [mean(group)], color=color, linestyle="", **mark(number))
    _leave_out_far(axes, rows)
    axes.set(xlabel="parameters", title="One colour a budget, one point a method", ylabel=SCORE)
    _logarithmic(axes)
    colors = zip(_colors(budgets), budgets, strict=True)
    methods = [_key(row.label, color="gray", **mark(number)) for number, row in enumerate(rows)]
    _legend(axes, [*(_key(budget, color=color, marker="s") for color, budget in colors), *methods])
    return figure


def _by_exit(comparison: Comparison, rows: list[Row], budgets: list[str]) -> Figure:
    """A panel for each budget, so that no two budgets are compared; beside it one of variants, which take another's."""
    done = [number for number in range(len(budgets)) if any(row.budgets[number] for row in rows)]
    measures = {comparison.baseline, comparison.floor}
    varied = [comparison.methods[row.name].rate_of is not None for row in rows]
    kinds = [kind for kind in (False, True) if kind in varied]
    figure = Figure(figsize=(5 * len(kinds) + 3.5, max(1, len(done)) * 4.2 + 0.1 * len(rows)), layout="constrained")
    panels = figure.subplots(max(1, len(done)), max(1, len(kinds)), squeeze=False)
    for beside, number in zip(panels, done, strict=False):
        for axes, kind in zip(beside, kinds, strict=True):
            shown = [at for at, row in enumerate(rows) if varied[at] == kind or row.name in measures]
            groups = {at: rows[at].budgets[number] for at in shown if rows[at].budgets[number]}
            axes.set(title=f"{'variants' if kind else 'methods'}, {budgets[number]}", ylabel=SCORE)
            if groups:
                _exits(axes, {at: _mean_exits(group) for at, group in groups.items()})
    keys = [_key(row.label, **look(number)) for number, row in enumerate(rows)]
    figure.legend(handles=keys, fontsize="small", edgecolor="none", loc="outside lower left", ncols=3)
    return figure


def _exits(axes: Axes, curves: dict[int, Sequence[float]]) -> None:
    most = max(map(len, curves.values()))
    for number, exits in curves.items():
        if len(exits) == 1:  # without a loop: the same from end to end
            axes.plot([1, most], [exits[0]] * 2, **look(number))
        else:
            axes.plot(range(1, len(exits) + 1), exits, **look(number))
    best, worst = min(exits[-1] for exits in curves.values()), max(max(exits) for exits in curves.values())
    axes.set(xlabel="steps of the loop taken", ylim=(best * 0.985, min(best * 1.3, worst * 1.015)))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _mean_exits(group: list[Result]) -> Sequence[float]:
    return np.mean([result["measured"]["exits"] for result in group], axis=0).tolist()


def _differences(comparison: Comparison, table: Table, rows: list[Row], budgets: list[str]) -> Figure:
    figure, [axes] = _figure(rows)
    base, numbers = comparison.baseline, range(len(budgets))
    found = {row.name: [table.difference(row.name, base, n) for n in numbers] for row in rows if row.name != base}
    shown = {name: each for name, each in found.items() if any(each)}
    for at, each in enumerate(shown.values()):
        for number, (color, more) in enumerate(zip(_colors(budgets), each, strict=True)):
            if more is not None:
                _difference(axes, more, at + (number - (len(budgets) - 1) / 2) * 0.5 / len(budgets), color)
    axes.axvline(0, color="gray")
    axes.set_yticks(range(len(shown)), [table.rows[name].label for name in shown])
    axes.set_ylim(max(1, len(shown)) - 0.5, -0.5)
    label = comparison.methods[base].label
    axes.set_xlabel(f"bits per byte more than {label}, at as many tokens; a line that crosses 0 claims nothing")
    most = _most([more.value for each in shown.values() for more in each if more is not None])
    if most is not None:
        axes.set_xlim(-0.15 * most, most)
        beyond = [(at, more) for at, each in enumerate(shown.values()) for more in each if more and more.value > most]
        for at, more in beyond:
            axes.annotate(f"{more.value:.2f} \u2192", (most, at), ha="right", va="center")
    filled = [_key(budget, color=color, marker="o") for color, budget in zip(_colors(budgets), budgets, strict=True)]
    _legend(axes, [*filled, _key("open: one seed, no error known", color="gray", marker="o", fillstyle="none")])
    return figure


def _difference(axes: Axes, more: Estimate, at: float, color: str) -> None:
    if more.error is None:
        axes.plot([more.value], [at], "o", color=color, fillstyle="none")
    else:
        axes.errorbar([more.value], [at], xerr=[errors_needed(more.freedom) * more.error], fmt="o", color=color)


def _leave_out_far(axes: Axes, rows: list[Row]) -> None:
    """Ends the vertical axis below losses far above all others, and says which they are."""
    losses = [(mean(group), row.label) for row in rows for group in row.budgets if group]
    most = _most([loss for loss, _ in losses])
    if most is not None:
        axes.set_ylim(min(losses)[0] - 0.1 * (most - min(losses)[0]), most)
        beyond = "\n".join(f"{label}: {loss:.2f} \u2191" for loss, label in losses if loss > most)
        axes.annotate(beyond, (0.5, 0.99), xycoords="axes fraction", ha="center", va="top")


def _most(values: Sequence[float]) -> float | None:
    """Where an axis ends if some values are far above the others; None where none is."""
    low, middle = min(values, default=0.0), float(np.median(values)) if values else 0.0
    near = [value for value in values if value <= middle + 4 * (middle - low)]
    return None if len(near) == len(values) else max(near) + 0.15 * (max(near) - low)


def _figure(rows: list[Row], num_panels: int = 1) -> tuple[Figure, list[Axes]]:
    """Panels below each other; tall enough for a legend, or an axis, that names all rows."""
    panels = max(1, num_panels)
    figure = Figure(figsize=(8.5, max(5.2, 4.2 * panels, 1 + 0.22 * len(rows))), layout="constrained")
    return figure, list(figure.subplots(panels, 1, squeeze=False)[:, 0])


def _logarithmic(axes: Axes) -> None:
    """With as many numbers as have room."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 4, 6)))
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())


def _colors(budgets: list[str]) -> list[str]:
    return [COLORS[number % len(COLORS)] for number in range(len(budgets))]


def _key(label: str, **looks: Any) -> Line2D:
    return Line2D([], [], label=label, **{"linestyle": "", **looks})


def _legend(axes: Axes, keys: Sequence[Any]) -> None:
    """Beside the axes, where it covers nothing."""
    if keys:
        axes.legend(handles=keys, fontsize="small", edgecolor="none", loc="upper left", bbox_to_anchor=(1, 1))
