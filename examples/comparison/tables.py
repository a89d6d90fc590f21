"""The Markdown tables of a comparison on text; what is not done shows as open."""

from collections.abc import Sequence

import numpy as np

from comparison import statistics
from comparison.collecting import Row, Table
from comparison.parts import Comparison
from comparison.statistics import Estimate, Spread

OPEN = "open"


def methods_table(comparison: Comparison, table: Table) -> str:
    """Each method's size, costs and losses."""
    head = ["method", "layout", "parameters", "FLOPs, forward", "FLOPs, training", *_budgets(comparison)]
    return _markdown(head, [_method(comparison, table, row) for row in table.rows.values()])


def _method(comparison: Comparison, table: Table, row: Row) -> list[str]:
    base = table.rows[comparison.baseline]
    sizes = [OPEN] * 4
    if row.longest:
        result = row.longest[0]
        sizes = [
            result["layout"],
            f"{result['parameters']:,}",
            _times(row, base, _forward),
            _times(row, base, statistics.spent),
        ]
    return [row.label, *sizes, *(_losses(row, number) for number in range(len(row.budgets)))]


def baseline_table(comparison: Comparison, table: Table) -> str:
    """Each method beside the baseline: at equal tokens, at equal training FLOPs, and as a share of the headroom."""
    baseline, budgets = comparison.baseline, _budgets(comparison)
    head = ["method", *(f"at {each}" for each in budgets), "at equal training FLOPs"]
    head += [f"headroom recovered, {each}" for each in budgets]
    lines = []
    for row in _done(table):
        if row.name == baseline:
            continue
        less = [in_words(table.difference(row.name, baseline, number)) for number in range(len(budgets))]
        shares = [_recovered(comparison, table, row, number) for number in range(len(budgets))]
        lines.append([row.label, *less, _at_equal_flops(comparison, table, row), *shares])
    return _markdown(head, lines)


def depth_table(comparison: Comparison, table: Table) -> str:
    """The depth gain of each loop."""
    gains = {row.label: [table.depth_gain(row.name, n) for n in range(len(row.budgets))] for row in _loops(table)}
    lines = [[label, *map(in_words, found)] for label, found in gains.items()]
    return _markdown(["depth gain", *_budgets(comparison)], lines)


def exits_table(comparison: Comparison, table: Table) -> str:
    """The loss after each step at the longest budget done, mean over seeds; the longest first."""
    loops = sorted(_loops(table), key=lambda row: row.longest[0]["tokens"], reverse=True)
    most = max((len(row.longest[0]["measured"]["exits"]) for row in loops), default=0)
    lines = []
    for row in loops:
        exits = np.mean([result["measured"]["exits"] for result in row.longest], axis=0)
        values = [*(f"{value:.4f}" for value in exits), *[""] * (most - len(exits))]
        lines.append([row.label, _in_tokens(row.longest[0]["tokens"]) + left_out(row.lost), *values])
    return _markdown(["steps", "trained on", *(str(step + 1) for step in range(most))], lines)


def trials_table(comparison: Comparison, table: Table) -> str:
    """Each method's trials of the learning rate: the best in bold, and whether it is the lowest or highest tried."""
    rates = sorted(comparison.protocol.rates)
    shown = {row.label: _trials(row) for row in table.rows.values() if row.trials}
    lines = [[label, *(losses.get(rate, "") for rate in rates)] for label, losses in shown.items()]
    return _markdown(["rate", *(f"{rate:g}" for rate in rates)], lines)


def pairs_table(comparison: Comparison, table: Table) -> str:
    """Differences that a claim would rest on, at each budget."""
    head = ["difference", *_budgets(comparison)]
    lines = []
    for some, others in comparison.pairs:
        found = [table.difference(some, others, number) for number in range(len(comparison.protocol.budgets))]
        lines.append([f"{table.rows[some].label} less {table.rows[others].label}", *map(in_words, found)])
    return _markdown(head, lines)


def headroom_table(comparison: Comparison, table: Table) -> str:
    """Loss of the stored blocks run once less that of the dense model, and how many spreads over seeds that is."""
    rooms = [_headroom(comparison, table, number) for number in range(len(comparison.protocol.budgets))]
    times = [
        OPEN if room is None or spread is None or not spread.value else f"{room / spread.value:.1f} ×"
        for room, spread in zip(rooms, table.spreads, strict=True)
    ]
    lines = [
        ["headroom", *(_headroom_in_words(comparison, table, number) for number in range(len(rooms)))],
        [
            "spread of a loss beyond its method and seed",
            *(OPEN if spread is None else f"{spread.value:.4f} ({_freedom(spread)})" for spread in table.spreads),
        ],
        ["headroom over spread", *times],
    ]
    return _markdown(["", *_budgets(comparison)], lines)


def in_words(estimate: Estimate | None) -> str:
    """With its standard error, in bold where it is claimed."""
    if estimate is None:
        return OPEN
    if estimate.error is None:
        return f"{estimate.value:+.4f} (one seed)" + left_out(estimate.diverged)
    text = f"{estimate.value:+.4f} ± {estimate.error:.4f}"
    return (f"**{text}**" if estimate.claimed else text) + left_out(estimate.diverged)


def left_out(diverged: int) -> str:
    """Says that a number is one of survivors."""
    return f" ({diverged} diverged, left out)" if diverged else ""


def _freedom(spread: Spread) -> str:
    return f"{spread.freedom} degree{'s' if spread.freedom > 1 else ''} of freedom"


def _headroom(comparison: Comparison, table: Table, number: int) -> float | None:
    groups = [table.rows[name].budgets[number] for name in (comparison.floor, comparison.baseline)]
    if not all(groups):
        return None
    floor, base = map(statistics.mean, statistics.shared(*groups))
    return floor - base


def _headroom_in_words(comparison: Comparison, table: Table, number: int) -> str:
    room = _headroom(comparison, table, number)
    lost = table.diverged(number, comparison.floor, comparison.baseline)
    return OPEN if room is None else f"{room:.4f}" + left_out(lost)


def _recovered(comparison: Comparison, table: Table, row: Row, number: int) -> str:
    groups = [table.rows[name].budgets[number] for name in (comparison.floor, comparison.baseline, row.name)]
    if not all(groups):
        return OPEN
    floor, base, mine = map(statistics.mean, statistics.shared(*groups))
    share = f"{(floor - mine) / (floor - base):.0%}" if floor != base else "no headroom"
    return share + left_out(table.diverged(number, row.name, comparison.floor, comparison.baseline))


def _losses(row: Row, number: int) -> str:
    group, lost = row.budgets[number], row.diverged[number]
    also = f", {lost} diverged" if lost else ""
    if group:
        return f"{statistics.mean(group):.4f} ({len(group)} of {row.num_seeds}{also})"
    if lost and lost == row.num_seeds:
        return "diverged"
    return f"{OPEN} (0 of {row.num_seeds}{also})" if lost else OPEN


def _at_equal_flops(comparison: Comparison, table: Table, row: Row) -> str:
    """After the budget that it is of."""
    less = table.at_equal_flops(row.name, comparison.baseline)
    if less is None and not all(table.rows[comparison.baseline].budgets):
        return OPEN
    last = row.budgets.index(row.longest)
    return f"{_budgets(comparison)[last].removesuffix(' tokens')}: {'outside' if less is None else in_words(less)}"


def _forward(result: statistics.Result) -> float:
    return result["flops_per_token"]


def _times(row: Row, base: Row, of) -> str:
    for mine, others in zip(reversed(row.budgets), reversed(base.budgets), strict=True):
        if mine and others:
            return f"{statistics.mean(mine, of) / statistics.mean(others, of):.2f} ×"
    return OPEN


def _trials(row: Row) -> dict[float, str]:
    shown = {rate: _trial(loss) for rate, loss in row.trials.items()}
    if row.rate is not None:
        at_edge = row.rate in (min(shown), max(shown))
        shown[row.rate] = f"**{shown[row.rate]}**" + (" (edge)" if at_edge else "")
    return shown


def _trial(value: float | None) -> str:
    return OPEN if value is None else "diverged" if value == float("inf") else f"{value:.4f}"


def _done(table: Table) -> list[Row]:
    return [row for row in table.rows.values() if row.longest]


def _loops(table: Table) -> list[Row]:
    return [row for row in _done(table) if len(row.longest[0]["measured"]["exits"]) > 1]


def _budgets(comparison: Comparison) -> list[str]:
    return [_in_tokens(budget * comparison.data.batch_tokens()) for budget in comparison.protocol.budgets]


def _in_tokens(tokens: int) -> str:
    return f"{tokens / 1e6:.3g} M tokens"


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"
