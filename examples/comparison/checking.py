"""What a file of cells may ask for."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from comparison.parts import Comparison, Full, Method, Protocol, Trials
from recurrent_depth.arguments import require_instance, require_number, require_whole


def check(comparison: Comparison) -> None:
    """Refuses what no run could make sense of.

    Raises:
        ValueError: if budgets don't ascend or leave the trunk no step, a number of the protocol is out of its range, a
            name is that of no method or cannot be that of a file, or something is no method, cell or pair.
    """
    _check_kinds(comparison)
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


def check_steps(comparison: Comparison, names: Iterable[str]) -> None:
    """Takes a forward of each method on the first batch, and reads an exit. The data must be open.

    Raises:
        ValueError: naming a method, the part of it that fails and why.
    """
    with torch.random.fork_rng(devices=[]):
        for name in names:
            _step(comparison, name)


def _step(comparison: Comparison, name: str) -> None:
    method, (model, objective, depth) = comparison.methods[name], _build(comparison, name)
    batch = comparison.data.batch(0, 0)
    loss = _made(name, "objective", lambda: objective(*batch, depth))
    if not isinstance(loss, torch.Tensor) or loss.ndim > 0:
        raise ValueError(f"objective of method {name!r} must give a loss, a tensor of one number; got {_shape(loss)}.")
    tokens = batch[0][:2]
    wanted = (*tokens.shape, comparison.sizes().vocab_size)
    logits = _made(name, "exits", lambda: next(iter(method.exits(model.eval(), tokens, 1))))
    if not isinstance(logits, torch.Tensor) or logits.shape != wanted:
        raise ValueError(f"exits of method {name!r} must give logits {wanted} after each step, got {_shape(logits)}.")


def _shape(given: object) -> str:
    return f"shape {tuple(given.shape)}" if isinstance(given, torch.Tensor) else type(given).__name__


def _build(comparison: Comparison, name: str) -> tuple[Any, Any, Any]:
    """Model, objective and depth of a method."""
    method, sizes = comparison.methods[name], comparison.sizes()
    model = _made(name, "build", lambda: method.make(sizes))
    objective = _made(name, "objective", lambda: comparison.data.objective(method, model))
    depth = _made(name, "sampler", lambda: method.sampler(model, 0)(0))
    _made(name, "cost", lambda: method.cost(model, depth, sizes.context_length))
    return model, objective, depth


def _made(name: str, part: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:  # whatever a part of a method does wrong, it is the user's
        raise ValueError(f"{part} of method {name!r} fails: {type(error).__name__}: {error}") from error


def _check_kinds(comparison: Comparison) -> None:
    for name, method in comparison.methods.items():
        require_instance(f"method {name!r}", method, Method, "Method(label, build)")
        if not re.fullmatch(r"[\w.+-]+", name):
            raise ValueError(
                f"method {name!r} names files too: its name must be of letters, digits, '-', '_', '.', '+'."
            )
    for cell in comparison.plan:
        if not isinstance(cell, Trials | Full):
            raise ValueError(f"plan holds {cell!r}, but must be of Trials(name) and Full(name, seed).")
    for pair in comparison.pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(f"pairs holds {pair!r}, but each must be the names of two methods.")


def _check_budgets(protocol: Protocol) -> None:
    budgets = protocol.budgets
    require_number("cooldown", protocol.cooldown, above=0, below=1)
    if not budgets or any(before >= after for before, after in pairwise(budgets)):
        raise ValueError(f"budgets are {budgets}, but must be at least one, in ascending order.")
    if not _whole(budgets) or protocol.fork(budgets[0]) < 1:
        raise ValueError(
            f"budgets are {budgets}, but must be whole numbers of steps, of which a cooldown of {protocol.cooldown:g} "
            "leaves at least one."
        )


def _check_numbers(protocol: Protocol) -> None:
    rates = [require_number("one of rates", rate, above=0) for rate in protocol.rates]
    if not rates or len({f"{rate:g}" for rate in rates}) < len(rates):
        raise ValueError(f"rates are {protocol.rates}, but must be at least one, and different from each other.")
    require_whole("warmup", protocol.warmup, 1)
    fork = protocol.fork(protocol.budgets[0])
    if protocol.warmup > fork:
        raise ValueError(
            f"warmup is {protocol.warmup}, but must be at most {fork}: then the cooldown of the first budget, "
            f"{protocol.budgets[0]}, begins."
        )
    require_number("weight_decay", protocol.weight_decay, at_least=0)
    if protocol.clip != math.inf:  # that clips nothing
        require_number("clip", protocol.clip, above=0)


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
