"""Parameter groups and the learning-rate schedule."""

import math
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from battery import every_method, tiny
from hypothesis import given
from hypothesis import strategies as st

from recurrent_depth.training import parameter_groups, warmup_cosine

PREFIXES = ["embed", "embed.token", "core", "core.update", "core.update.gate", "core.update.gate.write", "norm.weight"]
scale = st.floats(0.01, 100)


def ids(parameters) -> list[int]:
    return [id(parameter) for parameter in parameters]


@every_method
def test_groups_hold_every_parameter_exactly_once(build) -> None:
    model = tiny(build)
    grouped = [parameter for group in parameter_groups(model) for parameter in group["params"]]
    assert sorted(ids(grouped)) == sorted(ids(model.parameters()))


@given(st.dictionaries(st.sampled_from(PREFIXES), scale))
def test_scaled_groups_hold_every_parameter_exactly_once(scales: dict[str, float]) -> None:
    model = tiny()
    groups = parameter_groups(model, 0.1, scales, lr=1e-3)
    assert sorted(ids(p for group in groups for p in group["params"])) == sorted(ids(model.parameters()))
    assert len({(group["lr"], group["weight_decay"]) for group in groups}) <= len(groups)
    torch.optim.AdamW(groups)  # which refuses a parameter twice


def test_matrices_decay_and_vectors_do_not() -> None:
    groups = parameter_groups(tiny(), weight_decay=0.3)
    assert {(parameter.ndim >= 2, group["weight_decay"]) for group in groups for parameter in group["params"]} == {
        (True, 0.3),
        (False, 0.0),
    }


def test_a_tied_head_is_grouped_once_and_frozen_parameters_are_left_out() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5))
    model[1].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    [group] = parameter_groups(model)
    assert ids(group["params"]) == [id(model[0].weight)]


@given(scale, scale)
def test_the_longest_fitting_name_decides_the_scale(core: float, gate: float) -> None:
    model = tiny()
    groups = parameter_groups(model, scales={"core": core, "core.update.gate": gate}, lr=0.5)
    rates = {id(parameter): group["lr"] for group in groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        factor = gate if name.startswith("core.update.gate.") else core if name.startswith("core.") else 1.0
        assert rates[id(parameter)] == 0.5 * factor


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"scales": {"core.update.gates": 2.0}, "lr": 1e-3}, "core.update.gates"),
        ({"scales": {"core.update.gat": 2.0}, "lr": 1e-3}, "core.update.gate"),
        ({"scales": {"core": 0.0}, "lr": 1e-3}, "above 0"),
        ({"scales": {"core": math.nan}, "lr": 1e-3}, "nan"),
        ({"scales": {"core": 2.0}}, "lr"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"weight_decay": math.inf}, "weight_decay is inf"),
    ],
)
def test_impossible_groups_are_refused(arguments, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parameter_groups(tiny(), **arguments)


@given(st.integers(1, 300), st.data(), st.floats(0, 1))
def test_the_schedule_rises_to_one_then_falls_to_its_floor(num_steps: int, data, floor: float) -> None:
    warmup_steps = data.draw(st.integers(0, num_steps))
    factor = warmup_cosine(num_steps, warmup_steps, floor)
    factors = [factor(step) for step in range(num_steps + 10)]
    assert all(0 < f <= 1 for f in factors[:warmup_steps])
    assert all(a < b for a, b in pairwise(factors[:warmup_steps]))
    later = factors[warmup_steps:]
    assert all(a >= b for a, b in pairwise(later))
    assert factors[num_steps:] == pytest.approx([floor] * 10) or warmup_steps == num_steps
    assert max(factors) == pytest.approx(1.0)


def test_the_schedule_is_that_of_the_paper() -> None:
    factor = warmup_cosine(20_000, 2_000, 0.1)
    assert [6e-4 * factor(step) for step in (0, 1_999, 2_000, 11_000, 20_000)] == pytest.approx(
        [3e-7, 6e-4, 6e-4, 3.3e-4, 6e-5]
    )


def test_a_resumed_schedule_goes_on_where_it_was() -> None:
    def rates(start: int, settings: list[dict]) -> tuple[list[float], list[dict]]:
        optimizer = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))], **settings[0]}], lr=0.1)
        schedule, seen = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine(20, 5), last_epoch=start - 1), []
        for _ in range(10):
            seen.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        return seen, [{k: v for k, v in optimizer.param_groups[0].items() if k != "params"}]

    first, settings = rates(0, [{}])
    second, _ = rates(10, settings)
    assert [*first, *second] == [0.1 * warmup_cosine(20, 5)(step) for step in range(20)]


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((0, 0), "num_steps is 0"),
        ((10, -1), "warmup_steps is -1"),
        ((10, 11), "warmup_steps is 11"),
        ((10, True), "warmup_steps is True"),
        ((10, 1, -0.1), "floor is -0.1"),
        ((10, 1, 1.5), "floor is 1.5"),
        ((10, 1, math.nan), "floor is nan"),
    ],
)
def test_impossible_schedules_are_refused(arguments, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        warmup_cosine(*arguments)


def test_importing_the_library_needs_none_of_this() -> None:
    extras = "safetensors", "matplotlib", "accelerate", "transformers"
    code = f"import sys, recurrent_depth; print([name for name in {extras} if name in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"
