"""Says what to install where a package is missing; imported before all that would fail without it."""

import importlib.util
import sys

INSTALL = 'pip install -c constraints.txt -e ".[train,hf]" peft'


def require_installed(*packages: str) -> None:
    """Ends the program with the packages that are missing, and how to install them."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        sys.exit(f"error: {', '.join(missing)} missing. In the checkout: {INSTALL}")


require_installed("accelerate", "matplotlib", "peft", "safetensors", "tokenizers", "tqdm", "transformers", "tyro")
