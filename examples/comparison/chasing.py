"""The cells of pointer chasing."""

from comparison.panel import panel
from comparison.puzzles import PointerChasing

COMPARISON = panel(PointerChasing())
