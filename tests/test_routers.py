"""Routers: who is taken, with which weight, and what teaches them; closed forms on inputs made by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import seeds
from torch import nn
from torch.nn.functional import one_hot
from torch.testing import assert_close
from user_parts import Balanced, Remembering

import recurrent_depth as rd
from recurrent_depth.routers import at_least, at_most
from recurrent_depth.top_tokens import choice_loss, highest, row_mean, row_share, z_loss


class Told(rd.RouterScores):
    """Says what it was told, whatever the state."""

    def __init__(self, *scores):
        super().__init__()
        self.scores = torch.tensor(scores)[..., None]
        self.num_routers, self.num_outputs = len(scores), 1

    def forward(self, h, router):
        return self.scores[router].expand(len(h), h.shape[1], -1).to(h.dtype)

    def cost(self):
        return 0


H = torch.zeros(1, 5, 4)
REAL = torch.ones(1, 5, dtype=torch.bool)
SHARE = row_share(H)
SCORES = [0.3, -2.0, 1.5, -0.1, 0.7]


# Picks


@st.composite
def chosen(draw, batch=3, num_tokens=6):
    return torch.tensor(
        draw(
            st.lists(st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens), min_size=batch, max_size=batch)
        )
    )


def tokens_of(pick: rd.Pick, batch: int) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in range(batch)]
    valid = pick.valid_like()
    for i, row in enumerate(range(batch) if pick.rows is None else pick.rows.tolist()):
        rows[row] = pick.index[i][valid[i]].tolist()
    return rows


@given(chosen())
def test_a_pick_names_the_chosen_tokens_in_the_order_of_the_text_and_as_few_others_as_goes(mask):
    expected = [row.nonzero()[:, 0].tolist() for row in mask]
    fewest, full = rd.pick_fewest(mask), rd.pick_chosen(mask, mask.shape[1])
    assert tokens_of(fewest, 3) == tokens_of(full, 3) == expected
    assert fewest.index.shape[1] == max(map(len, expected))
    if mask.any():
        assert len(fewest.index) == sum(map(bool, expected))


@given(chosen(), chosen(), seeds)
def test_rows_that_are_left_out_change_nothing_but_the_work(mask, inner, seed):
    torch.manual_seed(seed)
    fewest, full = rd.pick_fewest(mask), rd.pick_chosen(mask, 6)
    x, stack = torch.randn(3, 6, 8), rd.Stack([Remembering(), Balanced()])
    at, before = rd.At(torch.arange(6)[None], None, mask[:, [3]].expand(-1, 6)), torch.randn(3, 6, 8)
    found = []
    for pick in (fewest, full):
        notes = rd.Notes({0: (torch.ones(3, 6, 1), before)})
        blocks = rd.StepBlocks(stack, at, 0, None, notes).picked(pick)
        assert torch.equal(pick.scatter(x, pick.gather(x)), x)
        found.append((pick.scatter(x, blocks(pick.gather(x))), notes.after[0], notes.losses["balance"]))
    assert_close(found[0], found[1])
    fresh = rd.Notes()
    rd.StepBlocks(stack, at, 0, None, fresh)(fewest.gather(x), pick=fewest)
    assert torch.equal(fresh.after[0][0][..., 0], mask.float())
    narrow = rd.pick_fewest(fewest.gather(inner) & fewest.valid_like())
    assert tokens_of(fewest.narrow(narrow), 3) == tokens_of(rd.pick_fewest(mask & inner), 3)


def test_padding_of_a_pick_is_known_to_the_blocks_that_are_called_on_it():
    real = torch.tensor([[True] * 3, [False, True, True], [False] * 3])
    blocks = rd.StepBlocks(nn.Identity(), rd.At(torch.arange(3)[None], real, real), 0, None, rd.Notes())
    assert torch.equal(blocks.valid, real)
    pick = rd.Pick(torch.tensor([[0, 2], [1, 1]]), torch.tensor([[True, True], [True, False]]), torch.tensor([1, 0]), 3)
    assert blocks.picked(pick).valid.tolist() == [[False, True], [True, False]]
    whole = rd.StepBlocks(nn.Identity(), rd.At(), 0, None, rd.Notes())
    assert whole.valid is None
    assert torch.equal(whole.picked(pick).valid, pick.valid)


# Scores and weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("build", [rd.LinearScores, rd.MLPScores])
def test_scores_are_one_routers_own_and_float32_at_least(build, dtype):
    scores = build(8, num_routers=3, num_outputs=2, temperature=0.5).to(dtype)
    h = torch.randn(2, 5, 8, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    w = {name: weight.to(wide) for name, weight in scores.named_parameters()}
    for router in range(3):
        x = h.to(wide) / 0.5
        if build is rd.MLPScores:
            x = x @ w["up"][router].T
            expected = (x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))) @ w["out"][router].T
        else:
            expected = x @ w["weight"][router].T
        assert_close(scores(h, router), expected)
        with torch.autocast("cpu", torch.bfloat16):
            assert_close(scores(h, router), expected)
    assert scores.cost() == 2 * sum(weight[0].numel() for weight in scores.parameters())
    assert rd.MLPScores(8).up.shape == (1, 16, 8)


def test_weights_are_what_their_names_say():
    x = torch.randn(2, 3, 4)
    assert_close(rd.SigmoidWeight()(x), 0.1 / (1 + (-x).exp()))
    assert_close(rd.TanhWeight(0.5)(x), 0.5 * (x.exp() - (-x).exp()) / (x.exp() + (-x).exp()))
    assert_close(rd.SoftmaxWeight(2.0)(x), 2 * x.exp() / x.exp().sum(-1, keepdim=True))
    assert torch.equal(rd.RawWeight()(x), x)
    assert (rd.ConstantWeight(0.3)(x) == 0.3).all()


# Who is taken


def test_the_highest_scores_are_taken_up_to_the_limit_of_each_row_and_nobody_who_is_not_active():
    scores = torch.tensor([SCORES, SCORES, SCORES, SCORES])
    active = torch.tensor([[True] * 5, [True, True, False, True, True], [False] * 5, [False, True, False, False, True]])
    limit = at_most(active, 0.6)
    assert limit.rows.tolist() == [3, 2, 1, 1]
    assert limit.widest == 3
    found = highest(scores, active, limit)
    assert [row.nonzero()[:, 0].tolist() for row in found] == [[0, 2, 4], [0, 4], [], [4]]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40))
def test_capacities_are_rounded_as_published_and_not_by_floating_point(num_tokens, part, whole):
    capacity = min(part, whole) / whole
    real = torch.ones(1, num_tokens, dtype=torch.bool)
    product = min(part, whole) * num_tokens
    for limit, count in (
        (at_most(real, capacity), max(1, product // whole)),
        (at_least(real, capacity), -(-product // whole)),
    ):
        assert limit.rows.tolist() == [limit.widest] == [count]


def top(scores=SCORES, predictor=None, **coefficients) -> rd.TopTokens:
    return rd.TopTokens(Told(scores), rd.SigmoidWeight(), predictor=predictor, **coefficients)


def test_training_takes_the_best_and_everything_else_whoever_is_above_one_half():
    router = rd.ExpertChoice(rd.TopTokens(Told(SCORES, SCORES), rd.SigmoidWeight()), (1, 0.4))
    state = router.begin(H, rd.Call(2))
    for causal, expected in ((False, [2, 4]), (True, [0, 2, 4])):
        first = router(H, state, REAL, 0, causal=causal)
        assert first.pick is None
        second = router(H, state._replace(carry=first.carry), REAL, 1, causal=causal)
        assert tokens_of(second.pick, 1) == [expected]
        assert torch.equal(second.carry, one_hot(torch.tensor(expected), 5).sum(0).bool()[None])
        assert_close(second.weight[0], 0.1 * torch.tensor(SCORES).sigmoid())


def test_who_was_left_out_of_a_step_does_not_come_back():
    router = rd.ExpertChoice(rd.TopTokens(Told(SCORES, [-x for x in SCORES]), rd.RawWeight()), (0.6, 0.4))
    first = router(H, router.begin(H, rd.Call(2)), REAL, 0, causal=False)
    second = router(H, rd.RouterState(SHARE, first.carry), REAL, 1, causal=False)
    assert tokens_of(first.pick, 1) == [[0, 2, 4]]
    assert tokens_of(second.pick, 1) == [[0, 4]]


def test_mixture_of_depths_routes_every_other_step_and_chooses_anew_each_time():
    scores = rd.TopTokens(Told(SCORES, [-x for x in SCORES]), rd.RawWeight())
    router = rd.MixtureOfDepths(scores, capacity=0.3)
    taken = []
    for step in range(4):
        routing = router(H, router.begin(H, rd.Call(4)), REAL, step, causal=False)
        taken.append(None if routing.pick is None else tokens_of(routing.pick, 1))
        assert (routing.weight is None) == (step % 2 == 0)
    assert taken == [None, [[2, 4]], None, [[1, 3]]]
    assert router.cost(4).shares == (1.0, 0.3, 1.0, 0.3)


def test_a_predictor_decides_where_decisions_are_causal_and_nowhere_else():
    predictor = Told([-1.0, 1.0, -1.0, 1.0, -1.0])
    for causal, expected in ((False, [2, 4]), (True, [1, 3])):
        choice = top(predictor=predictor)(H, REAL, 0, at_most(REAL, 0.4), share=SHARE, causal=causal)
        assert choice.chosen[0].nonzero()[:, 0].tolist() == expected
        assert_close(choice.weight[0], 0.1 * torch.tensor(SCORES).sigmoid())


# Losses


def test_the_choice_loss_is_its_closed_form_and_padding_does_not_count():
    active = torch.tensor([[True] * 5, [False, True, True, False, True]])
    taken = torch.tensor([[False, False, True, False, True], [False, False, True, False, False]])
    scores = torch.tensor([SCORES, SCORES])
    terms = [
        [math.log1p(math.exp(-u)) if taken[row, i] else math.log1p(math.exp(u)) for i, u in enumerate(SCORES)]
        for row in (0, 1)
    ]
    expected = (sum(terms[0]) / 5 + (terms[1][1] + terms[1][2] + terms[1][4]) / 3) / 2
    share = torch.full((2, 5), 0.5)
    assert choice_loss(scores, taken, active, share).item() == pytest.approx(expected)
    assert choice_loss(scores.where(active, 1e9), taken, active, share).item() == pytest.approx(expected)


def test_the_coefficients_scale_the_losses_and_zero_leaves_them_out():
    limit = at_most(REAL, 0.4)
    losses = top(loss=0.5, z_loss=0.25)(H, REAL, 0, limit, share=SHARE, causal=False).losses
    taken = torch.tensor([[False, False, True, False, True]])
    assert_close(losses["router"], 0.5 * choice_loss(torch.tensor([SCORES]), taken, REAL, SHARE))
    assert_close(losses["router_z"], 0.25 * torch.tensor(SCORES).square().mean())
    assert top(loss=1, z_loss=1)(H, REAL, 0, limit, share=SHARE, causal=True).losses == {}
    with pytest.warns(UserWarning, match="loss is 0, so nothing teaches the router who is taken outside of training"):
        untaught = top(loss=0, z_loss=0)
    assert untaught(H, REAL, 0, limit, share=SHARE, causal=False).losses == {}


def test_the_balance_loss_is_its_closed_form():
    weights = torch.tensor([[[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.2, 0.6, 0.2], [9.0, 9.0, 9.0]]])
    real = torch.tensor([[True, True, True, False]])
    last = weights.argmax(-1)
    even = rd.BalanceLoss(1.0).losses(weights, last, real)["balance"]
    assert even.item() == pytest.approx(1.0)
    uneven = rd.BalanceLoss(0.1).losses(weights, torch.tensor([[0, 2, 0, 1]]), real)["balance"]
    means = [0.8 / 3, 1.0 / 3, 1.2 / 3]
    assert uneven.item() == pytest.approx(0.1 * 3 * (means[0] * 2 / 3 + means[2] * 1 / 3))
    collapsed = torch.tensor([[[1.0, 0.0, 0.0]] * 4])
    assert rd.BalanceLoss(1.0).losses(collapsed, collapsed.argmax(-1), real)["balance"].item() == pytest.approx(3.0)


def test_losses_do_not_depend_on_how_a_batch_is_split():
    scores, real = torch.randn(4, 6, 3), torch.arange(6)[None] >= torch.tensor([[0], [3], [5], [1]])
    last = scores.argmax(-1)
    for loss in (
        lambda rows: rd.BalanceLoss().losses(scores[rows].softmax(-1), last[rows], real[rows])["balance"],
        lambda rows: choice_loss(scores[rows][..., 0], last[rows] == 0, real[rows], row_share(scores[rows])),
        lambda rows: z_loss(scores[rows], real[rows], row_share(scores[rows])),
    ):
        parts = [loss(slice(0, 2)), loss(slice(2, 4))]
        assert_close(loss(slice(0, 4)), sum(parts) / 2)


def test_the_mean_of_a_row_of_padding_is_zero():
    x, counted = torch.full((2, 3), 5.0), torch.tensor([[True, False, False], [False] * 3])
    assert row_mean(x, counted).tolist() == [5.0, 0.0]
    assert row_mean(x[..., None], counted).tolist() == [[5.0], [0.0]]


def test_the_balance_bias_moves_towards_depths_that_are_seldom_taken_and_only_compares():
    balance = rd.BalanceBias(3, rate=0.01)
    last, mask = torch.tensor([[0, 0, 1], [0, 2, 2]]), torch.tensor([[True] * 3, [True, False, False]])
    balance.update(last, mask)
    assert_close(balance.bias, torch.tensor([-0.01, 0.01, 0.01]))
    balance.update(torch.tensor([[0, 1, 2]]))
    assert_close(balance.bias, torch.tensor([-0.01, 0.01, 0.01]))
    router = rd.TokenChoice(rd.LinearScores(4, num_outputs=3), rd.SoftmaxWeight(), balance)
    balance.moves.copy_(torch.tensor([0, 1000, 0]))
    context = router.begin(torch.randn(1, 5, 4), rd.Call(3)).context
    assert (context.last == 1).all()
    assert (context.weight < 1).all()
    balance.reset_parameters()
    assert (balance.bias == 0).all()


def cast(balance: rd.BalanceBias) -> rd.BalanceBias:
    return balance.to(torch.bfloat16)


def built_and_loaded_in_bfloat16(balance: rd.BalanceBias) -> rd.BalanceBias:
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)  # as from_pretrained does
        loaded = rd.BalanceBias(3)
        loaded.load_state_dict(balance.state_dict())
    finally:
        torch.set_default_dtype(default)
    return loaded


@pytest.mark.parametrize("change", [cast, rd.BalanceBias.half, built_and_loaded_in_bfloat16])
def test_the_balance_bias_of_a_model_in_bfloat16_loses_no_update(change):
    balance, last = rd.BalanceBias(3), torch.tensor([[0, 0, 1]])
    for _ in range(1000):
        balance.update(last)
    balance = change(balance)
    for _ in range(1000):
        balance.update(last)
    assert balance.bias.dtype == torch.float32
    assert_close(balance.bias, torch.tensor([-2.0, 0.0, 2.0]))
    even = torch.full((1, 1, 3), 1 / 3, dtype=torch.bfloat16)
    assert_close(balance.preference(even), even.float() + balance.bias)


@given(st.integers(1, 7), st.integers(1, 9), st.booleans())
def test_depths_in_even_use_and_texts_of_padding_move_no_bias(num_depths, times, padded):
    balance = rd.BalanceBias(num_depths)
    last = torch.arange(num_depths).repeat(times)[None]
    balance.update(last, torch.zeros_like(last, dtype=torch.bool) if padded else None)
    assert (balance.bias == 0).all()


# Capacities, and what is refused


def test_capacities_fall_along_a_cosine():
    schedule = rd.CosineCapacities((1, 2 / 3, 1 / 3), warmup=10)
    assert schedule(0) == (1, 1, 1)
    assert schedule(5) == pytest.approx((1, 5 / 6, 2 / 3))
    assert schedule(2)[2] == pytest.approx(1 / 3 + 2 / 3 * 0.5 * (1 + math.cos(0.2 * math.pi)))
    assert schedule(10) == schedule(999) == pytest.approx(rd.falling_capacities(3))
    router = rd.expert_choice(8, 3)
    router.capacities = schedule(5)
    assert router.cost(2).shares == pytest.approx((1, 5 / 6))


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda: rd.expert_choice(8, 3, capacities=(1, 0.5, 0.6)), r"capacities\[2\] is 0.6, above the 0.5"),
        (
            lambda: rd.expert_choice(8, 2, capacities=(1.5, 0.5)),
            r"capacities\[0\] is 1.5, but must be a finite number",
        ),
        (
            lambda: rd.expert_choice(8, 2, capacities=(1, 0.0)),
            r"capacities\[1\] is 0.0, but must be a finite number",
        ),
        (lambda: rd.expert_choice(8, 2, capacities=(1, math.nan)), r"capacities\[1\] is nan"),
        (lambda: rd.expert_choice(8, 2, capacities=()), "capacities is empty"),
        (lambda: rd.expert_choice(8, 3, capacities=(1, 0.5)), "capacities has 2 shares, but must have one for each of"),
        (lambda: setattr(rd.expert_choice(8, 2), "capacities", (0.5, 1)), "must not rise"),
        (lambda: rd.CosineCapacities((0.5, 1), 10), "must not rise"),
        (lambda: rd.CosineCapacities((1, 0.5), 0), "warmup"),
        (lambda: rd.falling_capacities(0), "num_steps"),
        (
            lambda: rd.every_other(8, 4, capacity=0.0),
            "capacity is 0.0, but must be a finite number above 0 and at most 1",
        ),
        (
            lambda: rd.every_other(8, 4, capacity=1.1),
            "capacity is 1.1, but must be a finite number above 0 and at most 1",
        ),
        (lambda: rd.every_other(8, 4, every=0), "every"),
        (lambda: rd.LinearScores(8, temperature=0.0), "temperature of the router is 0.0, but must be a finite number"),
        (lambda: rd.MLPScores(8, hidden=0), "hidden"),
        (lambda: rd.BalanceBias(0), "num_depths"),
        (lambda: rd.TopTokens(rd.LinearScores(8, num_outputs=4), rd.RawWeight()), "scores gives 4 outputs, .* one"),
        (lambda: top(predictor=rd.LinearScores(8, num_outputs=2)), "predictor gives 2 outputs, .* num_outputs=1"),
        (lambda: top(predictor=rd.LinearScores(8, num_routers=2)), "predictor has 2 routers, .* num_routers=1"),
        (lambda: rd.TopTokens(Told(SCORES, SCORES), rd.RawWeight(), predictor=Told(SCORES)), "must have as many .* 2"),
        (lambda: rd.TopTokens(Told(SCORES), rd.SoftmaxWeight()), r"only one, .* use SigmoidWeight\(\)"),
        (lambda: by_token(rd.LinearScores(8, num_routers=3, num_outputs=3)), "scores has 3 routers, .* num_routers=1"),
        (
            lambda: by_token(balance=rd.BalanceBias(1)),
            "built for 1 depths, but scores has 3 .* build the balance for 3",
        ),
        (
            lambda: by_token(balance=rd.BalanceBias(5)),
            "built for 5 depths, but scores has 3 .* build the balance for 3",
        ),
        (lambda: rd.LinearScores(8)(torch.zeros(1, 5, 9), 0), "9 wide, but the router was built for 8: .* dim=9"),
        (lambda: rd.MLPScores(8)(torch.zeros(1, 2, 9), 0), "The state is 9 wide, but the router was built for 8"),
        (lambda: rd.CosineCapacities((1, 0.5), 5)(-3), "draw is -3, but must be a whole number of at least 0"),
        (lambda: rd.CosineCapacities((1, 0.5), 5)(True), "draw is True, but must be a whole number"),
        (lambda: mixture_of_depths(2, num_steps=6), "3 are routed with every=2, .* num_routers=3"),
        (lambda: mixture_of_depths(2, num_steps=0), "num_steps is 0"),
    ],
)
def test_what_a_router_cannot_do_is_refused(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def by_token(scores=None, balance=None, **coefficients) -> rd.TokenChoice:
    scores = rd.LinearScores(8, num_outputs=3) if scores is None else scores
    return rd.TokenChoice(scores, rd.SoftmaxWeight(), rd.BalanceLoss() if balance is None else balance, **coefficients)


def mixture_of_depths(num_routers: int, **arguments) -> rd.MixtureOfDepths:
    return rd.MixtureOfDepths(rd.TopTokens(rd.LinearScores(4, num_routers=num_routers), rd.RawWeight()), **arguments)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -0.1])
@pytest.mark.parametrize(
    "build",
    [
        lambda bad: rd.expert_choice(8, 2, alpha=bad),
        lambda bad: rd.expert_choice(8, 2, loss=bad),
        lambda bad: rd.expert_choice(8, 2, z_loss=bad),
        lambda bad: rd.expert_choice(8, 2, temperature=bad),
        lambda bad: rd.token_choice(8, 2, alpha=bad),
        lambda bad: rd.token_choice(8, 2, balance=bad),
        lambda bad: rd.token_choice(8, 2, z_loss=bad),
        lambda bad: rd.every_other(8, 2, loss=bad),
        lambda bad: rd.MLPScores(8, temperature=bad),
        lambda bad: rd.TanhWeight(bad),
        lambda bad: rd.BalanceBias(2, rate=bad),
        lambda bad: rd.ConstantWeight(bad if bad != -0.1 else -math.inf),
    ],
)
def test_numbers_that_are_negative_or_not_finite_are_refused(build, bad):
    with pytest.raises(ValueError, match=r"is (nan|-?inf|-0.1), but must be"):
        build(bad)


@pytest.mark.parametrize("build", [rd.SigmoidWeight, rd.TanhWeight, rd.SoftmaxWeight])
def test_a_weight_that_is_always_zero_is_refused(build):
    with pytest.raises(ValueError, match="alpha is 0, but must be a finite number above 0"):
        build(0)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 5])
@pytest.mark.filterwarnings("ignore:Of 1 steps none is routed")
def test_mixture_of_depths_takes_the_steps_that_it_was_built_for_and_no_more(num_steps):
    router = mixture_of_depths(max(1, num_steps // 2), num_steps=num_steps)
    for taken in range(1, num_steps + 1):
        router.begin(H, rd.Call(taken))
    words = f"router was built for {num_steps} at most, .* ask for {num_steps} steps or fewer, or build and train"
    with pytest.raises(ValueError, match=words):
        router.begin(H, rd.Call(num_steps + 1))


def test_mixture_of_depths_warns_if_it_routes_no_step():
    with pytest.warns(UserWarning, match="Of 1 steps none is routed with every=2, .* take 2 steps or more, or every=1"):
        mixture_of_depths(1, num_steps=1)
