"""Relaxed tying: its limits are the naive loop and the dense model, and in between it is as near as its rank allows."""

import copy
import sys
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from agreement import assert_agrees, assert_all_agree, assert_slopes_agree
from battery import close, gradients, lively, tiny
from processes import start as start_process
from torch import nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode
from transcription_parts import arrays, blocks
from transcription_steps import of_step
from transcription_steps import rrt as written
from user_parts import Mixing

import recurrent_depth as rd
from recurrent_depth.corrections import LowRank

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from live_bytes import LiveBytes

LAYOUT = rd.Layout(1, 2, 3, 1)
X = torch.randint(23, (2, 7), generator=torch.Generator().manual_seed(0))
STARTS = [rd.average_start, rd.stepwise_start, rd.lower_start]
FORMS = {
    "gpt2": partial(rd.GPT2Form, bias=True),
    "llama": partial(rd.LlamaForm, num_kv_heads=1, arrangement=rd.BranchSandwich),
}
every_start = pytest.mark.parametrize("start", STARTS, ids=lambda start: start.__name__)


def rrt(layout=LAYOUT, rank=4, **changes) -> rd.RecurrentTransformer:
    return tiny(partial(rd.rrt, rank=rank), layout, **changes)


def dense(num_blocks=6, **changes) -> rd.RecurrentTransformer:
    return lively(tiny(lambda layout, **sizes: rd.dense(num_blocks, **sizes), **changes)).eval()


def with_seed(build, seed=3):
    torch.manual_seed(seed)
    return build()


def corrections(model) -> dict[str, LowRank]:
    return model.core.stack.corrections.layers


# The limit of no correction: the naive loop


def test_at_rank_zero_it_is_the_naive_loop_by_names_weights_and_outputs():
    model, naive = (with_seed(build) for build in (partial(rrt, rank=0), partial(tiny, rd.naive, LAYOUT)))
    assert list(model.state_dict()) == list(naive.state_dict())
    for num_steps in (1, 2, 3):
        assert torch.equal(model(X, num_steps), naive(X, num_steps))


@pytest.mark.parametrize("update", [rd.plain, partial(rd.gated, bias=0.0, state_noise=0.0, gate_noise=0.0)])
def test_it_starts_as_the_loop_that_it_relaxes(update):
    model, tied = (
        with_seed(build) for build in (partial(rrt, update=update), partial(tiny, rd.grt, LAYOUT, update=update))
    )
    assert torch.equal(model(X), tied(X))
    assert set(tied.state_dict()) < set(model.state_dict())
    model.load_state_dict(tied.state_dict(), strict=False)


def test_every_linear_layer_of_the_loop_is_corrected_and_none_outside():
    model = rrt(form=rd.LlamaForm)
    names = [name for name, layer in model.core.stack.blocks.named_modules() if isinstance(layer, nn.Linear)]
    assert sorted(corrections(model)) == sorted(f"blocks.{name}" for name in names)
    assert len(names) == 2 * 5
    shapes = {name: (layer.A.shape, layer.B.shape) for name, layer in corrections(model).items()}
    for name in names:
        layer = model.core.stack.blocks.get_submodule(name)
        assert shapes[f"blocks.{name}"] == ((3, 4, layer.in_features), (3, layer.out_features, 4))


# What a correction is


@pytest.mark.parametrize("dtype, accuracy", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("rank, skip_first", [(1, False), (4, False), (4, True), (100, False)])
def test_a_step_runs_the_blocks_of_its_own_weights_at_scale_one(rank, skip_first, dtype, accuracy):
    model = lively(rrt(rank=rank, skip_first=skip_first)).to(dtype).eval()
    expected = written(arrays(model.state_dict()), X.numpy(), LAYOUT, 2, skip_first=skip_first)
    assert_all_agree(model.trajectory(X, every_step=True), *expected, accuracy)


@pytest.mark.parametrize("step", range(3))
def test_a_correction_changes_its_step_and_those_behind_it_alone(step):
    model = lively(rrt()).eval()
    before = model.trajectory(X, every_step=True).states
    with torch.no_grad():
        corrections(model)["blocks.1.mlp.up"].B[step] += 0.5
    after = model.trajectory(X, every_step=True).states
    for place, (old, new) in enumerate(zip(before, after, strict=True)):
        assert torch.equal(old.h, new.h) == (place < step)


def test_with_skip_first_the_first_step_is_bare():
    model = lively(rrt(skip_first=True)).eval()
    naive = tiny(rd.naive, LAYOUT).eval()
    naive.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(model(X, 1), naive(X, 1))
    assert not torch.allclose(model(X, 2), naive(X, 2), atol=1e-3)
    assert {len(layer.A) for layer in corrections(model).values()} == {2}


def test_outside_of_a_call_the_tied_blocks_are_bare():
    stack = lively(rd.Stack([Mixing(8)]))
    plain, x = copy.deepcopy(stack), torch.randn(1, 3, 8)
    relaxed = lively(rd.RelaxedStack(stack, 2, rank=2))
    plain.load_state_dict(relaxed.state_dict(), strict=False)
    at = rd.At()
    assert not torch.allclose(relaxed(x, at, 1), plain(x, at), atol=1e-3)
    assert torch.equal(stack(x, at), plain(x, at))


def test_a_copy_and_a_pickle_are_corrected_by_their_own_factors(tmp_path):
    model = lively(rrt()).eval()
    torch.save(model, tmp_path / "model.pt")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert torch.equal(other(X), model(X))
        lively(other)
        assert not torch.allclose(other(X), model(X), atol=1e-2)
        x = torch.randn(2, 7, 16)
        expected = blocks(of_step(arrays(other.state_dict()), 0), "core.stack.", x.double().numpy(), 2, 2)
        assert_agrees(other.core.stack(x, rd.At(), 0), expected, 1e-5)


def test_an_error_inside_of_the_blocks_leaves_them_bare():
    class Failing(Mixing):
        def forward(self, x, at):
            if at.extra:
                raise RuntimeError("on purpose")
            return super().forward(x, at)

    stack = lively(rd.Stack([Failing(8)]))
    relaxed, x = lively(rd.RelaxedStack(stack, 2, rank=2)), torch.randn(1, 3, 8)
    expected = stack(x, rd.At())
    with pytest.raises(RuntimeError, match="on purpose"):
        relaxed(x, rd.At(extra={"fail": True}), 1)
    assert torch.equal(stack(x, rd.At()), expected)


# With routers: tokens that take a step take it with its corrections


@pytest.mark.parametrize("router", [rd.expert_choice, rd.token_choice])
def test_a_router_goes_with_a_correction_per_step(router):
    build = partial(tiny, partial(rd.mor, router=router, update=rd.gated, combine=rd.Interpolate), LAYOUT)
    routed, model = (with_seed(build).eval() for _ in range(2))
    model.core = rd.RecurrentCore(rd.RelaxedStack(model.core.stack, 3, rank=4), model.core.update).eval()
    assert_close(model(X), routed(X))
    before = model.trajectory(X, every_step=True).states
    with torch.no_grad():
        corrections(model)["blocks.1.mlp.up"].B[1] += 5.0
    after = model.trajectory(X, every_step=True).states
    assert torch.equal(before[0].h, after[0].h)
    assert not torch.equal(before[1].h, after[1].h)


# Any module, which stays its caller's


class HostLayer(nn.Module):
    """A layer of another library: its own arguments, a tuple out."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, hidden, *, scale):
        return (hidden + scale * self.o_proj(torch.tanh(self.q_proj(hidden))),)


def test_layers_of_any_library_are_relaxed_without_being_owned():
    host, x = nn.ModuleList([HostLayer(), HostLayer()]), torch.randn(2, 5, 8)
    names = list(host.state_dict())
    ours = [lively(rd.StepCorrections(layer, 3, rank=2)) for layer in host]
    assert list(host.state_dict()) == names
    assert list(ours[0].state_dict()) == ["q_proj.A", "q_proj.B", "o_proj.A", "o_proj.B"]
    for step in range(3):
        (found,) = ours[1](host[1], step, x, scale=0.5)
        down, up = (ours[1].layers[name] for name in ("q_proj", "o_proj"))
        q, o = host[1].q_proj.weight + down.B[step] @ down.A[step], host[1].o_proj.weight + up.B[step] @ up.A[step]
        expected = x + 0.5 * torch.tanh(x @ q.T + host[1].q_proj.bias) @ o.T
        assert_close(found, expected)


class Eighths(nn.Linear):
    """A stand-in for a quantised layer: whole numbers for weights, in a forward of its own."""

    def __init__(self, layer):
        super().__init__(layer.in_features, layer.out_features, bias=False)
        self.weight = nn.Parameter((8 * layer.weight).round().to(torch.int8), requires_grad=False)

    def forward(self, x):
        return x @ (self.weight.to(x.dtype) / 8).T


def test_a_quantised_layer_is_corrected_on_top():
    layer, x = Eighths(nn.Linear(8, 6)), torch.randn(2, 8)
    ours = lively(rd.StepCorrections(nn.Sequential(layer), 2, rank=3))
    wrapped = nn.Sequential(layer)
    factors = ours.layers["0"]
    assert factors.A.dtype == torch.float32
    assert_close(ours(wrapped, 1, x), layer(x) + x @ factors.A[1].T @ factors.B[1].T)


# Gradients, and what data-parallel training needs


@pytest.mark.parametrize("skip_first", [False, True])
def test_gradients_are_those_of_the_used_steps_and_zero_rather_than_none_elsewhere(skip_first):
    model = lively(rrt(skip_first=skip_first)).eval()
    for num_steps in (1, 2, 3):
        model(X, num_steps).square().sum().backward()
        for layer in corrections(model).values():
            for factor in (layer.A, layer.B):
                used = factor.grad.flatten(1).norm(dim=1) > 0
                assert used.tolist() == [step < num_steps for step in range(int(skip_first), 3)]
        gradients(model)


@pytest.mark.parametrize("skip_first", [False, True])
def test_gradients_are_those_of_the_equations(skip_first):
    model = lively(rrt(skip_first=skip_first), 0.1).double().eval()

    def loss(weights):
        return (written(weights, X.numpy(), LAYOUT, 2, skip_first=skip_first)[0] ** 2).sum()

    assert_slopes_agree(model, model(X).square().sum(), loss)


def test_gradients_equal_those_of_the_merged_weights():
    model = lively(rrt(rd.Layout(0, 1, 1, 0))).eval()
    naive = tiny(rd.naive, rd.Layout(0, 1, 1, 0)).eval()
    naive.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        for name, layer in corrections(model).items():
            naive.core.stack.get_submodule(name).weight += layer.B[0] @ layer.A[0]
    for one in (model, naive):
        one(X).square().sum().backward()
    for name, layer in corrections(model).items():
        whole = naive.core.stack.get_submodule(name).weight.grad
        assert_close(layer.B.grad[0], whole @ layer.A[0].T, **close)
        assert_close(layer.A.grad[0], layer.B[0].T @ whole, **close)
        assert_close(model.core.stack.get_submodule(name).weight.grad, whole, **close)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_checkpointed_steps_recompute_with_their_corrections(checkpointing):
    model = lively(rrt()).eval()
    found = []
    for model.core.checkpointing in (False, True):
        model(X).square().sum().backward()
        found.append(gradients(model))
    for name, gradient in found[0].items():
        assert_close(found[1][name], gradient, **close)


def gradient_of_two(rank: int) -> torch.Tensor:
    model = nn.parallel.DistributedDataParallel(rd.WithObjective(lively(rrt(skip_first=True))))
    for num_steps in (1, 3, 1, 2):
        model(X[rank : rank + 1], num_steps).backward()
    return corrections(model.module.model)["blocks.0.mlp.up"].A.grad


def distributed(rank: int, meeting: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    grad = gradient_of_two(rank)  # the wrapper is gone with the call: one that outlives its group can hang at exit
    both = [torch.zeros_like(grad) for _ in range(2)]
    torch.distributed.all_gather(both, grad)
    assert torch.equal(*both)
    print("equal")
    torch.distributed.destroy_process_group()


def test_data_parallel_training_takes_shallow_depths_without_a_flag(tmp_path):
    outs = [tmp_path / f"{rank}.txt" for rank in range(2)]
    running = [start_process(distributed, rank, str(tmp_path / "meeting"), out=out) for rank, out in enumerate(outs)]
    for process, out in zip(running, outs, strict=True):
        process.join(120)
        assert process.exitcode == 0, out.read_text()
        assert "equal" in out.read_text()


# From a dense model


@every_start
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("num_steps", [1, 2, 3, 6])
def test_at_full_rank_it_is_the_dense_model(start, form, num_steps):
    model = dense(form=form)
    relaxed = rd.relax(model, num_steps, rank=100, start=start)
    assert relaxed.layout == rd.Layout(0, 6 // num_steps, num_steps, 0)
    assert_close(relaxed(X), model(X), **close)


@every_start
def test_each_step_stands_for_its_blocks_of_the_dense_model(start):
    model = dense()
    relaxed = rd.relax(model, 3, rank=100, start=start)
    at, h = rd.At(torch.arange(7)[None]), model.embed(X, torch.arange(7)[None])
    for step, state in enumerate(relaxed.trajectory(X, every_step=True).states):
        h = rd.Stack(model.core.stack.blocks[2 * step : 2 * step + 2])(h, at)
        assert_close(state.h, h, **close)


@every_start
@pytest.mark.parametrize("rank", [0, 1, 3, 8])
def test_a_truncated_start_is_as_near_as_its_rank_allows(start, rank):
    model = dense()
    stack = rd.relax(model, 3, rank, start=start).core.stack
    for place in range(2):
        for part in ("attention.qkv", "attention.out", "mlp.up", "mlp.out"):
            tied = stack.blocks[place].get_submodule(part).weight.detach().numpy()
            for step in range(3):
                wanted = model.core.stack.blocks[2 * step + place].get_submodule(part).weight.detach().numpy()
                lost = wanted - tied
                if rank:
                    factors = stack.corrections.layers[f"blocks.{place}.{part}"]
                    lost = lost - (factors.B[step] @ factors.A[step]).detach().numpy()
                left_out = np.linalg.svd((wanted - tied).astype(np.float64), compute_uv=False)[rank:]
                assert np.linalg.norm(lost) == pytest.approx(np.linalg.norm(left_out), rel=1e-4, abs=1e-4)


def test_more_rank_is_nearer_to_the_dense_model():
    model = dense()
    away = [(rd.relax(model, 3, rank)(X) - model(X)).norm().item() for rank in (0, 8, 12, 16)]
    assert away == sorted(away, reverse=True)
    assert away[-1] < 1e-3 * away[0]


def test_tied_blocks_start_as_the_starts_say():
    blocks = list(dense().core.stack.blocks)

    def weights(blocks):
        return [block.around_mlp.norm.weight for block in blocks] + [block.mlp.up.weight for block in blocks]

    def same(tied, expected):
        assert all(torch.equal(*pair) for pair in zip(weights(tied), weights(expected), strict=True))
        assert not {id(block) for block in tied} & {id(block) for block in blocks}

    same(rd.lower_start(blocks, 2), blocks[:2])
    same(rd.stepwise_start(blocks, 2), [blocks[0], blocks[5]])
    same(rd.stepwise_start(blocks, 3), [blocks[0], blocks[2], blocks[5]])  # round(2.5) is 2
    same(rd.stepwise_start(blocks, 1), [blocks[0]])
    same(rd.stepwise_start(blocks, 6), blocks)
    for place, block in enumerate(rd.average_start(blocks, 2)):
        for name, weight in block.named_parameters():
            assert_close(weight, sum(dict(one.named_parameters())[name] for one in blocks[place::2]) / 3)


def test_relaxing_leaves_the_dense_model_alone():
    model = dense()
    before, expected = copy.deepcopy(model.state_dict()), model(X)
    relaxed = lively(rd.relax(model, 3, rank=4))
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert torch.equal(model(X), expected)
    assert not {id(p) for p in model.parameters()} & {id(p) for p in relaxed.parameters()}
    rd.relax(model, 2, rank=4)


def test_blocks_that_share_nothing_stay_around_the_loop():
    model = lively(tiny(rd.naive, rd.Layout(1, 4, 1, 1))).eval()
    relaxed = rd.relax(model, 2, rank=100)
    assert relaxed.layout == rd.Layout(1, 2, 2, 1)
    assert torch.equal(relaxed.prelude.blocks[0].mlp.up.weight, model.prelude.blocks[0].mlp.up.weight)
    assert_close(relaxed(X), model(X), **close)


def test_without_vectors_norms_are_shared_and_matrices_alone_are_met():
    model = dense(form=FORMS["gpt2"])
    relaxed = rd.relax(model, 3, rank=100, vectors=False)
    assert not torch.allclose(relaxed(X), model(X), atol=1e-2)
    assert relaxed.core.stack.corrections.vectors == {}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.startswith("core") and weight.ndim == 1:
                weight.fill_(1.0)
    assert_close(rd.relax(model, 3, rank=100, vectors=False)(X), model(X), **close)


def test_skip_first_meets_a_dense_model_from_the_lower_blocks_alone():
    model = dense()
    lower, average = (
        rd.relax(model, 3, 100, start=start, skip_first=True) for start in (rd.lower_start, rd.average_start)
    )
    assert_close(lower(X), model(X), **close)
    assert not torch.allclose(average(X), model(X), atol=1e-2)


def test_a_relaxed_model_keeps_its_dtype_and_learns():
    model = rd.relax(dense().to(torch.bfloat16), 3, rank=4)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    rd.next_token_loss(model(X), X).backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters())


def test_the_names_of_a_relaxed_model():
    model = rd.relax(dense(2, form=partial(rd.GPT2Form, bias=True)), 2, rank=4)
    names = [name for name in model.state_dict() if "corrections.blocks.0.mlp.up" in name]
    assert [name.removeprefix("core.stack.corrections.blocks.0.") for name in names] == [
        "mlp.up.A",
        "mlp.up.B",
        "mlp.up.bias.offset",
    ]
    assert "core.stack.corrections.blocks.0.around_mlp.norm.weight.offset" in model.state_dict()
    other = rd.relax(dense(2, form=partial(rd.GPT2Form, bias=True)), 2, rank=4)
    other.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(model(X), other(X))


# Costs, decoding, bad input


def test_the_factors_are_counted():
    tied, model = (rd.accounting.flops_breakdown(one, tokens=7) for one in (tiny(rd.naive, LAYOUT), rrt()))
    extra = sum(layer.A[0].numel() + layer.B[0].numel() for layer in corrections(rrt()).values())
    assert model.core - tied.core == 3 * 7 * 2 * extra
    assert model._replace(core=0) == tied._replace(core=0)


@pytest.mark.parametrize("update", [rd.plain, rd.gated])
@pytest.mark.parametrize("form, above", [(rd.GPT2Form, 1.01), (rd.LlamaForm, 1.2)])
def test_memory_of_decoding_is_not_above_the_prediction_and_hardly_below(form, above, update):
    model = rrt(dim=256, form=form, update=update, context_length=128).eval()
    tokens, cache = torch.zeros(1, 128, dtype=torch.long), rd.DepthCache(rd.KeepAll(), max_tokens=128)
    predicted = rd.accounting.decode_memory(model, 128, batch=1, dtype=torch.float32)
    with torch.no_grad(), LiveBytes() as live:
        rd.extend(model, tokens, cache, logits_to_keep=1)
    found = live.peak - predicted.cache
    assert 0.99 * found <= predicted.prefill <= above * found


@pytest.mark.parametrize("update", [rd.plain, rd.gated])
@pytest.mark.parametrize("form", [rd.GPT2Form, rd.LlamaForm])
def test_the_flops_are_those_that_torch_counts(form, update):
    with torch.device("meta"):
        model, tokens = rrt(form=form, update=update, skip_first=True).eval(), torch.zeros(1, 7, dtype=torch.long)
    for num_steps in (1, 3):
        with FlopCounterMode(display=False) as counter:
            model(tokens, num_steps)
        assert counter.get_total_flops() == rd.accounting.flops(model, 7, num_steps)


@pytest.mark.parametrize("update", [rd.plain, partial(rd.gated, bias=0.0)])
def test_decoding_through_a_cache_is_the_parallel_pass(update):
    model = lively(rrt(update=update)).eval()
    cache = rd.DepthCache(rd.KeepAll())
    with torch.no_grad():
        parts = [rd.extend(model, part, cache) for part in X.split([3, 1, 2, 1], dim=1)]
    assert_close(torch.cat(parts, dim=1), model(X), **close)


def test_more_steps_than_corrections_are_refused_and_never_taken_in_turn():
    model = rrt()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        says = "step 4 has no correction, since they were made for 3 steps: ask for at most num_steps=3"
        for num_steps in (4, 8, [1, 5]):
            with pytest.raises(ValueError, match=says):
                model(X, num_steps)
        with pytest.raises(ValueError, match=says):
            rd.generate(model.eval(), X, max_new_tokens=2, num_steps=7)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: rrt(rank=-1), "rank is -1"),
        (lambda: rd.RelaxedStack(rd.Stack([Mixing()]), 0, rank=1), "num_steps is 0"),
        (lambda: rrt(rd.Layout(0, 1, 1, 0), skip_first=True), "skip_first"),
        (lambda: rd.RelaxedStack(rrt().core.stack, 3, rank=1), "already"),
        (lambda: rd.StepCorrections(nn.Linear(2, 2), 2, rank=1), "module is a Linear"),
        (lambda: rd.StepCorrections(nn.LayerNorm(2), 2, rank=1), "module is a LayerNorm, but must contain linear"),
        (lambda: rd.relax(dense(), 4, rank=1), "num_steps is 4, but must divide the number of blocks, 6"),
        (lambda: rd.relax(rrt(), 3, rank=1), "dense takes 3 steps"),
        (lambda: rd.relax(dense(), 3, rank=-2), "rank is -2"),
        (lambda: rd.relax(uneven(), 2, rank=1, start=rd.lower_start), "must be alike"),
        (lambda: rrt().core.stack.corrections.fit(nn.Identity(), []), "one for each of 3 steps"),
    ],
)
def test_bad_input_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def uneven() -> rd.RecurrentTransformer:
    model = dense(2)
    model.core.stack.blocks[1].mlp = rd.MLP(16, 24)
    return model
