"""Names of parameters, which are public; and that weights survive saving, copying and the meta device."""

from functools import partial

import pytest
import torch
from battery import every_method, lively, tiny
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from strategies import few

import recurrent_depth as rd

GPT2_BLOCK = """
attention.qkv.weight attention.out.weight around_attention.norm.weight
mlp.up.weight mlp.out.weight around_mlp.norm.weight
"""
GPT2_BIASES = """
attention.qkv.bias attention.out.bias around_attention.norm.bias mlp.up.bias mlp.out.bias around_mlp.norm.bias
"""
LLAMA_BLOCK = """
attention.qkv.weight attention.out.weight around_attention.norm.weight
mlp.gate.weight mlp.up.weight mlp.out.weight around_mlp.norm.weight
"""
SANDWICH_BLOCK = """
attention.qkv.weight attention.out.weight around_attention.before.weight around_attention.after.weight
mlp.gate.weight mlp.up.weight mlp.out.weight around_mlp.before.weight around_mlp.after.weight
"""
INJECTION = "core.update.inject.state.weight core.update.inject.anchor.weight core.update.inject.anchor.bias"
GATE = """
core.update.gate.state.weight core.update.gate.anchor.weight core.update.gate.anchor.bias
core.update.gate.write.linear.weight core.update.gate.write.bias
"""
TWO_NORMS = "core.update.gate.state_norm.weight core.update.gate.anchor_norm.weight"
HALTING = "core.update.unit.linear.weight core.update.unit.bias"
SLOTS = """
core.update.writer.weight core.update.writer.bias core.update.reader.weight core.update.reader.bias
"""
CONDITIONED_BLOCK = """
attention.qkv.weight attention.out.weight mlp.up.weight mlp.out.weight modulation.weight modulation.bias
"""
TIME = " ".join(
    f"core.update.{of}.{layer}.{part}"
    for of in ("time", "length")
    for layer in ("first", "second")
    for part in ("weight", "bias")
)
FACTORS = " ".join(
    f"core.stack.corrections.blocks.0.{layer}.{factor}"
    for layer in ("attention.qkv", "attention.out", "mlp.up", "mlp.out")
    for factor in "AB"
)
STEP_EMBEDDING = """
core.update.embedding.table.weight core.update.embedding.context.weight core.update.embedding.norm.weight
core.update.narrow.weight core.update.widen.weight core.update.norm.weight
"""
POSITIONED = "embed.token.weight embed.position.weight norm.weight"


ADAPTER = "core.update.inner.inject.state.weight core.update.inner.inject.anchor.weight"
DIAGONAL = """
core.update.inner.inject.log_rate core.update.inner.inject.dt_bias core.update.inner.inject.norm.weight
core.update.inner.inject.input.linear.weight core.update.module.linear.weight
"""


def around(block: str, core: int = 1, prelude: int = 1, coda: int = 1) -> list[str]:
    stacks = [("prelude", prelude), ("core.stack", core), ("coda", coda)]
    return [f"{name}.blocks.{i}.{part}" for name, count in stacks for i in range(count) for part in block.split()]


def joint_norm(dim: int) -> rd.DepthUpdate:
    return rd.GatedDepthUpdate(rd.ConcatProjection(dim), rd.JointNormGate(dim))


sandwich = partial(rd.LlamaForm, arrangement=rd.ResidualSandwich)
GOLDEN = {
    "grt": (rd.grt, [*around(GPT2_BLOCK), INJECTION, GATE, TWO_NORMS, POSITIONED]),
    "grt, joint norm": (
        partial(rd.grt, update=joint_norm),
        [*around(GPT2_BLOCK), INJECTION, GATE, "core.update.gate.norm.weight", POSITIONED],
    ),
    "grt, Llama": (
        partial(rd.grt, form=rd.LlamaForm),
        [*around(LLAMA_BLOCK), INJECTION, GATE, TWO_NORMS, "embed.token.weight norm.weight"],
    ),
    "grt, sandwich, untied": (
        partial(rd.grt, form=partial(sandwich, tied=False)),
        [*around(SANDWICH_BLOCK), INJECTION, GATE, TWO_NORMS, "embed.token.weight norm.weight head.linear.weight"],
    ),
    "huginn": (rd.huginn, [*around(SANDWICH_BLOCK), ADAPTER, "embed.token.weight norm.weight"]),
    "ouro": (rd.ouro, [*around(SANDWICH_BLOCK), "embed.token.weight core.update.norm.weight norm.weight"]),
    "albert": (
        lambda layout, **sizes: rd.albert(layout.num_steps, **sizes),
        [*around(GPT2_BLOCK, prelude=0, coda=0), POSITIONED, "embed.project.weight head.project.weight"],
    ),
    "parcae": (rd.parcae, [*around(LLAMA_BLOCK), DIAGONAL, "embed.token.weight norm.weight"]),
    "naive": (rd.naive, [*around(GPT2_BLOCK), POSITIONED]),
    "damped": (partial(rd.grt, update=rd.damped), [*around(GPT2_BLOCK), POSITIONED]),
    "universal": (
        rd.universal,
        [*around(GPT2_BLOCK + GPT2_BIASES), HALTING, "embed.token.weight norm.weight norm.bias"],
    ),
    "grt, halting": (
        partial(rd.grt, update=partial(rd.halted, inner=rd.gated)),
        [
            *around(GPT2_BLOCK),
            *f"{INJECTION} {GATE} {TWO_NORMS}".replace("core.update.", "core.update.inner.").split(),
            HALTING,
            POSITIONED,
        ],
    ),
    "mor": (rd.mor, [*around(GPT2_BLOCK), "core.update.router.choose.scores.weight", POSITIONED]),
    "mor, token choice": (
        partial(rd.mor, router=rd.token_choice),
        [*around(GPT2_BLOCK), "core.update.router.scores.weight", POSITIONED],
    ),
    "mod": (rd.mod, [*around(GPT2_BLOCK), "core.update.router.choose.scores.weight", POSITIONED]),
    "rrt": (partial(rd.rrt, rank=4), [*around(GPT2_BLOCK), FACTORS, POSITIONED]),
    "embedding per step": (partial(rd.ple, size=8), [*around(GPT2_BLOCK), STEP_EMBEDDING, POSITIONED]),
    "mesh": (rd.mesh, [*around(GPT2_BLOCK), SLOTS, POSITIONED]),
    "loopformer": (
        rd.loopformer,
        [*around(GPT2_BLOCK, core=0), *around(CONDITIONED_BLOCK, prelude=0, coda=0), TIME, POSITIONED],
    ),
    "dense, biases": (
        lambda layout, **sizes: rd.dense(3, form=partial(rd.GPT2Form, bias=True), **sizes),
        [*around(GPT2_BLOCK + GPT2_BIASES, core=3, prelude=0, coda=0), POSITIONED, "norm.bias"],
    ),
}


@pytest.mark.filterwarnings("ignore:Of 1 steps none is routed")
@pytest.mark.parametrize("num_steps", [1, 7])
@pytest.mark.parametrize("build, names", GOLDEN.values(), ids=GOLDEN)
def test_names_are_those_of_the_golden_list_whatever_the_number_of_steps(build, names, num_steps):
    model = tiny(build, rd.Layout(1, 1, num_steps, 1))
    golden = sorted(name for group in names for name in group.split())
    assert sorted(model.state_dict()) == golden
    assert sorted(name for name, _ in model.named_parameters()) == golden


@few
@given(st.builds(rd.Layout, st.integers(0, 3), st.integers(1, 3), st.integers(1, 9), st.integers(0, 3)))
def test_a_model_has_the_layout_that_it_was_built_with(layout):
    for build in (rd.grt, rd.naive):
        model = tiny(build, layout)
        assert model.layout == layout
        assert [len(stack.blocks) for stack in (model.prelude, model.core.stack, model.coda)] == [
            layout.prelude,
            layout.core,
            layout.coda,
        ]
    assert tiny(lambda layout, **sizes: rd.dense(5, **sizes)).layout == rd.Layout(0, 5, 1, 0)


@every_method
def test_no_storage_has_two_names(build):
    state = tiny(build).state_dict()
    assert len({weight.untyped_storage().data_ptr() for weight in state.values()}) == len(state)


@every_method
def test_weights_survive_safetensors_to_the_bit(build, tmp_path):
    model, other = lively(tiny(build)).eval(), lively(tiny(build)).eval()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    num_bytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    assert num_bytes < (tmp_path / "model.safetensors").stat().st_size < num_bytes + 8192
    x = torch.randint(23, (2, 5))
    assert not torch.equal(model(x), other(x))
    other.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    assert torch.equal(model(x), other(x))


@every_method
def test_a_model_from_the_meta_device_is_initialised_like_any_other(build):
    with torch.device("meta"):
        model = tiny(build, rd.Layout(1, 1, 3, 1), dim=64)
    assert all(weight.is_meta for weight in model.parameters())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(torch.nan)
    rd.initialise(model)
    usual = dict(tiny(build, rd.Layout(1, 1, 3, 1), dim=64).named_parameters())
    for name, weight in model.named_parameters():
        assert weight.isfinite().all(), name
        mean, std = usual[name].mean().item(), usual[name].std(correction=0).item()
        assert weight.mean().item() == pytest.approx(mean, abs=6 * std * (2 / weight.numel()) ** 0.5 + 1e-9), name
        assert weight.std(correction=0).item() == pytest.approx(std, rel=5 * weight.numel() ** -0.5), name
    assert model(torch.randint(23, (2, 5))).isfinite().all()


@pytest.mark.parametrize("bias", [4.0, -1.5])
def test_the_gate_keeps_its_bias_through_initialisation(bias):
    model = tiny(update=partial(rd.gated, bias=bias))
    assert (model.get_parameter("core.update.gate.write.bias") == bias).all()
    rd.initialise(lively(model))
    assert (model.get_parameter("core.update.gate.write.bias") == bias).all()
    assert (model.get_parameter("core.update.gate.anchor.bias") == 0).all()


@few
@given(st.builds(rd.Layout, st.integers(0, 2), st.integers(1, 2), st.integers(1, 9), st.integers(0, 2)))
def test_residual_projections_start_narrower_by_the_blocks_executed(layout):
    model = tiny(layout=layout, dim=64)
    for name, weight in model.named_parameters():
        if name.endswith("out.weight"):
            assert weight.std().item() == pytest.approx(0.02 / (2 * layout.executed) ** 0.5, rel=0.1)
        elif weight.ndim == 2:
            assert weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_the_deviations_of_the_start_are_arguments():
    model = tiny(dim=64)
    rd.initialise(model, std=0.5, residual_std=0.1)
    assert model.get_parameter("embed.token.weight").std().item() == pytest.approx(0.5, rel=0.1)
    assert model.get_parameter("prelude.blocks.0.mlp.out.weight").std().item() == pytest.approx(0.1, rel=0.1)


def test_two_models_of_one_form_share_nothing():
    form = rd.GPT2Form(16, 2)
    first, second = (
        rd.assemble(rd.Layout(1, 1, 2, 1), form, rd.gated(16), vocab_size=23, context_length=16) for _ in range(2)
    )
    assert not {id(module) for module in first.modules()} & {id(module) for module in second.modules()}
    assert not torch.equal(first.embed.token.weight, second.embed.token.weight)
