"""Hugging Face: native models, and recurrence grafted onto pretrained ones. Imports transformers."""

from recurrent_depth.hf.grafting import graft, is_graft, ungraft
from recurrent_depth.hf.host_first import HostFirst
from recurrent_depth.hf.layer_table import LayerLine, LayerReport, WindowLine
from recurrent_depth.hf.reporting import layer_report

__all__ = [
    "HostFirst",
    "LayerLine",
    "LayerReport",
    "WindowLine",
    "graft",
    "is_graft",
    "layer_report",
    "ungraft",
]
