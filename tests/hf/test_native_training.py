"""Native models in training: loss, accumulation, recomputation, Trainer, adapters."""

import warnings

import peft
import pytest
import torch
from looped import DESCRIPTIONS, PICKING, made, some_tokens
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import recurrent_depth as rd
from recurrent_depth.hf import RecurrentDepthForCausalLM, SampleDepth
from recurrent_depth.hf.versions import CACHE


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad()
    return found


def assert_same(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor], atol: float = 1e-6) -> None:
    assert some.keys() == others.keys()
    for name, tensor in some.items():
        torch.testing.assert_close(tensor, others[name], atol=atol, rtol=1e-4, msg=lambda said, name=name: name + said)


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_the_loss_is_the_librarys(name):
    model, tokens = made(name), some_tokens()
    torch.testing.assert_close(model(tokens, labels=tokens).loss, rd.WithObjective(model.native)(tokens))


def test_padding_is_no_target():
    model, tokens = made(), some_tokens()
    mask = torch.ones_like(tokens)
    mask[1, 4:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    loss = model(tokens, attention_mask=mask, labels=labels).loss
    torch.testing.assert_close(loss, rd.next_token_loss(model.native(tokens, mask=mask.bool()), tokens, mask.bool()))


@pytest.mark.parametrize("name", ["grt", "grt-halted"])
def test_accumulated_batches_give_the_gradient_of_one(name):
    model, tokens = made(name), some_tokens(4)
    labels = tokens.clone()
    if name == "grt":  # auxiliary losses are means over tokens, of which targets are not all
        labels[1, 3:] = -100
    num_items = (labels[:, 1:] != -100).sum()
    model(tokens, labels=labels).loss.backward()
    expected = gradients(model)
    for row in range(4):
        model(tokens[row : row + 1], labels=labels[row : row + 1], num_items_in_batch=num_items).loss.backward()
    assert_same(gradients(model), expected)


def switch(model: nn.Module, on: bool, **arguments) -> None:
    """Transformers' own switch, whose name it changed."""
    names = ("activation_checkpointing", "gradient_checkpointing")
    name = next(name for name in names if hasattr(model, f"{name}_enable"))
    if on:
        getattr(model, f"{name}_enable")(*arguments.values())
    else:
        getattr(model, f"{name}_disable")()


@pytest.mark.parametrize("name", [name for name in DESCRIPTIONS if name not in ("dense", *PICKING)])
def test_recomputed_steps_give_the_same_gradients_with_noise_too(name):
    model, tokens = made(name).train(), some_tokens()
    found = []
    for on in (False, True):
        switch(model, on)
        assert model.native.core.checkpointing == on
        torch.manual_seed(1)
        model(tokens, labels=tokens).loss.backward()
        found.append(gradients(model))
    assert_same(*found)


def test_both_switches_are_one():
    model = made()
    switch(model, True, arguments={"use_reentrant": True})  # which is never done
    assert model.model.gradient_checkpointing
    model.native.core.checkpointing = False
    assert not model.model.gradient_checkpointing
    switch(model, True)
    switch(model, False)
    assert not model.native.core.checkpointing


def test_a_forward_that_is_recomputed_makes_no_cache():
    model, tokens = made().train(), some_tokens()
    assert model(tokens).get(CACHE) is None
    assert model(tokens, use_cache=True)[CACHE].get_seq_length() == tokens.shape[1]
    switch(model, True)
    out = model(tokens, labels=tokens, use_cache=True)
    assert out.get(CACHE) is None
    out.loss.backward()


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = torch.randint(1, 40, (24, 8), generator=torch.Generator().manual_seed(2))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Depths(TrainerCallback):
    """Notes how deep each forward in training goes."""

    def __init__(self, model: nn.Module):
        self.seen: list[int] = []
        core = next(module for module in model.modules() if isinstance(module, rd.RecurrentCore))
        inner = core.steps

        def steps(state, depth, *arguments, **named):
            if core.training:
                self.seen.append(depth.num_steps)
            return inner(state, depth, *arguments, **named)

        core.steps = steps


RECOMPUTED = next(
    {name: True}
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in TrainingArguments.__dataclass_fields__
)


def trained(model: nn.Module, folder, *, resume: bool = False, callbacks=(), **changed) -> Trainer:
    settings = {"max_steps": 6, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "save_steps": 3}
    settings |= {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "logging_steps": 100, "seed": 4}
    trainer = Trainer(
        model,
        TrainingArguments(str(folder), **{**settings, **changed}),
        train_dataset=Rows(),
        eval_dataset=Rows(),
        callbacks=[SampleDepth(rd.UniformDepth(3, seed=1)), *callbacks],
    )
    with warnings.catch_warnings():  # of Trainer's own
        warnings.filterwarnings("ignore", message=".*pin_memory.*")
        trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_trainer_draws_a_depth_for_each_step_and_resumes_exactly(tmp_path):
    models, depths = [], []
    for name, stops in (("whole", (6,)), ("halves", (3, 6))):
        torch.manual_seed(0)
        model = made().train()
        seen = Depths(model)
        for number, steps in enumerate(stops):
            stop = StopAt(steps)
            trained(model, tmp_path / name, resume=number > 0, callbacks=[stop], gradient_accumulation_steps=2)
        models.append(model)
        depths.append(seen.seen)
    expected = [rd.UniformDepth(3, seed=1)(step).num_steps for step in range(6) for _ in range(2)]
    assert depths[0] == expected
    assert depths[1] == expected
    whole, halves = (model.state_dict() for model in models)
    assert all(torch.equal(tensor, halves[name]) for name, tensor in whole.items())
    assert models[0].model.num_steps == 3


class StopAt(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step >= self.step


def test_trainer_in_bfloat16_with_recomputation_learns_and_evaluates(tmp_path):
    model = made().train()
    before = {name: x.clone() for name, x in model.named_parameters()}
    trainer = trained(model, tmp_path, bf16=True, **RECOMPUTED, max_steps=20)
    assert all(x.isfinite().all() for x in model.parameters())
    assert not any(torch.equal(x, before[name]) for name, x in model.named_parameters())
    assert trainer.state.log_history[-1]["train_loss"] < 3.7
    assert trainer.evaluate()["eval_loss"] < 3.7


def adapted(model: RecurrentDepthForCausalLM) -> peft.PeftModel:
    lora = peft.LoraConfig(
        target_modules=r".*core\.stack.*\.(qkv|up)", r=2, modules_to_save=["update.gate"], init_lora_weights=False
    )
    return peft.get_peft_model(model, lora)


@pytest.mark.parametrize("name", ["grt", "grt-llama"])
def test_an_adapter_of_the_core_learns_merges_and_is_saved(name, tmp_path):
    tokens, bare = some_tokens(), made(name)
    bare.save_pretrained(tmp_path / "bare")
    model = adapted(bare)
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    learning = {key for key, x in model.named_parameters() if x.requires_grad}
    assert learning
    assert all(".lora_" in key or ".gate.modules_to_save." in key for key in learning)
    for key, gradient in gradients(model).items():
        assert key in learning
        assert gradient.abs().sum() > 0, key
    with torch.no_grad():
        for key, x in model.named_parameters():
            if key in learning:
                x.add_(torch.randn_like(x), alpha=0.1)
    model.eval()
    depths = [model(tokens, num_steps=steps).logits for steps in (1, 3)]
    text = model.generate(input_ids=tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(
        RecurrentDepthForCausalLM.from_pretrained(tmp_path / "bare"), tmp_path / "adapter"
    )
    merged = model.merge_and_unload()
    for steps, logits in zip((1, 3), depths, strict=True):
        torch.testing.assert_close(again(tokens, num_steps=steps).logits, logits)
        torch.testing.assert_close(merged(tokens, num_steps=steps).logits, logits, atol=1e-5, rtol=1e-4)
    assert torch.equal(merged.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0), text)
    merged.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(
        RecurrentDepthForCausalLM.from_pretrained(tmp_path / "merged")(tokens).logits, merged(tokens).logits
    )


def test_an_adapter_is_trained_with_recomputation(tmp_path):
    model = adapted(made().train())
    frozen = {key: x.clone() for key, x in model.named_parameters() if not x.requires_grad}
    trained(model, tmp_path, **RECOMPUTED, max_steps=3)
    assert model.base_model.model.model.num_steps == 3
    assert all(torch.equal(x, frozen[key]) for key, x in model.named_parameters() if key in frozen)


def test_nothing_is_left_on_the_model_between_calls():
    model, tokens = made().train(), some_tokens()
    for _ in range(2):
        model(tokens, labels=tokens, output_hidden_states=True).loss.backward()
    model.eval()(tokens)
    model.train()(tokens, labels=tokens).loss.backward()
    held = [x for module in model.modules() for x in vars(module).values() if isinstance(x, torch.Tensor)]
    assert not held
