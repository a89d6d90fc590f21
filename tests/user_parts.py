"""Updates and blocks as a user would write them, each for one part of the contracts."""

import torch
from torch import Tensor, nn

import recurrent_depth as rd


class Recorded(rd.DepthUpdate):
    """The plain loop; keeps the calls that `begin` was given."""

    def __init__(self):
        super().__init__()
        self.calls: list[rd.Call] = []

    def begin(self, anchor, call):
        self.calls.append(call)
        return rd.initial_state(anchor if call.start is None else call.start)

    def forward(self, state, blocks, step):
        return state._replace(h=blocks(state.h))

    def read(self, state):
        return state.h

    def cost(self, num_steps):
        return rd.UpdateCost()


class Momentum(Recorded):
    """`v <- v / 2 + blocks(h) - h`, `h <- h + v`: the velocity is carried, inside a tree."""

    def begin(self, anchor, call):
        return rd.initial_state(anchor, carry={"velocity": (torch.zeros_like(anchor), None)})

    def forward(self, state, blocks, step):
        velocity = state.carry["velocity"][0] / 2 + blocks(state.h) - state.h
        return state._replace(h=state.h + velocity, carry={"velocity": (velocity, None)})

    def read(self, state):
        return state.h + state.carry["velocity"][0]


class LateBlocks(Recorded):
    """Leaves the state alone at every other step, the first among them."""

    def forward(self, state, blocks, step):
        return state._replace(h=blocks(state.h)) if step % 2 else state


class Mixing(nn.Module):
    """`x + tanh(W x)`: a block that a user wrote."""

    def __init__(self, dim: int = 8):
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor, at: rd.At) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Remembering(Mixing):
    """Adds the mean of all that it saw at earlier steps."""

    def forward(self, x, at):
        count, total = at.memory or (torch.zeros_like(x[..., :1]), torch.zeros_like(x))
        at.remember((count + 1, total + x))
        return super().forward(x, at) + total / count.clamp(min=1)


class Scaled(Mixing):
    """Scales by what the caller gave."""

    def forward(self, x, at):
        return super().forward(x, at) * at.extra["scale"]


class Stepwise(Mixing):
    """Adds what the update told it."""

    def forward(self, x, at):
        return super().forward(x, at) + at.condition["step"]


class Balanced(Mixing):
    """Adds the squares of its real inputs to a loss."""

    def forward(self, x, at):
        squares = x.square().sum(-1)
        at.add_loss("balance", (squares if at.valid is None else squares * at.valid).sum())
        return super().forward(x, at)


class Answering(rd.ExitRule):
    """Says the same whatever it is asked, right or wrong."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def hazard(self, carry, state, readout, step):
        return self.answer


class Confidence(rd.ExitRule):
    """A unit on the chance of the likeliest next token says how likely one is to leave."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def hazard(self, carry, state, readout, step):
        return carry, torch.sigmoid(self.linear(readout(state).softmax(-1).amax(-1, keepdim=True)))[..., 0]
