"""What layouts cost beside a dense model, as numbers and as a table."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from recurrent_depth.accounting import Counting, Outline, flops, flops_breakdown, training_flops
from recurrent_depth.arguments import require_whole
from recurrent_depth.depth import Layout
from recurrent_depth.sampling import FixedDepth, UniformDepth


class LayoutCost(NamedTuple):
    """What a layout costs, beside a dense model of the same width.

    Attributes:
        layout: the layout.
        num_parameters: its parameters, those of recurrence and embeddings included.
        parameters_ratio: the same over those of the dense model.
        flops: FLOPs of one forward of one sequence at full depth.
        compute: the compute multiple: the same over those of the dense model.
        overhead: what projection and gate spend, as a share of all else.
        training: FLOPs of training under even depths from 1 to the layout's, over those of training the dense model.
    """

    layout: Layout
    num_parameters: int
    parameters_ratio: float
    flops: int
    compute: float
    overhead: float
    training: float


class LayoutCosts:
    """The layouts that a search found, closest first; prints as a table.

    Args:
        dense: the dense model's outline.
        found: the outlines of the layouts, closest first.
        tokens: the length of the sequence that is counted.
        counting: the convention of the FLOPs.
        within: how far off a layout was allowed to be, as a share; said where nothing was found.
    """

    def __init__(
        self, dense: Outline, found: Sequence[Outline], *, tokens: int, counting: Counting, within: float | int
    ):
        self.dense, self.found, self.tokens, self.counting, self.within = dense, found, tokens, counting, within

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts alone."""
        return tuple(of.layout for of in self.found)

    def __len__(self) -> int:
        return len(self.found)

    def __iter__(self) -> Iterator[LayoutCost]:
        return (self.cost(of) for of in self.found)

    def cost(self, of: Outline) -> LayoutCost:
        """The costs of one outline beside the dense model's."""
        parts = flops_breakdown(of, self.tokens, counting=self.counting)
        dense_training = training_flops(self.dense, FixedDepth(1), self.tokens, counting=self.counting)
        training = training_flops(of, UniformDepth(of.layout.num_steps), self.tokens, counting=self.counting)
        return LayoutCost(
            layout=of.layout,
            num_parameters=of.num_parameters,
            parameters_ratio=of.num_parameters / self.dense.num_parameters,
            flops=parts.total,
            compute=parts.total / flops(self.dense, self.tokens, counting=self.counting),
            overhead=parts.overhead,
            training=training / dense_training,
        )

    def table(self, num_rows: int = 20) -> str:
        """The dense model and the closest layouts, with one row for all that only split prelude and coda otherwise.

        Raises:
            ValueError: if `num_rows` is below 1.
        """
        require_whole("num_rows", num_rows, at_least=1)
        splits: dict[tuple[int, int, int], list[Outline]] = {}
        for of in self.found:
            prelude, core, num_steps, coda = of.layout
            splits.setdefault((prelude + coda, core, num_steps), []).append(of)
        closest = list(splits.values())[:num_rows]
        rows = [_row(str(same[0].layout), str(len(same)), self.cost(same[0])) for same in closest]
        dense = _row("dense", "", self.cost(self.dense))
        legend = self._legend(len(rows), len(splits)) if rows else self._nothing()
        return "\n".join([_HEADER, "-" * len(_HEADER), dense, *rows, legend])

    def __str__(self) -> str:
        return self.table()

    __repr__ = __str__

    def _legend(self, num_rows: int, num_groups: int) -> str:
        head = "included" if self.counting.head else "left out"
        return (
            f"{num_rows} of {num_groups} rows, {len(self)} layouts in all. splits: ways to divide the "
            "same blocks over prelude\nand coda; the most even is shown. × is over the dense model. "
            f"FLOPs of one forward of {self.tokens:,} tokens, head {head}.\n"
            "overhead: projection and gate over all else. training: under even depths from 1 to the layout's."
        )

    def _nothing(self) -> str:
        return (
            f"nothing within {100 * self.within:g}% of the dense model. Try a larger `within`, smaller `min_prelude` "
            "and `min_coda`,\na larger `max_steps`, or another `match`: executed blocks, where the width is small."
        )


_COLUMNS = "{:<12} {:>6} {:>6} {:>8}  {:>10} {:>7}  {:>9} {:>7}  {:>8}  {:>8}"
_HEADER = _COLUMNS.format(
    "layout", "splits", "stored", "executed", "parameters", "×", "FLOPs", "×", "overhead", "training"
)


def _row(name: str, splits: str, cost: LayoutCost) -> str:
    return _COLUMNS.format(
        name,
        splits,
        cost.layout.stored,
        cost.layout.executed,
        _short(cost.num_parameters, "kM"),
        f"{cost.parameters_ratio:.2f} ×",
        _short(cost.flops, "kMG"),
        f"{cost.compute:.2f} ×",
        f"{cost.overhead:.1%}",
        f"{cost.training:.2f} ×",
    )


def _short(value: int, units: str) -> str:
    """In the largest of the units (k, M, ...: powers of a thousand) that leaves a digit before the point."""
    power = min(max(1, (len(str(value)) - 1) // 3), len(units))
    return f"{value / 1000**power:.1f} {units[power - 1]}"
