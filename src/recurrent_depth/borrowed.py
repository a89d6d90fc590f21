"""A module that belongs to another one, called from a second place."""

from typing import Any

from torch import nn


class Borrowed(nn.Module):
    """Calls a module that another one owns: the final norm inside the loop, a teacher inside an objective.

    Its parameters are not this module's: each keeps one name, and what moves, trains or saves them is the owner.
    Copying a model that holds both keeps them together.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self._module = (module,)  # in a tuple, where torch does not look for modules

    @property
    def module(self) -> Any:
        """The module."""
        return self._module[0]

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """What the module gives."""
        return self.module(*arguments, **named)

    def extra_repr(self) -> str:
        """Whose it is, for `print(model)`."""
        return type(self.module).__name__
