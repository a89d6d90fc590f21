"""Every method learns: a short training on a task of copying ends well below chance."""

import math

import pytest
import torch
from battery import METHODS, tiny
from torch import Tensor

import recurrent_depth as rd
from recurrent_depth.objective import token_losses

VOCAB, PERIOD, STEPS, RATE = 8, 2, 200, 0.03
CHANCE = math.log(VOCAB)
MOST = {
    "mod": 0.5 * CHANCE,  # decides token by token when it is measured, and may leave out one that it took in training
    "albert": 0.75 * CHANCE,  # two heads and nothing before the loop: which two tokens repeat, but hardly their order
}
"""Methods that need not come below a quarter of chance."""
LIMITS = {name: MOST.get(name, 0.25 * CHANCE) for name in METHODS}


def texts(number: int, rows: int) -> Tensor:
    """Two random tokens, four times over: from the third on each can be copied."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(VOCAB, (rows, PERIOD), generator=generator).repeat(1, 4)


def copying_loss(model: rd.RecurrentTransformer) -> float:
    """Nats per token that can be copied, of texts that were not trained on."""
    tokens = texts(STEPS, rows=256)
    with torch.no_grad():
        logits = model.eval()(tokens)
    targets = tokens.roll(-1, dims=1)
    return token_losses(logits, targets)[:, PERIOD - 1 : -1].mean().item()


@pytest.mark.usefixtures("as_a_user_runs_it")
@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns_to_copy(name: str):
    torch.manual_seed(0)
    model = tiny(METHODS[name], rd.Layout(1, 1, 3, 1), vocab_size=VOCAB, context_length=4 * PERIOD)
    assert copying_loss(model) > 0.9 * CHANCE
    loss = rd.WithObjective(model.train())
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * min(1, (step + 1) / 20) * (1 - step / STEPS)
        loss(texts(step, rows=32)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert copying_loss(model) < LIMITS[name]
