"""Training grafts: checkpointing, truncated gradients, data-parallel wrappers, adapters."""

import copy
from functools import partial

import hosts
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn

import recurrent_depth as rd
from recurrent_depth.hf import graft, recurse, ungraft

each_decoder = pytest.mark.parametrize("name", hosts.DECODERS)


def grads(model, **arguments):
    model.zero_grad()
    torch.manual_seed(5)  # the same noise
    tokens = hosts.tokens()
    model(tokens, labels=tokens, **arguments).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def checkpointing(model, on):
    ways = (f"activation_checkpointing_{on}", f"gradient_checkpointing_{on}")
    getattr(model, next(way for way in ways if hasattr(model, way)))()


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad)


@each_decoder
def test_checkpointing_recomputes_whole_steps_and_gives_the_same_gradients(name):
    model = hosts.grafted(name).train()
    expected = grads(model)
    checkpointing(model, "enable")
    assert model.recurrence.core.checkpointing
    assert not any(layer.gradient_checkpointing for layer in core_of(model))
    assert_same(grads(model), expected)
    checkpointing(model, "disable")
    assert not model.recurrence.core.checkpointing


@pytest.mark.parametrize("checkpointed", [False, True])
def test_auxiliary_losses_of_the_loop_are_in_the_loss(checkpointed):
    model, tokens = hosts.grafted("llama", update=partial(rd.halted, ponder=5.0)).train(), hosts.tokens()
    if checkpointed:
        checkpointing(model, "enable")
    with model.recurrence.recording() as steps:
        output = model(tokens, labels=tokens)
    text = rd.next_token_loss(output.logits, tokens)
    ponder = steps[-1].losses["ponder"]
    assert ponder > 5
    torch.testing.assert_close(output.loss, text + ponder)
    torch.testing.assert_close(model(tokens, labels=tokens, return_dict=False)[0], output.loss)
    by_place = model(tokens, None, None, None, None, tokens, return_dict=False)
    torch.testing.assert_close(by_place[0], output.loss)
    targets = tokens[:, 1:].numel()
    by_place = model(tokens, None, None, None, None, tokens, return_dict=False, num_items_in_batch=3 * targets)
    torch.testing.assert_close(by_place[0], output.loss / 3)
    torch.testing.assert_close(model(tokens, labels=tokens, num_items_in_batch=3 * targets).loss, output.loss / 3)
    unit = model.recurrence.core.update.inner.unit
    output.loss.backward()
    whole = unit.bias.grad.clone()
    model.zero_grad()
    with model.recurrence.recording() as steps:
        model(tokens, labels=tokens)
    steps[-1].losses["ponder"].backward()
    assert (whole - unit.bias.grad).abs() < whole.abs()  # the ponder cost is most of it


def test_without_labels_nothing_is_added_and_nothing_is_kept():
    model, tokens = hosts.grafted("llama", update=rd.halted).train(), hosts.tokens()
    assert model(tokens).loss is None
    assert model.recurrence.losses == {}
    model.model(tokens)  # the host's own part, which has no loss
    assert model.recurrence.losses == {}


def core_of(model):
    return [part for part in model.modules() if hasattr(part, "run_layer")]


def test_checkpointing_keeps_one_state_for_each_further_step():
    def saved(num_steps):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
            model(hosts.tokens(), num_steps=num_steps, use_cache=False)
        return sum(sizes)

    model = hosts.grafted("llama").train()
    plainly = saved(6) - saved(3)
    checkpointing(model, "enable")
    assert saved(6) - saved(3) < plainly / 10


def test_a_step_counts_tokens_once_under_checkpointing():
    model = hosts.grafted("llama").train()
    checkpointing(model, "enable")
    output = model(hosts.tokens(), labels=hosts.tokens())
    output.loss.backward()
    assert hosts.cache_of(output) is None


def test_only_the_last_steps_learn():
    model = hosts.grafted("llama").eval()
    whole, last = grads(model), grads(model, num_steps=rd.Depth(3, grad_steps=1))
    assert whole.keys() == last.keys()
    assert all(last[name].any() for name in last if "recurrence" in name)
    inner = "model.layers.2.mlp.up_proj.weight"
    assert not torch.allclose(whole[inner], last[inner])
    all_steps = grads(model, num_steps=rd.Depth(3, grad_steps=3))
    assert all(torch.equal(grad, whole[name]) for name, grad in all_steps.items())


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_data_parallel_training_may_take_another_depth_at_every_step():
    model = hosts.grafted("llama").train()
    parallel = nn.parallel.DistributedDataParallel(model)
    for depth in (3, 1, 2, rd.Depth(3, grad_steps=1), 1, 4):
        parallel(hosts.tokens(), labels=hosts.tokens(), num_steps=depth).loss.backward()
        assert all(p.grad is not None for p in model.parameters())


@pytest.mark.usefixtures("one_process")
def test_layers_may_be_sharded_one_by_one():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = hosts.grafted("llama")
    expected, mesh = model(hosts.tokens()).logits, init_device_mesh("cpu", (1,))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)
    output = model(hosts.tokens(), labels=hosts.tokens())
    torch.testing.assert_close(output.logits, expected)
    output.loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks by the old name
@pytest.mark.parametrize("saved", ["recurrence", "gate"])
def test_an_adapter_trains_the_recurrence_too(saved):
    model = hosts.grafted("llama")
    expected = model(hosts.tokens()).logits
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=[saved]))
    assert torch.equal(adapted(hosts.tokens()).logits, expected)
    adapted(hosts.tokens(), labels=hosts.tokens(), num_steps=2).loss.backward()
    trained = {name: p.grad for name, p in adapted.named_parameters() if p.requires_grad}
    assert any(saved in name for name in trained)
    assert all(grad is not None and grad.any() for name, grad in trained.items() if "lora_A" not in name)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(hosts.tokens()).logits, expected)


def test_a_hook_on_a_layer_sees_every_step():
    model, seen = hosts.grafted("llama"), []
    handle = model.model.layers[2].register_forward_hook(lambda *_: seen.append(1))
    model(hosts.tokens())
    assert len(seen) == 3
    handle.remove()


def test_a_forward_that_hangs_on_the_model_itself_takes_steps_too():
    model = hosts.host("llama")
    own, expected = model.forward, model(hosts.tokens()).logits
    model.forward = lambda *arguments, **keywords: own(*arguments, **keywords)  # as accelerate's hooks do
    hung = vars(model)["forward"]
    graft(model, range(1, 4), 3)
    hosts.randomise(model.recurrence)
    assert torch.equal(model(hosts.tokens(), num_steps=1).logits, expected)
    assert not torch.equal(model(hosts.tokens()).logits, expected)
    assert vars(ungraft(model))["forward"] is hung


def test_a_sampler_draws_the_depth_of_every_step_of_a_trainer(tmp_path):
    from transformers import Trainer, TrainingArguments

    from recurrent_depth.hf import SampleDepth

    model, sampler, taken = hosts.grafted("llama"), rd.UniformDepth(4, seed=1), []
    step = model.recurrence.core.step
    model.recurrence.core.step = lambda state, at, index, kv=None: taken.append(index) or step(state, at, index, kv)
    rows = [{"input_ids": row, "labels": row} for row in hosts.tokens(rows=8)]
    settings = {"per_device_train_batch_size": 2, "max_steps": 4, "report_to": [], "use_cpu": True}
    arguments = TrainingArguments(output_dir=str(tmp_path), save_strategy="no", disable_tqdm=True, **settings)
    Trainer(model, arguments, train_dataset=rows, callbacks=[SampleDepth(sampler)]).train()
    assert taken == [index for draw in range(4) for index in range(sampler(draw).num_steps)]
    assert model.recurrence.num_steps == 3


def test_a_training_that_broke_off_leaves_no_depth_to_the_next(tmp_path):
    from transformers import Trainer, TrainingArguments

    from recurrent_depth.hf import SampleDepth

    model = hosts.grafted("llama")
    rows = [{"input_ids": row, "labels": row} for row in hosts.tokens(rows=4)]
    settings = {"per_device_train_batch_size": 2, "max_steps": 1, "report_to": [], "use_cpu": True}
    arguments = TrainingArguments(output_dir=str(tmp_path), save_strategy="no", disable_tqdm=True, **settings)
    sampler = rd.UniformDepth(1)
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[SampleDepth(sampler)])
    with model.register_forward_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):
        trainer.train()
    trainer.train()
    assert model.recurrence.num_steps == 3


@pytest.mark.parametrize("make", [lambda model: graft(model, range(1, 4), 2), lambda model: recurse(model, rank=2)])
def test_a_host_that_is_recomputed_is_so_in_the_loop_too(make):
    model = hosts.host("llama", num_hidden_layers=6)
    checkpointing(model, "enable")
    make(model)
    assert model.recurrence.core.checkpointing


def test_ungraft_leaves_recomputation_as_the_graft_had_it():
    model = hosts.host("llama")
    for before, after in (("enable", "disable"), ("disable", "enable")):
        checkpointing(model, before)
        graft(model, range(1, 4), 2)
        checkpointing(model, after)
        ungraft(model)
        assert [layer.gradient_checkpointing for layer in model.model.layers] == [after == "enable"] * 5


def test_training_moves_the_recurrence_and_the_host_is_still_there_at_one_step():
    model = hosts.host("llama")
    frozen = copy.deepcopy(model)
    graft(model, range(1, 4), 2)
    for name, p in model.named_parameters():
        p.requires_grad_("recurrence" in name)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = model(hosts.tokens(), labels=hosts.tokens()).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert torch.equal(model(hosts.tokens(), num_steps=1).logits, frozen(hosts.tokens()).logits)
