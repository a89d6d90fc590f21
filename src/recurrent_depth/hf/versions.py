"""Which releases of transformers this library goes with, and what they call differently."""

import importlib.metadata
import inspect
import re

from recurrent_depth.extras import install

FLOOR = (5, 8, 1)


def require_floor(found: str) -> None:
    """Raises an ImportError for a release of transformers that is too old."""
    if tuple(int(part) for part in re.findall(r"\d+", found)[:3]) < FLOOR:
        floor = ".".join(map(str, FLOOR))
        raise ImportError(
            f"recurrent_depth.hf needs transformers {floor} or newer, below 6, but {found} is installed: "
            f"pip install 'transformers>={floor},<6'"
        )


try:
    require_floor(importlib.metadata.version("transformers"))
except importlib.metadata.PackageNotFoundError:
    raise ImportError(f"recurrent_depth.hf needs transformers, {install('hf')}") from None

from transformers.masking_utils import create_causal_mask  # noqa: E402

CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
"""What a cache is called, in arguments and outputs: `past_key_values` up to transformers 5.23, `cache` from 5.24 on."""
