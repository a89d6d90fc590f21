"""Memory slots beside the state: what each step makes is written to slots, and the next state is read from them."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from recurrent_depth.arguments import require_instance, require_number, require_sizes, require_whole
from recurrent_depth.contracts import Call, PartCost, UpdateCost
from recurrent_depth.injection import Injection, check_width
from recurrent_depth.numerics import at_least_float32, without_autocast
from recurrent_depth.step import StepBlocks
from recurrent_depth.update import DepthState, DepthUpdate, initial_state


class StepRouter(nn.Module):
    """Shares over the slots, `softmax(W_t h + b_t)`, with weights of its own at each cycle t, in one tensor each.

    Args:
        dim: the width.
        num_slots: how many slots there are.
        num_cycles: how many cycles have weights.
        std: standard deviation of the weights as they start; biases start at 0.

    Raises:
        ValueError: if a size is below 1, or `std` negative.
    """

    def __init__(self, dim: int, num_slots: int, num_cycles: int, *, std: float = 0.02):
        super().__init__()
        require_sizes(dim=dim, num_slots=num_slots, num_cycles=num_cycles)
        self.weight = nn.Parameter(torch.empty(num_cycles, num_slots, dim))
        self.bias = nn.Parameter(torch.empty(num_cycles, num_slots))
        self.std = require_number("std", std, at_least=0)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights."""
        nn.init.normal_(self.weight, std=self.std)
        nn.init.zeros_(self.bias)

    def forward(self, h: Float[Tensor, "batch token dim"], cycle: int) -> Float[Tensor, "batch token slot"]:
        """The shares, in float32; they sum to 1."""
        return at_least_float32(F.linear(h, self.weight[cycle], self.bias[cycle])).softmax(-1)

    def cost(self) -> int:
        """Matrix FLOPs per token of one cycle."""
        return 2 * self.weight[0].numel()


class MemorySlotsUpdate(DepthUpdate):
    """`m_b <- m_b + w_b o`, then `h <- sum_b r_b m_b`, with `o = blocks(inject(h))` and shares `w`, `r` made of `h`.

    Slot 0 starts as the embedding, the others empty. A first cycle before the loop writes the prelude's output, with
    shares made of the embedding, and reads the first state. (The paper says that there is such a cycle, and its number
    of parameters that it has routers of its own, but not what those see: as the loop's see the core's input, they see
    the prelude's here.) Each step has routers of its own, so that the shared blocks know where they are; there are no
    more steps than routers.

    Args:
        inject: what the blocks see of the state; `KeepState()` in the source.
        dim: the width.
        num_slots: how many slots each token has; the source takes 3 more than steps.
        num_steps: how many steps have routers.

    Raises:
        ValueError: if a number is below 1, or `inject` no injection; in a forward, if it has more steps than there are
            routers.

    Reference: Yu et al., 2025, arXiv 2510.07739.
    """

    replaces_state = True

    def __init__(self, inject: Injection, dim: int, *, num_slots: int, num_steps: int):
        super().__init__()
        self.dim = require_whole("dim", dim, at_least=1)
        self.num_slots = require_whole("num_slots", num_slots, at_least=1)
        self.num_steps = require_whole("num_steps", num_steps, at_least=1)
        require_instance("inject", inject, Injection, "rd.KeepState()")
        self.inject = inject
        self.writer, self.reader = (StepRouter(dim, num_slots, num_steps + 1) for _ in range(2))

    def begin(self, anchor: Float[Tensor, "batch token dim"], call: Call) -> DepthState:
        """The slots and the state after the first cycle; without an embedding the anchor stands for it.

        Raises:
            ValueError: if the forward takes more steps than there are routers, or the anchor has another width.
        """
        check_width(anchor, self.dim)
        self._check(call.num_steps)
        embedding = anchor if call.embedding is None else call.embedding
        empty = embedding.new_zeros(*embedding.shape[:2], self.num_slots - 1, embedding.shape[2])
        slots, h = self._cycle(torch.cat([embedding[:, :, None], empty], dim=2), embedding, anchor, cycle=0)
        return initial_state(h, self.inject.begin(anchor, call), carry=slots)

    def forward(self, state: DepthState, blocks: StepBlocks, step: int) -> DepthState:
        """One write and one read."""
        out = blocks(self.inject(state.h, state.context, step)).to(state.h.dtype)
        slots, h = self._cycle(state.carry, state.h, out, cycle=step + 1)
        return state._replace(h=h, carry=slots, write=torch.ones_like(state.write))

    def _cycle(self, slots: Tensor, h: Tensor, out: Tensor, cycle: int) -> tuple[Tensor, Tensor]:
        write, read = (router(h, cycle).to(slots.dtype) for router in (self.writer, self.reader))
        slots = torch.addcmul(slots, write[..., None], out[:, :, None])  # in one pass: slots are many times the state
        with without_autocast(slots.device):
            return slots, (read[:, :, None] @ slots)[:, :, 0]

    def read(self, state: DepthState) -> Float[Tensor, "batch token dim"]:
        """The state: the last step's read."""
        return state.h

    def _check(self, num_steps: int) -> None:
        if num_steps > self.num_steps:
            raise ValueError(
                f"num_steps is {num_steps}, but must be at most {self.num_steps}: each step has its own routers."
            )

    def cost(self, num_steps: int) -> UpdateCost:
        """Both routers and the sum that is read, once per cycle, and the injection's.

        Raises:
            ValueError: for more steps than there are routers.
        """
        self._check(num_steps)
        cycle = self.writer.cost() + self.reader.cost() + 2 * self.num_slots * self.dim
        return UpdateCost(*PartCost(cycle, cycle).plus(self.inject.cost()))
