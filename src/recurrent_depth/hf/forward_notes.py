"""What one forward of a graft has noted of the host's calls, and of its loop."""

import threading
from typing import Any

from torch import Tensor

from recurrent_depth.depth import Depth
from recurrent_depth.hf.host_calls import HostCall
from recurrent_depth.update import DepthState, add_losses


class ForwardNotes(threading.local):
    """What the forward of one thread was asked for, and what it has noted; each thread has its own.

    A copy, by `copy` or `pickle`, starts with nothing: tensors in the middle of a forward can have no copies.
    """

    def __init__(self):  # runs once in each thread; a compiler's guards need attributes that are there from the start
        self.asked: Depth | None = None
        self.noted: tuple[HostCall, ...] = ()
        self.anchor: Tensor | None = None
        self.records: tuple[list[DepthState], ...] = ()
        self.losses: dict[str, Tensor] | None = None  # of the loop, while somebody is there to add them to a loss
        self.of_step: dict[str, Tensor] = {}

    def __reduce__(self) -> Any:
        return ForwardNotes, ()

    def forget(self) -> None:
        """Lets go of what was noted."""
        self.noted, self.anchor = (), None

    def watch(self, state: DepthState) -> None:
        """Keeps a state for whoever records, and the auxiliary losses so far."""
        self.of_step = state.losses
        for record in self.records:
            record.append(state)

    def sum_losses(self) -> None:
        """Adds the auxiliary losses of the loop that has just ended to those of the forward."""
        if self.of_step and self.losses is not None:
            self.losses = add_losses(self.losses, self.of_step)
        self.of_step = {}
