"""Laws of choosing the next token, against a reference in plain Python."""

import dataclasses
import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from torch.testing import assert_close

from recurrent_depth.choice import Greedy, NextTokenRule, Sampling, check_logits
from recurrent_depth.draw import RowStreams, draw

REFUSED = (ValueError, TypeCheckError)  # the latter only where the tests' hook checks types first
NO_NUMBERS = [True, "1", math.nan, math.inf, -math.inf, -1.0, torch.tensor(1.0)]
INFINITY = math.inf

# Quarters, so that equal logits and exact borders are common; -inf is a token that a caller forbids.
logit = st.integers(-16, 16).map(lambda n: n / 4) | st.just(-INFINITY)
vocabularies = st.lists(logit, min_size=1, max_size=12).filter(lambda row: max(row) > -INFINITY)
penalties = st.sampled_from([1, 0.5, 1.3, 4.0])
temperatures = st.floats(0.05, 20)
filters = st.builds(
    Sampling,
    temperatures,
    st.none() | st.integers(1, 14),
    st.none() | st.floats(0.01, 1),
    st.none() | st.floats(0, 1),
    penalties,
)
choices = filters | st.builds(Greedy, penalties)


@st.composite
def batches(draw, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, tokens seen and which of them are no padding; padding may hold any number."""
    batch, vocab, keys = draw(st.integers(1, 3)), draw(st.integers(1, 12)), draw(st.integers(0, 5))
    row = st.lists(logit, min_size=vocab, max_size=vocab).filter(lambda row: max(row) > -INFINITY)
    logits = torch.tensor([draw(row) for _ in range(batch)], dtype=dtype)
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=batch * keys, max_size=batch * keys))).bool()
    seen = draw(st.lists(st.integers(0, vocab - 1), min_size=batch * keys, max_size=batch * keys))
    filled = torch.tensor(seen).long().masked_fill(~mask, draw(st.sampled_from([-100, 0, vocab + 7])))
    return logits, filled.reshape(batch, keys), mask.reshape(batch, keys)


def nothing_seen(logits: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(logits), 0, dtype=torch.long)


def distribution(choice: NextTokenRule, row: list[float], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    logits = torch.tensor([row], dtype=dtype)
    return choice.probabilities(logits, nothing_seen(logits))[0]


# The written reference: loops over lists, one row at a time


def shares(logits: dict[int, float]) -> dict[int, float]:
    largest = max(logits.values())
    weights = {token: math.exp(value - largest) for token, value in logits.items()}
    return {token: weight / math.fsum(weights.values()) for token, weight in weights.items()}


def penalised(row: list[float], seen: set[int], penalty: float) -> list[float]:
    row = list(row)
    for token in seen:
        row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
    return row


def decided(value: float, bound: float) -> bool:
    """Whether value >= bound; examples where rounding decides are dropped."""
    assume(abs(value - bound) > 1e-9)
    return value >= bound


def nucleus(kept: dict[int, float], p: float) -> dict[int, float]:
    mass, nucleus = 0.0, {}
    for token in kept:  # they are sorted
        nucleus[token] = kept[token]
        mass += shares(kept)[token]
        if decided(mass, p):
            break
    return nucleus


def reference(choice: Sampling, row: list[float], seen: set[int]) -> list[float]:
    logits = [value / choice.temperature for value in penalised(row, seen, choice.repetition_penalty)]
    ranked = sorted(range(len(row)), key=lambda token: (-logits[token], token))
    kept = {token: logits[token] for token in ranked[: choice.top_k]}
    if choice.top_p is not None and choice.top_p < 1:
        kept = nucleus(kept, choice.top_p)
    if choice.min_p is not None:
        share = shares(kept)
        largest = max(share.values())
        kept = {
            token: kept[token]
            for token in kept
            if share[token] == largest or decided(share[token], choice.min_p * largest)
        }
    return [shares(kept).get(token, 0.0) for token in range(len(row))]


@given(filters, batches())
def test_sampling_is_what_the_reference_says(choice, batch):
    logits, seen, mask = batch
    found = choice.probabilities(logits, seen, mask)
    for row, probabilities in enumerate(found.tolist()):
        expected = reference(choice, logits[row].tolist(), set(seen[row][mask[row]].tolist()))
        assert probabilities == pytest.approx(expected, abs=1e-9)
        assert [p > 0 for p in probabilities] == [p > 0 for p in expected]


@given(st.builds(Greedy, penalties), batches())
def test_greedy_takes_the_first_of_the_largest(choice, batch):
    logits, seen, mask = batch
    found = choice.probabilities(logits, seen, mask)
    for row, probabilities in enumerate(found.tolist()):
        scores = penalised(logits[row].tolist(), set(seen[row][mask[row]].tolist()), choice.repetition_penalty)
        assert probabilities == [float(token == scores.index(max(scores))) for token in range(len(scores))]


# Laws


@given(choices, batches(), st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
def test_every_choice_gives_a_distribution_in_full_precision(choice, batch, dtype):
    logits, seen, mask = batch
    found = choice.probabilities(logits.to(dtype), seen, mask)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (found >= 0).all()
    assert_close(found.sum(-1), torch.ones(len(found), dtype=found.dtype))
    assert not found[logits == -INFINITY].any()
    assert torch.equal(found, choice.probabilities(logits.to(dtype).to(found.dtype), seen, mask))


@given(choices, batches(), st.sampled_from([torch.float32, torch.float64]))
def test_no_row_depends_on_its_neighbours_and_nothing_given_is_changed(choice, batch, dtype):
    logits, seen, mask = batch[0].to(dtype), *batch[1:]
    before = logits.clone(), seen.clone(), mask.clone()
    found = choice.probabilities(logits, seen, mask)
    for row in range(len(logits)):
        one = slice(row, row + 1)
        assert torch.equal(choice.probabilities(logits[one], seen[one], mask[one]), found[one])
    assert all(map(torch.equal, before, (logits, seen, mask)))


@given(vocabularies, temperatures)
def test_temperature_divides_the_logits(row, temperature):
    expected = (torch.tensor(row, dtype=torch.float64) / temperature).softmax(-1)
    assert_close(distribution(Sampling(temperature), row), expected)


@given(vocabularies, temperatures)
def test_filters_at_their_limits_change_nothing(row, temperature):
    plain = distribution(Sampling(temperature), row)
    for limit in ({"top_k": len(row)}, {"top_k": 10**6}, {"top_p": 1}, {"min_p": 0}, {"repetition_penalty": 1}):
        assert torch.equal(distribution(Sampling(temperature, **limit), row), plain)


@given(vocabularies, temperatures, st.sampled_from([torch.bfloat16, torch.float32, torch.float64]))
def test_filters_at_their_other_limits_leave_the_greedy_token(row, temperature, dtype):
    greedy = distribution(Greedy(), row, dtype)
    assert torch.equal(distribution(Sampling(temperature, top_k=1), row, dtype), greedy)
    assert torch.equal(distribution(Sampling(temperature, top_p=1e-30), row, dtype), greedy)
    tied = distribution(Sampling(temperature, min_p=1), row, dtype) > 0
    assert tied.tolist() == [value == max(row) for value in row]
    coldest = distribution(Sampling(1e-30), row, dtype)
    assert_close(coldest, tied / tied.sum(), check_dtype=False)


@given(filters, vocabularies)
def test_filters_keep_the_order_and_the_ratios_of_what_stays(choice, row):
    plain, found = distribution(Sampling(choice.temperature), row), distribution(choice, row)
    kept = found > 0
    assert_close(found[kept], plain[kept] / plain[kept].sum())
    assert kept.all() or plain[kept].min() >= plain[~kept].max()


@given(vocabularies, penalties)
def test_without_a_mask_all_that_is_given_was_seen(row, penalty):
    logits, seen = torch.tensor([row]), torch.arange(0, len(row), 2)[None]
    choice = Sampling(repetition_penalty=penalty)
    everything = torch.ones_like(seen, dtype=torch.bool)
    assert torch.equal(choice.probabilities(logits, seen), choice.probabilities(logits, seen, everything))
    assert torch.equal(choice.probabilities(logits, seen), choice.probabilities(logits, torch.cat([seen, seen], 1)))
    assert torch.equal(choice.probabilities(logits, seen, ~everything), Sampling().probabilities(logits, seen))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_of_equals_at_the_edge_the_first_stay(dtype):
    row = [0.0, 2.0, 0.0, 0.0, 0.0]
    assert distribution(Sampling(top_k=3), row, dtype).nonzero().flatten().tolist() == [0, 1, 2]
    equal = [1.0] * 4  # shares of exactly a quarter
    assert distribution(Sampling(top_p=0.5), equal, dtype).tolist() == [0.5, 0.5, 0, 0]
    assert distribution(Sampling(top_p=0.51), equal, dtype).count_nonzero() == 3
    assert distribution(Sampling(top_k=2, top_p=0.6), equal, dtype).tolist() == [0.5, 0.5, 0, 0]
    assert distribution(Sampling(min_p=1), equal, dtype).tolist() == [0.25] * 4
    many = [0.0] * 1024  # more than a sort keeps in order by chance
    for choice in (Sampling(top_k=512), Sampling(top_p=0.5)):
        assert distribution(choice, many, dtype).tolist() == [1 / 512] * 512 + [0] * 512


@pytest.mark.parametrize("temperature", [1e-30, 1e30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_no_temperature_overflows(temperature, dtype):
    huge = [torch.finfo(dtype).max, torch.finfo(dtype).min, 0.0, -INFINITY]
    assert distribution(Sampling(temperature, 3, 0.99, 0.01), huge, dtype).sum() == pytest.approx(1)


# Drawing


@st.composite
def distributions(draw) -> torch.Tensor:
    """Weights of small vocabularies and of large ones, in which most tokens are impossible."""
    vocab = draw(st.sampled_from([1, 2, 8, 255, 256, 257, 700]))
    weights = torch.zeros(vocab, dtype=draw(st.sampled_from([torch.float32, torch.float64])))
    for token, weight in draw(st.dictionaries(st.integers(0, vocab - 1), st.floats(1e-6, 1), min_size=1)).items():
        weights[token] = weight
    return weights


@given(distributions(), st.floats(0, 1, exclude_max=True))
def test_a_draw_is_where_the_cumulated_probabilities_pass_the_number(weights, uniform):
    token = draw(weights[None], torch.tensor([uniform], dtype=torch.float64)).item()
    before, total = math.fsum(weights[:token].tolist()), math.fsum(weights.tolist())
    assert weights[token] > 0
    assert before - 1e-12 <= uniform * total <= before + weights[token].item() + 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rare_tokens_of_large_vocabularies_are_drawn_in_their_place(dtype):
    weights = torch.full((1000,), 1e-9, dtype=dtype)
    weights[0] = 1  # next to it float32 could not tell the others apart
    masses = weights.double().cumsum(-1)
    middles = (masses - weights / 2) / masses[-1]
    assert draw(weights.expand(1000, -1), middles).tolist() == list(range(1000))


def test_no_impossible_token_is_drawn_where_a_number_meets_a_border():
    weights = torch.rand(40, 4 * 256, dtype=torch.float64) * (torch.rand(40, 4 * 256) < 0.5)
    weights[:, ::256] = 0
    for row in weights:
        borders = row.cumsum(-1)[255:-1:256] / row.sum()
        near = torch.cat(
            [borders, borders.nextafter(torch.zeros(3).double()), borders.nextafter(torch.ones(3).double())]
        )
        assert (row[draw(row.expand(9, -1), near)] > 0).all()


@given(distributions(), st.integers(1, 2000))
def test_evenly_spread_numbers_draw_every_token_as_often_as_its_probability_says(weights, num):
    probabilities = weights / weights.sum()
    tokens = draw(probabilities.expand(num, -1), torch.arange(num, dtype=torch.float64) / num)
    counts = tokens.bincount(minlength=len(weights))
    assert ((counts / num - probabilities).abs() <= 1 / num + 1e-6).all()
    assert (tokens.diff() >= 0).all()
    assert not counts[probabilities == 0].any()


@given(distributions(), st.sampled_from([0.0, 2.0**-60, 0.5, 1 - 2.0**-24, 1 - 2.0**-53, 1.0]))
def test_no_impossible_token_is_drawn_at_the_ends_nor_where_a_number_was_rounded_to_1(weights, uniform):
    for scale in (1.0, 1.0 - 1e-7, 1.0 + 1e-7):
        probabilities = scale * weights / weights.sum()
        token = draw(probabilities[None], torch.tensor([uniform], dtype=torch.float64))
        assert probabilities[token] > 0


@given(st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=6), st.sampled_from([1, 5, 400]))
def test_one_hot_rows_are_drawn_exactly(uniforms, vocab):
    wanted = 77 * torch.arange(len(uniforms)) % vocab
    for dtype in (torch.float32, torch.float64):  # in float32 a number next to 1 rounds to 1
        numbers = torch.tensor(uniforms, dtype=dtype)
        assert torch.equal(draw(torch.nn.functional.one_hot(wanted, vocab).to(dtype), numbers), wanted)


@given(st.integers(1, 5), st.integers(0, 2**31))
def test_the_draw_of_a_row_depends_on_its_own_number_alone(batch, seed):
    generator = torch.Generator().manual_seed(seed)
    probabilities = torch.randn(batch, 300, generator=generator).softmax(-1)
    uniforms = torch.rand(batch, generator=generator)
    together = draw(probabilities, uniforms)
    assert together.tolist() == [draw(probabilities[row, None], uniforms[row, None]).item() for row in range(batch)]


# Streams


@given(st.integers(), st.lists(st.sets(st.integers(0, 3)), max_size=6))
def test_the_numbers_of_a_row_do_not_depend_on_which_others_still_run(seed, schedule):
    everyone = RowStreams(4, seed)
    expected = torch.stack([everyone.uniforms(range(4)) for _ in range(7)])
    streams, taken = RowStreams(5, seed), [0] * 4
    for rows in map(sorted, schedule):
        found = streams.uniforms(rows)
        assert found.tolist() == [expected[taken[row], row] for row in rows]
        taken = [count + (row in rows) for row, count in enumerate(taken)]


def test_streams_of_rows_and_seeds_are_uniform_and_unrelated():
    numbers = torch.stack([RowStreams(64, seed).uniforms(range(64)) for seed in range(64)])
    assert numbers.dtype == torch.float64
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert numbers.unique().numel() == 64 * 64
    counts = numbers.histc(16, 0, 1)
    assert (counts - 256).abs().max() < 5 * 16  # five standard deviations
    assert (numbers.T.corrcoef() - torch.eye(64)).abs().max() < 5 / 8


def test_without_a_seed_every_run_differs_and_tells_how_to_repeat_it():
    before = torch.get_rng_state()
    one, other = RowStreams(3), RowStreams(3)
    assert one.seed != other.seed
    assert torch.equal(one.uniforms([0, 2]), RowStreams(3, one.seed).uniforms([0, 2]))
    assert torch.equal(before, torch.get_rng_state())


# Refusals


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p", "repetition_penalty"])
@pytest.mark.parametrize("value", [*NO_NUMBERS, 0, 1.5, 2.5, None, 1e31])
def test_sampling_refuses_what_is_out_of_range(name, value):
    allowed = {"temperature": (1.5, 2.5), "repetition_penalty": (1.5, 2.5), "min_p": (0, None)}
    if value in allowed.get(name, (None,)):
        assert getattr(Sampling(**{name: value}), name) == value
    else:
        with pytest.raises(REFUSED, match=name):
            Sampling(**{name: value})


@pytest.mark.parametrize("value", [*NO_NUMBERS, 0, None, 1e31])
def test_greedy_refuses_a_penalty_out_of_range(value):
    with pytest.raises(REFUSED, match="repetition_penalty"):
        Greedy(value)


def test_a_refusal_names_argument_value_and_range():
    with pytest.raises(
        ValueError, match=r"top_p is 1.5, but must be a finite number of at least 1e-30 and at most 1\."
    ):
        Sampling(top_p=1.5)
    with pytest.raises(ValueError, match=r"top_k is 0, but must be a whole number of at least 1\."):
        Sampling(top_k=0)


@pytest.mark.parametrize("arguments", [{"num_rows": -1}, {"num_rows": 2.5}, {"num_rows": 2, "seed": 0.5}])
def test_streams_refuse_what_is_no_number_of_rows_or_no_seed(arguments):
    with pytest.raises(REFUSED):
        RowStreams(**arguments)


def test_choices_cannot_be_changed_and_the_interface_not_be_built():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Sampling().top_k = 3
    with pytest.raises(TypeError, match="abstract"):
        NextTokenRule()  # pyright: ignore[reportAbstractUsage]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_logits_without_a_distribution_are_refused_row_by_row(dtype):
    logits = torch.zeros(5, 3, dtype=dtype)
    logits[1, 2] = -INFINITY
    check_logits(logits)
    logits[0, 1], logits[2], logits[3, 0], logits[4, 2] = math.nan, -INFINITY, INFINITY, math.nan
    with pytest.raises(ValueError, match=r"NaN in rows \[0, 4\]; \+inf in rows \[3\]; only -inf in rows \[2\]"):
        check_logits(logits)
    with pytest.raises(ValueError, match=r"hold NaN in rows \[0\], so"):
        check_logits(logits[:2])


# Peers


@pytest.mark.slow
@given(filters, st.integers(0, 2**31))
def test_sampling_is_what_transformers_computes(choice, seed):
    peer = pytest.importorskip("transformers.generation.logits_process")
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(3, 11, generator=generator, dtype=torch.float64)
    seen = torch.randint(11, (3, 5), generator=generator)
    warpers = [
        peer.RepetitionPenaltyLogitsProcessor(float(choice.repetition_penalty)),
        peer.TemperatureLogitsWarper(choice.temperature),
        *([] if choice.top_k is None else [peer.TopKLogitsWarper(choice.top_k)]),
        *([] if choice.top_p is None else [peer.TopPLogitsWarper(choice.top_p)]),
        *([] if choice.min_p is None else [peer.MinPLogitsWarper(choice.min_p)]),
    ]
    scores = logits
    for warper in warpers:
        scores = warper(seen, scores)
    assert_close(choice.probabilities(logits, seen), scores.softmax(-1))
