"""Native models under torch.compile: one graph, no breaks."""

import pytest
import torch
from looped import DESCRIPTIONS, made, some_tokens
from transformers import CompileConfig

pytestmark = pytest.mark.compile
QUICK = ("grt", "huginn", "loopformer", "mesh", "mor", "parcae", "ple", "rrt", "universal")
"""Those that share no update with another; all of them take half a minute."""


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()


@torch.no_grad()
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in DESCRIPTIONS]
)
def test_a_forward_is_one_graph(name):
    num_steps = 2 if name == "mod" else 1  # what breaks a graph does so in the first step that is of the method's kind
    model, tokens = made(name, layout=[0, 1, num_steps, 0]), some_tokens()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(tokens).logits, model(tokens).logits)


def test_generate_compiles_by_itself_over_a_static_cache():
    model, tokens = made(layout=[0, 1, 2, 0]), some_tokens()
    mask = torch.ones_like(tokens)
    mask[0, :2] = 0
    settings = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0, "max_new_tokens": 5}
    expected = model.generate(tokens, **settings)
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    compiling = CompileConfig(fullgraph=True, backend=backend, mode=None)
    compiling._compile_all_devices = True  # as on a GPU, where generate needs no telling
    written = model.generate(tokens, cache_implementation="static", compile_config=compiling, **settings)
    assert torch.equal(written, expected)
    assert 1 <= len(graphs) <= 2  # for all tokens behind the prompt
