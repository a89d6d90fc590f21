"""How deep: the layout of a model and the depth of one forward."""

import numbers
from collections.abc import Iterable
from typing import NamedTuple

from recurrent_depth.arguments import optional_steps, require_whole


class _LayoutParts(NamedTuple):
    prelude: int
    core: int
    num_steps: int
    coda: int


class Layout(_LayoutParts):
    """Blocks before, inside and after the loop, and how often the loop runs; prints as `1+1×10+1`.

    `prelude` and `coda` may be 0 (the anchor is then the embedding); `core` and `num_steps` are at least 1.

    Raises:
        ValueError: if a part is no whole number or too small.
    """

    __slots__ = ()

    def __new__(cls, prelude: int, core: int, num_steps: int, coda: int) -> "Layout":
        return super().__new__(
            cls,
            require_whole("prelude", prelude, at_least=0),
            require_whole("core", core, at_least=1),
            require_whole("num_steps", num_steps, at_least=1),
            require_whole("coda", coda, at_least=0),
        )

    @classmethod
    def _make(cls, iterable: Iterable[int]) -> "Layout":  # pyright: ignore[reportIncompatibleMethodOverride]
        # NamedTuple's own builds around __new__, and _replace calls it: the checks would be skipped.
        return cls(*iterable)

    @property
    def stored(self) -> int:
        """Blocks that have weights of their own."""
        return self.prelude + self.core + self.coda

    @property
    def executed(self) -> int:
        """Blocks that one forward at full depth runs."""
        return self.prelude + self.core * self.num_steps + self.coda

    def __str__(self) -> str:
        return f"{self.prelude}+{self.core}×{self.num_steps}+{self.coda}"


class Depth(NamedTuple):
    """How many steps one forward takes, and how many of them learn.

    `grad_steps`: the last so many steps are differentiated, counted back from each row's own end; None is all of
    them. `rows`: the depth of each row of the batch; row i takes steps 0 to `rows[i] - 1` and leaves. `num_steps` is
    then their maximum. `as_depth` checks all this.
    """

    num_steps: int
    grad_steps: int | None = None
    rows: tuple[int, ...] | None = None


def as_depth(value: object, *, batch: int | None = None) -> Depth:
    """Reads what a caller gives as `num_steps`: a number of steps, a `Depth`, or a number of steps for each row.

    Raises:
        ValueError: for everything else: 0, negative or fractional steps, a string, a bool, rows that are empty or not
            as many as `batch`, and a `Depth` whose parts contradict each other.
    """
    if isinstance(value, Depth):
        return _checked(value, batch)
    if isinstance(value, numbers.Integral):
        return Depth(require_whole("num_steps", value, at_least=1))
    if isinstance(value, list | tuple | range) and not isinstance(value, Layout):
        rows = _checked_rows("num_steps", value, batch)
        return Depth(max(rows), rows=rows)
    raise ValueError(
        f"num_steps is {value!r}, but must be a whole number of at least 1, a Depth, or a list, one per row"
        f"{_hint(value)}."
    )


def _hint(value: object) -> str:
    if callable(value):
        return ": a sampler is called for its depth, sampler(draw), with the number of the training step"
    if callable(getattr(value, "tolist", None)):
        return ": of a tensor or an array give .tolist()"
    return ""


def _checked(depth: Depth, batch: int | None) -> Depth:
    num_steps = require_whole("num_steps", depth.num_steps, at_least=1)
    grad_steps = optional_steps("grad_steps", depth.grad_steps)
    rows = None if depth.rows is None else _checked_rows("rows", depth.rows, batch)
    if rows is not None and num_steps != max(rows):
        raise ValueError(f"num_steps is {num_steps}, but must be the largest of rows, {max(rows)}.")
    return Depth(num_steps, grad_steps, rows)


def _checked_rows(name: str, rows: object, batch: int | None) -> tuple[int, ...]:
    if not isinstance(rows, list | tuple | range):
        raise ValueError(f"{name} is {rows!r}, but must be a list or tuple with one whole number per row.")
    if len(rows) == 0 or (batch is not None and len(rows) != batch):
        wanted = "at least one row" if batch is None else f"one for each of the {batch} rows of the batch"
        raise ValueError(f"{name} holds {len(rows)} depths, {rows!r}, but must hold {wanted}.")
    return tuple(require_whole(f"{name}[{i}]", steps, at_least=1) for i, steps in enumerate(rows))
