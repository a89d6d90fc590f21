"""The Markdown tables of a comparison on text; what is not done shows as open."""

from collections.abc import Sequence

import numpy as np

from comparison import statistics
from comparison.collecting import Row, Table
from comparison.parts import Comparison
from comparison.statistics import Estimate

OPEN = "open"


def methods_table(comparison: Comparison, table: Table) -> str:
    """Each method's size, costs and losses, and how much of the headroom it recovers."""
    tokens = [f"{_tokens(comparison, budget) / 1e6:.3g} M tokens" for budget in comparison.protocol.budgets]
    head = ["method", "layout", "parameters", "FLOPs, forward", "FLOPs, training", "rate", *tokens]
    head += ["headroom recovered", "depth gain", f"less {comparison.baseline}", "at equal training FLOPs"]
    return _markdown(head, [_method(comparison, table, row) for row in table.rows.values()])


def _method(comparison: Comparison, table: Table, row: Row) -> list[str]:
    last, base = len(comparison.protocol.budgets) - 1, table.rows[comparison.baseline]
    some = row.longest[:1]
    sizes = [OPEN] * 4
    if some:
        [result] = some
        sizes = [result["layout"], f"{result['parameters']:,}", _times(row, base, _forward), _times(row, base, _spent)]
    losses = [_losses(row, table, number) for number in range(last + 1)]
    less = table.difference(row.name, comparison.baseline, last) if row.name != comparison.baseline else None
    return [
        row.label,
        *sizes,
        OPEN if row.rate is None else f"{row.rate:g}",
        *losses,
        _recovered(comparison, table, row),
        "" if some and len(some[0]["measured"]["exits"]) == 1 else in_words(table.depth_gain(row.name, last)),
        "" if row.name == comparison.baseline else in_words(less),
        _at_equal_flops(row, base),
    ]


def exits_table(table: Table) -> str:
    """The loss after each step at the longest budget done, mean over seeds."""
    loops = [row for row in table.rows.values() if row.longest and len(row.longest[0]["measured"]["exits"]) > 1]
    most = max((len(row.longest[0]["measured"]["exits"]) for row in loops), default=0)
    lines = []
    for row in loops:
        exits = np.mean([result["measured"]["exits"] for result in row.longest], axis=0)
        lines.append([row.label, *(f"{value:.4f}" for value in exits), *[""] * (most - len(exits))])
    return _markdown(["steps", *(str(step + 1) for step in range(most))], lines)


def trials_table(comparison: Comparison, table: Table) -> str:
    """Each method's trials of the learning rate: the best in bold, and whether it is the lowest or highest tried."""
    head = ["rate", *(f"{rate:g}" for rate in comparison.protocol.rates)]
    rows = [row for row in table.rows.values() if row.trials]
    return _markdown(head, [[row.label, *_trials(row)] for row in rows])


def pairs_table(comparison: Comparison, table: Table) -> str:
    """Differences that a claim would rest on, at each budget."""
    head = ["difference", *(f"{_tokens(comparison, budget) / 1e6:.3g} M" for budget in comparison.protocol.budgets)]
    lines = []
    for some, others in comparison.pairs:
        found = [table.difference(some, others, number) for number in range(len(comparison.protocol.budgets))]
        lines.append([f"{table.rows[some].label} less {table.rows[others].label}", *map(in_words, found)])
    return _markdown(head, lines)


def headroom(comparison: Comparison, table: Table, budget: int = -1) -> tuple[float, float | None] | None:
    """Loss of the stored blocks run once less that of the dense model, and how many spreads over seeds that is."""
    groups = [table.rows[name].budgets[budget] for name in (comparison.floor, comparison.baseline)]
    if not all(groups):
        return None
    room, spread = statistics.mean(groups[0]) - statistics.mean(groups[1]), table.spreads[budget]
    return room, None if not spread else room / spread


def in_words(estimate: Estimate | None) -> str:
    """With its standard error, in bold where it is claimed."""
    if estimate is None:
        return OPEN
    if estimate.error is None:
        return f"{estimate.value:+.4f} (one seed)"
    text = f"{estimate.value:+.4f} ± {estimate.error:.4f}"
    return f"**{text}**" if estimate.claimed else text


def _recovered(comparison: Comparison, table: Table, row: Row) -> str:
    room, group = headroom(comparison, table), row.budgets[-1]
    if room is None or not group:
        return OPEN
    return f"{(statistics.mean(table.rows[comparison.floor].budgets[-1]) - statistics.mean(group)) / room[0]:.0%}"


def _losses(row: Row, table: Table, number: int) -> str:
    group = row.budgets[number]
    if not group:
        return OPEN
    return f"{statistics.mean(group):.4f} ({len(group)} of {row.num_seeds} seeds)"


def _at_equal_flops(row: Row, base: Row) -> str:
    """The loss less that of the baseline trained for as many FLOPs."""
    if row is base:
        return ""
    if not row.budgets[-1]:
        return OPEN
    of_base = statistics.at_equal_flops(base.budgets, statistics.mean(row.budgets[-1], _spent))
    return "outside" if of_base is None else f"{statistics.mean(row.budgets[-1]) - of_base:+.4f}"


def _forward(result: statistics.Result) -> float:
    return result["flops_per_token"]


def _spent(result: statistics.Result) -> float:
    return result["training"]["flops"]


def _times(row: Row, base: Row, of) -> str:
    for mine, others in zip(reversed(row.budgets), reversed(base.budgets), strict=True):
        if mine and others:
            return f"{statistics.mean(mine, of) / statistics.mean(others, of):.2f} ×"
    return OPEN


def _trials(row: Row) -> list[str]:
    shown = {rate: _trial(loss) for rate, loss in row.trials.items()}
    if row.rate is not None:
        at_edge = row.rate in (min(shown), max(shown))
        shown[row.rate] = f"**{shown[row.rate]}**" + (" (edge)" if at_edge else "")
    return list(shown.values())


def _trial(value: float | None) -> str:
    return OPEN if value is None else "diverged" if value == float("inf") else f"{value:.4f}"


def _tokens(comparison: Comparison, budget: int) -> int:
    return budget * comparison.data.batch_tokens()


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"
