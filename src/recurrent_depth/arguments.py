"""What arguments must be: types, numbers and instances, refused where they are given."""

import math
import numbers
from typing import Any

from beartype import BeartypeConf, BeartypeViolationVerbosity, beartype


class WrongTypeError(ValueError):
    """An argument is of another type than the signature says. The message is one line, whatever a value prints."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))


check_types = beartype(
    conf=BeartypeConf(violation_type=WrongTypeError, violation_verbosity=BeartypeViolationVerbosity.MINIMAL)
)
"""Refuses arguments of another type than a function's signature says, by a ValueError; for what runs once."""


def require_whole(name: str, value: object, at_least: int | None = None) -> int:
    """Returns `value` as an int.

    Raises:
        ValueError: if it is no whole number (a bool is none) or below `at_least`; names argument, value and bound.
    """
    if (
        isinstance(value, numbers.Integral)
        and not isinstance(value, bool)
        and (at_least is None or int(value) >= at_least)
    ):
        return int(value)
    bound = "" if at_least is None else f" of at least {at_least}"
    raise ValueError(f"{name} is {value!r}, but must be a whole number{bound}.")


def require_sizes(**sizes: object) -> None:
    """Raises a ValueError for a size that is no whole number of at least 1; names it."""
    for name, size in sizes.items():
        require_whole(name, size, at_least=1)


def optional_steps(name: str, value: object) -> int | None:
    """Like `require_whole` of at least 1, where None stands for all steps."""
    return None if value is None else require_whole(name, value, at_least=1)


def require_number(
    name: str,
    value: object,
    *,
    above: float | int = -math.inf,
    at_least: float | int = -math.inf,
    below: float | int = math.inf,
    at_most: float | int = math.inf,
) -> float:
    """Returns `value` as a float.

    Raises:
        ValueError: if it is no finite number (a bool is none) or out of bounds; names argument, value and bounds.
    """
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        number = float(value)
        if math.isfinite(number) and above < number < below and at_least <= number <= at_most:
            return number
    bounds = (("above", above), ("of at least", at_least), ("below", below), ("at most", at_most))
    told = " and ".join(f"{word} {bound:g}" for word, bound in bounds if math.isfinite(bound))
    raise ValueError(f"{name} is {value!r}, but must be a finite number {told}".rstrip() + ".")


def require_callable(name: str, value: object, example: str) -> Any:
    """Returns `value`.

    Raises:
        ValueError: if it cannot be called.
    """
    if not callable(value):
        raise ValueError(f"{name} is {value!r}, but must be a function, such as {example}.")
    return value


def require_instance(name: str, value: object, kind: type, example: str = "") -> None:
    """Raises a ValueError for anything that is no instance of a class; says so where the class itself was given."""
    if isinstance(value, kind):
        return
    said, hint = repr(value), f", such as {example}" if example else ""
    if isinstance(value, type):
        said, hint = f"the class {value.__name__}", f": give an instance, such as {value.__name__}(...)"
    elif len(said) > 60 or "\n" in said:
        said = f"of {type(value).__name__}"
    article = "an" if kind.__name__[0] in "AEIOU" else "a"
    raise ValueError(f"{name} is {said}, but must be {article} {kind.__name__}{hint}.")
