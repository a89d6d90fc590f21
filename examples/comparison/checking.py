"""What a file of cells may ask for."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from comparison.parts import Comparison, Full, Protocol
from recurrent_depth.arguments import require_whole


def check(comparison: Comparison) -> None:
    """Refuses what no run could make sense of.

    Raises:
        ValueError: if budgets don't ascend or leave the trunk no step, a number of the protocol is out of its range, or
            a name is that of no method.
    """
    _check_budgets(comparison.protocol)
    _check_numbers(comparison.protocol)
    if comparison.baseline == comparison.floor:
        raise ValueError(
            f"baseline and floor are both {comparison.floor!r}, but must be two: the headroom lies between them."
        )
    for place, name in _names(comparison):
        if name not in comparison.methods:
            raise ValueError(f"{place} names {name!r}, but the methods are {', '.join(comparison.methods)}.")
    _check_plan(comparison)


def check_methods(comparison: Comparison) -> None:
    """Builds each method of the plan once: what fails here would fail in every run, and that hours later.

    Raises:
        ValueError: naming a method, the part of it that fails and why; or if the plan never trains one that others are
            compared with.
    """
    trained = list(dict.fromkeys(cell.method for cell in comparison.plan))
    for place, name in _compared(comparison):
        if name not in trained:
            raise ValueError(f"{place} names {name!r}, but the plan does not train it.")
    with torch.random.fork_rng(devices=[]):
        for name in trained:
            _build(comparison, name)


def _build(comparison: Comparison, name: str) -> None:
    method, sizes = comparison.methods[name], comparison.sizes()
    model = _made(name, "build", lambda: method.make(sizes))
    _made(name, "objective", lambda: comparison.data.objective(method, model))
    depth = _made(name, "sampler", lambda: method.sampler(model, 0)(0))
    _made(name, "cost", lambda: method.cost(model, depth, sizes.context_length))


def _made(name: str, part: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:  # whatever a part of a method does wrong, it is the user's
        raise ValueError(f"{part} of method {name!r} fails: {type(error).__name__}: {error}") from error


def _check_budgets(protocol: Protocol) -> None:
    budgets = protocol.budgets
    if not 0 < protocol.cooldown < 1:
        raise ValueError(f"cooldown is {protocol.cooldown}, but must be a share between 0 and 1.")
    if not budgets or any(before >= after for before, after in pairwise(budgets)):
        raise ValueError(f"budgets are {budgets}, but must be at least one, in ascending order.")
    if not _whole(budgets) or protocol.fork(budgets[0]) < 1:
        raise ValueError(
            f"budgets are {budgets}, but must be whole numbers of steps, of which a cooldown of {protocol.cooldown:g} "
            "leaves at least one."
        )


def _check_numbers(protocol: Protocol) -> None:
    rates = protocol.rates
    if not rates or len({f"{rate:g}" for rate in rates}) < len(rates) or not all(0 < rate < math.inf for rate in rates):
        raise ValueError(f"rates are {rates}, but must be above 0 and different from each other.")
    if not _whole([protocol.warmup]) or protocol.warmup < 1:
        raise ValueError(f"warmup is {protocol.warmup}, but must be a whole number of at least 1 step.")
    fork = protocol.fork(protocol.budgets[0])
    if protocol.warmup > fork:
        raise ValueError(
            f"warmup is {protocol.warmup}, but must be at most {fork}: then the cooldown of the first budget, "
            f"{protocol.budgets[0]}, begins."
        )
    if not 0 <= protocol.weight_decay < math.inf:
        raise ValueError(f"weight_decay is {protocol.weight_decay}, but must be at least 0.")
    if not protocol.clip > 0:
        raise ValueError(f"clip is {protocol.clip}, but must be above 0.")


def _check_plan(comparison: Comparison) -> None:
    most = len(comparison.protocol.budgets)
    for cell in comparison.plan:
        if isinstance(cell, Full):
            require_whole(f"seed of {cell.method}", cell.seed, 0)
        if isinstance(cell, Full) and cell.num_budgets is not None and not 1 <= cell.num_budgets <= most:
            raise ValueError(f"num_budgets of {cell.method} is {cell.num_budgets}, but there are {most} budgets.")


def _compared(comparison: Comparison) -> Iterator[tuple[str, str]]:
    yield from (("baseline", comparison.baseline), ("floor", comparison.floor))
    yield from (("pairs", name) for pair in comparison.pairs for name in pair)


def _names(comparison: Comparison) -> Iterator[tuple[str, str]]:
    yield from _compared(comparison)
    yield from (("plan", cell.method) for cell in comparison.plan)
    yield from (("rate_of", method.rate_of) for method in comparison.methods.values() if method.rate_of is not None)


def _whole(numbers: Sequence[object]) -> bool:
    return all(isinstance(number, int) for number in numbers)
