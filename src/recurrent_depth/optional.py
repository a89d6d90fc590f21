"""Modules that may be left out."""

from torch import nn

from recurrent_depth.arguments import require_instance


def module_or_identity(name: str, module: nn.Module | None, example: str = "") -> nn.Module:
    """The module; the identity where there is none.

    Raises:
        ValueError: for anything that is no module, such as a number or a class.
    """
    if module is None:
        return nn.Identity()
    require_instance(name, module, nn.Module, example)
    return module
