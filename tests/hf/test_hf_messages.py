"""Refusals that name the way that works."""

from pathlib import Path

import hosts
import jaxtyping
import pytest
import torch
import transformers

import recurrent_depth as rd
from recurrent_depth.hf import RecurrentDepthConfig, RecurrentDepthForCausalLM, graft
from recurrent_depth.hf.convert import main


@pytest.fixture(autouse=True)
def without_type_checks(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as a user runs it


@pytest.mark.parametrize("name", ["meta-llama/any", Path("meta-llama/any")], ids=["name", "folder"])
def test_a_name_in_place_of_a_model_is_to_be_loaded(name):
    with pytest.raises(ValueError, match=r"load it first, .* AutoModelForCausalLM.from_pretrained\('meta-llama/any'\)"):
        graft(name, range(1, 3), 2)


def test_a_word_in_place_of_a_policy_is_answered_by_an_example():
    said = r"is 'mean', but must be a KVStepPolicy, such as rd.KeepMean\(\)\."
    with pytest.raises(ValueError, match=f"kv {said}"):
        graft(hosts.host("llama"), range(1, 3), 2, kv="mean")
    with pytest.raises(ValueError, match=f"policy {said}"):
        rd.DepthCache(policy="mean", max_tokens=4)


@pytest.mark.parametrize("num_steps", [1.5, "2", True])
def test_a_graft_does_not_speak_of_lists_that_it_refuses(num_steps):
    with pytest.raises(ValueError, match=r"^num_steps is .*, but must be a whole number of at least 1\.$"):
        hosts.grafted("llama")(hosts.tokens(), num_steps=num_steps)


def test_rows_of_a_native_model_go_without_a_cache():
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "vocab_size": hosts.VOCAB, "max_position_embeddings": 64}
    model = RecurrentDepthForCausalLM(RecurrentDepthConfig(layout=[1, 1, 4, 1], **sizes)).eval()
    with pytest.raises(ValueError, match="use_cache=False"):
        model(hosts.tokens(), num_steps=[1, 4])
    mixed = model(hosts.tokens(), num_steps=[1, 4], use_cache=False).logits
    for row, num_steps in enumerate((1, 4)):
        expected = model(hosts.tokens(), num_steps=num_steps, use_cache=False).logits
        torch.testing.assert_close(mixed[row], expected[row])


def test_a_state_space_model_goes_without_a_cache():
    config = transformers.MambaConfig(vocab_size=hosts.VOCAB, hidden_size=32, num_hidden_layers=4, state_size=4)
    host, tokens = transformers.MambaForCausalLM(config).eval(), hosts.tokens()
    expected = host(tokens).logits
    model = graft(host, range(1, 3), 2)
    with pytest.raises(ValueError, match="use_cache=False"):
        model(tokens)
    assert torch.equal(model(tokens, use_cache=False).logits, expected)


def test_a_conversion_of_nothing_ends_in_a_line(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for source, said in (("nowhere", "but there is no such file or folder"), ("empty", "checkpoint")):
        with pytest.raises(SystemExit) as ended:
            main([str(tmp_path / source), str(tmp_path / "target")])
        assert ended.value.code == 2
        assert said in capsys.readouterr().err.splitlines()[-1]
