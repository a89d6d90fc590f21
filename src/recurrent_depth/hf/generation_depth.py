"""The depth of `generate` where a generation configuration says it."""

import functools
from collections.abc import Callable
from typing import Any


def told_depth(model: Any) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """A class's `_prepare_generation_config` that hands a `num_steps` of the configuration on to the forwards.

    transformers takes an argument of a call for the configuration's where that has one of the name: without this, a
    depth that somebody once wrote there would make `generate` deaf to `num_steps=`.
    """
    prepare = model._prepare_generation_config

    @functools.wraps(prepare)
    def prepared(self: Any, *arguments: Any, **keywords: Any) -> tuple[Any, dict[str, Any]]:
        config, others = prepare(self, *arguments, **keywords)
        num_steps = getattr(config, "num_steps", None)
        return config, others if num_steps is None else {"num_steps": num_steps} | others

    return prepared
