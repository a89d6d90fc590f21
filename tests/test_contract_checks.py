"""Three published designs as a user would write them, as a check that the contracts hold what they need.

Hyper-connections keep several streams in `carry`; a mixture of experts says its own loss; a recurrent block has a state
in place of keys and values.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from battery import gradients, lively, tiny
from torch import nn
from torch.testing import assert_close

import recurrent_depth as rd

DOUBLE = torch.float64


# Hyper-connections: n parallel streams (Hyperloop, arXiv 2604.21254, in the form that a third party noted)


class HyperConnections(rd.DepthUpdate):
    """`Y <- res * Y + post * (blocks(sum pre * Y) + e_r)`; what is read is the mean of the streams."""

    def __init__(self, dim: int, num_streams: int, num_steps: int):
        super().__init__()
        self.num_streams = num_streams
        self.weights = nn.Linear(num_streams * dim, 3 * num_streams)
        self.loop_embedding = nn.Embedding(num_steps, dim)

    def begin(self, anchor, call):
        return rd.initial_state(anchor, carry=anchor[:, :, None].expand(-1, -1, self.num_streams, -1).clone())

    def forward(self, state, blocks, step):
        streams = state.carry
        z = F.rms_norm(streams.flatten(2), (streams[0, 0].numel(),), eps=1e-6)
        pre, post, res = (share[..., None] for share in torch.sigmoid(self.weights(z)).chunk(3, dim=-1))
        out = blocks((pre * streams).sum(2)) + self.loop_embedding.weight[step]
        streams = (res * streams + 2 * post * out[:, :, None]).to(streams.dtype)
        return state._replace(h=streams.mean(2), carry=streams)

    def read(self, state):
        return state.h

    def cost(self, num_steps):
        return rd.UpdateCost(step=2 * self.weights.weight.numel())


def hyper(layout: rd.Layout, **sizes) -> rd.RecurrentTransformer:
    return rd.grt(layout, update=lambda dim: HyperConnections(dim, 3, layout.num_steps), **sizes)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_streams_are_those_of_the_equations():
    model = lively(tiny(hyper)).double().eval()
    x, at = torch.randint(23, (1, 5)), rd.At(torch.arange(5)[None])
    w = {name: weight.detach().numpy() for name, weight in model.core.update.named_parameters()}
    anchor = model.prelude(model.embed(x, at.positions), at)[0].detach().numpy()
    streams = np.stack([anchor] * 3, axis=1)
    for step in range(3):
        flat = streams.reshape(5, -1)
        z = flat / np.sqrt((flat**2).mean(-1, keepdims=True) + 1e-6)
        pre, post, res = np.split(sigmoid(z @ w["weights.weight"].T + w["weights.bias"]), 3, axis=1)
        seen = torch.from_numpy(np.einsum("ts,tsd->td", pre, streams))[None]
        out = model.core.stack(seen, at)[0].detach().numpy() + w["loop_embedding.weight"][step]
        streams = res[..., None] * streams + np.einsum("ts,td->tsd", 2 * post, out)
    last = model.trajectory(x).states[-1]
    assert_close(last.carry[0], torch.from_numpy(streams))
    assert_close(model.core.update.read(last)[0], torch.from_numpy(streams.mean(1)))


# A mixture of experts with the balance loss of the Switch Transformer (arXiv 2101.03961)


class Experts(nn.Module):
    """Each token runs the expert with the largest share; the loss is `num_experts * sum_e f_e P_e` over real tokens."""

    def __init__(self, dim: int, num_experts: int = 4):
        super().__init__()
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList(rd.MLP(dim, 2 * dim) for _ in range(num_experts))

    def forward(self, x, at):
        shares = self.router(x).float().softmax(-1)
        share, chosen = shares.max(-1)
        out = sum(
            (chosen == e)[..., None] * expert(x) for e, expert in enumerate(self.experts)
        )  # slow and plain: every expert sees every token
        real = torch.ones_like(share) if at.valid is None else at.valid.to(share)
        count = real.sum().clamp(min=1)
        used = (F.one_hot(chosen, len(self.experts)) * real[..., None]).sum((0, 1)) / count
        mean = (shares * real[..., None]).sum((0, 1)) / count
        at.add_loss("balance", 0.01 * len(self.experts) * (used * mean).sum())
        return x + (share[..., None] * out).to(x.dtype)

    def cost(self):
        # Counted as one expert per token, which a fused kernel runs.
        router = rd.BlockCost(linear=2 * self.router.weight.numel())
        return router.plus(self.experts[0].cost())


def experts(layout: rd.Layout = rd.Layout(1, 1, 3, 1), update=rd.gated) -> rd.RecurrentTransformer:
    model = tiny(layout=layout, update=update)
    model.core.stack.blocks.append(Experts(16))
    return lively(model, 0.1).eval()


def balance(trajectory: rd.Trajectory) -> torch.Tensor:
    return trajectory.losses["balance"]


def test_the_loss_of_experts_sums_over_steps_and_is_known_when_all_are_used_alike():
    model, x = experts(), torch.randint(23, (2, 8))
    with torch.no_grad():
        model.core.stack.blocks[1].router.weight.zero_()
    # Equal shares: P_e = 1/4 and sum f_e = 1, so the loss is 0.01 at each step.
    assert balance(model.trajectory(x)).item() == pytest.approx(0.03)
    assert balance(model.trajectory(x, 2)).item() == pytest.approx(0.02)


def test_padding_leaves_the_loss_of_experts():
    model, x = experts(), torch.randint(23, (1, 6))
    padded, mask = torch.cat([x.new_zeros(1, 3), x], dim=1), torch.arange(9)[None] >= 3
    assert_close(balance(model.trajectory(padded, mask=mask)), balance(model.trajectory(x)))


def test_the_router_of_experts_learns_from_their_loss_and_it_is_added():
    model, x = experts(), torch.randint(23, (2, 8))
    trajectory = model.trajectory(x)
    loss = rd.last_step_loss(trajectory, x)
    assert_close(loss, rd.next_token_loss(trajectory.output, x) + balance(trajectory))
    balance(trajectory).backward()
    assert gradients(model)["core.stack.blocks.1.router.weight"].abs().max() > 0


def test_experts_work_with_halting_checkpointing_truncation_and_a_cache():
    halting = experts(update=lambda dim: rd.halted(dim, inner=rd.gated, bias=-2.0))
    x = torch.randint(23, (2, 8))
    assert set(halting.trajectory(x).losses) == {"balance", "ponder"}
    model = experts().double()
    model.core.checkpointing = True
    rd.last_step_loss(model.trajectory(x, rd.Depth(3, 2)), x).backward()
    model.core.checkpointing = False
    assert gradients(model)["core.stack.blocks.1.router.weight"].abs().max() > 0
    cache = rd.DepthCache()
    found = torch.cat([rd.extend(model, part, cache) for part in x.split([5, 1, 2], dim=1)], dim=1)
    assert_close(found, model(x))


def test_with_a_depth_for_each_row_the_loss_of_experts_is_that_of_the_rows_still_at_work():
    # A block sees the rows that take the step: a mean over tokens is over theirs, whatever the size of the batch.
    model, x = experts(), torch.randint(23, (2, 6))
    found = balance(model.trajectory(x, [1, 3]))
    first = balance(model.trajectory(x, 1))
    alone = balance(model.trajectory(x[1:], 3)) - balance(model.trajectory(x[1:], 1))
    assert_close(found, first + alone)


# A block with a recurrent state in place of keys and values (a gated linear recurrence, as in arXiv 2312.06635)


class Recurrence(nn.Module):
    """`s_t = a_t * s_{t-1} + (1 - a_t) * v_t`, then `x_t + W s_t`: the state runs over the tokens.

    A cache holds what each token adds, `log a_t` in the place of keys and `v_t` in that of values, and the state is
    made anew of all of them. That is exact, for any chunks, padding and picks, but constant neither in memory nor time.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.decay, self.value, self.out = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x, at):
        decays, values = F.logsigmoid(self.decay(x)), self.value(x)
        if at.kv is not None:
            decays, values = (part[:, 0] for part in at.kv.update(decays[:, None], values[:, None]))
        real = self._real(at, decays)
        decays, inputs = decays * real, values * (1 - decays.exp()) * real
        states, state = [], torch.zeros_like(values[:, 0])
        for t in range(values.shape[1]):
            state = decays[:, t].exp() * state + inputs[:, t]
            states.append(state)
        return x + self.out(self._own(at, torch.stack(states, dim=1), x.shape[1]))

    @staticmethod
    def _own(at, states, num_queries):
        """The states at the current tokens: each one's own place is the last key that it sees."""
        if at.mask is None or at.mask.ndim == 2:
            return states[:, -num_queries:]
        places = (at.mask * torch.arange(at.mask.shape[2])).argmax(-1)
        return states.take_along_dim(places[..., None], dim=1)

    @staticmethod
    def _real(at, keys):
        """Which keys are there: the newest query of a complete mask sees all that are real."""
        if at.mask is None:
            return torch.ones_like(keys[..., :1])
        seen = at.mask if at.mask.ndim == 2 else at.mask[:, -1]
        return seen[..., None].to(keys)

    def cost(self):
        return rd.PlainBlock(self).cost()._replace(cached=2 * self.out.in_features)


def recurrent(layout: rd.Layout = rd.Layout(1, 1, 3, 1), update=rd.gated) -> rd.RecurrentTransformer:
    model = tiny(layout=layout, update=update)
    model.core.stack.blocks.append(Recurrence(16))
    return lively(model, 0.1).double().eval()


def test_the_state_is_the_recurrence():
    block = Recurrence(4).double()
    x = torch.randn(1, 6, 4, dtype=DOUBLE)
    a, v = (part[0].detach().numpy() for part in (torch.sigmoid(block.decay(x)), block.value(x)))
    state, expected = np.zeros(4), []
    for t in range(6):
        state = a[t] * state + (1 - a[t]) * v[t]
        expected.append(x[0, t].numpy() + block.out.weight.detach().numpy() @ state + block.out.bias.detach().numpy())
    assert_close(block(x, rd.At())[0], torch.from_numpy(np.stack(expected)))


def test_a_recurrent_block_obeys_prefix_causality_padding_and_rows():
    model, x = recurrent(), torch.randint(23, (2, 7))
    trajectory = model.trajectory(x, every_step=True)
    assert torch.equal(model(x, 2), trajectory.after(2))
    changed = x.clone()
    changed[:, 4] = (x[:, 4] + 1) % 23
    assert_close(model(changed)[:, :4], trajectory.output[:, :4])
    padded, mask = torch.cat([x.new_zeros(2, 3), x], dim=1), torch.arange(10)[None].expand(2, -1) >= 3
    assert_close(model(padded, mask=mask)[:, 3:], trajectory.output)
    assert_close(model(x, [1, 3])[:1], model(x[:1], 1))


@pytest.mark.parametrize("chunks", [[7], [3, 4], [1] * 7])
@pytest.mark.parametrize("padding", [0, 2])
def test_a_recurrent_block_decodes_with_a_cache_exactly(chunks, padding):
    model, x = recurrent(), torch.randint(23, (2, 7))
    mask = torch.ones_like(x).bool()
    mask[0, :padding] = False
    cache, seen, found = rd.DepthCache(), 0, []
    for part in x.split(chunks, dim=1):
        seen += part.shape[1]
        found.append(rd.extend(model, part, cache, mask=mask[:, :seen]))
    assert_close(torch.cat(found, dim=1)[mask], model(x, mask=mask)[mask])


def test_a_recurrent_block_may_be_routed():
    class EveryOther(rd.DepthUpdate):
        def begin(self, anchor, call):
            return rd.initial_state(anchor)

        def forward(self, state, blocks, step):
            pick = rd.Pick(torch.arange(step % 2, state.h.shape[1], 2).expand(len(state.h), -1))
            return state._replace(h=pick.scatter(state.h, blocks(pick.gather(state.h), pick)))

        def read(self, state):
            return state.h

        def cost(self, num_steps):
            return rd.UpdateCost(selects=True)

    model, x = recurrent(update=lambda dim: EveryOther()), torch.randint(23, (2, 8))
    cache = rd.DepthCache()
    found = torch.cat([rd.extend(model, part, cache) for part in x.split([4, 4], dim=1)], dim=1)
    assert_close(found, model(x))


def test_a_recurrent_state_costs_a_cache_that_grows():
    # The contract has no place for one state per row: what a block keeps for later tokens is one entry per token.
    model = recurrent()
    sizes = []
    for num_tokens in (4, 8):
        cache = rd.DepthCache()
        rd.extend(model, torch.randint(23, (1, num_tokens)), cache)
        sizes.append(cache.num_bytes)
    assert sizes[1] == 2 * sizes[0]


# All of them through the loop


def hyper_connected() -> rd.RecurrentTransformer:
    return lively(tiny(hyper), 0.1)


@pytest.mark.parametrize("model", [hyper_connected, experts, recurrent])
def test_gradients_reach_every_parameter(model):
    model, x = model().double(), torch.randint(23, (4, 12))
    rd.last_step_loss(model.trajectory(x), x).backward()
    for name, gradient in gradients(model).items():
        assert gradient.isfinite().all(), name
        assert gradient.abs().max() > 0, name


def test_streams_obey_prefix_causality_padding_rows_and_a_cache():
    model, x = lively(tiny(hyper)).double().eval(), torch.randint(23, (2, 7))
    trajectory = model.trajectory(x, every_step=True)
    assert torch.equal(model(x, 2), trajectory.after(2))
    changed = x.clone()
    changed[:, 4] = (x[:, 4] + 1) % 23
    assert_close(model(changed)[:, :4], trajectory.output[:, :4])
    padded, mask = torch.cat([x.new_zeros(2, 3), x], dim=1), torch.arange(10)[None].expand(2, -1) >= 3
    assert_close(model(padded, mask=mask)[:, 3:], trajectory.output)
    assert_close(model(x, [1, 3])[:1], model(x[:1], 1))
    cache = rd.DepthCache()
    found = torch.cat([rd.extend(model, part, cache) for part in x.split([4, 1, 2], dim=1)], dim=1)
    assert_close(found, trajectory.output)


def test_streams_may_halt():
    model = lively(tiny(update=lambda dim: rd.halted(dim, inner=lambda d: HyperConnections(d, 3, 3), bias=-1.0)), 0.1)
    x = torch.randint(23, (2, 7))
    last = model.trajectory(x).states[-1]
    assert last.carry.inner.shape == (2, 7, 3, 16)
    rd.last_step_loss(model.trajectory(x), x).backward()
    assert all(gradient.abs().max() > 0 for gradient in gradients(model).values())
