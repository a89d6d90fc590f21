"""Grafts under torch.compile: one graph, no breaks."""

import hosts
import pytest
import torch
import torch._dynamo.testing
from transformers import StaticCache

from recurrent_depth.hf import graft
from recurrent_depth.hf.versions import CACHE

pytestmark = pytest.mark.compile


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()


@pytest.mark.parametrize("name", [*hosts.DECODERS, *hosts.ENCODERS])
def test_a_forward_is_one_graph(name):
    model, inputs = hosts.grafted(name), hosts.inputs(name)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    expected = hosts.outcome(model(**inputs, num_steps=2))
    torch.testing.assert_close(hosts.outcome(compiled(**inputs, num_steps=2)), expected)


def test_a_host_that_compiles_in_place_may_be_grafted():
    model, tokens = hosts.host("llama"), hosts.tokens()
    model.compile(backend="eager")
    expected = model(tokens).logits
    graft(model, range(1, 4), 2)
    assert torch.equal(model(tokens, num_steps=1).logits, expected)
    hosts.randomise(model.recurrence)
    assert not torch.equal(model(tokens).logits, expected)


def test_a_training_step_is_one_graph():
    model = hosts.grafted("llama").eval()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    grads = []
    for run in (model, compiled):
        model.zero_grad()
        run(hosts.tokens(), labels=hosts.tokens(), use_cache=False).loss.backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, atol=1e-5, rtol=1e-4)


def test_decoding_with_a_static_cache_compiles():
    model, tokens = hosts.grafted("llama"), hosts.tokens(length=6)
    with torch.no_grad():
        expected = model(tokens).logits
        cache = StaticCache(config=model.config, max_cache_len=16)
        model(tokens[:, :4], **{CACHE: cache})
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        for at in (4, 5):
            out = compiled(tokens[:, at : at + 1], position_ids=torch.tensor([[at]]), **{CACHE: cache})
            torch.testing.assert_close(out.logits[:, 0], expected[:, at], atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_one_compiled_step_serves_every_depth():
    model, tokens = hosts.grafted("llama"), hosts.tokens()
    expected = [model(tokens, num_steps=n, use_cache=False).logits for n in (1, 2, 3, 4, 5)]
    graphs = torch._dynamo.testing.CompileCounterWithBackend("eager")
    model.recurrence.core.compile_step(backend=graphs, fullgraph=True)
    for n, logits in zip((1, 2, 3, 4, 5), expected, strict=True):
        torch.testing.assert_close(model(tokens, num_steps=n, use_cache=False).logits, logits)
    assert graphs.frame_count <= 4
