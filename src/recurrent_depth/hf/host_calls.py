"""A host's layers as blocks of the loop: each with the arguments that the host called it with."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor, nn
from transformers import Cache

from recurrent_depth.contracts import At, KeyValues


class HostCall(NamedTuple):
    """One layer, and what the host called it with beside the hidden state.

    Attributes:
        run: the layer itself, with its hooks; called once for each step.
        before: the keyword that the hidden state was given by; None where it was the first positional argument.
        arguments: the other positional ones.
        keywords: the other keywords.
    """

    run: Callable[..., Any]
    before: str | None
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    @property
    def cache(self) -> Cache | None:
        """The cache among the arguments; transformers' layers take it at many places and under three names."""
        given = (*self.arguments, *self.keywords.values())
        return next((value for value in given if isinstance(value, Cache)), None)

    def with_cache(self, cache: Cache | None) -> "HostCall":
        """The same call with another object in the cache's place."""
        arguments = tuple(cache if isinstance(value, Cache) else value for value in self.arguments)
        keywords = {name: cache if isinstance(value, Cache) else value for name, value in self.keywords.items()}
        return self._replace(arguments=arguments, keywords=keywords)

    def __call__(self, x: Float[Tensor, "batch token dim"]) -> tuple[Any, ...]:
        """What the layer gives for another hidden state; a tensor alone becomes a tuple of one."""
        if self.before is None:
            out = self.run(x, *self.arguments, **self.keywords)
        else:
            out = self.run(*self.arguments, **{self.before: x}, **self.keywords)
        return tuple(out) if isinstance(out, tuple | list) else (out,)


class HostStack(nn.Module):
    """Runs the host's layers with their own arguments, which each forward hands over in `at.extra`.

    It holds no layer: they stay the host's, under the host's names.
    """

    def forward(
        self, x: Float[Tensor, "batch token dim"], at: At, step: int = 0, kv: Sequence[KeyValues] | None = None
    ) -> Float[Tensor, "batch token dim"]:
        """The last layer's output at this step."""
        slots = at.extra["slots"]
        view = None if slots is None else slots.view(step)
        for call in at.extra["calls"]:
            x = (call if view is None else call.with_cache(view))(x)[0]
        return x
