"""What must be refused before any work is lost, by an error that names argument, value and bound."""

from functools import partial

import jaxtyping
import pytest
import torch
from battery import METHODS, tiny
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import recurrent_depth as rd

SIZES = {"dim": 16, "num_heads": 2, "vocab_size": 23, "context_length": 8}
LAYOUT = rd.Layout(1, 1, 3, 1)
X = torch.arange(8).reshape(2, 4)
WRONG_TYPE = (ValueError, jaxtyping.TypeCheckError)  # the hook of the tests words them otherwise
unhooked = pytest.mark.usefixtures("as_a_user_runs_it")


BUILDERS = {
    "grt": partial(rd.grt, LAYOUT),
    "naive": partial(rd.naive, LAYOUT),
    "dense": partial(rd.dense, 3),
    "grt, Llama": partial(rd.grt, LAYOUT, form=rd.LlamaForm),
}
every_builder = pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)


@unhooked
@every_builder
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -4, True])
def test_a_size_below_one_is_refused(build, name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}, but must be a whole number of at least 1"):
        build(**SIZES | {name: value})


@every_builder
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [2.5, "16", None])
def test_a_size_of_a_wrong_type_is_refused(build, name, value):
    with pytest.raises(WRONG_TYPE, match=name) as error:
        build(**SIZES | {name: value})
    assert repr(value) in str(error.value)


PARTS = {
    rd.Attention: {"dim": 8, "num_heads": 2},
    rd.MLP: {"dim": 8, "hidden": 8},
    rd.SwiGLU: {"dim": 8, "hidden": 8},
    partial(rd.ConditionedBlock, nn.Identity(), nn.Identity()): {"dim": 8},
    rd.TokenEmbedding: {"vocab_size": 8, "dim": 8},
    rd.PositionedEmbedding: {"vocab_size": 8, "dim": 8, "context_length": 8},
    partial(rd.ScaledTable, scale=2.0): {"vocab_size": 8, "dim": 8},
    rd.FactorisedEmbedding: {"vocab_size": 8, "inner_dim": 8, "dim": 8, "num_positions": 8},
    rd.Head: {"dim": 8, "vocab_size": 8},
    rd.FactorisedHead: {"dim": 8, "inner_dim": 8},
    rd.AnchoredGate: {"dim": 8},
    rd.JointNormGate: {"dim": 8},
    partial(rd.WriteShare, bias=4.0, temperature=1.0, noise=None): {"dim": 8},
    rd.ConcatProjection: {"dim": 8},
    rd.DiagonalInjection: {"dim": 8},
    rd.SquareMap: {"dim": 8},
    rd.StepRouter: {"dim": 8, "num_slots": 3, "num_cycles": 3},
    rd.HaltingUnit: {"dim": 8},
    rd.LearnedExit: {"dim": 8},
    rd.LinearScores: {"dim": 8, "num_routers": 2, "num_outputs": 2},
    rd.MLPScores: {"dim": 8, "hidden": 8, "num_routers": 2, "num_outputs": 2},
    rd.TimeEmbedding: {"dim": 8, "num_frequencies": 4},
    rd.CoarseTimes: {"finest": 4},
    partial(rd.TimeConditionedUpdate, rd.plain(8), times=rd.CoarseTimes(2)): {"dim": 8},
    rd.StepEmbedding: {"vocab_size": 8, "dim": 8, "num_steps": 2, "size": 4},
    partial(rd.AddStepEmbedding, rd.plain(8), rd.StepEmbedding(8, 8, 2, 4)): {"dim": 8},
    partial(rd.MemorySlotsUpdate, rd.KeepState()): {"dim": 8, "num_slots": 3, "num_steps": 2},
}


@unhooked
@pytest.mark.parametrize("part", PARTS, ids=lambda part: getattr(part, "func", part).__name__)
def test_a_part_refuses_a_size_that_is_none(part):
    sizes = PARTS[part]
    part(**sizes)
    for name in sizes:
        for value in (0, -4, "16", 1.5, True):
            with pytest.raises(ValueError, match=f"{name} is {value!r}, but must be a whole number of at least 1"):
                part(**sizes | {name: value})


@unhooked
@every_builder
def test_a_width_that_the_heads_do_not_divide_is_refused(build):
    with pytest.raises(ValueError, match="dim must be divisible by num_heads, got dim=16 and num_heads=3"):
        build(**SIZES | {"num_heads": 3})


@unhooked
@every_builder
@pytest.mark.parametrize("name", ["head", "num_head", "layers", "num_steps"])
def test_an_unknown_word_is_never_ignored_by_a_builder(build, name):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        build(**SIZES, **{name: 4})


@pytest.mark.parametrize("bad", [(1, 1, 3, 1), "1+1x3+1", None, [1, 1, 3, 1]], ids=str)
def test_a_layout_is_a_layout(bad):
    for build in (rd.grt, rd.naive):
        with pytest.raises(WRONG_TYPE, match="layout"):
            build(bad, **SIZES)


@unhooked
@pytest.mark.parametrize("num_blocks", [0, -1, True])
def test_a_dense_model_has_blocks(num_blocks):
    with pytest.raises(ValueError, match=f"num_blocks is {num_blocks}.* at least 1"):
        rd.dense(num_blocks, **SIZES)


@unhooked
@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_kv_heads": 3}, "num_heads must be divisible by num_kv_heads, got num_heads=4 and num_kv_heads=3"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"hidden": 0}, "hidden is 0"),
        ({"hidden": 2.5}, "hidden is 2.5"),
        ({"num_heads": 16}, "even head size, got 16 / 16"),
        ({"rotary_base": 0.0}, "rotary_base is 0.0"),
    ],
    ids=str,
)
def test_the_llama_form_refuses_sizes_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        rd.LlamaForm(**{"dim": 16, "num_heads": 4} | options)


@unhooked
def test_a_form_refuses_unknown_words():
    for form in (rd.GPT2Form, rd.LlamaForm):
        with pytest.raises(TypeError, match="unexpected keyword"):
            form(16, 2, norm="rms")


@unhooked
@pytest.mark.parametrize("build", [rd.grt, METHODS["naive-llama-untied"]], ids=["grt", "naive"])
@pytest.mark.parametrize(
    "tokens, message",
    [
        (torch.zeros(2, 0, dtype=torch.long), r"not empty, got shape \(2, 0\)"),
        (torch.zeros(0, 3, dtype=torch.long), r"not empty, got shape \(0, 3\)"),
        (torch.zeros(3, dtype=torch.long), r"\(batch, token\).* got shape \(3,\)"),
        (torch.zeros(1, 2, 3, dtype=torch.long), r"\(batch, token\).* got shape \(1, 2, 3\)"),
        (torch.zeros(2, 3), "tokens must be integers, got torch.float32"),
        (torch.zeros(2, 3, dtype=torch.bool), "tokens must be integers, got torch.bool"),
        (torch.tensor([[0, 23]]), "0 to 22, the vocabulary; got 0 to 23"),
        (torch.tensor([[-1, 2]]), "0 to 22, the vocabulary; got -1 to 2"),
        ([[1, 2]], "tokens must be .* got list"),
        (None, "tokens must be .* got NoneType"),
    ],
    ids=str,
)
def test_bad_tokens_are_refused(build, tokens, message):
    with pytest.raises(ValueError, match=message):
        tiny(build)(tokens)


@unhooked
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_tokens_of_any_integer_dtype_are_tokens(dtype):
    model = tiny().eval()
    assert torch.equal(model(X.to(dtype)), model(X))


@unhooked
def test_more_tokens_than_learned_positions_are_refused_and_rotary_ones_are_not():
    too_long = torch.zeros(1, 9, dtype=torch.long)
    with pytest.raises(ValueError, match="learned positions 0 to 7, but the sequence has 0 to 8"):
        rd.grt(LAYOUT, **SIZES)(too_long)
    assert rd.grt(LAYOUT, **SIZES, form=rd.LlamaForm)(too_long).shape == (1, 9, 23)


BAD_DEPTHS = [0, -1, 2.5, 2.0, "2", True, [], [1], [1, 2, 3], [1, 0], [1, 2.5], {1, 2}, rd.Depth(0), rd.Depth(3, 0)]
BAD_DEPTHS += [rd.Depth(3, rows=(1, 2)), rd.Depth(2, rows=(1, 2, 2)), torch.tensor(2), rd.Layout(1, 1, 3, 1), object]


@unhooked
@pytest.mark.parametrize("depth", BAD_DEPTHS, ids=str)
def test_an_impossible_depth_is_refused_wherever_it_is_given(depth):
    model = tiny()
    core = rd.RecurrentCore([rd.PlainBlock(nn.Identity())], rd.plain(8))
    for call in (
        partial(model, X, depth),
        partial(model.trajectory, X, num_steps=depth),
        partial(rd.WithObjective(model), X, depth),
        partial(core, torch.randn(2, 4, 8), depth),
    ):
        with pytest.raises(ValueError, match=r"num_steps|grad_steps|rows"):
            call()


@unhooked
@given(st.from_regex(r"\A(num_step|steps|n_loops|depth|mask_|attention_mask|position)\Z"))
def test_an_unknown_word_is_never_ignored_by_a_call(name):
    model = tiny()
    core = rd.RecurrentCore([rd.PlainBlock(nn.Identity())], rd.plain(8))
    for call in (model, model.trajectory, rd.WithObjective(model), partial(core, torch.randn(2, 4, 8), 2)):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            call(**{"tokens": X} if call.__class__ is not partial else {}, **{name: 3})


@unhooked
@pytest.mark.parametrize("shape", [(2, 3), (2, 5), (1, 4), (4,), (2, 3, 4), (2, 4, 5), (3, 4, 4)], ids=str)
def test_a_mask_of_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match=r"mask must be \(2, 4\) like tokens.* got"):
        tiny()(X, mask=torch.ones(shape, dtype=torch.bool))


@unhooked
def test_a_float_mask_is_refused():
    # 0 and -inf, as some libraries write it, would both be True or both be wrong.
    with pytest.raises(ValueError, match=r"mask must be boolean or of integers.* got torch.float32"):
        tiny()(X, mask=torch.zeros(2, 4))


@unhooked
@pytest.mark.parametrize("mask", [torch.full((2, 4), 3), torch.tensor([[1, 1, 1, -1]] * 2)], ids=["3", "-1"])
def test_a_mask_of_other_integers_than_0_and_1_is_refused(mask):
    model = tiny().eval()
    logits = model(X)
    calls = (partial(model, X), partial(rd.WithObjective(model), X), partial(rd.next_token_loss, logits, X))
    for call in (*calls, partial(rd.generate, model, X, max_new_tokens=2)):
        with pytest.raises(ValueError, match="mask must be boolean, or of 1 at real tokens and 0 at padding; got"):
            call(mask=mask)
    with pytest.raises(ValueError, match="mask must be boolean or of integers"):
        calls[-1](mask=torch.ones(2, 4))


class Returns(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x, at):
        return self.make(x)


@unhooked
@pytest.mark.parametrize(
    "make, got",
    [
        (lambda x: (x, None), "got tuple"),
        (lambda x: None, "got NoneType"),
        (lambda x: x[0], r"got a tensor of shape \(3, 4\)"),
        (lambda x: x[..., :2], r"got a tensor of shape \(2, 3, 2\)"),
        (lambda x: x[:, :1], r"got a tensor of shape \(2, 1, 4\)"),
    ],
    ids=["tuple", "none", "no batch", "narrow", "short"],
)
def test_a_block_that_returns_anything_else_is_named(make, got):
    core = rd.RecurrentCore([rd.PlainBlock(nn.Identity()), Returns(make)], rd.plain(4))
    with pytest.raises(ValueError, match=r"Block 1 \(Returns\) must return .* shape \(2, 3, 4\), " + got):
        core(torch.randn(2, 3, 4), 2)
