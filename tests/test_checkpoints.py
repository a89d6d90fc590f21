"""Checkpoints: bit-equal when whole, refused when anything is wrong with them, and never lost."""

import errno
import json
import os
import resource
import shutil
import signal
from pathlib import Path
from unittest import mock

import pytest
import safetensors.torch
import torch
from battery import every_method, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import start

import recurrent_depth as rd
from recurrent_depth import sealed
from recurrent_depth.sealed import read_sealed, write_sealed
from recurrent_depth.training import (
    latest_checkpoint,
    load_checkpoint,
    parameter_groups,
    random_state,
    read_checkpoint,
    save_checkpoint,
)

FILES = {"manifest.json", "model.safetensors", "optimizer.safetensors", "random.safetensors", "state.json"}
CONFIG = {"layout": [1, 2, 3, 1], "recipe": {"lr": 1e-3, "bf16": False}}


def trained(model: rd.RecurrentTransformer, steps: int = 2) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=1e-2, betas=(0.9, 0.95))
    for _ in range(steps):
        take_step(model, optimizer)
    return optimizer


def take_step(model: rd.RecurrentTransformer, optimizer: torch.optim.Optimizer) -> float:
    tokens = torch.randint(23, (2, 8))
    loss = rd.next_token_loss(model(tokens), tokens)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run's folder with one checkpoint, of step 600."""
    model = tiny()
    save_checkpoint(tmp_path, 600, model=model, optimizer=trained(model), config=CONFIG)
    return tmp_path


@every_method
def test_loaded_weights_are_bit_equal(build, tmp_path: Path) -> None:
    model = tiny(build)
    path = save_checkpoint(tmp_path, 3, model=model, optimizer=trained(model), config={})
    other = tiny(build)
    assert load_checkpoint(path, model=other, config={}) == (path, 3, {})
    found, expected = other.state_dict(), model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_special_values_and_dtypes_survive(dtype: torch.dtype, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3).to(dtype)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.0, -0.0], [float("inf"), -float("inf")], [1e-40, 1.0]]))
    path = save_checkpoint(tmp_path, 0, model=model, optimizer=torch.optim.SGD(model.parameters()), config={})
    other = torch.nn.Linear(2, 3).to(dtype)
    load_checkpoint(path, model=other)
    assert model.weight.detach().view(torch.uint8).equal(other.weight.detach().view(torch.uint8))


def test_training_goes_on_exactly_with_noise_and_optimizer(tmp_path: Path) -> None:
    model = tiny()
    optimizer = trained(model)
    path = save_checkpoint(tmp_path, 2, model=model, optimizer=optimizer, config=CONFIG)
    expected = [take_step(model, optimizer) for _ in range(3)]

    torch.manual_seed(99)
    other = tiny()
    fresh = torch.optim.AdamW(parameter_groups(other), lr=1e-2, betas=(0.9, 0.95))
    load_checkpoint(path, model=other, optimizer=fresh, config=CONFIG)
    assert [take_step(other, fresh) for _ in range(3)] == expected
    assert all(a.equal(b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_loading_weights_alone_leaves_the_random_numbers_alone(saved: Path) -> None:
    before = torch.get_rng_state()
    model = tiny()
    torch.set_rng_state(before)
    load_checkpoint(saved / "checkpoint-000600", model=model)
    assert torch.get_rng_state().equal(before)


def test_every_rank_gets_its_own_random_numbers(tmp_path: Path) -> None:
    model, states = tiny(), []
    for rank in range(3):
        torch.manual_seed(rank)
        states.append(random_state())
    optimizer = trained(model)
    path = save_checkpoint(tmp_path, 1, model=model, optimizer=optimizer, config={}, random_states=states)
    for rank, state in enumerate(states):
        load_checkpoint(path, model=model, optimizer=optimizer, rank=rank)
        assert torch.get_rng_state().equal(state["cpu"])
    with pytest.raises(ValueError, match=r"rank is 3, .* ranks \[0, 1, 2\]"):
        load_checkpoint(path, model=model, optimizer=optimizer, rank=3)


def test_nothing_is_pickled_and_each_tensor_is_stored_once(saved: Path) -> None:
    path, model = saved / "checkpoint-000600", tiny()
    assert {file.name for file in path.iterdir()} == FILES
    assert json.loads((path / "state.json").read_bytes())["config"] == CONFIG
    unique = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    header = len(safetensors.torch.save({name: t[:0].clone() for name, t in model.state_dict().items()}))
    assert unique < (path / "model.safetensors").stat().st_size < unique + header + 1000


@settings(max_examples=60)
@given(data=st.data())
def test_any_bit_flip_is_refused(data, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("flip")
    model = torch.nn.Linear(2, 2)
    path = save_checkpoint(folder, 7, model=model, optimizer=torch.optim.SGD(model.parameters()), config=CONFIG)
    file = path / data.draw(st.sampled_from(sorted(FILES)))
    content = bytearray(file.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)
    with pytest.raises(ValueError, match="checkpoint-000007 is damaged"):
        read_checkpoint(path)
    with pytest.raises(ValueError, match="No good checkpoint is left"):
        latest_checkpoint(folder)


def test_no_bit_of_a_manifest_can_change_unnoticed(tmp_path: Path) -> None:
    path = tmp_path / "sealed"
    write_sealed(path, {"a": b"1"})
    manifest = path / "manifest.json"
    whole = manifest.read_bytes()
    for bit in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        manifest.write_bytes(changed)
        with pytest.raises(ValueError, match="damaged"):
            read_sealed(path)


@pytest.mark.parametrize("name", sorted(FILES))
@pytest.mark.parametrize("kept", [None, 0, 0.5])
def test_missing_and_truncated_files_are_refused(saved: Path, name: str, kept: float | None) -> None:
    file = saved / "checkpoint-000600" / name
    content = file.read_bytes()
    file.unlink() if kept is None else file.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(ValueError, match=f"checkpoint-000600 is damaged.*{name}"):
        read_checkpoint(saved / "checkpoint-000600")


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    write_sealed(tmp_path / "checkpoint-000001", {"something": b"else"})
    with pytest.raises(ValueError, match=r"is no checkpoint: it holds \['something'\]"):
        read_checkpoint(tmp_path / "checkpoint-000001")
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "not-there"):
        with pytest.raises(ValueError, match="cannot be read"):
            load_checkpoint(path, model=tiny())


def test_another_configuration_is_refused_by_the_names_that_differ(saved: Path) -> None:
    other = {"layout": [1, 2, 4, 1], "recipe": {"lr": 1e-3}, "new": 1}
    with pytest.raises(ValueError, match="another configuration") as error:
        load_checkpoint(saved / "checkpoint-000600", model=tiny(), config=other)
    for told in (
        "layout is [1, 2, 3, 1] there and [1, 2, 4, 1] here",
        "recipe.bf16 is False there and absent here",
        "new is absent there and 1 here",
    ):
        assert told in str(error.value)
    assert "recipe.lr" not in str(error.value)


def test_a_configuration_with_numbers_that_equal_nothing_is_still_the_same(tmp_path: Path) -> None:
    model, config = torch.nn.Linear(1, 1), {"x": float("nan"), "list": [float("nan"), float("inf")]}
    path = save_checkpoint(tmp_path, 1, model=model, optimizer=torch.optim.SGD(model.parameters()), config=config)
    load_checkpoint(path, model=model, config=config)
    with pytest.raises(ValueError, match="x is nan there and 1 here"):
        load_checkpoint(path, model=model, config={**config, "x": 1})


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"layout": rd.Layout(2, 2, 3, 1)}, "prelude.blocks.1.* is absent there"),
        ({"layout": rd.Layout(1, 1, 3, 1)}, "core.stack.blocks.1.* absent here"),
        ({"dim": 32}, r"torch.float32 \(.*16.*\) there and torch.float32 \(.*32.*\) here"),
        ({"vocab_size": 24}, r"embed.token.weight is torch.float32 \(23, 16\) there and torch.float32 \(24, 16\) here"),
    ],
)
def test_another_model_is_refused_and_left_as_it_was(saved: Path, changes, said: str) -> None:
    model = tiny(**changes)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=f"of another model: .*{said}"):
        load_checkpoint(saved / "checkpoint-000600", model=model)
    assert all(before[name].equal(tensor) for name, tensor in model.state_dict().items())


def test_another_dtype_is_refused(saved: Path) -> None:
    with pytest.raises(ValueError, match=r"torch\.float32 .* there and torch\.bfloat16"):
        load_checkpoint(saved / "checkpoint-000600", model=tiny().bfloat16())


def test_another_optimizer_is_refused_and_nothing_is_changed(saved: Path) -> None:
    model = tiny()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    groups = parameter_groups(model)
    few = torch.optim.AdamW([{"params": [model.norm.weight]}, {"params": [model.embed.token.weight]}])
    for optimizer, said in (
        (torch.optim.AdamW(model.parameters()), "its number of groups is 2 there and 1 here"),
        (few, "core.stack.* is in group 0 there and absent here"),
        (torch.optim.AdamW(tiny().parameters()), "the bare model"),
        (torch.optim.AdamW(groups[::-1]), "core.stack.* is in group 0 there and in group 1 here"),
        (torch.optim.SGD(groups, momentum=0.9), "its class is AdamW there and SGD here"),
    ):
        settings, random = str(optimizer), torch.get_rng_state()
        with pytest.raises(ValueError, match=said):
            load_checkpoint(saved / "checkpoint-000600", model=model, optimizer=optimizer)
        assert torch.get_rng_state().equal(random)
        assert str(optimizer) == settings
        assert not optimizer.state
    assert all(before[name].equal(tensor) for name, tensor in model.state_dict().items())


def test_adamw_is_not_accepted_where_sgd_was_saved(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    path = save_checkpoint(tmp_path, 1, model=model, optimizer=torch.optim.SGD(model.parameters()), config={})
    with pytest.raises(ValueError, match="its class is SGD there and AdamW here"):
        load_checkpoint(path, model=model, optimizer=torch.optim.AdamW(model.parameters()))


def test_the_random_numbers_are_set_last(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    optimizer = trained(model, steps=0)
    load, before = optimizer.load_state_dict, torch.get_rng_state()

    def drawing(state: dict) -> None:
        assert torch.get_rng_state().equal(before)
        torch.rand(1)  # as an optimizer might that sets itself up
        load(state)

    monkeypatch.setattr(optimizer, "load_state_dict", drawing)
    load_checkpoint(saved / "checkpoint-000600", model=model, optimizer=optimizer)
    after = torch.get_rng_state()
    load_checkpoint(saved / "checkpoint-000600", model=model, optimizer=trained(model, steps=0))
    assert torch.get_rng_state().equal(after)


def test_only_tensors_and_json_can_be_saved(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match=r"what JSON can hold: .*Path"):
        save_checkpoint(tmp_path, 1, model=model, optimizer=optimizer, config={"path": tmp_path})
    optimizer.state[model.weight]["count"] = 3
    with pytest.raises(ValueError, match="keeps count of weight as 3"):
        save_checkpoint(tmp_path, 1, model=model, optimizer=optimizer, config={})
    assert not list(tmp_path.iterdir())


def test_tied_parameters_are_refused_by_their_names(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match=r"0\.weight and 1\.weight are one tensor under two names"):
        save_checkpoint(tmp_path, 1, model=model, optimizer=torch.optim.SGD(model.parameters()), config={})
    assert not list(tmp_path.iterdir())


@given(steps=st.lists(st.integers(0, 10**7), min_size=1, max_size=6, unique=True), keep=st.integers(1, 3))
def test_the_last_ones_stay_and_the_newest_is_found(steps: list[int], keep: int, tmp_path_factory) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    folder = tmp_path_factory.mktemp("kept")
    for step in sorted(steps):
        save_checkpoint(folder, step, model=model, optimizer=optimizer, config={}, keep=keep)
    found = latest_checkpoint(folder)
    assert found is not None
    assert found.step == max(steps)
    assert {path.name for path in folder.iterdir()} == {f"checkpoint-{step:06d}" for step in sorted(steps)[-keep:]}


def test_a_folder_without_checkpoints_has_no_latest(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "not-there") is None
    (tmp_path / "checkpoint-final").mkdir()
    assert latest_checkpoint(tmp_path) is None


def test_a_damaged_newest_is_named_and_the_last_good_one_used(saved: Path) -> None:
    model = tiny()
    save_checkpoint(saved, 700, model=model, optimizer=trained(model), config=CONFIG)
    file = saved / "checkpoint-000700" / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.warns(UserWarning, match=r"000700 is damaged: optimizer.*The last good checkpoint is used: .*000600"):
        found = latest_checkpoint(saved)
    assert found is not None
    assert found.step == 600
    # Saved again where the damaged one lies, it is whole; and the good one before it was never in danger.
    save_checkpoint(saved, 700, model=model, optimizer=trained(model), config=CONFIG)
    assert [path.name for path in sorted(saved.iterdir())] == ["checkpoint-000600", "checkpoint-000700"]
    assert read_checkpoint(saved / "checkpoint-000700").step == 700


def test_newer_ones_are_not_counted_when_older_ones_go(saved: Path) -> None:
    model = tiny()
    optimizer = trained(model)
    for step in (700, 650):  # as after 700 was found damaged
        save_checkpoint(saved, step, model=model, optimizer=optimizer, config=CONFIG)
    assert sorted(path.name[-3:] for path in saved.iterdir()) == ["600", "650", "700"]


def test_leftovers_of_killed_saves_go_with_the_next(saved: Path) -> None:
    for name in (".checkpoint-000700.tmp", ".checkpoint-000600.old.tmp"):
        shutil.copytree(saved / "checkpoint-000600", saved / name)
    (saved / ".checkpoint-000700.tmp" / "model.safetensors").unlink()
    found = latest_checkpoint(saved)
    assert found is not None
    assert found.step == 600
    model = tiny()
    save_checkpoint(saved, 700, model=model, optimizer=trained(model), config=CONFIG)
    assert sorted(path.name for path in saved.iterdir()) == ["checkpoint-000600", "checkpoint-000700"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("call", range(6))
def test_a_save_that_fails_at_any_sync_leaves_the_others_whole(saved: Path, monkeypatch, call: int, error) -> None:
    calls, real = [], os.fsync

    def failing(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == call + 1:
            raise error
        real(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    model = tiny()
    with pytest.raises(type(error)):
        save_checkpoint(saved, 700, model=model, optimizer=trained(model), config=CONFIG)
    assert [path.name for path in saved.iterdir()] == ["checkpoint-000600"]
    assert read_checkpoint(saved / "checkpoint-000600").step == 600


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
@pytest.mark.parametrize("call", range(3))
def test_saving_a_step_again_that_fails_leaves_the_first_in_place(saved: Path, monkeypatch, call: int, error) -> None:
    before = read_sealed(saved / "checkpoint-000600")
    moves, sync, rename = [], sealed._sync_folder, Path.rename

    def failing(real):
        def move(path: Path, *target: Path) -> None:
            moves.append(path)
            if len(moves) == call + 2:  # the temporary folder is synced first; then come two renames and a sync
                raise error
            real(path, *target)

        return move

    monkeypatch.setattr(sealed, "_sync_folder", failing(sync))
    monkeypatch.setattr(Path, "rename", failing(rename))
    model = tiny()
    with pytest.raises(type(error)):
        save_checkpoint(saved, 600, model=model, optimizer=trained(model), config=CONFIG)
    assert [path.name for path in saved.iterdir()] == ["checkpoint-000600"]
    assert read_sealed(saved / "checkpoint-000600") == before


def save_and_be_killed(folder: Path) -> None:
    rename = Path.rename

    def rename_once(path: Path, target: Path) -> None:
        rename(path, target)
        os.kill(os.getpid(), signal.SIGKILL)

    model = tiny()
    with mock.patch.object(Path, "rename", rename_once):
        save_checkpoint(folder, 600, model=model, optimizer=trained(model), config=CONFIG)


def test_a_step_that_is_saved_again_survives_a_kill_between_the_renames(saved: Path, tmp_path_factory) -> None:
    before = read_sealed(saved / "checkpoint-000600")
    process = start(save_and_be_killed, saved, out=tmp_path_factory.mktemp("told") / "said")
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not (saved / "checkpoint-000600").exists()
    found = latest_checkpoint(saved)
    assert found is not None
    assert found == read_checkpoint(saved / "checkpoint-000600") == (saved / "checkpoint-000600", 600, CONFIG)
    model = tiny()
    assert load_checkpoint(found.path, model=model, optimizer=trained(model, steps=0)) == found
    save_checkpoint(saved, 700, model=model, optimizer=trained(model), config=CONFIG)
    assert sorted(path.name for path in saved.iterdir()) == ["checkpoint-000600", "checkpoint-000700"]
    assert read_sealed(saved / "checkpoint-000600") == before


def save_on_a_full_disk(folder: Path, told: Path) -> None:
    model = tiny()
    optimizer = trained(model)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # the kernel then refuses as on a full disk
    try:
        save_checkpoint(folder, 700, model=model, optimizer=optimizer, config=CONFIG)
    except OSError as error:
        told.write_text(f"{type(error).__name__} {error.errno} {error}")


def test_a_full_disk_is_an_error_and_the_previous_checkpoint_survives(saved: Path, tmp_path_factory) -> None:
    told = tmp_path_factory.mktemp("told") / "error"
    process = start(save_on_a_full_disk, saved, told, out=told.with_name("said"))
    process.join()
    assert process.exitcode == 0  # no SIGBUS, no SIGXFSZ
    assert told.read_text().startswith(f"OSError {errno.EFBIG} ")
    assert "000700 could not be saved (File too large). Earlier checkpoints are untouched" in told.read_text()
    assert [path.name for path in saved.iterdir()] == ["checkpoint-000600"]
    found = latest_checkpoint(saved)
    assert found is not None
    assert found.step == 600


@pytest.mark.parametrize("numbers", [{"step": -1}, {"step": True}, {"step": 1, "keep": 0}])
def test_impossible_numbers_are_refused(tmp_path: Path, numbers: dict[str, int]) -> None:
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match="must be a whole number of at least"):
        save_checkpoint(tmp_path, **numbers, model=model, optimizer=torch.optim.SGD(model.parameters()), config={})
