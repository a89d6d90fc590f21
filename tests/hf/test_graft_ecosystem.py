"""Grafts in Trainer, PEFT, pipeline and accelerate, as any other model there."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import hosts
import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments, pipeline

import recurrent_depth as rd
from recurrent_depth.hf import SampleDepth, graft, load_graft

# transformers 5.24 renamed it.
NAMES = [field.name for field in dataclasses.fields(TrainingArguments)]
CHECKPOINTING = next(name for name in ("activation_checkpointing", "gradient_checkpointing") if name in NAMES)
ROWS = [{"input_ids": row, "labels": row} for row in hosts.tokens(rows=16)]


def trainer(
    model: nn.Module,
    folder: Path,
    *,
    steps: int = 6,
    sampler: rd.DepthSampler | None = None,
    compute_metrics: Any = None,
    **settings: Any,
):
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **{"per_device_train_batch_size": 2, "save_strategy": "no", "seed": 3} | settings,
    )
    callbacks = [] if sampler is None else [SampleDepth(sampler)]
    return Trainer(
        model,
        arguments,
        train_dataset=ROWS,
        eval_dataset=ROWS[:2],
        callbacks=callbacks,
        compute_metrics=compute_metrics,
    )


def losses(run: Trainer) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


# Trainer -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("only_recurrence", [False, True])
def test_trainer_stops_saves_and_goes_on_as_if_it_had_not_stopped(tmp_path, only_recurrence):
    def fresh():
        model = hosts.grafted("llama")
        for name, weight in model.named_parameters():
            weight.requires_grad_(name.startswith("recurrence.") or not only_recurrence)
        return model

    settings = {"save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "constant"}
    whole = trainer(fresh(), tmp_path / "whole", sampler=rd.UniformDepth(4, seed=1), **settings)
    whole.train()
    resumed = trainer(fresh(), tmp_path / "whole", sampler=rd.UniformDepth(4, seed=1), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert len(losses(whole)) == 6
    assert losses(resumed) == losses(whole)
    for (name, ours), (_, theirs) in zip(resumed.model.named_parameters(), whole.model.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_accumulated_gradients_are_those_of_the_whole_batch(tmp_path):
    quiet, runs = partial(rd.gated, bias=0.0, state_noise=0.0, gate_noise=0.0), []
    for rows, times in ((4, 1), (2, 2), (1, 4)):
        run = trainer(
            hosts.grafted("llama", update=quiet),
            tmp_path,
            steps=3,
            sampler=rd.UniformDepth(4, seed=1),
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=times,
            optim="sgd",
        )
        run.train()
        runs.append(run)
    whole = runs[0].model.state_dict()
    for run in runs[1:]:
        torch.testing.assert_close(run.model.state_dict(), whole, rtol=1e-4, atol=1e-5)


def test_one_depth_serves_all_forwards_of_an_accumulated_step(tmp_path):
    model, sampler, taken = hosts.grafted("llama"), rd.UniformDepth(4, seed=1), []
    model.recurrence.register_forward_pre_hook(lambda loop, _: taken.append(loop.num_steps))
    trainer(model, tmp_path, steps=3, sampler=sampler, gradient_accumulation_steps=4).train()
    assert taken == [sampler(draw) for draw in range(3) for _ in range(4)]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer_trains_in_bfloat16(tmp_path, checkpointing):
    model = hosts.grafted("llama")
    run = trainer(model, tmp_path, steps=12, bf16=True, **{CHECKPOINTING: checkpointing})
    run.train()
    found = losses(run)
    assert all(map(torch.isfinite, torch.tensor(found)))
    assert found[-1] < found[0]
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def test_trainer_brings_the_best_checkpoint_back(tmp_path):
    model, best, last = hosts.grafted("llama"), tmp_path / "checkpoint-2", tmp_path / "checkpoint-6"
    saved = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    choice = {"load_best_model_at_end": True, "metric_for_best_model": "step", "greater_is_better": False}
    run = trainer(model, tmp_path, compute_metrics=lambda _: {"step": run.state.global_step}, **saved, **choice)
    run.train()
    assert run.state.best_model_checkpoint == str(best)
    loaded, other = load_graft(best), load_graft(last)
    assert all(torch.equal(weight, loaded.state_dict()[name]) for name, weight in model.state_dict().items())
    moved = [name for name, weight in other.named_parameters() if not torch.equal(weight, loaded.state_dict()[name])]
    assert {name.startswith("recurrence.") for name in moved} == {True, False}


def test_trainer_evaluates_at_the_depth_of_the_model(tmp_path):
    def evaluated(model):
        return trainer(model, tmp_path).evaluate(ROWS[:4])["eval_loss"]

    model = hosts.grafted("llama")
    deep = evaluated(model)
    model.recurrence.num_steps = 1
    assert evaluated(model) == evaluated(hosts.host("llama"))
    assert abs(deep - evaluated(model)) > 0.01


# PEFT ----------------------------------------------------------------------------------------------------------------


def adapted(model: nn.Module, **settings: Any) -> PeftModel:
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **settings))


def train(model: nn.Module, steps: int = 3) -> None:
    model.train()
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
    for draw in range(steps):
        model(input_ids=hosts.tokens(), labels=hosts.tokens(), num_steps=1 + (draw + 1) % 3).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def logits(model: nn.Module, num_steps: int) -> Tensor:
    with torch.no_grad():
        return model(input_ids=hosts.tokens(), num_steps=num_steps).logits


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "qwen3", "phi", "opt"])
@pytest.mark.parametrize("core_only", [False, True])
def test_a_merged_adapter_is_the_adapted_model_at_every_depth(name, core_only):
    where = {"layers_to_transform": [1, 2, 3]} if core_only else {}
    model = adapted(hosts.grafted(name), **where)
    before = logits(model, 3)
    train(model)
    expected = {num_steps: logits(model, num_steps) for num_steps in (1, 2, 4)}
    assert not torch.allclose(logits(model, 3), before, atol=1e-3)
    merged = model.merge_and_unload()
    assert not any("lora" in key for key in merged.state_dict())
    for num_steps, found in expected.items():
        torch.testing.assert_close(logits(merged, num_steps), found, rtol=1e-4, atol=1e-4)


def test_an_adapter_on_the_shared_core_learns_from_every_step():
    """Its gradient is the sum of what each step alone gives it."""
    model = adapted(hosts.grafted("llama"), layers_to_transform=[1, 2, 3])
    train(model)  # so that no factor is zero

    def gradients(num_steps):
        model.zero_grad()
        model(input_ids=hosts.tokens(), labels=hosts.tokens(), num_steps=num_steps).loss.backward()
        return {name: weight.grad for name, weight in model.named_parameters() if "lora_" in name}

    whole, last = gradients(3), gradients(rd.Depth(3, grad_steps=1))
    assert all(grad.any() for grad in whole.values())
    assert all(not torch.allclose(whole[name], grad) for name, grad in last.items())


@pytest.mark.parametrize("saved", ["gate", "recurrence"])
def test_the_gate_trains_beside_an_adapter_and_both_survive_their_folder(saved, tmp_path):
    model = adapted(hosts.grafted("llama"), modules_to_save=[saved])
    gate = {name: weight for name, weight in model.named_parameters() if "gate" in name and weight.requires_grad}
    before = {name: weight.detach().clone() for name, weight in gate.items()}
    assert len(gate) >= 6
    train(model)
    assert all(not torch.equal(weight, before[name]) for name, weight in gate.items())
    expected = logits(model, 3)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(hosts.grafted("llama"), tmp_path)
    assert torch.equal(logits(loaded, 3), expected)
    torch.testing.assert_close(logits(loaded.merge_and_unload(), 3), expected, rtol=1e-4, atol=1e-4)


def test_an_adapter_on_the_recurrence_itself_merges():
    settings = LoraConfig(r=4, target_modules=r"recurrence\..*\.(state|anchor)")
    model = get_peft_model(hosts.grafted("llama"), settings)
    train(model)
    expected = logits(model, 3)
    torch.testing.assert_close(logits(model.merge_and_unload(), 3), expected, rtol=1e-4, atol=1e-4)


def test_an_adapted_graft_writes_alike_with_and_without_a_cache():
    model = adapted(hosts.grafted("llama"), modules_to_save=["gate"])
    train(model)
    settings = {"max_new_tokens": 6, "do_sample": False, "num_steps": 2}
    cached = model.eval().generate(**hosts.padded(), **settings)
    assert torch.equal(model.generate(**hosts.padded(), **settings, use_cache=False), cached)


def test_an_adapter_of_a_graft_trains_in_trainer(tmp_path):
    model = adapted(hosts.grafted("llama"), modules_to_save=["gate"])
    run = trainer(model, tmp_path, steps=8, sampler=rd.UniformDepth(3, seed=0))
    run.train()
    assert losses(run)[-1] < losses(run)[0]


def test_grafting_an_adapted_and_merged_host_is_grafting_the_host():
    model = adapted(hosts.host("llama"))
    model(input_ids=hosts.tokens(), labels=hosts.tokens()).loss.backward()
    host = model.merge_and_unload()
    expected = host(hosts.tokens()).logits
    assert torch.equal(logits(graft(host, range(1, 4), 2), 3), expected)


# pipeline, accelerate ------------------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: index for index, word in enumerate(["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(3, 67))])}
    built = Tokenizer(WordLevel(words, unk_token="<pad>"))
    built.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=built, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )


def test_a_pipeline_writes_what_generate_writes(tokenizer):
    model, texts = hosts.grafted("llama"), ["w3 w4 w5 w6", "w10"]
    write = pipeline("text-generation", model=model, tokenizer=tokenizer)
    for num_steps in (1, 3):
        settings = {"max_new_tokens": 5, "do_sample": False, "num_steps": num_steps}
        for batch_size in (1, 2):
            said = [out[0]["generated_text"] for out in write(texts, batch_size=batch_size, **settings)]
            for text, found in zip(texts, said, strict=True):
                written = model.generate(**tokenizer(text, return_tensors="pt"), **settings)[0]
                whole = tokenizer.decode(written, skip_special_tokens=True)
                assert found.replace(" ", "") == whole.replace(" ", "")


def test_accelerate_prepares_a_graft_and_brings_it_back(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = hosts.grafted("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    for num_steps in (2, 1, 3):
        accelerator.backward(model(hosts.tokens(), labels=hosts.tokens(), num_steps=num_steps).loss)
        optimizer.step()
        optimizer.zero_grad()
    expected = logits(model, 3)
    accelerator.save_state(str(tmp_path))
    hosts.randomise(model.recurrence)
    assert not torch.equal(logits(model, 3), expected)
    accelerator.load_state(str(tmp_path))
    assert torch.equal(logits(model, 3), expected)
    assert accelerator.unwrap_model(model).recurrence.num_steps == 3
