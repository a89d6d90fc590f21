"""What form of answer a host expects of a layer: a slot must give it before the layer has run."""

import ast
import functools
import inspect
import textwrap

from torch import nn


@functools.cache
def gives_tuple(layer: type[nn.Module]) -> bool:
    """Whether `forward` returns a tuple, read from its source. False where there is none to read.

    Annotations are no help: those of gemma3's layers promise a tuple, and bloom's have none.
    """
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(layer.forward)))
    except (OSError, TypeError):
        return False
    function = ast.parse(source).body[0]
    returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    names = {value.id for value in returned if isinstance(value, ast.Name)}
    assigned = [node.value for node in ast.walk(function) if isinstance(node, ast.Assign) and _targets(node) & names]
    return any(_is_tuple(value) for value in returned + assigned)


def _targets(node: ast.Assign) -> set[str]:
    return {target.id for target in node.targets if isinstance(target, ast.Name)}


def _is_tuple(value: ast.expr | None) -> bool:
    if isinstance(value, ast.BinOp):  # outputs = (hidden_states,) + outputs
        return _is_tuple(value.left) or _is_tuple(value.right)
    return isinstance(value, ast.Tuple)


def check_answerable(layer: nn.Module) -> None:
    """Refuses a layer that makes something for the layers behind it to read, which a slot cannot give.

    Raises:
        ValueError: for the form of T5 and WavLM, where a layer gives the position bias that it made.
    """
    takes = "position_bias" in inspect.signature(layer.forward).parameters
    if takes and any(hasattr(part, "compute_bias") for part in layer.modules()):
        raise ValueError(
            f"{type(layer).__name__} makes a position bias (compute_bias) and hands it to the layers behind it "
            "(position_bias), but a loop's layers hand on nothing beside the hidden state. Such layers cannot loop."
        )
