"""FLOPs of training: what each step adds to a forward, and how often it is taken and differentiated."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from recurrent_depth.counting import Counting, forward_flops
from recurrent_depth.outline import Outline
from recurrent_depth.sampling import DepthSampler, ExpectedDepth

NEVER = 1e-9
"""A step less likely than this is never taken, up to rounding."""


class Law(NamedTuple):
    """How deep a training step is.

    Attributes:
        expected: on average.
        at: what falls on one step, counted from 1; None where that is not known.
    """

    expected: ExpectedDepth
    at: Callable[[int], ExpectedDepth | None]

    def deeper_than(self, num_steps: int) -> bool:
        """Whether more steps may be taken, as far as is known."""
        beyond = self.at(num_steps + 1)
        return self.expected.num_steps > num_steps if beyond is None else beyond.num_steps > NEVER


class Added(NamedTuple):
    """What one more step adds to a forward.

    Attributes:
        begin: to the work that is done once, and always differentiated.
        step: to the work of the steps.
    """

    begin: int
    step: int


def law_of(depth: DepthSampler | ExpectedDepth, draw: int) -> Law:
    """The law of a sampler's draw; of an expected depth alone little is known."""
    if isinstance(depth, ExpectedDepth):
        return Law(depth, lambda step: None)
    return Law(depth.expected(draw), partial(depth.expected_at, draw=draw))


def loop_flops(of: Outline, law: Law, num_tokens: int, counting: Counting) -> float:
    """FLOPs that training spends inside of the loop, and once for it, on one sequence.

    Raises:
        ValueError: for more steps than the model has weights for, and if steps cost differently, but how often each is
            taken is not known.
    """
    num_steps = of.layout.num_steps
    deepest = num_steps + law.deeper_than(num_steps)
    steps = [_added(of, num_tokens, step, counting) for step in range(1, deepest + 1)]
    backward = 3 if of.checkpointing else 2
    return sum(
        3 * added.begin * taken.num_steps + added.step * (taken.num_steps + backward * taken.grad_steps)
        for added, taken in _taken(steps, law)
    )


def _added(of: Outline, num_tokens: int, step: int, counting: Counting) -> Added:
    before, after = (_through(of, num_tokens, number, counting) for number in (step - 1, step))
    return Added(after.begin - before.begin, after.step - before.step)


def _through(of: Outline, num_tokens: int, num_steps: int, counting: Counting) -> Added:
    if num_steps == 0:
        return Added(0, 0)
    parts = forward_flops(of, num_tokens, num_steps, counting)
    # A convention may count the work that no step changes as part of each step.
    begin = counting.begin(0) * of.update(num_steps).begin * num_tokens
    return Added(begin, parts.begin - begin + parts.core + parts.update)


def _taken(steps: list[Added], law: Law) -> Iterator[tuple[Added, ExpectedDepth]]:
    """What steps add, beside how often they are taken and differentiated."""
    first = steps[0]
    yield Added(first.begin, 0), ExpectedDepth(1.0, 1.0)
    if all(later == (0, first.step) for later in steps[1:]):
        yield Added(0, first.step), law.expected
        return
    left = law.expected
    for step, added in enumerate([first._replace(begin=0), *steps[1:]], start=1):
        taken = _known(law.at(step)) if step < len(steps) else left
        left = ExpectedDepth(left.num_steps - taken.num_steps, left.grad_steps - taken.grad_steps)
        yield added, taken


def _known(taken: ExpectedDepth | None) -> ExpectedDepth:
    if taken is None:
        raise ValueError(
            "The steps of this model do not cost the same, so an expected depth is not enough, nor a sampler whose "
            "expected_at gives None: hand over one that says how likely each step is, such as UniformDepth."
        )
    return taken
