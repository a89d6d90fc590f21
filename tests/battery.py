"""Every method that the laws are tested on. A new method joins by one line in METHODS."""

import warnings
from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch

import recurrent_depth as rd

Build = Callable[..., rd.RecurrentTransformer]

close = {"atol": 1e-4, "rtol": 1e-3}
"""Two ways to compute the same in float32, for values around 1 of lively models; what is wrong is wrong by far more."""


def joint_norm(dim: int) -> rd.DepthUpdate:
    noise = rd.GaussianNoise(0.1)
    return rd.GatedDepthUpdate(rd.ConcatProjection(dim, noise), rd.JointNormGate(dim, noise=noise))


def noisy_start(dim: int) -> rd.DepthUpdate:
    return rd.GatedDepthUpdate(rd.ConcatProjection(dim), rd.AnchoredGate(dim), start=rd.GaussianNoise(0.1))


def noise_per_token(dim: int) -> rd.DepthUpdate:
    gate = rd.AnchoredGate(dim, temperature=2.0, noise=rd.GaussianNoise(0.1, per_token=True))
    return rd.GatedDepthUpdate(rd.ConcatProjection(dim, rd.GaussianNoise(0.1), bias=False), gate)


def anchor_added(dim: int) -> rd.DepthUpdate:
    return rd.ReplaceState(rd.AddAnchor())


def skipped(dim: int) -> rd.DepthUpdate:
    return rd.SkipUpdate(rd.KeepState())


def anchor_skipped(dim: int) -> rd.DepthUpdate:
    return rd.SkipUpdate(rd.KeepAnchor())


def dense(layout: rd.Layout, **sizes) -> rd.RecurrentTransformer:
    return rd.dense(layout.stored, **sizes)


def halting_gate(dim: int) -> rd.DepthUpdate:
    return rd.halted(dim, inner=rd.gated, bias=-4.0)


def mod(layout: rd.Layout, **sizes) -> rd.RecurrentTransformer:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Of 1 steps none is routed")
        return rd.mod(layout, **sizes)


def albert(layout: rd.Layout, **sizes) -> rd.RecurrentTransformer:
    return rd.albert(layout.num_steps, inner_dim=8, **sizes)


METHODS: dict[str, Build] = {
    "grt": rd.grt,
    "grt-llama": partial(rd.grt, form=partial(rd.LlamaForm, num_kv_heads=1)),
    "grt-joint-norm": partial(rd.grt, update=joint_norm),
    "grt-noisy-start": partial(rd.grt, update=noisy_start),
    "grt-noise-per-token": partial(rd.grt, update=noise_per_token),
    "naive": rd.naive,
    "naive-llama-untied": partial(rd.naive, form=partial(rd.LlamaForm, tied=False)),
    "dense": dense,
    "anchor-added": partial(rd.grt, update=anchor_added),
    "skip": partial(rd.grt, update=skipped),
    "skip-anchor": partial(rd.grt, update=anchor_skipped),
    "biases": partial(rd.grt, form=partial(rd.GPT2Form, bias=True)),
    "post-norm": partial(rd.grt, form=partial(rd.GPT2Form, arrangement=rd.PostNorm)),
    "residual-sandwich": partial(rd.grt, form=partial(rd.LlamaForm, arrangement=rd.ResidualSandwich)),
    "huginn": rd.huginn,
    "huginn-gpt2": partial(rd.huginn, form=rd.GPT2Form),
    "ouro": rd.ouro,
    "albert": albert,
    "parcae": rd.parcae,
    "branch-sandwich": partial(rd.naive, form=partial(rd.GPT2Form, arrangement=rd.BranchSandwich)),
    "universal": partial(rd.universal, update=partial(rd.halted, bias=-5.0)),
    "halting-gate": partial(rd.grt, update=halting_gate),
    "mor": rd.mor,
    "mor-llama": partial(rd.mor, form=partial(rd.LlamaForm, num_kv_heads=1)),
    "mor-token-choice": partial(rd.mor, router=rd.token_choice),
    "mor-gated": partial(rd.mor, update=rd.gated, combine=rd.Interpolate),
    "mod": mod,
    "rrt": partial(rd.rrt, rank=4),
    "rrt-gated": partial(rd.rrt, rank=4, update=rd.gated, form=rd.LlamaForm),
    "embedding-per-step": partial(rd.ple, size=8),
    "mesh": rd.mesh,
    "loopformer": rd.loopformer,
    "damped": partial(rd.grt, update=rd.damped),
}

every_method = pytest.mark.parametrize("build", METHODS.values(), ids=METHODS)


def every_method_but(broken: Mapping[str, str]) -> pytest.MarkDecorator:
    """All methods but those that break a law by design, each named with the reason."""
    kept = {name: build for name, build in METHODS.items() if name not in broken}
    return pytest.mark.parametrize("build", kept.values(), ids=kept)


LONGER = "a run of k steps takes longer ones than a deeper run, so it is no prefix of it"
NO_PREFIX = {"loopformer": LONGER, "damped": LONGER}
LATER = "its factors B start at zero, so the factors A learn from the second training step on"
SKIPS = {
    name: "a token that is not picked stays as it is: a step may change nothing, and rounding may flip a decision"
    for name in METHODS
    if name.startswith(("mor", "mod"))
}
IDENTITY = {
    "loopformer": "its blocks start as the identity, so attention and MLP learn from the second step on",
    "rrt": LATER,
    "rrt-gated": LATER,
}


def tiny(build: Build = rd.grt, layout: rd.Layout = rd.Layout(1, 2, 3, 1), **changes) -> rd.RecurrentTransformer:
    """A small model of a method, as it is built: in training mode, with the weights it starts with."""
    return build(layout, **{"dim": 16, "num_heads": 2, "vocab_size": 23, "context_length": 16, **changes})


def lively(model: torch.nn.Module, scale: float = 0.3) -> torch.nn.Module:
    """The module with all weights moved, so that every part matters: at the start most of them hardly do."""
    with torch.no_grad():
        for weight in model.parameters():
            weight += scale * torch.randn_like(weight)
        for name, bias in model.named_parameters():
            if name.endswith("write.bias"):  # a gate that is half open
                bias -= bias.mean()
    return model


def blocks_of(core: rd.RecurrentCore) -> list[torch.nn.Module]:
    """The shared blocks."""
    return list(core.stack.get_submodule("blocks").children())


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The gradients by name; zero where there is none. Takes them away."""
    found = {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in model.named_parameters()
    }
    model.zero_grad(set_to_none=True)
    return found
