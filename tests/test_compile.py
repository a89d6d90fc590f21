"""One compiled step serves every depth: how many graphs there are, and that they say what eager code says.

Run without the type-checking hook, which breaks compilation: `pytest --jaxtyping-packages= -m compile`.
"""

import copy

import pytest
import torch
from battery import METHODS, close, gradients, lively, tiny
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

import recurrent_depth as rd

pytestmark = [
    pytest.mark.compile,
    # The compiler looks at the states' .grad itself, and hides the warning but where warnings are errors.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]
DEPTHS = range(1, 13)
LAYOUT = rd.Layout(1, 1, 12, 1)
X = torch.randint(23, (2, 7), generator=torch.Generator().manual_seed(0))
LOOPS = [
    *("grt", "grt-llama", "grt-joint-norm", "grt-noise-per-token", "naive", "anchor-added", "skip-anchor"),
    *("huginn", "ouro", "parcae", "damped"),
]
NUMBERED = [  # these read which step it is
    *("rrt", "rrt-gated", "embedding-per-step"),
    *("mesh", "loopformer"),
]
HALTING = ["universal", "halting-gate"]  # these mix in a state one step later
every_loop = pytest.mark.parametrize("build", [METHODS[name] for name in LOOPS], ids=LOOPS)
numbered = pytest.mark.parametrize("build", [METHODS[name] for name in NUMBERED], ids=NUMBERED)
halting = pytest.mark.parametrize("build", [METHODS[name] for name in HALTING], ids=HALTING)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(build=rd.grt, **changes) -> tuple[rd.RecurrentTransformer, CompileCounterWithBackend]:
    model, counter = tiny(build, LAYOUT, **changes), CompileCounterWithBackend("aot_eager")
    model.compile_step(backend=counter, fullgraph=True)
    return model, counter


def train(model: rd.RecurrentTransformer, depth) -> None:
    rd.next_token_loss(model.train()(X, depth), X).backward()


def evaluate(model: rd.RecurrentTransformer, depth) -> None:
    with torch.no_grad():
        model.eval()(X, depth)


@every_loop
def test_two_graphs_serve_training_at_every_depth_and_one_more_evaluation(build):
    model, counter = compiled(build)
    for depth in DEPTHS:
        train(model, depth)
    assert counter.frame_count <= 2
    for depth in DEPTHS:
        evaluate(model, depth)
    assert counter.frame_count <= 3


@every_loop
def test_three_graphs_serve_truncated_training(build):
    model, counter = compiled(build)
    for depth in DEPTHS:
        train(model, rd.Depth(depth, grad_steps=3))
    assert counter.frame_count <= 3
    for depth in DEPTHS:
        evaluate(model, depth)
    assert counter.frame_count <= 4


@numbered
def test_a_step_that_reads_its_number_takes_one_graph_more_at_most_for_step_0(build):
    model, counter = compiled(build)
    for depth in DEPTHS:
        train(model, depth)
        train(model, rd.Depth(depth, grad_steps=3))
    assert counter.frame_count <= 4
    for depth in DEPTHS:
        evaluate(model, depth)
    assert counter.frame_count <= 5


@halting
def test_a_step_that_mixes_states_takes_another_graph_behind_frozen_steps(build):
    model, counter = compiled(build)
    for depth in DEPTHS:
        train(model, depth)
        train(model, rd.Depth(depth, grad_steps=3))
    assert counter.frame_count <= 5
    for depth in DEPTHS:
        evaluate(model, depth)
    assert counter.frame_count <= 6


@pytest.mark.parametrize("order", [(1, 5, 12, 2), (12, 1, 7), (3, 3, 1, 12)], ids=str)
def test_the_order_of_depths_changes_nothing(order):
    model, counter = compiled()
    for depth in order:
        train(model, depth)
        train(model, rd.Depth(depth, grad_steps=2))
        evaluate(model, depth)
    assert counter.frame_count <= 4


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_new_depth_compiles_nothing(checkpointing):
    model, counter = compiled()
    model.core.checkpointing = checkpointing
    for depth in (2, 4):
        train(model, depth)
        train(model, rd.Depth(depth, 1))
    before = counter.frame_count
    for depth in DEPTHS:
        train(model, depth)
        train(model, rd.Depth(depth, 1))
    assert counter.frame_count == before <= 3


@pytest.mark.parametrize(
    "backend, build", [*(("aot_eager", name) for name in [*LOOPS, *NUMBERED, *HALTING]), ("inductor", "grt")]
)
def test_compiled_is_eager(backend, build):
    eager = lively(tiny(METHODS[build], rd.Layout(1, 1, 3, 1))).eval()
    fast = copy.deepcopy(eager)
    fast.compile_step(backend=backend, fullgraph=True)
    for depth in (1, 3, rd.Depth(3, 1)):
        outputs = [model(X, depth) for model in (eager, fast)]
        assert_close(outputs[1], outputs[0], **close)
        for output in outputs:
            output.square().sum().backward()
        expected, found = gradients(eager), gradients(fast)
        largest = max(gradient.norm() for gradient in expected.values())
        for name, gradient in expected.items():
            assert (found[name] - gradient).norm() <= 1e-3 * gradient.norm() + 1e-5 * largest, name


def test_a_depth_for_each_row_compiles_too():
    eager = lively(tiny(layout=rd.Layout(1, 1, 3, 1))).eval()
    fast = copy.deepcopy(eager)
    fast.compile_step(backend="aot_eager", fullgraph=True)
    for rows in ([1, 3], [3, 2], [3, 3]):
        assert_close(fast(X, rows), eager(X, rows), **close)


def test_recomputed_steps_replay_their_noise():
    model = lively(tiny(layout=rd.Layout(1, 1, 3, 1)))
    model.compile_step(backend="aot_eager", fullgraph=True)
    found = []
    for model.core.checkpointing in (False, True):
        torch.manual_seed(1)
        model(X, rd.Depth(3, 2)).square().sum().backward()
        found.append(gradients(model))
    for name, gradient in found[0].items():
        assert_close(found[1][name], gradient, **close)


@pytest.mark.parametrize("policy", [rd.KeepAll(), rd.KeepMean()], ids=["all", "mean"])
@pytest.mark.parametrize("form", [rd.GPT2Form, rd.LlamaForm])
def test_one_graph_decodes_a_text_of_any_length_padded_or_not(form, policy):
    model, counter = (
        lively(tiny(layout=rd.Layout(1, 1, 3, 1), form=form)).eval(),
        CompileCounterWithBackend("aot_eager"),
    )
    prompt, mask = X[:, :4], torch.tensor([[True] * 4, [False, True, True, True]])
    for given in (None, mask):
        expected = rd.generate(model, prompt, max_new_tokens=9, kv=policy, mask=given)
        rd.compile_decoding(model, backend=counter, fullgraph=True)
        assert torch.equal(rd.generate(model, prompt, max_new_tokens=9, kv=policy, mask=given), expected)
        model.decode = None
    assert counter.frame_count == 1


def test_a_compiled_step_leaves_depths_that_differ_and_exit_rules_to_eager_code():
    model, counter = lively(tiny(layout=rd.Layout(1, 1, 3, 1))).eval(), CompileCounterWithBackend("aot_eager")
    calls = ({"num_steps": [1, 3]}, {"exit": rd.GateClosed(below=0.5)})
    expected = [rd.generate(model, X[:, :4], max_new_tokens=4, **call) for call in calls]
    rd.compile_decoding(model, backend=counter, fullgraph=True)
    for call, text in zip(calls, expected, strict=True):
        assert torch.equal(rd.generate(model, X[:, :4], max_new_tokens=4, **call), text)
    assert counter.frame_count == 0


def test_compiled_decoding_by_inductor_is_eager():
    model = lively(tiny(layout=rd.Layout(1, 1, 3, 1))).eval()
    found = []
    for compiles in (False, True):
        if compiles:
            rd.compile_decoding(model, fullgraph=True)
        cache = rd.DepthCache(rd.KeepMean(), max_tokens=8)
        with torch.no_grad():
            found.append(torch.cat([rd.extend(model, part, cache) for part in X.split([4, 1, 1, 1], dim=1)], dim=1))
    assert_close(found[1], found[0], **close)


def test_a_depth_for_each_row_takes_one_graph_a_change_of_the_batch_and_no_more():
    model, counter = compiled()
    model.eval()
    with torch.no_grad():
        for rows in ([1, 3, 2], [3, 1, 2], [2, 2, 1], [4, 5, 12], [12, 1, 1]):
            model(torch.cat([X, X[:1]]), rows)
    assert counter.frame_count <= 3
