"""Laws of leaving early: the law over steps, the decision, and every rule against its written form."""

import inspect
import math
from fractions import Fraction
from functools import partial
from itertools import accumulate, pairwise

import jaxtyping
import pytest
import torch
from battery import lively, tiny
from hypothesis import assume, given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from torch.distributions import Categorical, kl_divergence

import recurrent_depth as rd
from recurrent_depth.convergence import ArgmaxStable, GateClosed, KLConverged, LatentConverged, Stability, divergence
from recurrent_depth.exits import AtLeast, ExitAfter, ExitRule, LearnedExit, exit_law, leaving
from recurrent_depth.trees import map_tensors

DIM = 6
LAYOUT = rd.Layout(1, 1, 6, 1)

RULES = {
    "after": partial(ExitAfter, 3),
    "gate": partial(GateClosed, 0.4),
    "latent": partial(LatentConverged, 0.5),
    "kl": partial(KLConverged, 0.2),
    "argmax": partial(ArgmaxStable, 2),
    "learned": partial(LearnedExit, DIM, quantile=0.7, bias=-1.0),
    "normed": lambda: LearnedExit(DIM, norm=torch.nn.LayerNorm(DIM)),
    "at-least": lambda: AtLeast(3, ArgmaxStable(1)),
}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
hazard_tables = st.integers(1, 8).flatmap(
    lambda width: st.lists(st.lists(st.floats(0, 1, width=32), min_size=width, max_size=width), min_size=1, max_size=9)
)


def itself(state: rd.DepthState) -> torch.Tensor:
    """A readout whose logits are the state."""
    return state.h


def unread(state: rd.DepthState) -> torch.Tensor:
    raise AssertionError("This rule promises to read no logits.")


def states(*h: torch.Tensor, write: list[torch.Tensor] | None = None) -> list[rd.DepthState]:
    """The states after each step."""
    made = [rd.initial_state(one) for one in h]
    return made if write is None else [one._replace(write=share) for one, share in zip(made, write, strict=True)]


def one_token(*h: list[float]) -> list[rd.DepthState]:
    return states(*(torch.tensor([[one]]) for one in h))


def walk(num_steps: int, batch: int, num_tokens: int = 2, dtype: torch.dtype = torch.float32) -> list[rd.DepthState]:
    """States that come to rest, and gates that close: each token at its own speed."""
    rest, h = torch.randn(2, batch, num_tokens, DIM)
    speed = torch.rand(batch, num_tokens)
    steps, shares = [], []
    for _ in range(num_steps):
        h = h + speed[..., None] * (rest - h)
        steps.append(h.to(dtype))
        shares.append(speed * torch.rand(batch, num_tokens))
    return states(*steps, write=shares)


def hazards(rule: ExitRule, states: list[rd.DepthState], readout=itself) -> torch.Tensor:
    """What a rule says after each step, if nobody leaves."""
    carry, said = None, []
    for step, state in enumerate(states):
        carry, hazard = rule.hazard(carry, state, readout, step)
        said.append(hazard)
    return torch.stack(said)


def steps_taken(rule: ExitRule, hazards: torch.Tensor) -> torch.Tensor:
    """After how many steps each token leaves; those that stay take all."""
    survival, taken = torch.ones_like(hazards[0]), torch.full(hazards.shape[1:], len(hazards))
    for step, hazard in enumerate(hazards):
        survival, leaves = leaving(survival, hazard, rule.quantile)
        taken = torch.where(leaves, taken.clamp(max=step + 1), taken)
    return taken


def gathered(rule: ExitRule, states: list[rd.DepthState]) -> tuple[dict[int, int], dict[tuple[int, int], torch.Tensor]]:
    """Rows leave when all of their tokens have, and are gathered out of everything, the carry too."""
    rows, carry = torch.arange(states[0].h.shape[0]), None
    survival = torch.ones_like(states[0].write)
    taken, said = {}, {}
    for step, state in enumerate(states):
        state = state._replace(h=state.h[rows], write=state.write[rows])
        carry, hazard = rule.hazard(carry, state, itself, step)
        survival, leaves = leaving(survival, hazard, rule.quantile)
        said |= {(row, step): one for row, one in zip(rows.tolist(), hazard, strict=True)}
        stay = ~leaves.all(1)
        taken |= dict.fromkeys(rows[~stay].tolist(), step + 1)
        rows, survival = rows[stay], survival[stay]
        carry = map_tensors(lambda leaf, stay=stay: leaf[stay], carry)
        if len(rows) == 0:
            break
    return taken | dict.fromkeys(rows.tolist(), len(states)), said


def slow_law(hazards: list) -> list[Fraction]:
    """Goes down the tree of chances: at each step leave, or stay for what comes."""
    if len(hazards) == 1:
        return [Fraction(1)]
    leave = Fraction(hazards[0])
    return [leave, *((1 - leave) * later for later in slow_law(hazards[1:]))]


# The law over steps


@given(hazard_tables)
def test_the_law_over_steps_is_that_of_the_tree_of_chances(table):
    law = exit_law(torch.tensor(table)[:, None])
    wanted = [[float(p) for p in slow_law(column)] for column in zip(*table, strict=True)]
    torch.testing.assert_close(law[:, 0].T, torch.tensor(wanted))


@given(hazard_tables, st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
def test_the_law_over_steps_is_never_negative_and_sums_to_one(table, dtype):
    law = exit_law(torch.tensor(table, dtype=dtype)[:, None])
    assert law.dtype == torch.promote_types(dtype, torch.float32)
    assert (law >= 0).all()
    torch.testing.assert_close(law.sum(0), torch.ones_like(law[0]), atol=1e-6, rtol=0)


def test_expected_state_is_weighted_by_the_law_alone():
    law = exit_law(torch.tensor([0.2, 0.5, 0.9])[:, None, None])
    torch.testing.assert_close(law.flatten(), torch.tensor([0.2, 0.4, 0.4]))
    h = torch.tensor([1.0, 2.0, 4.0])[:, None, None]
    assert (law * h).sum().item() == pytest.approx(0.2 * 1 + 0.4 * 2 + 0.4 * 4)


@given(hazard_tables, st.floats(0, 1, width=32))
def test_the_last_hazard_is_forced(table, other):
    changed = [*table[:-1], [other] * len(table[0])]
    assert exit_law(torch.tensor(table)[:, None]).equal(exit_law(torch.tensor(changed)[:, None]))


def test_the_law_is_differentiable_where_hazards_are_certain_too():
    certain = torch.tensor([[0.3, 0.0, 1.0, 0.2], [0.6, 1.0, 1.0, 0.0], [0.5, 0.5, 0.0, 1.0]], dtype=torch.float64)
    assert torch.autograd.gradcheck(exit_law, certain[:, None].requires_grad_())


def test_a_small_hazard_is_not_lost():
    law = exit_law(torch.tensor([1e-12, 0.5, 0.5])[:, None, None])
    assert law[0].item() == pytest.approx(1e-12)


def test_a_law_over_no_steps_is_refused():
    with pytest.raises(ValueError, match=r"hazards must hold at least one step, got shape \(0, 2, 3\)"):
        exit_law(torch.zeros(0, 2, 3))


# The decision


@given(hazard_tables, st.floats(1e-3, 1))
def test_a_token_leaves_once_the_law_up_to_here_reaches_the_quantile(table, quantile):
    rule = LearnedExit(DIM, quantile=quantile)
    for column in zip(*table, strict=True):
        # The law of a longer loop, so that no hazard of these is the forced one.
        gone = list(accumulate(slow_law([*column, 0])[:-1]))
        assume(all(abs(chance - Fraction(quantile)) > 1e-5 for chance in gone))
        wanted = next((steps for steps, chance in enumerate(gone, 1) if chance >= quantile), len(column))
        assert steps_taken(rule, torch.tensor(column)[:, None, None]).item() == wanted


@pytest.mark.parametrize("quantile", [5e-324, 1e-30, 0.1, 0.5, 0.9, 1.0])
def test_certain_hazards_leave_at_any_quantile(quantile):
    survival = torch.ones(1, 2)
    survival, leaves = leaving(survival, torch.zeros(1, 2), quantile)
    assert leaves.tolist() == [[False, False]]
    survival, leaves = leaving(survival, torch.tensor([[1.0, 0.0]]), quantile)
    assert leaves.tolist() == [[True, False]]
    assert survival.tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize("quantile", [0.1, 0.3, 0.5, 0.7, 0.9, 0.99])
def test_a_hazard_that_is_the_quantile_leaves(quantile):
    _, leaves = leaving(torch.ones(1, 1), torch.full((1, 1), quantile), quantile)
    assert leaves.item()


def test_a_hazard_that_is_no_number_lets_nobody_go():
    survival, leaves = leaving(torch.ones(1, 1), torch.full((1, 1), math.nan), 0.5)
    assert not leaves.item()
    assert not leaving(survival, torch.ones(1, 1), 0.5)[1].item()


# What every rule keeps


@every_rule
@given(st.integers(0, 2**31), st.integers(1, 5))
def test_no_row_depends_on_its_neighbours(rule, seed, batch):
    torch.manual_seed(seed)
    rule, together = rule(), walk(8, batch)
    taken, said = gathered(rule, together)
    for row in range(batch):
        alone = [state._replace(h=state.h[[row]], write=state.write[[row]]) for state in together]
        alone_taken, alone_said = gathered(rule, alone)
        assert taken[row] == alone_taken[0]
        for step in range(taken[row]):
            torch.testing.assert_close(said[row, step], alone_said[0, step])


@every_rule
def test_a_rule_remembers_nothing_and_changes_nothing(rule):
    rule, seen = rule(), walk(6, 3)
    before = [state.h.clone() for state in seen]
    weights = map_tensors(torch.clone, rule.state_dict())
    assert hazards(rule, seen).equal(hazards(rule.eval(), seen))
    assert all(state.h.equal(h) for state, h in zip(seen, before, strict=True))
    assert all(value.equal(weights[name]) for name, value in rule.state_dict().items())


@every_rule
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_hazards_are_chances_in_any_dtype(rule, dtype):
    rule, seen = rule().to(dtype), walk(6, 3, dtype=dtype)
    said = hazards(rule, seen)
    assert said.dtype in (torch.float32, torch.promote_types(dtype, torch.float32))
    assert ((said >= 0) & (said <= 1)).all()
    exact = hazards(rule.double(), [state._replace(h=state.h.double()) for state in seen])
    torch.testing.assert_close(said.double(), exact.double(), atol=0.01, rtol=0)


@pytest.mark.compile
@every_rule
def test_a_rule_compiles_to_one_graph(rule):
    rule, (first, then) = rule(), walk(2, 3)

    def two_steps(first, then):
        carry, hazard = rule.hazard(None, first, itself, 0)
        survival, _ = leaving(torch.ones_like(hazard), hazard, rule.quantile)
        return leaving(survival, rule.hazard(carry, then, itself, 1)[1], rule.quantile)

    compiled = torch.compile(two_steps, backend="eager", fullgraph=True)(first, then)
    for one, other in zip(compiled, two_steps(first, then), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["gate", "latent", "kl", "learned", "normed"])
def test_states_that_are_no_numbers_let_nobody_go(name):
    broken = [state._replace(h=state.h * math.nan, write=state.write * math.nan) for state in walk(6, 2)]
    rule = RULES[name]()
    assert (steps_taken(rule, hazards(rule, broken)) == 6).all()


@pytest.mark.parametrize("name", ["after", "gate", "latent", "learned", "normed"])
def test_rules_that_promise_it_read_no_logits(name):
    assert len(hazards(RULES[name](), walk(4, 2), readout=unread)) == 4


@pytest.mark.parametrize("name", ["kl", "argmax", "at-least"])
def test_rules_that_read_logits_do_so_once_a_step(name):
    reads = []
    hazards(RULES[name](), walk(4, 2), readout=lambda state: reads.append(state) or state.h)
    assert len(reads) == 4


# Each rule against its written form


@given(st.integers(1, 9))
def test_a_fixed_exit_is_after_that_many_steps(num_steps):
    rule = ExitAfter(num_steps)
    assert (steps_taken(rule, hazards(rule, walk(9, 2))) == num_steps).all()


def test_a_token_leaves_when_its_gate_has_closed():
    model = lively(tiny(layout=LAYOUT)).eval()
    seen = model.trajectory(torch.randint(23, (3, 5)), every_step=True).states
    writes = torch.stack([state.write for state in seen])
    below = writes.median().item()
    said = hazards(GateClosed(below), list(seen), readout=unread)
    assert said.equal((writes < below).float())
    assert 0 < said.mean() < 1


def test_a_fresh_gate_counts_as_closed():
    model = tiny(layout=LAYOUT).eval()
    seen = model.trajectory(torch.randint(23, (3, 5)), every_step=True).states
    rule = GateClosed()
    assert (steps_taken(rule, hazards(rule, list(seen))) == 1).all()
    assert seen[0].write.mean().item() == pytest.approx(0.018, abs=2e-3)


def test_no_gate_never_closes():
    model = tiny(rd.naive, layout=LAYOUT).eval()
    seen = model.trajectory(torch.randint(23, (3, 5)), every_step=True).states
    assert not hazards(GateClosed(1.0), list(seen)).any()


def test_the_latent_rule_leaves_when_a_step_moves_little():
    seen = one_token([3.0, 4.0], [3.0, 4.2], [3.0, 4.2], [0.0, 0.0], [0.0, 1.0])
    ratios = [math.inf, 0.2 / math.hypot(3, 4.2), 0.0, math.inf, 1.0]
    for below in (0.01, 0.038, 0.039, 1.01):
        assert hazards(LatentConverged(below), seen).flatten().tolist() == [float(ratio < below) for ratio in ratios]


def test_the_latent_rule_carries_the_last_state():
    seen = walk(3, 2)
    carry, _ = LatentConverged().hazard(None, seen[0], unread, 0)
    assert carry.equal(seen[0].h)
    carry, _ = LatentConverged().hazard(carry, seen[1], unread, 1)
    assert carry.equal(seen[1].h)


@given(st.integers(0, 2**31), st.floats(0.1, 20))
def test_the_divergence_is_that_of_torch(seed, scale):
    first, second = scale * torch.randn(2, 2, 3, 7, generator=torch.Generator().manual_seed(seed)).double()
    wanted = kl_divergence(Categorical(logits=first), Categorical(logits=second))
    torch.testing.assert_close(divergence(first.log_softmax(-1), second.log_softmax(-1)), wanted)


def test_the_divergence_is_a_written_sum_from_the_previous_to_the_current():
    seen = one_token([0.0, 0.0], [math.log(3), 0.0], [math.log(3), 0.0])
    wanted = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    for below, leaves in ((wanted * 0.999, 0.0), (wanted * 1.001, 1.0)):
        assert hazards(KLConverged(below), seen).flatten().tolist() == [0.0, leaves, 1.0]


def test_the_divergence_takes_tokens_that_are_ruled_out():
    never = [0.0, 1.0, -math.inf]
    assert hazards(KLConverged(), one_token(never, never)).flatten().tolist() == [0.0, 1.0]
    assert hazards(KLConverged(1e9), one_token([0.0, 1.0, 2.0], never)).flatten().tolist() == [0.0, 0.0]
    assert hazards(KLConverged(1e9), one_token(never, [0.0, 1.0, 2.0])).flatten().tolist() == [0.0, 1.0]


def test_no_convergence_rule_leaves_after_the_first_step():
    uniform = one_token([0.0, 0.0, 0.0])
    for rule in (LatentConverged(1e9), KLConverged(1e9), ArgmaxStable(1)):
        assert not hazards(rule, uniform).any()


def test_the_divergence_rule_reads_the_model_after_each_step():
    model = lively(tiny(layout=LAYOUT)).eval()
    trajectory = model.trajectory(torch.randint(23, (3, 5)), every_step=True)
    said = [Categorical(logits=trajectory.after(step)) for step in range(1, 7)]
    moves = torch.stack([kl_divergence(before, after) for before, after in pairwise(said)])
    below = moves.median().item() * 1.01
    wanted = torch.cat([torch.zeros_like(moves[:1]), (moves < below).float()])
    assert hazards(KLConverged(below), list(trajectory.states), trajectory.readout).equal(wanted)


def test_the_argmax_rule_counts_how_often_in_a_row_it_stayed():
    likeliest = [0, 1, 1, 1, 0, 0, 0, 0]
    seen = one_token(*([1.0, 0.0] if token == 0 else [0.0, 1.0] for token in likeliest))
    stayed = [0, 0, 1, 2, 0, 1, 2, 3]
    for times in (1, 2, 3, 4):
        said = hazards(ArgmaxStable(times), seen).flatten().tolist()
        assert said == [float(count >= times) for count in stayed]


def test_the_argmax_rule_by_default_takes_six_equal_predictions():
    rule = ArgmaxStable()
    assert steps_taken(rule, hazards(rule, one_token(*[[1.0, 0.0]] * 9))).item() == 6
    carry, _ = rule.hazard(None, walk(1, 2)[0], itself, 0)
    assert isinstance(carry, Stability)
    assert [leaf.shape for leaf in carry] == [(2, 2), (2, 2)]


@given(st.integers(1, 9))
def test_a_rule_that_waits_has_seen_the_steps_before(num_steps):
    rule = ArgmaxStable(2)
    waiting = AtLeast(num_steps, rule)
    seen = one_token(*[[1.0, 0.0]] * 9)
    assert steps_taken(waiting, hazards(waiting, seen)).item() == max(3, num_steps)
    plain, waited = hazards(rule, seen), hazards(waiting, seen)
    assert not waited[: num_steps - 1].any()
    assert waited[num_steps - 1 :].equal(plain[num_steps - 1 :])


def test_a_rule_that_waits_keeps_the_quantile():
    rule = LearnedExit(DIM, quantile=0.9)
    waiting = AtLeast(2, rule)
    assert waiting.quantile == 0.9
    rule.quantile = 0.7
    assert waiting.quantile == 0.7
    waiting.quantile = 0.4
    assert rule.quantile == 0.4


@pytest.mark.parametrize("make", [partial(LearnedExit, DIM), lambda: AtLeast(2, LearnedExit(DIM)), GateClosed])
@pytest.mark.parametrize("value", [7, 0, -0.5, True, math.nan, "0.5", None])
def test_a_quantile_that_is_set_is_checked_as_one_that_is_given(make, value, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as a user runs it
    rule = make()
    with pytest.raises(ValueError, match=f"quantile is {value!r}, but must be a finite number above 0 and at most 1"):
        rule.quantile = value
    assert rule.quantile == 0.5


# The learned exit


def test_the_learned_exit_is_a_sigmoid_of_a_linear_unit():
    rule, state = LearnedExit(3, bias=0.5), one_token([1.0, -2.0, 4.0])[0]
    rule.linear.weight.data = torch.tensor([[0.1, 0.2, 0.3]])
    _, hazard = rule.hazard(None, state, unread, 0)
    assert hazard.item() == pytest.approx(1 / (1 + math.exp(-(0.1 - 0.4 + 1.2 + 0.5))))


def test_the_learned_exit_reads_the_normed_state():
    norm = rd.grt(LAYOUT, dim=DIM, num_heads=1, vocab_size=5, context_length=4, form=rd.LlamaForm).norm
    normed, plain = LearnedExit(DIM, norm=norm), LearnedExit(DIM)
    plain.linear.load_state_dict(normed.linear.state_dict())
    seen = walk(3, 2)
    assert hazards(normed, seen).equal(hazards(plain, [state._replace(h=norm(state.h)) for state in seen]))


def test_the_learned_exit_learns_from_the_law():
    rule, seen = LearnedExit(DIM), walk(5, 3)
    for state in seen:
        state.h.requires_grad_()
    law = exit_law(hazards(rule, seen))
    (law * torch.arange(5.0)[:, None, None]).sum().backward()
    for weight in (*rule.parameters(), *(state.h for state in seen[:-1])):
        assert weight.grad.isfinite().all()
        assert weight.grad.any()
    assert seen[-1].h.grad is None or not seen[-1].h.grad.any()


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float32], ids=str)
def test_the_learned_exit_is_float32_in_a_half_precision_model(cast):
    rule, seen = LearnedExit(DIM, bias=-6.0).to(cast), walk(2, 3, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        said = hazards(rule, seen)
    assert said.dtype == torch.float32
    logits = torch.stack([state.h.double() @ rule.linear.weight.double()[0] for state in seen]) + rule.bias.double()
    torch.testing.assert_close(said.double(), logits.sigmoid(), atol=0, rtol=1e-5)


def test_a_fresh_learned_exit_is_shallow_and_a_negative_bias_starts_deep():
    seen = tiny(layout=rd.Layout(1, 1, 10, 1)).trajectory(torch.randint(23, (4, 12)), every_step=True).states

    def depth(bias: float) -> float:
        rule = LearnedExit(16, bias=bias, norm=torch.nn.LayerNorm(16))
        torch.nn.init.normal_(rule.linear.weight, std=0.02)
        return steps_taken(rule, hazards(rule, list(seen))).double().mean().item()

    assert depth(0.0) < 2.1
    assert depth(-3.0) == 10


def test_the_bias_of_the_learned_exit_comes_back():
    rule = LearnedExit(DIM, bias=-3.0)
    assert list(rule.state_dict()) == ["bias", "linear.weight"]
    rule.bias.data.zero_()
    rule.reset_parameters()
    assert rule.bias.tolist() == [-3.0]


# What is refused

BAD = {
    "num_steps": [
        (lambda value: ExitAfter(value), [0, -1, True, 2.5, "3", None]),
        (lambda value: AtLeast(value, GateClosed()), [0, -1, True, 2.5, "3", None]),
    ],
    "times": [(ArgmaxStable, [0, -1, True, 2.5, "3", None])],
    "below": [
        (GateClosed, [0, -0.1, 1.1, True, math.nan, math.inf, "0.1", None]),
        (LatentConverged, [0, -0.1, True, math.nan, math.inf, "0.1", None]),
        (KLConverged, [0.0, -1e-9, False, math.nan, -math.inf, "0.1", None]),
    ],
    "quantile": [(lambda value: LearnedExit(4, quantile=value), [0, -0.5, 1.01, True, math.nan, "0.5", None])],
    "bias": [(lambda value: LearnedExit(4, bias=value), [True, math.nan, -math.inf, "0", None])],
    "dim": [(LearnedExit, [0, -1, True, 2.5, "3", None])],
}
REFUSALS = [(name, make, value) for name, cases in BAD.items() for make, values in cases for value in values]


@pytest.mark.parametrize(
    "name, make, value", REFUSALS, ids=[f"{i}-{name}-{v}" for i, (name, _, v) in enumerate(REFUSALS)]
)
def test_bad_arguments_are_refused_by_name_value_and_range(name, make, value, monkeypatch):
    with pytest.raises((ValueError, TypeCheckError), match=name):
        make(value)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as a user runs it
    with pytest.raises(ValueError, match=rf"{name} is {value!r}, but must be a (finite|whole) number") as error:
        make(value)
    assert str(error.value).endswith(".")


@pytest.mark.parametrize("width", [1, 8])
def test_a_learned_exit_refuses_a_state_of_another_width(width):
    state = rd.initial_state(torch.randn(2, 3, 4))
    with pytest.raises(ValueError, match=f"The state is 4 wide, but the exit was built for {width}"):
        LearnedExit(width).hazard(None, state, lambda state: state.h, 0)


def test_a_refusal_says_the_range():
    with pytest.raises(ValueError, match=r"^quantile is 1.5, but must be a finite number above 0 and at most 1\.$"):
        LearnedExit(4, quantile=1.5)
    with pytest.raises(ValueError, match=r"^below is 0.0, but must be a finite number above 0\.$"):
        KLConverged(0.0)


def test_the_interface_is_abstract():
    assert inspect.isabstract(ExitRule)
    assert ExitRule.__abstractmethods__ == {"hazard"}
