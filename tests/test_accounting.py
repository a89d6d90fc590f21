"""Closed forms against what torch counts, against the published counts, and against each other."""

import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from torch.utils.flop_counter import FlopCounterMode

import recurrent_depth as rd
from recurrent_depth import accounting, presets
from recurrent_depth.accounting import EXECUTED, PAPER, Counting, causal_attention, every_step, full_attention
from recurrent_depth.contracts import BlockCost, UpdateCost
from recurrent_depth.depth import Layout

few = settings(max_examples=8)  # counting takes torch up to a second
REFUSED = (ValueError, TypeCheckError)

forms = st.sampled_from(
    [
        rd.GPT2Form,
        partial(rd.GPT2Form, bias=True),
        partial(rd.GPT2Form, arrangement=rd.PostNorm),
        rd.LlamaForm,
        partial(rd.LlamaForm, num_kv_heads=2),
        partial(rd.LlamaForm, tied=False, arrangement=rd.BranchSandwich),
        partial(rd.LlamaForm, hidden=40, arrangement=rd.ResidualSandwich),
    ]
)
layouts = st.builds(Layout, st.integers(0, 2), st.integers(1, 2), st.integers(1, 4), st.integers(0, 2))
builders = st.one_of(
    st.builds(lambda layout: partial(rd.grt, layout), layouts),
    st.builds(lambda layout: partial(rd.naive, layout), layouts),
    st.builds(lambda blocks: partial(rd.dense, blocks), st.integers(1, 4)),
)
tokens = st.integers(1, 12)


def expert_choice(dim, num_steps, shares):
    capacities = sorted(shares[:num_steps], reverse=True)
    return rd.expert_choice(dim, num_steps, capacities=capacities, loss=0)


gated = {"update": rd.gated, "combine": rd.Interpolate}
shares = st.sampled_from([1, 0.9, 0.7, 2 / 3, 0.5, 0.3, 0.125, 0.01])
routed = st.one_of(  # the routers' own losses are not counted
    st.builds(
        lambda layout, shares, how: partial(rd.mor, layout, router=partial(expert_choice, shares=shares), **how),
        layouts,
        st.lists(shares, min_size=4, max_size=4),
        st.sampled_from([{}, gated]),
    ),
    st.builds(
        lambda layout, capacity, every, update: partial(
            rd.mod, layout, router=partial(rd.every_other, capacity=capacity, every=every, loss=0), update=update
        ),
        layouts,
        shares,
        st.integers(1, 3),
        st.sampled_from([rd.plain, rd.gated]),
    ),
)


def models(builders=builders, forms=forms):
    """Draws what builds a model on the meta device; the test builds it."""
    return st.builds(
        lambda *parts: partial(on_meta, *parts), builders, st.sampled_from([8, 16, 24]), st.integers(2, 90), forms
    )


def on_meta(build, dim=16, vocab_size=30, form=rd.GPT2Form):
    with torch.device("meta"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "loss is 0, so|Of . steps none is routed")
        return build(dim=dim, num_heads=4, vocab_size=vocab_size, context_length=12, form=form)


def meta(preset):
    with torch.device("meta"):
        return preset()


def forward(model, num_tokens, num_steps=None, batch=1):
    return model(torch.zeros(batch, num_tokens, dtype=torch.long, device="meta"), num_steps)


def counted(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


# FLOPs of a forward


@given(st.one_of(models(), models(routed)), tokens, st.data())
def test_the_closed_form_is_what_torch_counts(build, num_tokens, data):
    model = build()
    num_steps = data.draw(st.none() | st.integers(1, model.layout.num_steps))
    predicted = accounting.flops(model, num_tokens, num_steps)
    assert predicted == counted(lambda: forward(model, num_tokens, num_steps))
    assert accounting.flops_per_token(model, num_tokens, num_steps) == predicted / num_tokens
    assert accounting.flops(accounting.outline(model), num_tokens, num_steps) == predicted


@few
@given(models(), tokens, st.integers(2, 3))
def test_a_batch_costs_its_rows(build, num_tokens, batch):
    model = build()
    assert counted(lambda: forward(model, num_tokens, batch=batch)) == batch * accounting.flops(model, num_tokens)


@given(models(), tokens)
def test_the_parts_are_what_torch_counts_inside_them(build, num_tokens):
    model = build()
    with FlopCounterMode(display=False) as counter:
        forward(model, num_tokens)
    inside = {name.split(".", 1)[-1]: sum(c.values()) for name, c in counter.get_flop_counts().items()}
    parts = accounting.flops_breakdown(model, num_tokens)
    assert parts.prelude == inside.get("prelude", 0)
    assert parts.core == inside["core.stack"]
    assert parts.core + parts.update == inside["core.update"]
    assert parts.coda == inside.get("coda", 0)
    assert parts.head == inside["head"]


@given(layouts, st.integers(1, 8), tokens)
def test_a_grt_costs_what_its_formula_says(layout, heads, num_tokens):
    dim, length = 4 * heads, num_tokens
    model = on_meta(partial(rd.grt, layout), dim)

    def per_token(**convention):
        return accounting.flops_per_token(model, num_tokens, counting=Counting(head=False, **convention))

    full, causal = 24 * dim**2 + 4 * length * dim, 24 * dim**2 + 2 * (length + 1) * dim
    steps = layout.num_steps
    assert per_token() == layout.executed * full + steps * 6 * dim**2 + 4 * dim**2
    assert per_token(begin=every_step) == layout.executed * full + steps * 10 * dim**2
    assert per_token(attention=causal_attention) == layout.executed * causal + steps * 6 * dim**2 + 4 * dim**2
    assert accounting.flops_per_token(model, num_tokens) - per_token() == 2 * 30 * dim
    assert accounting.flops_per_token(model, num_tokens, counting=PAPER) == per_token(begin=every_step)


@given(st.integers(1, 200))
def test_causal_attention_counts_the_pairs_that_a_mask_leaves(num_tokens):
    assert causal_attention(num_tokens) == int(torch.ones(num_tokens, num_tokens).tril().sum())
    assert full_attention(num_tokens) == num_tokens**2


@given(models(), tokens, st.integers(1, 40), st.integers(1, 40))
def test_flops_grow_evenly_with_the_steps(build, num_tokens, shallow, deep):
    model = build()
    costs = [accounting.flops(model, num_tokens, n) for n in (shallow, deep, shallow + 1, deep + 1)]
    assert costs[2] - costs[0] == costs[3] - costs[1] > 0


@given(models())
def test_the_default_length_is_that_of_the_learned_positions(build):
    model = build()
    if accounting.outline(model).context_length is None:
        with pytest.raises(ValueError, match="tokens is None"):
            accounting.flops(model)
    else:
        assert accounting.flops(model) == accounting.flops(model, 12)
        assert accounting.flops_per_token(model) == accounting.flops_per_token(model, 12)


def test_a_gate_without_step_invariant_work_costs_all_of_it_at_every_step():
    def joint(dim):
        return rd.GatedDepthUpdate(rd.ConcatProjection(dim), rd.JointNormGate(dim))

    model = on_meta(partial(rd.grt, Layout(1, 2, 3, 1), update=joint))
    assert accounting.flops(model, 7) == counted(lambda: forward(model, 7))


def test_a_block_of_ones_own_is_counted_by_its_linear_layers():
    def core(dim):
        return rd.RecurrentCore([rd.PlainBlock(torch.nn.Linear(dim, dim)) for _ in range(2)], rd.gated(dim))

    model = on_meta(partial(rd.grt, Layout(1, 2, 3, 1)))
    with torch.device("meta"):
        model.core = core(16)
    assert accounting.flops(model, 7) == counted(lambda: forward(model, 7))


def test_tokens_that_skip_a_step_cost_no_blocks_there():
    of = accounting.outline(on_meta(partial(rd.grt, Layout(0, 1, 2, 0))))
    half = of._replace(core=BlockCost(10, 4), update=lambda num_steps: UpdateCost(shares=(1.0, 0.5)))
    parts = accounting.flops_breakdown(half, 8)
    assert parts.core == (10 * 8 + 4 * 8**2) + (10 * 4 + 4 * 4**2)


# Training


@few
@given(st.one_of(models(), models(routed)), tokens, st.data())
def test_training_at_a_fixed_depth_costs_what_torch_counts(build, num_tokens, data):
    model = build()
    num_steps = data.draw(st.integers(1, model.layout.num_steps))
    predicted = accounting.training_flops(model, rd.FixedDepth(num_steps), num_tokens)
    assert predicted == counted(lambda: forward(model, num_tokens, num_steps).sum().backward())
    assert predicted == 3 * accounting.flops(model, num_tokens, num_steps)


grts = st.builds(lambda layout: partial(rd.grt, layout), layouts)
pre_norm = st.sampled_from([rd.GPT2Form, rd.LlamaForm])


@few
@given(models(grts, pre_norm), tokens, st.data())
def test_truncated_training_costs_what_torch_counts_but_for_the_gradient_that_goes_nowhere(build, num_tokens, data):
    model = build()
    num_steps = model.layout.num_steps
    grad_steps = data.draw(st.integers(1, num_steps))
    run = counted(lambda: forward(model, num_tokens, rd.Depth(num_steps, grad_steps)).sum().backward())
    nowhere = 2 * model.embed.token.embedding_dim**2 * num_tokens * (grad_steps < num_steps)
    assert accounting.training_flops(model, rd.FixedDepth(num_steps, grad_steps), num_tokens) == run + nowhere


@few
@given(st.one_of(models(), models(routed)), st.integers(2, 12), st.data())
def test_a_loss_at_every_step_costs_what_torch_counts(build, num_tokens, data):
    model = build()
    num_steps = data.draw(st.integers(1, model.layout.num_steps))
    trained = rd.WithObjective(model, rd.every_step_loss, every_step=True)
    ids = torch.zeros(1, num_tokens, dtype=torch.long, device="meta")
    predicted = accounting.training_flops(model, rd.FixedDepth(num_steps), num_tokens, read_every_step=True)
    assert predicted == counted(lambda: trained(ids, num_steps).backward())


@few
@given(models(grts), tokens, st.data())
def test_checkpointing_runs_each_learned_step_once_more(build, num_tokens, data):
    model = build()
    grad_steps = data.draw(st.integers(1, model.layout.num_steps))
    sampler = rd.FixedDepth(model.layout.num_steps, grad_steps)
    plain = accounting.training_flops(model, sampler, num_tokens)
    run = counted(lambda: forward(model, num_tokens, sampler(0)).sum().backward())
    model.core.checkpointing = True
    again = counted(lambda: forward(model, num_tokens, sampler(0)).sum().backward())
    assert accounting.training_flops(model, sampler, num_tokens) - plain == again - run


@given(models(), tokens, st.integers(1, 9), st.none() | st.integers(1, 9))
def test_training_under_a_sampler_averages_its_depths(build, num_tokens, max_steps, grad_steps):
    model = build()
    sampler = rd.UniformDepth(max_steps, grad_steps=grad_steps)
    each = [accounting.training_flops(model, rd.FixedDepth(n, grad_steps), num_tokens) for n in range(1, max_steps + 1)]
    assert accounting.training_flops(model, sampler, num_tokens) == pytest.approx(sum(each) / max_steps, rel=1e-12)
    assert accounting.training_flops(model, sampler.expected(), num_tokens) == pytest.approx(sum(each) / max_steps)


@given(models(routed), tokens, st.data())
def test_training_a_routed_model_under_a_sampler_averages_its_depths(build, num_tokens, data):
    model = build()
    max_steps = data.draw(st.integers(1, model.layout.num_steps))
    grad_steps = data.draw(st.none() | st.integers(1, 5))
    depths = [rd.FixedDepth(n, grad_steps) for n in range(1, max_steps + 1)]
    each = [accounting.training_flops(model, depth, num_tokens) for depth in depths]
    found = accounting.training_flops(model, rd.UniformDepth(max_steps, grad_steps=grad_steps), num_tokens)
    assert found == pytest.approx(sum(each) / max_steps, rel=1e-12)
    ramped = rd.RampedDepth(partial(rd.UniformDepth, grad_steps=grad_steps), max_steps, 1)
    assert accounting.training_flops(model, ramped, num_tokens, draw=1) == found


@pytest.mark.parametrize("grad_steps", [1, 2, 3])
def test_a_routed_step_that_is_not_differentiated_costs_one_forward_of_the_tokens_that_take_it(grad_steps):
    model = on_meta(partial(rd.mor, Layout(1, 2, 4, 1), router=partial(rd.expert_choice, loss=0)))
    forwards = [accounting.flops(model, 11, n) for n in range(1, 5)]
    frozen = forwards[3 - grad_steps] - (forwards[0] - added(model, 1)) if grad_steps < 4 else 0
    whole, part = (accounting.training_flops(model, rd.FixedDepth(4, g), 11) for g in (None, grad_steps))
    assert whole - part == 2 * frozen


def added(model, step):
    """FLOPs of one step: its blocks for those that take it, and the router for all 11 tokens."""
    blocks = accounting.outline(model).core
    takers = (11, 8, 5, 2)[step - 1]
    return blocks.linear * takers + blocks.per_key * takers**2 + 11 * 2 * 16


def uneven(full_depth, calls):
    """A model whose step n costs n units, n = 1, 2, ...; without end."""
    of = accounting.outline(on_meta(partial(rd.grt, Layout(0, 1, full_depth, 0))))

    def cost(num_steps):
        calls.append(num_steps)
        return UpdateCost(shares=(0.0,) * num_steps, step=(num_steps + 1) / 2)

    return of._replace(head=0, update=cost)


@pytest.mark.parametrize(
    "sampler",
    [
        rd.FixedDepth(3, 2),
        rd.UniformDepth(5, grad_steps=2),
        rd.PoissonLogNormalDepth(1.5, None, sigma=0.3),
        rd.PoissonLogNormalDepth(1.5, 2, sigma=0.3),
        rd.PoissonDepthPerRow(1.5, num_rows=3, grad_steps=1),
        rd.RampedDepth(partial(rd.PoissonLogNormalDepth, grad_steps=1), max_depth=2, num_draws=5),
    ],
)
def test_steps_that_cost_differently_count_as_often_as_the_sampler_takes_them(sampler):
    parts = [sampler.expected_at(step, 4) for step in range(1, 25)]
    assert [sum(numbers) for numbers in zip(*parts, strict=True)] == pytest.approx(list(sampler.expected(4)), rel=1e-4)
    wanted = sum(step * (part.num_steps + 2 * part.grad_steps) for step, part in enumerate(parts, start=1))
    assert accounting.training_flops(uneven(24, []), sampler, 1, draw=4) == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("sampler", [rd.PoissonLogNormalDepth(2, 1, sigma=0.4), rd.UniformDepth(4, grad_steps=2)])
def test_what_falls_on_a_step_is_how_often_draws_take_it(sampler):
    drawn = [replace(sampler, seed=seed)(0) for seed in range(4000)]
    for step in range(1, 6):
        taken = sum(depth.num_steps >= step for depth in drawn) / len(drawn)
        learned = sum(0 <= depth.num_steps - step < depth.grad_steps for depth in drawn) / len(drawn)
        assert sampler.expected_at(step) == pytest.approx((taken, learned), abs=0.03)


class Unknown(rd.DepthSampler):
    """Says how deep it is on average, but no more."""

    def __call__(self, draw):
        return rd.Depth(1 + draw % 2)

    def expected(self, draw=0):
        return rd.ExpectedDepth(1.5, 1.5)


@pytest.mark.parametrize("depth", [Unknown(), rd.ExpectedDepth(1.5, 1.5)])
def test_an_average_depth_is_enough_only_where_all_steps_cost_the_same(depth):
    plain, mixed = (on_meta(partial(build, Layout(1, 1, 2, 1))) for build in (rd.grt, rd.mor))
    assert accounting.training_flops(plain, depth, 8) == accounting.training_flops(plain, rd.UniformDepth(2), 8)
    with pytest.raises(ValueError, match="do not cost the same, so an expected depth is not enough"):
        accounting.training_flops(mixed, depth, 8)


# Parameters


@pytest.mark.parametrize(
    "preset, num_parameters",
    [
        (presets.grt_medium, 171_073_536),
        (presets.grt_medium_isoparams, 359_847_936),
        (presets.grt_large, 290_196_480),
        (presets.grt_large_isoparams, 781_780_480),
    ],
)
def test_the_published_models_have_their_published_parameters(preset, num_parameters):
    model = meta(preset)
    assert accounting.num_parameters(model) == num_parameters
    dim, layout = model.embed.token.embedding_dim, model.layout
    non_embedding = layout.stored * (12 * dim**2 + 2 * dim) + dim + 5 * dim**2 + 5 * dim
    assert accounting.num_non_embedding_parameters(model) == non_embedding
    assert accounting.num_nanogpt_parameters(model) == num_parameters - 1024 * dim


@given(layouts, st.integers(1, 30), forms)
def test_the_number_of_steps_adds_no_parameters(layout, num_steps, form):
    models = [on_meta(partial(rd.grt, layout._replace(num_steps=n)), form=form) for n in (1, num_steps)]
    for count in (
        accounting.num_parameters,
        accounting.num_non_embedding_parameters,
        accounting.num_nanogpt_parameters,
    ):
        assert count(models[0]) == count(models[1]) == count(accounting.outline(models[0]))


@given(layouts, forms)
def test_each_tensor_counts_once(layout, form):
    model = rd.grt(layout, dim=16, num_heads=4, vocab_size=20, context_length=8, form=form)
    storage = {p.data_ptr(): p.numel() for p in [*model.parameters(), *model.parameters()]}
    assert accounting.num_parameters(model) == sum(storage.values())


def test_a_shared_tensor_counts_once():
    layer = torch.nn.Linear(3, 4)
    assert accounting.num_parameters(torch.nn.Sequential(layer, torch.nn.Sequential(layer))) == 16


def test_non_embedding_parameters_leave_the_head_out_whether_tied_or_not():
    tied, untied = (on_meta(partial(rd.dense, 2), form=partial(rd.LlamaForm, tied=t)) for t in (True, False))
    assert accounting.num_non_embedding_parameters(tied) == accounting.num_non_embedding_parameters(untied)
    assert accounting.num_parameters(untied) - accounting.num_parameters(tied) == 30 * 16


# Blocks and published ratios


@given(layouts, st.integers(1, 30))
def test_executed_blocks_are_those_of_the_layout(layout, num_steps):
    model = on_meta(partial(rd.grt, layout))
    assert accounting.executed_blocks(model) == layout.executed
    assert accounting.executed_blocks(model, num_steps) == layout._replace(num_steps=num_steps).executed


@pytest.mark.parametrize(
    "model, dense, published",
    [
        (presets.grt_medium_isoparams, presets.gpt2_medium, 26.4 / 7.35),
        (presets.grt_large_isoparams, presets.gpt2_large, 109.0 / 21.1),
    ],
)
def test_the_published_ratios_of_inference_flops(model, dense, published):
    ratio = accounting.flops(meta(model), counting=PAPER) / accounting.flops(meta(dense), counting=PAPER)
    assert ratio == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize(
    "counting, ratio",
    [(PAPER, 1.28), (Counting(head=False), 1.18), (EXECUTED, 1.13)],
    ids=["paper", "executed without head", "executed"],
)
def test_the_small_layout_costs_more_than_its_dense_model(counting, ratio):
    small, dense = meta(presets.grt_small), meta(presets.gpt2_small)
    costs = [accounting.flops(model, 1024, counting=counting) for model in (small, dense)]
    assert costs[0] / costs[1] == pytest.approx(ratio, rel=0.01)


@pytest.mark.parametrize("counting, ratio", [(Counting(head=False), 0.73), (EXECUTED, 0.80)], ids=["no head", "head"])
def test_even_depths_train_the_small_layout_for_less_than_its_dense_model(counting, ratio):
    costs = [
        accounting.training_flops(meta(presets.grt_small), rd.UniformDepth(10), 1024, counting=counting),
        accounting.training_flops(meta(presets.gpt2_small), rd.FixedDepth(1), 1024, counting=counting),
    ]
    assert costs[0] / costs[1] == pytest.approx(ratio, rel=0.01)


# Bad input


@pytest.mark.parametrize("value", [0, -1, 1.5, "3", True])
def test_lengths_and_steps_must_be_whole_numbers_of_at_least_one(value):
    model = on_meta(partial(rd.grt, Layout(1, 1, 2, 1)))
    for count in (accounting.flops, accounting.flops_per_token, accounting.flops_breakdown):
        with pytest.raises(Exception, match="tokens") as by_length:
            count(model, value)
        with pytest.raises(Exception, match="num_steps") as by_steps:
            count(model, 4, value)
        assert is_refusal(by_length.value)
        assert is_refusal(by_steps.value)
    with pytest.raises(Exception, match="num_steps") as error:
        accounting.executed_blocks(model, value)
    assert is_refusal(error.value)


@pytest.mark.parametrize(
    "build",
    [
        rd.mor,
        partial(rd.mor, router=rd.token_choice),
        partial(rd.mor, update=rd.gated, combine=rd.Interpolate),
        rd.mod,
        rd.mesh,
        partial(rd.rrt, rank=2),
        partial(rd.ple, size=4),
    ],
)
def test_steps_that_a_model_has_no_weights_for_are_not_counted(build):
    model = on_meta(partial(build, Layout(1, 1, 4, 1)))
    for num_steps in range(1, 5):
        assert accounting.flops(model, 8, num_steps) > 0
        assert accounting.training_flops(model, rd.UniformDepth(num_steps), 8) > 0
    beyond = [
        partial(accounting.flops, model, 8, 9),
        partial(accounting.flops_breakdown, model, 8, 5),
        partial(accounting.training_flops, model, rd.FixedDepth(9), 8),
        partial(accounting.training_flops, model, rd.UniformDepth(5), 8),
        partial(accounting.training_flops, model, rd.ExpectedDepth(4.5, 4.5), 8),
        partial(accounting.training_flops, model, rd.PoissonLogNormalDepth(2, None), 8),
    ]
    for count in beyond:
        with pytest.raises(ValueError, match="4"):
            count()


def is_refusal(error):
    return isinstance(error, REFUSED)


def test_only_models_have_flops():
    for wrong in (torch.nn.Linear(2, 2), "gpt2", None, Layout(1, 1, 2, 1)):
        with pytest.raises(Exception, match="model") as error:
            accounting.flops(wrong, 4)
        assert is_refusal(error.value)


def test_a_convention_is_an_object_and_no_word():
    model = on_meta(partial(rd.dense, 1))
    for wrong in ("paper", Counting, None):
        with pytest.raises(Exception, match="counting") as error:
            accounting.flops(model, 4, counting=wrong)
        assert is_refusal(error.value)
