"""What a method is, as JSON can hold it: a run goes on only as the method that it began as."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from comparison.parts import Comparison, Method, Run, Sizes

ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@cache
def description(method: Method, sizes: Sizes, seed: int) -> dict[str, Any]:
    """A method's parts in words; checksums of its tensors, their first values and all settings of its modules."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = method.make(sizes)
        trained = method.objective(model)
        sampler = method.sampler(model, seed)
    parts = {name: described(getattr(method, name)) for name in ("build", "objective", "cost", "exits", "init_std")}
    tensors = {name: tensor.double() for name, tensor in trained.state_dict().items()}
    return {
        **parts,
        "layout": str(model.layout),
        "sampler": described(sampler),
        "tensors": _checksum(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items()),
        # Norms to four digits: another processor draws the same weights but for their last bits.
        "weights": _checksum(f"{name} {float(tensor.norm()):.4g}" for name, tensor in tensors.items()),
        "settings": _checksum(_settings(trained)),
    }


def settings(comparison: Comparison, run: Run) -> dict[str, Any]:
    """All that must be the same when a run goes on, but the data; rates may be added, and budgets behind the others."""
    protocol = {**comparison.protocol._asdict(), "budgets": None, "rates": None}
    sizes, method = [comparison.dim, comparison.num_heads], comparison.methods[run.method]
    described = description(method, comparison.sizes(), run.seed)
    return {"run": run.name, "protocol": protocol, "sizes": sizes, "method": described}


def require_same(where: Path, found: Mapping[str, Any], expected: Mapping[str, Any], *names: str) -> None:
    """Compares these settings, and those inside of them, as far as both sides have them.

    What was trained before methods were described has none to compare.

    Raises:
        ValueError: naming what differs, and what to do.
    """
    told = differences(found, expected, *names)
    if told:
        raise ValueError(
            f"{where} is of another run than the cells describe: {told}. "
            "Give another --out, or delete that run's folder to train it anew."
        )


def differences(found: Mapping[str, Any], expected: Mapping[str, Any], *names: str) -> str:
    """In words, how these settings differ and those inside of them, where both sides have them; empty if nowhere."""
    stored, ours = (_flat({name: side[name] for name in names if name in side}) for side in (found, expected))
    different = [name for name in ours if name in stored and stored[name] != ours[name]]
    return ", ".join(f"{name} is {stored[name]} there and {ours[name]} here" for name in different)


def described(value: object) -> str:
    """A part in words that are the same in every process: functions by name, with the arguments they are given."""
    if isinstance(value, partial):
        return f"{described(value.func)}({_joined(value.args, value.keywords)})"
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return f"{type(value).__qualname__}({_joined((), value._asdict())})"
    if isinstance(value, list | tuple):
        return f"[{_joined(value, {})}]"
    if is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__qualname__}({_joined((), {f.name: getattr(value, f.name) for f in fields(value)})})"
    return str(getattr(value, "__qualname__", None) or ADDRESS.sub("", repr(value)))


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    named = {name: value if isinstance(value, dict) else {"": value} for name, value in config.items()}
    return {f"{name}.{key}".strip("."): value for name, inner in named.items() for key, value in inner.items()}


def _joined(values: Iterable[object], named: Mapping[str, object]) -> str:
    return ", ".join([*map(described, values), *(f"{name}={described(value)}" for name, value in named.items())])


def _settings(trained: nn.Module) -> Iterable[str]:
    """What the modules hold beside tensors and other modules: capacities, noise, thresholds."""
    for place, module in trained.named_modules():
        if not type(module).__module__.startswith("torch."):  # whose own fields come and go with its versions
            for name in sorted(vars(module).keys() - vars(nn.Module()).keys()):
                yield f"{place}.{name} {described(vars(module)[name])}"


def _checksum(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
