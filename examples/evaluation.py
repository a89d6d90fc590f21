"""How good a model is on held-out text, at every depth, and how good mere counting is."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import recurrent_depth as rd


class Evaluation(NamedTuple):
    """Means over all held-out windows.

    Attributes:
        losses: in nats per token, after each of the depths asked for.
        gates: the gate g of each step, the share of the state that it kept; 0 for a model without a gate.
    """

    losses: list[float]
    gates: list[float]


@torch.no_grad()
def evaluate(model: rd.RecurrentTransformer, windows: Tensor, depths: Sequence[int], batch_size: int) -> Evaluation:
    """Runs the model once over the windows and reads its loss at each of `depths`; draws no random numbers."""
    training = model.training
    model.eval()
    device = model.embed.token.weight.device
    losses, gates = torch.zeros(len(depths), dtype=torch.float64), torch.zeros(max(depths), dtype=torch.float64)
    for part in windows.split(batch_size):
        tokens = part.to(device)
        trajectory = model.trajectory(tokens, max(depths), every_step=True)
        share = len(tokens) / len(windows)
        losses += share * _vector(rd.next_token_loss(trajectory.after(depth), tokens) for depth in depths)
        gates += share * _vector(1 - state.write.mean() for state in trajectory.states)
    model.train(training)
    return Evaluation(losses.tolist(), gates.tolist())


def _vector(values: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(values)).double().cpu()


def trigram_loss(train: np.ndarray, windows: Tensor) -> float:
    """Loss of a trigram count over bytes, in nats per byte, on the same predictions that the models make.

    Counts of three, two and one bytes are blended as Witten and Bell (1991) do. A model that has not passed this has
    not learned enough to be compared.
    """
    single = _blend(train, 1, np.full((1, 256), 1 / 256))
    pair = _blend(train, 2, single)
    triple = _blend(train, 3, np.tile(pair, (256, 1)))
    ids = windows.numpy()
    first = -np.log(pair[ids[:, 0], ids[:, 1]])
    others = -np.log(triple[ids[:, :-2] * 256 + ids[:, 1:-1], ids[:, 2:]])
    return float(np.concatenate([first, others.ravel()]).mean())


def _blend(tokens: np.ndarray, order: int, shorter: np.ndarray) -> np.ndarray:
    """Probabilities of the next byte, one row per context; `shorter` are those of the contexts without their first."""
    places = tokens.size - order + 1
    codes = np.zeros(places, dtype=np.int64)
    for offset in range(order):
        codes = codes * 256 + tokens[offset : offset + places]
    counts = np.bincount(codes, minlength=256**order).reshape(-1, 256)
    seen, kinds = counts.sum(1, keepdims=True), (counts > 0).sum(1, keepdims=True)
    return np.where(seen > 0, (counts + kinds * shorter) / np.maximum(seen + kinds, 1), shorter)
