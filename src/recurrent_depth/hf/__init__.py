"""Hugging Face: native models, and recurrence grafted onto pretrained ones. Imports transformers."""

from recurrent_depth.hf.grafting import graft, is_graft, ungraft
from recurrent_depth.hf.host_first import HostFirst

__all__ = ["HostFirst", "graft", "is_graft", "ungraft"]
