"""Optional packages: what to install where one is missing."""

import importlib.util


def require_extra(package: str, extra: str, purpose: str) -> None:
    """Says which extra brings a package that is not installed.

    Raises:
        ModuleNotFoundError: if it is not.
    """
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(f"{purpose} needs {package}, {install(extra)}", name=package)


def install(extra: str) -> str:
    """How an extra is installed, to stand at the end of a sentence."""
    return f"which the extra {extra!r} brings; in a checkout: pip install -c constraints.txt -e '.[{extra}]'"
