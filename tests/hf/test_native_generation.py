"""Native models under `generate`, with every cache, attention and strategy that transformers has."""

import pytest
import torch
from looped import DESCRIPTIONS, PICKING, made, some_tokens
from transformers import DynamicCache, GenerationConfig, StaticCache, TextStreamer, pipeline

import recurrent_depth as rd
from recurrent_depth.hf import RecurrentDepthForCausalLM
from recurrent_depth.hf.versions import CACHE

POLICIES = ["KeepAll", "KeepFirst", "KeepLast", "KeepMean", {"name": "KeepCyclic", "num": 2}]
with_a_cache = pytest.mark.parametrize("name", [name for name in DESCRIPTIONS if name not in PICKING])


def written(model: RecurrentDepthForCausalLM, tokens: torch.Tensor, **changed) -> torch.Tensor:
    settings = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 6, "attention_mask": torch.ones_like(tokens)}
    return model.generate(tokens, **{**settings, **changed})


@with_a_cache
@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_a_cache_changes_nothing(name, implementation):
    model, tokens = made(name), some_tokens()
    expected = written(model, tokens, use_cache=False)
    assert torch.equal(written(model, tokens, cache_implementation=implementation), expected)


@pytest.mark.parametrize("kv", POLICIES, ids=str)
@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_a_policy_means_what_it_means_in_the_library(kv, implementation):
    model, tokens = made(kv=kv), some_tokens()
    expected = rd.generate(model.native, tokens, max_new_tokens=6, kv=model.model.kv)
    assert torch.equal(written(model, tokens, cache_implementation=implementation), expected)


@pytest.mark.parametrize("num_steps", [1, 2])
def test_generate_takes_a_depth(num_steps):
    model, tokens = made(), some_tokens()
    expected = rd.generate(model.native, tokens, max_new_tokens=6, num_steps=num_steps)
    assert torch.equal(written(model, tokens, num_steps=num_steps), expected)
    assert not torch.equal(expected, written(model, tokens))
    assert torch.equal(written(model, tokens, num_steps=num_steps, use_cache=False), expected)
    model.generation_config.num_steps = num_steps
    assert torch.equal(written(model, tokens), expected)
    deep = rd.generate(model.native, tokens, max_new_tokens=6)
    assert torch.equal(written(model, tokens, num_steps=3), deep)


def test_each_row_may_have_a_depth_without_a_cache():
    model, tokens = made(), some_tokens()
    rows = written(model, tokens, num_steps=[1, 3], use_cache=False)
    assert torch.equal(rows[0], written(model, tokens, num_steps=1)[0])
    assert torch.equal(rows[1], written(model, tokens)[1])


def test_a_step_may_be_deeper_than_those_before_it():
    model, tokens = made(), some_tokens()
    cache = model(tokens, num_steps=1, use_cache=True)[CACHE]
    out = model(tokens[:, :1], num_steps=3, **{CACHE: cache})
    state = rd.DepthCache()
    rd.extend(model.native, tokens, state, num_steps=1)
    torch.testing.assert_close(out.logits, rd.extend(model.native, tokens[:, :1], state, num_steps=3))


@pytest.mark.parametrize("name", ["grt", "grt-llama"])
@pytest.mark.parametrize("kv", POLICIES, ids=str)
def test_rows_that_are_padded_on_the_left_write_what_they_write_alone(name, kv):
    model, tokens = made(name, kv=kv), some_tokens(3)
    mask = torch.ones_like(tokens)
    for row, padded in enumerate((0, 3, 5)):
        mask[row, :padded] = 0
    for more in ({}, {"cache_implementation": "static"}, {"num_beams": 2}):
        together = written(model, tokens, attention_mask=mask, **more)
        for row, padded in enumerate((0, 3, 5)):
            alone = written(model, tokens[row : row + 1, padded:], **more)
            assert torch.equal(together[row, padded:], alone[0])


def test_a_forward_counts_positions_from_a_rows_first_real_token():
    model, tokens = made(), some_tokens()
    mask = torch.ones_like(tokens)
    mask[:, :3] = 0
    torch.testing.assert_close(model(tokens, attention_mask=mask).logits[:, 3:], model(tokens[:, 3:]).logits)


@pytest.mark.parametrize("kv", POLICIES, ids=str)
@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_a_beams_score_is_that_of_its_text_read_alone(kv, implementation):
    model, tokens = made(kv=kv), some_tokens()
    beams = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.0, "return_dict_in_generate": True}
    found = written(model, tokens, **beams, output_scores=True, cache_implementation=implementation)
    assert found.sequences.shape == (4, 13)
    for text, score in zip(found.sequences, found.sequences_scores, strict=True):
        torch.testing.assert_close(score, score_alone(model, text[None], num_read=7), atol=1e-4, rtol=1e-4)
    if kv == "KeepAll":
        assert torch.equal(found.sequences, written(model, tokens, **beams, use_cache=False).sequences)


@torch.no_grad()
def score_alone(model: RecurrentDepthForCausalLM, text: torch.Tensor, num_read: int) -> torch.Tensor:
    """The log-likelihood of what follows the tokens that were read at once, by the library's own cache."""
    cache, score = rd.DepthCache(policy=model.model.kv), torch.zeros(())
    new = text[:, :num_read]
    for at in range(num_read, text.shape[1]):
        logits = rd.extend(model.native, new, cache)[0, -1]
        new = text[:, at : at + 1]
        score = score + logits.log_softmax(-1)[new.item()]
    return score


def test_sampling_is_the_same_with_and_without_a_cache():
    model, tokens = made(), some_tokens()
    drawn = []
    for use_cache in (True, False):
        torch.manual_seed(5)
        drawn.append(written(model, tokens, do_sample=True, top_k=10, temperature=0.7, use_cache=use_cache))
    assert torch.equal(*drawn)


def test_a_draft_changes_nothing():
    model, tokens = made(), some_tokens(1)
    draft, expected = made("naive", layout=[0, 1, 1, 0]), written(model, tokens, eos_token_id=0)
    assert torch.equal(written(model, tokens, eos_token_id=0, assistant_model=draft), expected)
    assert torch.equal(written(model, tokens, eos_token_id=0, prompt_lookup_num_tokens=2), expected)


@pytest.mark.parametrize("kv", POLICIES, ids=str)
def test_drafts_go_with_every_policy(kv):  # shared copies differ a little where several tokens are read at once
    model, tokens = made(kv=kv), some_tokens(1)
    assert written(model, tokens, assistant_model=made("naive", layout=[0, 1, 1, 0])).shape == (1, 13)


@pytest.mark.parametrize("kv", POLICIES, ids=str)
def test_a_users_own_cache_works(kv):
    model, tokens = made(kv=kv), some_tokens()
    expected = written(model, tokens)
    for cache in (DynamicCache(), DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=20)):
        assert torch.equal(written(model, tokens, **{CACHE: cache}), expected)
        assert cache.get_seq_length() == expected.shape[1] - 1


@pytest.mark.parametrize("sizes", [(5, 2), (1, 6), (3, 3, 1), (1,) * 7])
def test_text_may_be_read_in_chunks(sizes):
    model, tokens = made(), some_tokens()
    for cache in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=9)):
        parts = [model(chunk, **{CACHE: cache}).logits for chunk in tokens.split(sizes, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens).logits)


def test_complete_masks_may_be_boolean_of_integers_or_added_to_scores():
    model, tokens = made(), some_tokens()
    look = torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
    added = torch.zeros(1, 1, 7, 7).masked_fill(~look, torch.finfo(torch.float32).min)
    for mask in (look, look.long(), added):
        torch.testing.assert_close(model(tokens, attention_mask=mask).logits, model(tokens).logits)


def test_a_chunk_may_be_padded():
    model, tokens = made(), some_tokens()
    mask = torch.ones_like(tokens)
    mask[0, :2] = 0
    mask[1, 4:6] = 0  # inside of the text
    expected = model(tokens, attention_mask=mask).logits
    for cache in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=9)):
        first = model(tokens[:, :4], attention_mask=mask[:, :4], **{CACHE: cache}).logits
        rest = model(tokens[:, 4:], attention_mask=mask, **{CACHE: cache}).logits
        torch.testing.assert_close(torch.cat([first, rest], dim=1)[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize("name", PICKING)
def test_a_router_writes_without_a_cache(name):
    model, tokens = made(name), some_tokens()
    expected = rd.generate(model.native, tokens, max_new_tokens=6)
    if name != "mor":  # which may round ties otherwise
        assert torch.equal(written(model, tokens), expected)
    assert written(model, tokens).shape == expected.shape
    assert model(tokens).get(CACHE) is None
    with pytest.raises(ValueError, match="router"):
        written(model, tokens, use_cache=True)
    with pytest.raises(ValueError, match="router"):
        model(tokens, use_cache=True)


@pytest.mark.parametrize("name", ["grt", "grt-llama"])
@pytest.mark.parametrize("implementation", ["eager", pytest.param("flex_attention", marks=pytest.mark.slow)])
def test_every_attention_gives_the_same(name, implementation):
    torch.compiler.reset()  # flex attention is compiled once more for each of the shapes below, up to a limit
    model, tokens = made(name), some_tokens()
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    found = []
    for chosen in ("sdpa", implementation):
        model.set_attn_implementation(chosen)
        with torch.no_grad():
            found.append([model(tokens, attention_mask=mask).logits, model(tokens).logits])
            for cache in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=8)):
                model(tokens[:, :6], attention_mask=mask[:, :6], **{CACHE: cache})
                found[-1].append(model(tokens[:, 6:], attention_mask=mask, **{CACHE: cache}).logits)
    for logits, expected in zip(*reversed(found), strict=True):
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)


def test_text_is_the_same_under_eager_attention():
    model, tokens = made(), some_tokens()
    texts = [written(model, tokens, cache_implementation=cache) for cache in ("dynamic", "static")]
    model.set_attn_implementation("eager")
    assert [written(model, tokens, cache_implementation=cache).tolist() for cache in ("dynamic", "static")] == [
        text.tolist() for text in texts
    ]


def test_an_attention_is_chosen_when_a_model_is_loaded(tmp_path):
    made().save_pretrained(tmp_path)
    model = RecurrentDepthForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match=r"(?i)flash"):
        RecurrentDepthForCausalLM.from_pretrained(tmp_path, attn_implementation="flash_attention_2")


def test_gradients_are_the_same_under_eager_attention():
    model, tokens = made(), some_tokens()
    gradients = []
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        loss = model(tokens, labels=tokens).loss
        gradients.append(torch.autograd.grad(loss, model.native.core.stack.blocks[0].attention.qkv.weight)[0])
    torch.testing.assert_close(*gradients)


def test_two_forwards_in_evaluation_are_the_same_and_draw_nothing():
    model, tokens = made("huginn"), some_tokens()
    before = torch.get_rng_state()
    assert torch.equal(model(tokens).logits, model(tokens).logits)
    assert torch.equal(written(model, tokens), written(model, tokens))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_pipeline_writes(tokenizer, capsys):
    model = made(vocab_size=tokenizer.vocab_size)
    write = pipeline("text-generation", model=model, tokenizer=tokenizer)
    settings = GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=0)
    (said,) = write("ab c", generation_config=settings)
    assert said["generated_text"].startswith("ab c")
    both = write(["ab c", "a"], generation_config=settings, batch_size=2)
    assert both[0] == [said]
    streamer = TextStreamer(tokenizer)
    inputs = tokenizer("ab c", return_tensors="pt")
    model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], streamer=streamer, max_new_tokens=4)
    assert capsys.readouterr().out


@pytest.fixture
def tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {"<pad>": 0, **{letter: number for number, letter in enumerate("abcdefghij klmnop", start=1)}}
    characters = Tokenizer(models.BPE(vocab=letters, merges=[]))
    characters.pre_tokenizer, characters.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", padding_side="left")
