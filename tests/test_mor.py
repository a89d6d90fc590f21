"""Mixture-of-Recursions and Mixture-of-Depths as models: their limits, transcriptions, causality, and decoding."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
import transcription_routing as written
from agreement import assert_agrees, assert_slopes_agree
from battery import blocks_of, gradients, lively, tiny
from decoding_reference import Row, Sizes, keep_all
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from reading import Script, attention, grouped, read, scripts, uneven_blend
from strategies import few, loops, recipes
from test_routed_cache import Found, RoutedRow, Taken, assert_rows, every_policy
from test_routers import Told
from torch import Tensor
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode
from transcription_parts import Array, arrays, sigmoid

import recurrent_depth as rd
from recurrent_depth.routing import check_parts

double = torch.float64
LAYOUT = rd.Layout(1, 2, 3, 1)
ROUTED = {
    "mor": rd.mor,
    "mor-token-choice": partial(rd.mor, router=rd.token_choice),
    "mor-gated": partial(rd.mor, update=partial(rd.gated, bias=0.0), combine=rd.Interpolate),
    "mor-token-choice-gated": partial(rd.mor, router=rd.token_choice, update=rd.gated, combine=rd.Interpolate),
    "mod": rd.mod,
    "mod-gated": partial(rd.mod, update=rd.gated, router=partial(rd.every_other, capacity=0.5, every=1)),
}
models = recipes(loops, st.just(double))
every_routed = pytest.mark.parametrize("build", ROUTED.values(), ids=ROUTED)


def model_of(build=rd.mor, layout=LAYOUT, scale: float = 0.3, **sizes) -> rd.RecurrentTransformer:
    torch.manual_seed(4)  # with which every router takes some tokens and leaves some
    return lively(tiny(build, layout, **sizes), scale).double()


def some_tokens(batch: int = 3, num_tokens: int = 9) -> Tensor:
    return torch.randint(23, (batch, num_tokens))


def router_of(model: rd.RecurrentTransformer) -> rd.Router:
    return model.core.update.router


def score_parameters(model: rd.RecurrentTransformer) -> list[Tensor]:
    return list(router_of(model).parameters())


# Limits


def constant(weight: float, capacities):
    def router(dim: int, num_steps: int) -> rd.Router:
        scores = rd.LinearScores(dim, num_routers=num_steps)
        return rd.ExpertChoice(rd.TopTokens(scores, rd.ConstantWeight(weight)), capacities)

    return router


@pytest.mark.parametrize("training", [True, False])
def test_at_full_capacity_with_a_constant_weight_a_step_is_h_plus_g_times_its_blocks(training):
    model = model_of(partial(rd.mor, router=constant(0.3, (1, 1, 1)))).train(training)
    x = some_tokens()
    at = rd.At(torch.arange(9)[None])
    h = model.prelude(model.embed(x, at.positions), at)
    for _ in range(3):
        h = h + 0.3 * model.core.stack(h, at)
    assert_close(model(x), model.readout(h, at))


@pytest.mark.parametrize("training", [True, False])
def test_with_weight_one_interpolated_it_is_the_update_that_is_routed(training):
    for update in (rd.plain, partial(rd.gated, state_noise=0.0, gate_noise=0.0)):
        build = partial(rd.mor, router=constant(1.0, (1, 1, 1)), update=update, combine=rd.Interpolate)
        model, x = model_of(build).train(training), some_tokens()
        found = model.trajectory(x)
        model.core.update = model.core.update.inner
        expected = model.trajectory(x)
        assert_close(found.output, expected.output)
        assert_close(found.states[-1].write, expected.states[-1].write)


@pytest.mark.parametrize(
    "update, combination",
    [
        (rd.plain, rd.AddWeighted),
        (lambda dim: rd.NormEachStep(rd.plain(dim), torch.nn.RMSNorm(dim)), rd.AddWeighted),
        (rd.gated, rd.Interpolate),
        (lambda dim: rd.NormEachStep(rd.gated(dim), torch.nn.RMSNorm(dim)), rd.Interpolate),
        (lambda dim: rd.DampedUpdate(), rd.Interpolate),
    ],
    ids=["plain", "normed", "gated", "gated and normed", "damped"],
)
def test_a_result_that_holds_the_state_already_is_not_added_to_it_once_more(update, combination):
    assert type(model_of(partial(rd.mor, update=update)).core.update.combine) is combination


def test_mixture_of_depths_with_every_token_and_weight_one_is_the_plain_loop():
    def router(dim, num_steps):
        scores = rd.LinearScores(dim, num_routers=num_steps)
        return rd.MixtureOfDepths(rd.TopTokens(scores, rd.ConstantWeight()), capacity=1)

    model, x = model_of(partial(rd.mod, router=router)), some_tokens()
    found = model(x)
    model.core.update = rd.plain(16)
    assert_close(found, model(x))


def test_token_choice_at_full_depth_adds_the_weighted_loop_to_its_start():
    model, x = model_of(ROUTED["mor-token-choice"]), some_tokens()
    router, at = router_of(model), rd.At(torch.arange(9)[None])
    with pytest.raises((ValueError, TypeCheckError), match="full_depth"):
        router.full_depth = 3  # not a number of steps
    router.full_depth = True
    start = h = model.prelude(model.embed(x, at.positions), at)
    weight = router.scores(start, 0).softmax(-1)[..., 2:]
    for _ in range(3):
        h = model.core.stack(h, at)
    assert_close(model(x), model.readout(start + weight * h, at))
    model.eval()
    assert not torch.allclose(model(x), model.readout(start + weight * h, at))


def test_a_routed_update_may_be_routed_once_more():
    def twice(dim):
        half = partial(rd.every_other, capacity=0.5, every=1)
        return rd.RoutedUpdate(rd.plain(dim), half(dim, 3), rd.Interpolate())

    model = model_of(partial(rd.mor, update=twice, combine=rd.Interpolate))
    x, mask = some_tokens(), torch.arange(9)[None] >= torch.tensor([[0], [4], [2]])
    rd.last_step_loss(model.trajectory(x, mask=mask), x, mask).backward()
    assert all(gradient.isfinite().all() and gradient.abs().max() > 0 for gradient in gradients(model).values())
    model.eval()
    together, cache = model(x, mask=mask), rd.DepthCache()
    with torch.no_grad():
        parts = [rd.extend(model, x[:, i:j], cache, mask=mask[:, :j]) for i, j in ((0, 4), (4, 5), (5, 6), (6, 9))]
    assert_close(torch.cat(parts, dim=1)[mask], together[mask])
    for row in range(3):
        assert_close(together[row, mask[row]], model(x[row : row + 1, mask[row]])[0])


# Transcriptions


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("capacities", [(1, 2 / 3, 1 / 3), (0.75, 0.5, 0.25), (1, 0.7, 0.1)])
def test_expert_choice_is_its_transcription(capacities, training):
    router = partial(rd.expert_choice, capacities=capacities, alpha=0.4, loss=1.0)
    model, x = model_of(partial(rd.mor, router=router)).train(training), some_tokens(4, 10)
    with torch.no_grad():  # with which step 0 takes most, and step 1 some
        router_of(model).choose.scores.weight[0] *= -1
    weights, losses, taken = arrays(model.state_dict()), [], []
    for row in x:
        expected, chosen, loss = written.mor_expert_choice(
            weights, row.numpy(), LAYOUT, 2, capacities, 0.4, causal=not training
        )
        assert_agrees(model(row[None])[0], expected)
        losses.append(loss)
        taken.append(chosen)
    trajectory = model.trajectory(x, every_step=True)
    for step, state in enumerate(trajectory.states):
        assert [row.nonzero()[:, 0].tolist() for row in state.carry.router] == [chosen[step] for chosen in taken]
    assert any(0 < len(chosen[1]) < 10 for chosen in taken)  # otherwise nothing here would be routed
    if training:
        assert trajectory.losses["router"].item() == pytest.approx(sum(losses) / 4, rel=1e-12)
    else:
        assert trajectory.losses == {}


@pytest.mark.parametrize("training", [True, False])
def test_token_choice_is_its_transcription(training):
    build = partial(rd.mor, router=partial(rd.token_choice, balance=1.0, z_loss=1.0))
    model, x = model_of(build).train(training), some_tokens(4, 10)
    found, depths = [], []
    for row in x:
        expected, last, losses = written.mor_token_choice(arrays(model.state_dict()), row.numpy(), LAYOUT, 2)
        assert_agrees(model(row[None])[0], expected)
        found.append(losses)
        depths.append(last)
    trajectory = model.trajectory(x)
    assert trajectory.states[-1].context.router.last.tolist() == depths
    assert len({depth for last in depths for depth in last}) > 1
    for name, loss in trajectory.losses.items():
        assert loss.item() == pytest.approx(sum(losses[name] for losses in found) / 4, rel=1e-12)
    assert bool(trajectory.losses) == training


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("capacity", [0.125, 0.5])
def test_mixture_of_depths_is_its_transcription(capacity, training):
    layout = rd.Layout(1, 1, 5, 1)
    build = partial(rd.mod, router=partial(rd.every_other, capacity=capacity))
    model, x = model_of(build, layout).train(training), some_tokens(3, 10)
    for row in x:
        expected = written.mod(arrays(model.state_dict()), row.numpy(), layout, 2, capacity, causal=not training)
        assert_agrees(model(row[None])[0], expected)


BY_HAND = {
    "expert choice": (
        rd.mor,
        partial(written.mor_expert_choice, capacities=(1, 2 / 3, 1 / 3), alpha=0.1, causal=False),
    ),
    "token choice": (ROUTED["mor-token-choice"], written.mor_token_choice),
    "mixture of depths": (rd.mod, partial(written.mod, capacity=0.125, causal=False)),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_the_text_teaches_routers_and_blocks_as_in_the_transcription(name):
    build, function = BY_HAND[name]
    model, x = model_of(build, scale=0.1), some_tokens(1, 10)

    def loss(weights):
        said = function(weights, x[0].numpy(), LAYOUT, 2)
        return ((said if name == "mixture of depths" else said[0]) ** 2).sum()

    assert_slopes_agree(model, model(x).square().sum(), loss)


# Causality, padding, and gradients


@every_routed
def test_a_token_that_is_changed_changes_nothing_before_it_in_evaluation_and_does_in_training(build):
    model, x = model_of(partial(build, **quiet(build))), some_tokens(4, 12)
    for training in (False, True):
        model.train(training)
        leaks = 0.0
        for token in range(1, 12):
            changed = x.clone()
            changed[:, token] = (x[:, token] + 1) % 23
            leaks = max(leaks, (model(changed) - model(x))[:, :token].abs().max().item())
        if training and not isinstance(router_of(model), rd.TokenChoice):
            assert leaks > 1e-6  # the best of a text are not known before its end
        else:
            assert leaks < 1e-12


@every_routed
def test_a_padded_text_is_routed_as_it_is_alone_in_training_too(build):
    model, x, padding = model_of(partial(build, **quiet(build))), some_tokens(3, 12), [0, 7, 3]
    mask = torch.arange(12)[None] >= torch.tensor(padding)[:, None]
    together = model.trajectory(x, mask=mask)
    alone = [model.trajectory(x[row : row + 1, padding[row] :]) for row in range(3)]
    for row, one in enumerate(alone):
        assert_close(together.output[row, mask[row]], one.output[0])
    for name, loss in together.losses.items():
        assert_close(loss, sum(one.losses[name] for one in alone) / 3)


def quiet(build) -> dict:
    """Without noise, where the method has some."""
    update = getattr(build, "keywords", {}).get("update")
    return {} if update is None else {"update": partial(rd.gated, bias=0.0, state_noise=0.0, gate_noise=0.0)}


def test_padding_is_never_picked():
    mask = torch.tensor([[False, False, True, True], [False] * 4])
    for router, scores in (
        (rd.expert_choice(4, 2, capacities=(0.5, 0.5)), [9.0, 9.0, -1.0, -2.0]),
        (rd.every_other(4, 1, capacity=0.5, every=1), [9.0, 9.0, -1.0, -2.0]),
    ):
        router.choose.scores = Told(scores, scores)
        h = torch.zeros(2, 4, 4)
        for causal, expected in ((False, [[2], []]), (True, [[], []])):
            pick = router(h, router.begin(h, rd.Call(1)), mask, 0, causal=causal).pick
            taken = pick.scatter(torch.zeros(2, 4), torch.ones_like(pick.gather(torch.zeros(2, 4))))
            assert [row.nonzero()[:, 0].tolist() for row in taken] == expected


@every_routed
@pytest.mark.parametrize("training", [True, False])
def test_a_complete_mask_that_all_rows_share_is_that_mask_for_each(build, training):
    model, x = model_of(partial(build, **quiet(build))).train(training), some_tokens(3, 6)
    mask = torch.ones(1, 6, 6, dtype=torch.bool).tril()
    assert_close(model(x, mask=mask), model(x))


@every_routed
def test_the_losses_of_a_router_leave_the_model_without_gradient(build):
    model, x = model_of(build), some_tokens()
    losses = model.trajectory(x).losses
    assert losses
    sum(losses.values()).backward()
    reached = {name for name, gradient in gradients(model).items() if gradient.abs().max() > 0}
    assert reached
    assert all(name.startswith("core.update.router") for name in reached)


def test_a_predictor_learns_by_the_loss_alone_and_the_scores_by_the_text_alone():
    def router(dim, num_steps):
        scores, predictor = (rd.LinearScores(dim, num_routers=num_steps), rd.MLPScores(dim, num_routers=num_steps))
        return rd.ExpertChoice(rd.TopTokens(scores, rd.SigmoidWeight(), predictor=predictor), rd.falling_capacities(3))

    model, x = model_of(partial(rd.mor, router=router)), some_tokens()
    trajectory = model.trajectory(x)
    trajectory.losses["router"].backward(retain_graph=True)
    reached = {name for name, gradient in gradients(model).items() if gradient.abs().max() > 0}
    assert reached == {f"core.update.router.choose.predictor.{name}" for name in ("up", "out")}
    rd.next_token_loss(trajectory.output, x).backward()
    found = gradients(model)
    assert found["core.update.router.choose.scores.weight"].abs().max() > 0
    assert all(found[name].abs().max() == 0 for name in reached)


@every_routed
@pytest.mark.parametrize("training", [True, False])
def test_scores_a_hundred_times_as_large_stay_finite(build, training):
    model, x = model_of(build).float().train(training), some_tokens()
    with torch.no_grad():
        for weight in score_parameters(model):
            weight *= 100
    trajectory = model.trajectory(x)
    rd.last_step_loss(trajectory, x).backward()
    assert trajectory.output.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


def test_capacities_set_by_a_schedule_are_those_of_the_next_forward():
    model, x = model_of(), some_tokens(2, 12)
    schedule = rd.CosineCapacities(rd.falling_capacities(3), warmup=4)
    counts = []
    for draw in (0, 2, 4):
        router_of(model).capacities = schedule(draw)
        counts.append([int(state.carry.router[0].sum()) for state in model.trajectory(x, every_step=True).states])
    assert counts == [[12, 12, 12], [12, 10, 8], [12, 8, 4]]


# Decoding


@every_routed
@few
@given(models, scripts())
def test_keeping_all_is_the_parallel_pass_for_any_chunks_and_padding(build, recipe, drawn):
    model = recipe.model(build)
    script = whole_depth(drawn.script(model), model)
    found = read(model, script, rd.DepthCache())
    expected = model(script.tokens, mask=script.mask)
    size = expected[script.mask].abs().max().item()
    assert_close(found[script.mask], expected[script.mask], atol=1e-9 * size, rtol=1e-9)
    assert_rows(found, script, lambda alone, row: model(alone.tokens)[0])


def whole_depth(script: Script, model: rd.RecurrentTransformer) -> Script:
    return script._replace(num_steps=[[model.num_steps] * len(script.tokens)] * len(script.ends))


class MoRRow(RoutedRow):
    """One text under Mixture-of-Recursions by expert choice, read token by token."""

    def __init__(self, model: rd.RecurrentTransformer, found: Found):
        prelude, core, _, coda = model.layout
        sizes = Sizes(prelude, core, coda, attention(model).num_heads, attention(model).num_kv_heads)
        Row.__init__(self, arrays(model.state_dict()), sizes, keep_all)
        self.found, self.left, self.kept = found, {}, []

    def routed_step(self, hs: list[Array], anchors: list[Array], step: int, depth: int) -> list[Array]:
        weight, hs = self.w["core.update.router.choose.scores.weight"][step, 0], list(hs)
        scores = [h @ weight for h in hs]
        self.kept = [i for i in self.kept if scores[i] > 0] if step else list(range(len(hs)))
        candidates = [hs[i] for i in self.kept]
        for layer in range(self.sizes.num_core):
            name = f"core.stack.blocks.{layer}."
            for i in range(len(hs)):
                self.left.setdefault((name, self.length + i), Taken({}, depth))
            candidates = self.routed_block(name, candidates, [self.length + i for i in self.kept], step)
        for i, candidate in zip(self.kept, candidates, strict=True):
            hs[i] = hs[i] + 0.1 * sigmoid(scores[i]) * candidate
        return hs


@every_policy
@few
@given(models, scripts())
def test_every_policy_is_the_reference_recursion_wise_and_shared(case, recipe, drawn):
    model = recipe.model(partial(rd.mor, form=grouped)).requires_grad_(False)
    script = drawn.script(model)

    def alone(of: Script, row: int) -> Tensor:
        text, logits = MoRRow(model, case.found), []
        for start, end, steps in of.chunks:
            logits += text.read(of.tokens[0, start:end].tolist(), steps[0])
        return torch.from_numpy(np.stack(logits))

    assert_rows(read(model, script, rd.DepthCache(case.policy)), script, alone)


@every_routed
@pytest.mark.parametrize("policy", [rd.KeepAll(), rd.KeepFirst()], ids=["recursion-wise", "shared"])
def test_a_text_is_written_alone_as_it_is_in_a_batch(build, policy):
    model, prompt, padding = model_of(build).eval(), some_tokens(4, 6), [0, 3, 5, 1]
    mask = torch.arange(6)[None] >= torch.tensor(padding)[:, None]
    together = rd.generate(model, prompt, max_new_tokens=5, kv=policy, mask=mask)
    for row, start in enumerate(padding):
        alone = rd.generate(model, prompt[row : row + 1, start:], max_new_tokens=5, kv=policy)
        assert torch.equal(together[row, start:], alone[0])


@pytest.mark.filterwarnings("ignore:exit is LatentConverged, but this model's router leaves")
@every_routed
def test_rows_that_leave_early_are_routed_as_they_are_alone(build):
    model, prompt, rule = model_of(build).eval(), some_tokens(4, 6), rd.LatentConverged(below=0.5)
    together = rd.generate(model, prompt, max_new_tokens=5, exit=rule)
    rows = rd.generate(model, prompt, max_new_tokens=5, num_steps=[3, 1, 2, 3])
    for row, num_steps in enumerate([3, 1, 2, 3]):
        one = prompt[row : row + 1]
        assert torch.equal(together[row], rd.generate(model, one, max_new_tokens=5, exit=rule)[0])
        assert torch.equal(rows[row], rd.generate(model, one, max_new_tokens=5, num_steps=num_steps)[0])


@every_routed
@torch.no_grad()
def test_a_token_that_is_not_picked_costs_no_block(build):
    layout = rd.Layout(1, 2, 4, 1)
    model, x = model_of(build, layout).eval(), some_tokens(8, 12)
    moved = steps_taken(model, x)
    assert 0 < moved[:, :, 6:].float().mean() < 1
    cache, counts = rd.DepthCache(), []
    rd.extend(model, x[:, :6], cache)
    for block in blocks_of(model.core):
        block.register_forward_hook(lambda module, inputs, out: counts.append(out.shape[0] * out.shape[1]))
    for token in range(6, 12):
        counts.clear()
        rd.extend(model, x[:, token : token + 1], cache)
        assert counts == [int(taken) for taken in moved[:, :, token].sum(1) for _ in range(2)]


def steps_taken(model: rd.RecurrentTransformer, x: Tensor) -> Tensor:
    """Which tokens take each step of a whole forward: (step, row, token)."""
    states = [state.h for state in model.trajectory(x, every_step=True).states]
    at = rd.At(torch.arange(x.shape[1])[None])
    start = model.prelude(model.embed(x, at.positions), at)
    return torch.stack([(a != b).any(-1) for a, b in zip([start, *states], states, strict=False)])


@torch.no_grad()
def test_a_router_that_never_goes_on_leaves_one_step():
    model, x = model_of().eval(), some_tokens()
    router_of(model).choose.predictor = Told([-1.0], [-1.0], [-1.0])
    assert_close(model(x), model(x, 1))
    assert steps_taken(model, x).float().mean((1, 2)).tolist() == [1, 0, 0]
    router_of(model).choose.predictor = Told([1.0], [1.0], [1.0])
    assert steps_taken(model, x).all()


@torch.no_grad()
def test_the_depth_of_a_token_does_not_depend_on_the_call_that_it_comes_in():
    model, x = model_of().eval(), some_tokens(8, 12)
    whole, cache = steps_taken(model, x).sum(0), rd.DepthCache()
    assert set(whole.flatten().tolist()) == {1, 2, 3}
    for token in range(12):
        counts = []
        handle = blocks_of(model.core)[0].register_forward_hook(
            lambda module, inputs, out, to=counts: to.append(out.shape[0] * out.shape[1])
        )
        rd.extend(model, x[:, token : token + 1], cache)
        handle.remove()
        assert sum(counts) == whole[:, token].sum()


def test_with_gradients_a_cache_is_routed_causally_too_and_in_training():
    model, x = model_of(), some_tokens(2, 6)
    expected = model.eval()(x)
    cache = rd.DepthCache()
    found = [rd.extend(model.train(), part, cache) for part in x.split([4, 2], dim=1)]
    assert_close(torch.cat(found, dim=1), expected)


# Counting, names, compiling, refusing


@pytest.mark.parametrize(
    "build, exact",
    [
        (partial(rd.mor, router=partial(rd.expert_choice, loss=0)), True),
        (partial(rd.mor, router=partial(rd.expert_choice, loss=0), update=rd.gated, combine=rd.Interpolate), True),
        (partial(rd.mod, router=partial(rd.every_other, capacity=0.25, loss=0)), True),
        (rd.mor, False),
    ],
)
@pytest.mark.parametrize("form", [rd.GPT2Form, grouped])
@pytest.mark.filterwarnings("ignore:loss is 0, so nothing teaches the router")
def test_flops_are_those_that_the_expected_capacity_executes(build, exact, form):
    with torch.device("meta"):
        model = tiny(build, rd.Layout(1, 2, 4 if exact else 3, 1), form=form)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 12, dtype=torch.long, device="meta"))
    predicted = rd.accounting.flops(model, tokens=12)
    counted = counter.get_total_flops()
    assert counted == predicted if exact else predicted < counted < 1.01 * predicted


def test_shares_multiply_and_steps_cost_what_their_tokens_do():
    gate = rd.gated(16)
    routed = rd.RoutedUpdate(gate, rd.expert_choice(16, 3), rd.Interpolate())
    twice = rd.RoutedUpdate(routed, rd.every_other(16, 3, capacity=0.5, every=1), rd.Interpolate())
    assert routed.cost(3).shares == pytest.approx((1, 2 / 3, 1 / 3))
    assert (routed.cost(3).step, routed.cost(3).picked) == (32, gate.cost(3).step)
    assert routed.cost(3).begin == gate.cost(3).begin
    assert routed.cost(1).shares == (1,)
    assert twice.cost(3).shares == pytest.approx((0.5, 1 / 3, 1 / 6))
    assert rd.token_choice(16, 4).cost(4).shares == (1, 0.75, 0.5, 0.25)
    assert routed.cost(3).selects


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("build", ["mor", "mor-token-choice", "mod"])
def test_a_step_compiles_without_a_break_and_says_what_eager_code_says(build, training):
    torch._dynamo.reset()
    eager, x = model_of(ROUTED[build], rd.Layout(0, 1, 2, 0)).train(training), some_tokens(2, 8)
    fast = copy.deepcopy(eager)
    fast.compile_step(backend="aot_eager", fullgraph=True)
    found = []
    for model in (eager, fast):
        trajectory = model.trajectory(x)
        rd.last_step_loss(trajectory, x).backward()
        found.append((trajectory.output.detach(), gradients(model)))
    assert_close(found[1], found[0])


@pytest.mark.compile
@pytest.mark.parametrize("build", ["mor", "mor-token-choice", "mod"])
def test_compiled_decoding_is_eager(build):
    torch._dynamo.reset()
    model, x = model_of(ROUTED[build], rd.Layout(0, 1, 2, 0)).eval(), some_tokens(3, 8)
    expected = rd.generate(model, x, max_new_tokens=6)
    rd.compile_decoding(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(rd.generate(model, x, max_new_tokens=6), expected)


@pytest.mark.parametrize("build", [rd.mor, rd.mod, ROUTED["mor-token-choice"]], ids=["mor", "mod", "token choice"])
def test_more_steps_than_the_router_knows_are_refused(build):
    model, x = tiny(build, rd.Layout(0, 1, 3, 0)).eval(), some_tokens()
    with (
        pytest.warns(UserWarning, match="deeper than trained"),
        pytest.raises(
            ValueError, match=r"router was built for 3 at most, .* ask for 3 steps or fewer, or build and train"
        ),
    ):
        model(x, 4)


@torch.no_grad()
@every_routed
def test_a_blend_of_steps_is_refused(build):
    model = model_of(build).eval()
    with pytest.raises(ValueError, match="goes with no update that picks tokens"):
        rd.generate(model, some_tokens(), max_new_tokens=2, kv=uneven_blend(model))


def test_capacities_that_rise_or_leave_zero_to_one_are_refused_by_the_builders():
    for capacities in ((1, 0.5, 0.6), (1.2, 1, 1), (1, 0.5, 0), (1, 0.5)):
        with pytest.raises(ValueError, match="capacities"):
            tiny(partial(rd.mor, router=partial(rd.expert_choice, capacities=capacities)), LAYOUT)
    with pytest.raises(ValueError, match="capacity is 2"):
        tiny(partial(rd.mod, router=partial(rd.every_other, capacity=2)), LAYOUT)


@pytest.mark.parametrize("router", [rd.expert_choice, rd.token_choice])
def test_a_router_of_another_width_is_refused_at_the_first_call(router):
    model = tiny(partial(rd.mor, router=lambda dim, num_steps: router(8, num_steps)), LAYOUT)
    with pytest.raises(ValueError, match="state is 16 wide, but the router was built for 8: build it with dim=16"):
        model(some_tokens())


@pytest.mark.parametrize("num_steps", [2, 3, 4, 5])
def test_mixture_of_depths_is_as_deep_as_it_was_built(num_steps):
    model, x = tiny(rd.mod, rd.Layout(0, 1, num_steps, 0)).eval(), some_tokens()
    assert model(x, num_steps).isfinite().all()
    with (
        pytest.warns(UserWarning, match="deeper than trained"),
        pytest.raises(ValueError, match=f"router was built for {num_steps} at most"),
    ):
        model(x, num_steps + 1)


def test_mixture_of_depths_of_one_step_says_that_it_routes_nothing():
    with pytest.warns(UserWarning, match="Of 1 steps none is routed"):
        tiny(rd.mod, rd.Layout(0, 1, 1, 0))


@pytest.mark.parametrize(
    "place, part, message",
    [
        ("inner", rd.ExpertChoice, "inner is the class ExpertChoice, but must be a DepthUpdate"),
        ("inner", rd.every_other(16, 4), "inner is of MixtureOfDepths, but must be a DepthUpdate, such as rd.Repl"),
        ("router", rd.plain(16), "router is of ReplaceState, but must be a Router, such as rd.expert_choice"),
        ("router", rd.ExpertChoice, "router is the class ExpertChoice, but must be a Router: give an instance"),
        ("router", rd.expert_choice, "router is .*, but must be a Router, such as rd.expert_choice"),
        ("combine", rd.Interpolate, "combine is the class Interpolate, but must be a Combination: give an instance"),
        ("combine", None, "combine is None, but must be a Combination, such as rd.AddWeighted"),
    ],
)
def test_routing_refuses_parts_in_the_wrong_place(place, part, message):
    parts = {"inner": rd.plain(16), "router": rd.expert_choice(16, 2), "combine": rd.AddWeighted()} | {place: part}
    with pytest.raises((ValueError, TypeCheckError), match=place):
        rd.RoutedUpdate(**parts)
    with pytest.raises(ValueError, match=message):  # without the type checks of the tests
        check_parts(**parts)
