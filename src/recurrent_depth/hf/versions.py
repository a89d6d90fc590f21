"""What releases of transformers call differently."""

import inspect

from transformers.masking_utils import create_causal_mask

CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
"""What a cache is called, in arguments and outputs: `past_key_values` up to transformers 5.23, `cache` from 5.24 on."""
