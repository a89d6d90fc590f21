"""The layer report, by closed forms on layers made by hand, and by hosts with layers taken out or put in twice."""

import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path

import hosts
import jaxtyping
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import recurrent_depth as rd
from recurrent_depth.hf import graft, layer_report


class Turn(nn.Module):
    """Turns pairs of features by an angle, in half turns, and stretches them."""

    def __init__(self, half_turns: float = 0.0, stretch: float = 1.0):
        super().__init__()
        self.angle, self.stretch = half_turns * math.pi, stretch

    def forward(self, h: Tensor) -> Tensor:
        if self.angle == 0:
            return self.stretch * h
        x, y = h.chunk(2, dim=-1)
        cos, sin = math.cos(self.angle), math.sin(self.angle)
        return self.stretch * torch.cat([cos * x - sin * y, sin * x + cos * y], dim=-1)


class ByName(nn.Module):
    """Gives a tuple; the host calls it by names alone."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor, beside: str) -> tuple[Tensor, str]:
        return self.layer(hidden_states), beside


class Host(nn.Module):
    def __init__(self, layers: Iterable[nn.Module], *, by_name: bool = False):
        super().__init__()
        wrap = ByName if by_name else nn.Identity
        self.layers = nn.ModuleList(layer if wrap is nn.Identity else wrap(layer) for layer in layers)
        self.by_name = by_name

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(hidden_states=x, beside="x")[0] if self.by_name else layer(x)
        return x


def lengths(output: Tensor, batch: dict) -> Tensor:
    """The length of each token's state, of real tokens: what stretching multiplies."""
    mask = batch.get("attention_mask")
    found = output.norm(dim=-1)
    return found.flatten() if mask is None else found[mask.bool()]


report_of = partial(layer_report, losses=lengths, layers="layers")


@pytest.fixture
def x() -> Tensor:
    return F.normalize(torch.randn(3, 5, 8), dim=-1)


def test_a_layer_that_does_nothing_has_no_influence_and_costs_nothing(x):
    report = report_of(Host([Turn(0.3, 2.0), nn.Identity(), Turn(0.1)]), x)
    line = report.layers[1]
    assert (line.influence, line.angle) == (0.0, 0.0)
    assert line.skipped == line.looped == report.loss


@pytest.mark.parametrize("half_turns", [0.001, 0.25, 0.5, 0.75, 1.0])
def test_influence_and_angle_of_a_turn_are_its_own(x, half_turns):
    line = report_of(Host([Turn(half_turns, 3.0)]), x).layers[0]
    assert line.angle == pytest.approx(half_turns, rel=1e-4)
    assert line.influence == pytest.approx(1 - math.cos(half_turns * math.pi), rel=1e-3)


def test_stretching_has_no_influence_and_multiplies_the_loss(x):
    stretches = [1.5, 0.5, 3.0, 1.25]
    report = report_of(Host(Turn(stretch=s) for s in stretches), x, num_steps=3, core_length=2)
    whole = math.prod(stretches)
    assert report.loss == pytest.approx(whole)
    for line, own in zip(report.layers, stretches, strict=True):
        assert line.influence == pytest.approx(0, abs=1e-6)
        assert line.skipped == pytest.approx(whole / own)
        assert line.looped == pytest.approx(whole * own**2)
    pairs = [stretches[i] * stretches[i + 1] for i in range(3)]
    assert [line.core for line in report.windows] == [range(2), range(1, 3), range(2, 4)]
    assert [line.looped for line in report.windows] == pytest.approx([whole * pair**2 for pair in pairs])


def test_angles_of_a_window_add_up_where_its_layers_turn_one_way(x):
    report = report_of(Host([Turn(0.1), Turn(0.2), Turn(0.3)]), x, core_length=2)
    assert [line.angle for line in report.windows] == pytest.approx([0.3, 0.5], rel=1e-4)


def test_the_suggested_core_bears_looping_best_and_leaves_a_layer_on_either_side(x):
    # The first and the last window would shrink the loss most, but leave no layer outside.
    stretches = [0.1, 1.0, 1.2, 0.9, 1.1, 0.1]
    report = report_of(Host(Turn(stretch=s) for s in stretches), x)
    assert report.suggested == range(3, 5)
    assert "core=range(3, 5)" in str(report)
    short = report_of(Host([Turn(stretch=2.0), Turn(stretch=0.5)]), x)
    assert short.suggested == range(1, 2)


def test_layers_that_take_names_and_give_tuples_are_measured_alike(x):
    layers = [Turn(0.2, 1.5), Turn(0.3), Turn(0.1, 0.5)]
    assert report_of(Host(layers, by_name=True), x) == report_of(Host(layers), x)


def test_padding_counts_nowhere(x):
    host = Host([Turn(0.2, 1.5), nn.Linear(8, 8), Turn(0.3)])
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [1, 1, 0, 0, 0]])
    padded = torch.where(mask.bool()[..., None], x, torch.full_like(x, 1e6))
    real = x[mask.bool()][None]
    assert_near(report_of(host, {"x": padded, "attention_mask": mask}), report_of(host, real))


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7])
def test_the_outcome_does_not_depend_on_how_many_rows_are_read_at_once(batch_size):
    host, tokens = llama(), torch.randint(96, (3, 9))
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[0, :4] = mask[1, :1] = False
    assert_near(layer_report(host, tokens, mask, batch_size=batch_size), layer_report(host, tokens, mask))


# Hosts of transformers -----------------------------------------------------------------------------------------------


def llama(**other) -> transformers.LlamaForCausalLM:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "vocab_size": 96,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, initializer_range=0.2, **other))


def gpt2() -> transformers.GPT2LMHeadModel:
    config = transformers.GPT2Config(n_embd=32, n_layer=4, n_head=4, vocab_size=96, n_positions=32)
    return transformers.GPT2LMHeadModel(config)


def bloom() -> transformers.BloomForCausalLM:
    return transformers.BloomForCausalLM(transformers.BloomConfig(hidden_size=32, n_layer=4, n_head=4, vocab_size=96))


def neox() -> transformers.GPTNeoXForCausalLM:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 96,
    }
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes))


def with_layers(host: nn.Module, order: list[int]) -> nn.Module:
    """A host of the same layers in another order, some of them several times."""
    other = copy.deepcopy(host).eval()
    name = next(name for name, module in other.named_modules() if isinstance(module, nn.ModuleList))
    layers = other.get_submodule(name)
    parent, _, attribute = name.rpartition(".")
    setattr(other.get_submodule(parent), attribute, nn.ModuleList(layers[i] for i in order))
    other.config.num_hidden_layers = len(order)
    return other


def next_token_loss(host: nn.Module, tokens: Tensor) -> float:
    with torch.no_grad():
        logits = host(tokens, use_cache=False).logits
    return float(F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))


@pytest.mark.parametrize("build", [llama, gpt2, bloom, neox])
def test_losses_are_those_of_a_host_with_the_layers_taken_out_or_put_in_twice(build):
    host, tokens = build(), torch.randint(96, (2, 9))
    report = layer_report(host, tokens, core_length=2, num_steps=3)
    places = list(range(len(report.layers)))
    assert report.loss == pytest.approx(next_token_loss(host.eval(), tokens), abs=1e-5)
    for i in places:
        without, thrice = places[:i] + places[i + 1 :], places[:i] + [i] * 3 + places[i + 1 :]
        assert report.layers[i].skipped == pytest.approx(next_token_loss(with_layers(host, without), tokens), abs=1e-5)
        assert report.layers[i].looped == pytest.approx(next_token_loss(with_layers(host, thrice), tokens), abs=1e-5)
    for core, _, looped in report.windows:
        order = places[: core.start] + list(core) * 3 + places[core.stop :]
        assert looped == pytest.approx(next_token_loss(with_layers(host, order), tokens), abs=1e-5)


def test_states_are_those_that_the_host_itself_gives_out():
    host, tokens = llama().eval(), torch.randint(96, (2, 9))
    report = layer_report(host, tokens)
    with torch.no_grad():
        states = host(tokens, output_hidden_states=True).hidden_states
    for i in range(5):  # behind the last layer they stand after the final norm
        cosine = F.cosine_similarity(states[i], states[i + 1], dim=-1)
        assert report.layers[i].influence == pytest.approx(float(1 - cosine.mean()), abs=1e-5)
        assert report.layers[i].angle == pytest.approx(float(cosine.acos().mean() / math.pi), abs=1e-5)


def test_an_encoder_is_measured_by_losses_that_are_given():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    host = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, vocab_size=96))
    tokens = torch.randint(96, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    batch = {"input_ids": tokens, "attention_mask": mask}

    def masked(output, batch):
        return F.cross_entropy(output.logits[:, 3], batch["input_ids"][:, 3], reduction="none")

    report = layer_report(host, batch, losses=masked)
    with torch.no_grad():
        logits = host.eval()(**batch).logits
    assert report.loss == pytest.approx(float(F.cross_entropy(logits[:, 3], tokens[:, 3])), abs=1e-5)


def test_a_vision_model_reads_pixels():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=8, num_labels=5)
    host, pixels = transformers.ViTForImageClassification(config), torch.randn(4, 3, 16, 16)

    def chosen(output, batch):
        return F.cross_entropy(output.logits, torch.zeros(len(output.logits), dtype=torch.long), reduction="none")

    assert_near(layer_report(host, pixels, losses=chosen, batch_size=3), layer_report(host, pixels, losses=chosen))


def test_an_encoder_of_torch_is_measured():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    host = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    report = layer_report(host, torch.randn(2, 5, 16), losses=lambda output, batch: output.abs().mean(dim=(1, 2)))
    assert len(report.layers) == 3


@pytest.mark.parametrize("name", hosts.DECODERS)
def test_losses_of_looped_windows_are_those_of_grafts_with_the_plain_loop(name):
    tokens = hosts.tokens()
    report = layer_report(hosts.host(name), tokens, num_steps=3, core_length=2)
    assert report.loss == pytest.approx(next_token_loss(hosts.host(name), tokens), abs=1e-5)
    for core, _, looped in report.windows[1:3]:
        looping = graft(hosts.host(name), core, 3, update=rd.plain)
        assert looped == pytest.approx(next_token_loss(looping, tokens), abs=1e-4)


@pytest.mark.parametrize("name", hosts.DECODERS)
def test_losses_of_skipped_layers_are_those_of_grafts_that_drop_them(name):
    tokens = hosts.tokens()
    report = layer_report(hosts.host(name), tokens)
    without = graft(hosts.host(name), range(3, 4), 1, drop=[1])
    assert report.layers[1].skipped == pytest.approx(next_token_loss(without, tokens), abs=1e-4)


@pytest.mark.parametrize("name", hosts.ENCODERS)
def test_every_encoder_is_measured(name):
    def sizes(output, batch):
        return output.last_hidden_state.square().mean(dim=(1, 2))

    host = hosts.host(name)
    report = layer_report(host, hosts.inputs(name), core_length=2, losses=sizes)
    for core, _, looped in report.windows:
        looping = graft(hosts.host(name), core, 2, update=rd.plain)
        with torch.no_grad():
            expected = float(sizes(looping(**hosts.inputs(name)), {}).mean())
        assert looped == pytest.approx(expected, rel=1e-4)


def gemma4() -> transformers.Gemma4ForCausalLM:
    """Its last two layers read keys and values that earlier ones made."""
    settings = hosts.WITH_HEADS | {"num_hidden_layers": 6, "num_kv_shared_layers": 2, "sliding_window": 4}
    settings |= {"global_head_dim": 8, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": hosts.VOCAB}
    settings["layer_types"] = ["sliding_attention", "full_attention"] * 3
    return transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**settings, initializer_range=0.2))


def test_layers_that_write_for_later_ones_are_run_in_each_forward():
    host, tokens = gemma4(), hosts.tokens()
    with counted(host.model.layers) as ran:
        report = layer_report(host, tokens, core_length=2)
    assert len(ran) >= 6 * (3 * 6 - 2 + 2)
    for core, _, looped in report.windows[1:3]:
        looping = graft(copy.deepcopy(host).eval(), core, 2, update=rd.plain)
        assert looped == pytest.approx(next_token_loss(looping, tokens), abs=1e-4)


def test_losses_of_routers_are_not_asked_for():
    host = hosts.host("qwen3_moe", output_router_logits=True)
    assert layer_report(host, hosts.tokens()) == layer_report(hosts.host("qwen3_moe"), hosts.tokens())


# What it costs -------------------------------------------------------------------------------------------------------


@contextmanager
def counted(layers: Iterable[nn.Module]) -> Iterator[list[nn.Module]]:
    """The layers in the order in which they really run."""
    ran: list[nn.Module] = []

    def counting(layer: nn.Module, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(forward)
        def run(*arguments, **keywords):
            ran.append(layer)
            return forward(*arguments, **keywords)

        return run

    for layer in layers:
        layer.forward = counting(layer, layer.forward)
    yield ran
    for layer in layers:
        del layer.forward


@pytest.mark.parametrize("num_steps", [2, 4])
@pytest.mark.parametrize("length", [2, 5, 6])
@pytest.mark.parametrize("batch_size", [None, 2])
def test_it_costs_as_many_forwards_as_it_says(num_steps, length, batch_size):
    host, tokens = llama(), torch.randint(96, (3, 9))
    calls = []
    host.lm_head.register_forward_hook(lambda *_: calls.append(1))
    with counted(host.model.layers) as ran:
        layer_report(host, tokens, core_length=length, num_steps=num_steps, batch_size=batch_size)
    num_batches = 1 if batch_size is None else 2
    assert len(calls) == num_batches * (3 * 6 - length + 2)
    windows = 6 - length + 1
    whole = 6 + num_steps - 1 + windows * ((6 - length) / 2 + (num_steps - 1) * length) / 6
    assert len(ran) == pytest.approx(num_batches * 6 * whole)


def test_a_bar_shows_how_far_it_is_where_there_is_a_terminal(capsys, monkeypatch):
    host, tokens = llama(), torch.randint(96, (2, 9))
    layer_report(host, tokens)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    layer_report(host, tokens, progress=False)
    assert capsys.readouterr() == ("", "")
    layer_report(host, tokens)
    out, err = capsys.readouterr()
    assert out == ""
    assert "layer report" in err
    assert "18" in err  # 1 + 6 skipped + 6 looped + 5 windows of 2
    assert err.endswith("\r")


@pytest.mark.parametrize("in_place", [False, True])
def test_hooks_that_change_what_a_layer_gives_work_once(in_place):
    def steer(layer, arguments, output):
        return output.mul_(2) if in_place else 2 * output

    tokens = torch.randint(96, (2, 9))
    plain, hooked = llama(), llama()
    hooked.load_state_dict(plain.state_dict())
    hooked.model.layers[1].register_forward_hook(steer)
    first = layer_report(hooked, tokens)
    assert layer_report(hooked, tokens) == first
    plain.model.layers[1].register_forward_hook(lambda layer, arguments, output: 2 * output)
    without = with_layers(plain, [0, 1, 2, 4, 5])
    assert first.layers[3].skipped == pytest.approx(next_token_loss(without, tokens), abs=1e-5)


# What stays as it was ------------------------------------------------------------------------------------------------


def everything(model: nn.Module) -> list[tuple]:
    return [
        (name, module.training, dict(module._forward_hooks), dict(module._forward_pre_hooks), set(vars(module)))
        for name, module in model.named_modules()
    ]


def test_the_host_is_afterwards_what_it_was():
    host, tokens = llama(attention_dropout=0.1).train(), torch.randint(96, (2, 9))
    host.model.layers[2].eval()
    host.model.layers[1].register_forward_hook(lambda *_: None)
    before, weights, config = everything(host), copy.deepcopy(host.state_dict()), host.config.to_dict()
    state = torch.get_rng_state()
    first = layer_report(host, tokens)
    assert everything(host) == before
    assert host.config.to_dict() == config
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(host.state_dict(), weights, rtol=0, atol=0)
    assert all(weight.grad is None for weight in host.parameters())
    assert layer_report(host, tokens) == first


@pytest.mark.parametrize("calls", [0, 1, 8])
def test_the_host_is_what_it_was_after_an_exception_too(calls):
    host, tokens = llama().train(), torch.randint(96, (2, 9))
    before, count = everything(host), iter(range(100))

    def failing(output, batch):
        if next(count) == calls:
            raise RuntimeError("out of memory")
        return output.logits[:, 0, 0]

    with pytest.raises(RuntimeError, match="out of memory"):
        layer_report(host, tokens, losses=failing)
    assert everything(host) == before


# What is refused -----------------------------------------------------------------------------------------------------

TOKENS = torch.zeros(2, 6, dtype=torch.long)


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"tokens": TOKENS, "core_length": 7}, "core_length is 7, but the host has 6 layers"),
        ({"tokens": TOKENS, "core_length": 0}, "core_length is 0"),
        ({"tokens": TOKENS, "num_steps": 1}, "num_steps is 1"),
        ({"tokens": TOKENS, "batch_size": 0}, "batch_size is 0"),
        ({"tokens": TOKENS[:0]}, r"not empty, got shape \(0, 6\)"),
        ({"tokens": TOKENS[0]}, r"tokens must be \(batch, token\), got shape \(6,\)"),
        ({"tokens": TOKENS.float()}, "tokens must be integers, got torch.float32"),
        ({"tokens": TOKENS + 96}, "tokens must lie in 0 to 95, the vocabulary; got 96 to 96"),
        ({"tokens": TOKENS - 1}, "got -1 to -1"),
        ({"tokens": "some text"}, "got 'some text'"),
        ({"tokens": [TOKENS, TOKENS]}, "got a list. Batches are put into one tensor by torch.cat"),
        ({"tokens": {"input_ids": TOKENS.tolist()}}, "tokens must be a tensor"),
        (
            {"model": "a/name", "tokens": TOKENS},
            r"load it first, such as by AutoModelForCausalLM.from_pretrained\('a/name",
        ),
        ({"model": 3, "tokens": TOKENS}, "model is 3, but must be a Module"),
        ({"tokens": TOKENS[:, :1]}, "at least 2 long"),
        ({"tokens": TOKENS, "mask": torch.ones(2, 5, dtype=torch.bool)}, r"mask must be \(2, 6\)"),
        ({"tokens": TOKENS, "mask": torch.zeros(2, 6, dtype=torch.bool)}, "Nothing counts"),
        ({"tokens": {"input_ids": TOKENS}, "mask": torch.ones(2, 6)}, "belongs into it"),
        ({"tokens": {"input_ids": TOKENS, "attention_mask": torch.ones(3, 6)}}, "all inputs as many"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, said, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as a user runs it
    with pytest.raises(ValueError, match=said):
        layer_report(**{"model": llama()} | arguments)


def test_a_host_without_next_tokens_needs_losses():
    with pytest.raises(ValueError, match="losses="):
        layer_report(Host([nn.Identity()]), torch.randn(1, 2, 8))
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 96,
    }
    with pytest.raises(ValueError, match="BertModel says no next tokens"):
        layer_report(transformers.BertModel(transformers.BertConfig(**sizes)), TOKENS)


def test_layers_that_do_not_run_once_each_in_order_are_refused(x):
    class Backwards(Host):
        def forward(self, x):
            for layer in reversed(self.layers):
                x = layer(x)
            return x

    with pytest.raises(ValueError, match=r"in a forward of the host ran \[1, 0\]"):
        report_of(Backwards([Turn(0.1), Turn(0.2)]), x)


def test_a_graft_is_refused():
    with pytest.raises(ValueError, match="ungraft"):
        layer_report(graft(llama(), core=range(2, 4), num_steps=2), TOKENS)


def test_layers_with_a_cache_are_refused():
    class Caching(nn.Module):
        def __init__(self, host):
            super().__init__()
            self.host = host

        def forward(self, tokens):
            return self.host(tokens, use_cache=True).logits

    with pytest.raises(ValueError, match="turn it off"):
        layer_report(Caching(llama()), TOKENS, layers="host.model.layers", losses=lambda out, batch: out[:, 0, 0])


# Table and plot ------------------------------------------------------------------------------------------------------


def test_the_table_has_a_row_for_each_layer_and_fits_the_line():
    report = layer_report(llama(), torch.randint(96, (2, 9)))
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 100
    assert [line.split()[0] for line in lines[2:8]] == [str(i) for i in range(6)]
    assert sum(line.endswith(" <") for line in lines) == 1


def test_the_plot_is_written(tmp_path: Path):
    report = layer_report(llama(), torch.randint(96, (2, 9)))
    report.plot(tmp_path / "layers.png")
    report.plot(str(tmp_path / "layers.svg"))
    assert (tmp_path / "layers.png").stat().st_size > 10_000
    assert (tmp_path / "layers.svg").exists()


def assert_near(ours, expected) -> None:
    """Equal to float tolerance, number by number."""
    assert ours.loss == pytest.approx(expected.loss, abs=1e-5)
    for line, other in zip(ours.layers + ours.windows, expected.layers + expected.windows, strict=True):
        assert line[0] == other[0]
        assert line[1:] == pytest.approx(other[1:], abs=1e-5)
