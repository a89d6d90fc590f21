"""Hosts that are no decoders: torch's encoder, modules of a user's own, plain lists."""

import hosts
import pytest
import torch
from torch import nn

from recurrent_depth.hf import graft, ungraft


def layers(num=4):
    return [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(num)]


def run(blocks, x):
    for block in blocks:
        x = block(x)
    return x


class TupleBlock(nn.Module):
    """Answers as older layers do, and takes its input by name."""

    def __init__(self, dim=16):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(dim), nn.Linear(dim, dim)

    def forward(self, hidden, scale=1.0):
        outputs = (hidden + scale * self.linear(self.norm(hidden)),)
        return (*outputs, None)


class TupleModel(nn.Module):
    """A model of a user's own, whose layers differ in what they are given."""

    def __init__(self):
        super().__init__()
        self.inside = nn.ModuleDict({"blocks": nn.ModuleList(TupleBlock() for _ in range(4))})
        self.other = nn.ModuleList([nn.Linear(16, 16), nn.Identity()])

    def forward(self, x):
        for number, block in enumerate(self.inside["blocks"]):
            x = block(hidden=x, scale=0.5 + number)[0]
        return x


def test_torchs_own_encoder_is_met_exactly_with_its_masks():
    model = nn.TransformerEncoder(layers()[0], 4, enable_nested_tensor=False).eval()
    x, padding = torch.randn(2, 5, 16), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    plain, masked = model(x), model(x, src_key_padding_mask=padding)
    graft(model, range(1, 3), 3)
    for num_steps in (1, 3):
        assert torch.equal(model(x, num_steps=num_steps), plain)
        assert torch.equal(model(x, src_key_padding_mask=padding), masked)


def test_nested_tensors_are_refused():
    model = graft(nn.TransformerEncoder(layers()[0], 4, enable_nested_tensor=False).eval(), range(1, 3), 2)
    with pytest.raises(ValueError, match="use_nested_tensor = False"):
        model.layers[1](torch.nested.nested_tensor([torch.randn(3, 16)], layout=torch.jagged))


def test_a_model_of_ones_own_is_met_exactly_and_each_layer_gets_its_own_arguments():
    model, x = TupleModel().eval(), torch.randn(2, 5, 16)
    expected = model(x)
    graft(model, range(1, 3), 3, layers="inside.blocks")
    assert torch.equal(model(x), expected)
    assert torch.equal(model(x, num_steps=1), expected)
    hosts.randomise(model.recurrence)
    assert not torch.equal(model(x), expected)
    assert torch.equal(model(x, num_steps=1), expected)
    assert torch.equal(ungraft(model)(x), expected)


@pytest.mark.parametrize("kind", [list, tuple, nn.ModuleList])
def test_a_list_of_modules_comes_back_as_a_list_that_loops(kind):
    blocks, x = [block.eval() for block in layers()], torch.randn(2, 5, 16)
    expected = run(blocks, x)
    grafted = graft(kind(blocks), range(1, 3), 3).eval()
    assert isinstance(grafted, nn.ModuleList)
    assert len(grafted) == len(list(grafted)) == 4
    assert grafted[-1] is blocks[-1]
    assert len(grafted[1:3]) == 2
    assert torch.equal(run(grafted, x), expected)
    hosts.randomise(grafted.recurrence)
    assert not torch.equal(run(grafted, x), expected)
    with grafted.recurrence.at_depth(1):
        assert torch.equal(run(grafted, x), expected)
    assert torch.equal(run(ungraft(grafted), x), expected)
    assert list(grafted.state_dict()) == list(nn.ModuleList(blocks).state_dict())


def test_a_width_that_stands_nowhere_is_given():
    blocks = [nn.Linear(16, 16) for _ in range(3)]
    with pytest.raises(ValueError, match="give dim"):
        graft(blocks, [1], 2)
    assert graft(blocks, [1], 2, dim=16).recurrence.core.update.inner.gate.state.in_features == 16
