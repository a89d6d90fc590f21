"""What decoding refuses of parts: those of the wrong kind, and a user's own that answer wrongly."""

from functools import partial

import pytest
import torch
from battery import lively, tiny
from user_parts import Answering, Recorded

import recurrent_depth as rd

X = torch.randint(23, (2, 6), generator=torch.Generator().manual_seed(0))

pytestmark = pytest.mark.usefixtures("as_a_user_runs_it")


def model() -> rd.RecurrentTransformer:
    return lively(tiny()).eval()


def filled(policy=None) -> tuple[rd.RecurrentTransformer, rd.DepthCache]:
    made, cache = model(), rd.DepthCache(policy)
    with torch.no_grad():
        rd.extend(made, X[:, :4], cache)
    return made, cache


@pytest.mark.parametrize(
    "argument, given, message",
    [
        ("kv", "mean", "policy is 'mean', but must be a KVStepPolicy"),
        ("kv", rd.KeepMean, r"policy is the class KeepMean.*give an instance, such as KeepMean\(...\)"),
        ("exit", 2, "exit is 2, but must be an ExitRule"),
        ("exit", rd.GateClosed, "exit is the class GateClosed"),
        ("choose", 0.7, "choose is 0.7, but must be a NextTokenRule"),
    ],
)
def test_parts_of_another_kind_are_refused_by_the_call_itself(argument, given, message):
    for call in (rd.generate, rd.stream):
        with pytest.raises(ValueError, match=message):
            call(model(), X, max_new_tokens=3, **{argument: given})


def test_a_module_that_is_no_model_and_a_cache_that_is_none_are_refused():
    made = model()
    for call in (rd.generate, rd.stream):
        with pytest.raises(ValueError, match="model is of RecurrentCore, but must be a RecurrentTransformer"):
            call(made.core, X, max_new_tokens=3)
    with pytest.raises(ValueError, match="model is of RecurrentCore, but must be a RecurrentTransformer"):
        rd.compile_decoding(made.core)
    with pytest.raises(ValueError, match="cache is None, but must be a DepthCache"):
        rd.extend(made, X, None)
    with pytest.raises(ValueError, match="policy is 128, but must be a KVStepPolicy"):
        rd.DepthCache(128)
    with pytest.raises(ValueError, match="rule is None, but must be an ExitRule"):
        rd.AtLeast(2, None)


def test_a_cache_in_place_of_its_views_is_refused_with_what_to_call():
    for cache in (rd.DepthCache(), object(), [None]):
        with pytest.raises(
            ValueError, match=r"kv is of \w+, but must be ModelKeyValues.*extend\(model, tokens, cache\)"
        ):
            model()(X, kv=cache, positions=torch.arange(6)[None])


@pytest.mark.parametrize("keep", [0, -1, 1.5, True])
def test_logits_to_keep_are_at_least_one(keep):
    made = model()
    with pytest.raises(ValueError, match=r"logits_to_keep is .*at least 1"):
        made(X, logits_to_keep=keep)
    with pytest.raises(ValueError, match=r"logits_to_keep is .*at least 1"):
        rd.extend(made, X, rd.DepthCache(), logits_to_keep=keep)


def test_a_mask_that_contradicts_the_past_is_refused_and_the_cache_stays():
    made, cache = filled()
    mask = torch.ones(2, 5, dtype=torch.bool)
    with torch.no_grad():
        expected = rd.extend(made, X[:, 4:5], filled()[1], mask=mask)
        mask[0, :2] = False
        with pytest.raises(ValueError, match="something else of the 4 tokens in the cache"):
            rd.extend(made, X[:, 4:5], cache, mask=mask)
        assert cache.length == 4
        assert rd.extend(made, X[:, 4:5], cache).shape == expected.shape


@pytest.mark.parametrize(
    "answer, got",
    [
        ((None, torch.tensor([1.0, 0.0])), r"got \(2,\) of torch.float32"),
        ((None, torch.ones(2, 1, dtype=torch.bool)), r"got \(2, 1\) of torch.bool"),
        ((None, 1.0), "got float"),
        ((None, torch.full((2, 1), 1.7)), "chances from 1.7 to 1.7, which must lie in 0 to 1"),
        (torch.ones(2, 1), r"Tensor in place of \(carry, hazard\)"),
    ],
)
def test_hazards_of_another_shape_are_refused_since_rows_would_decide_for_each_other(answer, got):
    made, cache = filled()
    with torch.no_grad(), pytest.raises(ValueError, match=f"hazard of Answering must return.*{got}"):
        rd.extend_until(made, X[:, 4:5], cache, Answering(answer))
    assert cache.length == 4


class Merging(rd.OneCopy):
    def __init__(self, merged):
        super().__init__()
        self.merged = merged

    def merge(self, old, new, step, layer):
        return self.merged(new)


@pytest.mark.parametrize(
    "merged, got", [(lambda new: None, "NoneType"), (lambda new: rd.KeysValues(*(x[:, :1] for x in new)), "1, 4, 8")]
)
def test_what_a_policy_merges_has_the_shape_that_it_was_given(merged, got):
    with torch.no_grad(), pytest.raises(ValueError, match=f"merge of Merging must return KeysValues.*{got}"):
        rd.extend(model(), X[:, :4], rd.DepthCache(Merging(merged)))


@pytest.mark.parametrize("heads, size", [(1, 8), (2, 4)])
def test_a_blend_for_other_heads_is_refused(heads, size):
    blend = rd.KeepBlend(num_layers=2, num_steps=3, num_kv_heads=heads, head_size=size)
    with torch.no_grad(), pytest.raises(ValueError, match=f"num_kv_heads={heads} and head_size={size}.*2 heads of 8"):
        rd.extend(model(), X, rd.DepthCache(blend))


class Halves(rd.NextTokenRule):
    def probabilities(self, logits, seen, seen_mask=None):
        return logits.softmax(-1)

    def choose(self, logits, seen, seen_mask, uniforms):
        return logits.amax(-1)


class Tempered(rd.NextTokenRule):
    def probabilities(self, logits, seen, seen_mask=None):
        return (logits / 2).softmax(-1)


def test_tokens_that_are_no_ids_are_refused():
    with pytest.raises(ValueError, match="choose of Halves must return one token id per row"):
        rd.generate(model(), X, max_new_tokens=2, choose=Halves())


def test_a_rule_of_ones_own_needs_a_distribution_and_no_more():
    made = model()
    found = rd.generate(made, X, max_new_tokens=5, choose=Tempered(), seed=1)
    assert torch.equal(found, rd.generate(made, X, max_new_tokens=5, choose=rd.Sampling(temperature=2.0), seed=1))


@pytest.mark.parametrize(
    "rows, message",
    [
        ([0, 1], r"rows is \[0, 1\], but must be a tensor"),
        (torch.tensor([2]), "rows 0 to 1"),
        (torch.tensor([], dtype=torch.long), "rows is \\[\\]"),
    ],
)
def test_rows_that_cannot_be_chosen(rows, message):
    _, cache = filled()
    with pytest.raises(ValueError, match=message):
        cache.select(rows)
    with pytest.raises(ValueError, match="the cache is empty"):
        rd.DepthCache().select(torch.tensor([0]))
    cache.select(torch.tensor([1, 0], dtype=torch.uint8))
    assert cache.batch == 2


def test_a_model_in_training_mode_drafts_nothing():
    with pytest.raises(ValueError, match="training mode"):
        rd.speculate(model().train(), X, max_new_tokens=3, draft_steps=1)


def test_a_prompt_longer_than_the_learned_positions_says_so():
    with pytest.raises(ValueError, match="The prompt has 20 tokens, but the model learned 16 positions"):
        rd.generate(model(), torch.zeros(1, 20, dtype=torch.long), max_new_tokens=1)


@pytest.mark.parametrize(
    "stops, beyond", [([9999, 3, -5], r"\[-5, 9999\]"), ((23,), r"\[23\]"), (range(30, 32), "30, 31")]
)
def test_stop_tokens_that_no_model_writes_are_refused(stops, beyond):
    for call in (rd.generate, rd.stream, partial(rd.speculate, draft_steps=1)):
        with pytest.raises(ValueError, match=rf"stop_tokens holds .*{beyond}.* must lie in 0 to 22, the vocabulary"):
            call(model(), X, max_new_tokens=3, stop_tokens=stops)


@pytest.mark.parametrize("rule", [rd.GateClosed(0.1), rd.AtLeast(2, rd.GateClosed(0.1))], ids=["gate", "at least"])
@pytest.mark.parametrize("build", [rd.naive, rd.huginn, rd.ouro, rd.mor], ids=lambda build: build.__name__)
def test_a_rule_that_reads_the_gate_warns_where_there_is_none(build, rule):
    with pytest.warns(UserWarning, match=r"this model has no gate.* no token ever leaves early. Take LatentConverged"):
        rd.generate(tiny(build).eval(), X, max_new_tokens=2, exit=rule)


@pytest.mark.parametrize(
    "rule", [rd.LatentConverged(), rd.KLConverged(), rd.AtLeast(2, rd.ArgmaxStable(1))], ids=["state", "KL", "argmax"]
)
def test_a_rule_that_looks_for_convergence_warns_where_tokens_rest_and_go_on(rule, recwarn):
    with pytest.warns(UserWarning, match=r"exit is \w+, but this model's router leaves tokens out of a step"):
        rd.generate(tiny(rd.mod).eval(), X, max_new_tokens=2, exit=rule)
    cache, model = rd.DepthCache(), tiny(rd.mod).eval()
    rd.extend(model, X, cache)
    with pytest.warns(UserWarning, match="at rest they look converged"):
        rd.extend_until(model, X[:, :1], cache, rule)
    for build, exit_rule in ((rd.mor, rule), (rd.grt, rule), (rd.mod, rd.ExitAfter(2))):
        rd.generate(tiny(build).eval(), X, max_new_tokens=2, exit=exit_rule)
    assert not recwarn.list


def test_an_update_of_ones_own_may_say_that_it_has_no_gate():
    class Replaces(Recorded):
        replaces_state = True

    with pytest.warns(UserWarning, match="this model has no gate"):
        rd.generate(tiny(update=lambda dim: Replaces()).eval(), X, max_new_tokens=2, exit=rd.GateClosed(0.1))


def test_a_rule_that_reads_the_gate_says_nothing_where_there_is_one_or_nobody_knows(recwarn):
    for update in (rd.gated, partial(rd.halted, inner=rd.gated), lambda dim: Recorded()):
        rd.generate(tiny(update=update).eval(), X, max_new_tokens=2, exit=rd.GateClosed(0.1))
    assert not recwarn.list
