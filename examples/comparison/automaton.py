"""The cells of the cellular automaton."""

from comparison.panel import panel
from comparison.puzzles import Automaton

COMPARISON = panel(Automaton())
