"""A host's layers that share weights: one set of them runs at every step, under the corrections of that step."""

from collections.abc import Iterable, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from recurrent_depth.contracts import At, KeyValues
from recurrent_depth.corrections import Matrix, linear_matrix
from recurrent_depth.hf.host_calls import HostCall
from recurrent_depth.relaxation import StepCorrections


def host_matrix(layer: nn.Module) -> Matrix | None:
    """The matrix of an `nn.Linear`, or of GPT-2's linear layer, which stores it as (in, out)."""
    if isinstance(layer, Conv1D):
        return Matrix(layer.weight, layer.nf, layer.nx, transposed=True)
    return linear_matrix(layer)


class TiedLayers(nn.Module):
    """Layers that are their host's, run in order with the arguments of some calls."""

    def __init__(self, layers: Iterable[nn.Module]):
        super().__init__()
        for index, layer in enumerate(layers):
            self.add_module(str(index), layer)

    def forward(
        self, x: Float[Tensor, "batch token dim"], calls: Sequence[HostCall]
    ) -> Float[Tensor, "batch token dim"]:
        """The last layer's output."""
        for layer, call in zip(self.children(), calls, strict=True):
            x = call._replace(run=layer.run_layer)(x)[0]
        return x


class TiedStack(nn.Module):
    """Runs tied layers under the corrections of a step, with what the host called the layers of that step with.

    Args:
        layers: the tied ones.
        num_steps: how many steps there are corrections for.
        rank: of each correction.
        skip_first: the first step runs the bare tied layers.
        vectors: norms and biases get an offset per step too.
    """

    def __init__(self, layers: Sequence[nn.Module], num_steps: int, rank: int, *, skip_first: bool, vectors: bool):
        super().__init__()
        tied = TiedLayers(layers)
        self.num_tied = len(layers)
        self.corrections = StepCorrections(
            tied, num_steps, rank, skip_first=skip_first, vectors=vectors, matrix_of=host_matrix, name_of=_flat
        )
        self._tied = (tied,)  # in a tuple, so that the layers keep the host's names alone

    @property
    def tied(self) -> TiedLayers:
        """The layers."""
        return self._tied[0]

    def forward(
        self, x: Float[Tensor, "batch token dim"], at: At, step: int = 0, kv: Sequence[KeyValues] | None = None
    ) -> Float[Tensor, "batch token dim"]:
        """The tied layers' output at this step."""
        slots = at.extra["slots"]
        calls: Any = at.extra["calls"][step * self.num_tied : (step + 1) * self.num_tied]
        if slots is not None:
            calls = [call.with_cache(slots.view(step)) for call in calls]
        return self.corrections(self.tied, step, x, calls)


def _flat(path: str) -> str:
    """A name of one piece: what selects the host's layers by their last name, as adapters do, finds them alone."""
    return path.replace(".", "_")
