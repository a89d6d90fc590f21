"""JSON files that are there whole or not at all."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_json(path: Path, *keys: str) -> dict[str, Any]:
    """What a file holds, which has these keys.

    Raises:
        ValueError: if it is damaged: it can be deleted, and what made it makes it again.
    """
    try:
        content = json.loads(path.read_text())
        missing = [key for key in keys if key not in content]
        if missing or not isinstance(content, dict):
            raise ValueError(f"no {', '.join(missing) or 'object'} in it")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}). Delete it, and the same command makes it again.") from None
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Puts it in place by a rename: who finds the file finds all of it."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content))
    temporary.replace(path)
