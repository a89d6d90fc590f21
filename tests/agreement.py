"""How a model is compared with its transcription: what it says, and where its gradients point."""

from collections.abc import Callable

import torch
from battery import gradients
from torch import Tensor
from torch.testing import assert_close
from transcription_parts import Array, Weights, arrays

import recurrent_depth as rd


def assert_agrees(found: Tensor, written: Array, accuracy: float = 1e-12) -> None:
    """Relative to the largest number that is written."""
    expected = torch.from_numpy(written)
    assert_close(found.double(), expected, atol=accuracy * expected.abs().max().item(), rtol=accuracy)


def assert_all_agree(trajectory: rd.Trajectory, logits: Array, states: list[Array], accuracy: float = 1e-12) -> None:
    """The logits, and the state after every step."""
    assert_agrees(trajectory.output, logits, accuracy)
    for ours, theirs in zip(trajectory.states, states, strict=True):
        assert_agrees(ours.h, theirs, accuracy)


def assert_slopes_agree(model: torch.nn.Module, loss: Tensor, written: Callable[[Weights], float]) -> None:
    """Of every weight, the gradient along one drawn direction is the slope of what is written along it."""
    loss.backward()
    w = arrays(model.state_dict())
    for name, gradient in gradients(model).items():
        direction = torch.randn_like(gradient)
        found = slope(lambda t, name=name, to=direction.numpy(): written(w | {name: w[name] + t * to}))
        assert abs(found - (gradient * direction).sum().item()) <= 1e-6 * gradient.norm().item(), name


def slope(f: Callable[[float], float], step: float = 1e-5) -> float:
    """The derivative at 0 by central differences; their error falls with the fourth power of the step."""
    near, far = f(step) - f(-step), f(2 * step) - f(-2 * step)
    return (8 * near - far) / (12 * step)
