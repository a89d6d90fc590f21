"""Hugging Face: native models, and recurrence grafted onto pretrained ones. Imports transformers."""

from recurrent_depth.hf import versions as versions  # before all others: it says so where transformers is too old
from recurrent_depth.hf.anchor_correction import AnchorCorrection, corrected
from recurrent_depth.hf.checkpoints import from_checkpoint, to_checkpoint
from recurrent_depth.hf.configuration import RecurrentDepthConfig
from recurrent_depth.hf.dropping import drop_layers
from recurrent_depth.hf.graft_outline import graft_outline
from recurrent_depth.hf.grafting import graft, is_graft, ungraft
from recurrent_depth.hf.host_first import HostFirst
from recurrent_depth.hf.layer_table import LayerLine, LayerReport, WindowLine
from recurrent_depth.hf.loading import load_graft
from recurrent_depth.hf.modeling import RecurrentDepthForCausalLM, RecurrentDepthModel
from recurrent_depth.hf.outputs import RecurrentDepthCausalLMOutput, RecurrentDepthOutput
from recurrent_depth.hf.recursive import recurse
from recurrent_depth.hf.reporting import layer_report
from recurrent_depth.hf.retrofit import (
    adapted,
    anchor_start,
    draw_adapter,
    pass_anchor,
    random_start,
    retrofit,
    zero_start,
)
from recurrent_depth.hf.sampled_depth import SampleDepth

__all__ = [
    "AnchorCorrection",
    "HostFirst",
    "LayerLine",
    "LayerReport",
    "RecurrentDepthCausalLMOutput",
    "RecurrentDepthConfig",
    "RecurrentDepthForCausalLM",
    "RecurrentDepthModel",
    "RecurrentDepthOutput",
    "SampleDepth",
    "WindowLine",
    "adapted",
    "anchor_start",
    "corrected",
    "draw_adapter",
    "drop_layers",
    "from_checkpoint",
    "graft",
    "graft_outline",
    "is_graft",
    "layer_report",
    "load_graft",
    "pass_anchor",
    "random_start",
    "recurse",
    "retrofit",
    "to_checkpoint",
    "ungraft",
    "zero_start",
]
