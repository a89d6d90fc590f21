"""Relaxed tying: the shared weights plus a low-rank correction for each step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from recurrent_depth.arguments import require_whole
from recurrent_depth.contracts import At, BlockCost, KeyValues
from recurrent_depth.corrections import LowRank, Matrix, MatrixOf, Offset, linear_matrix, make_correctable
from recurrent_depth.moments import Moment
from recurrent_depth.numerics import at_least_float32


class StepCorrections(nn.Module):
    """Low-rank corrections, one per step, of every linear layer inside a module that stays its caller's own.

    `corrections(module, step, *arguments)` calls the module with each of its linear layers giving `base(x) + B A x`. It
    takes any module, over quantised layers too, as long as its linear layers are called: a fused kernel that takes
    their weights past them is not corrected. Whoever recomputes activations must recompute this whole call, as the
    core's `checkpointing` does; a checkpoint inside of the module would be recomputed without corrections.

    Args:
        module: its linear layers are corrected. They get a forward hook, idle outside of such a call.
        num_steps: how many steps there are.
        rank: of each correction, at most that of the layer; 0 corrects no layer.
        skip_first: step 0 runs the bare module.
        vectors: the module's vectors, such as biases and the scales of norms, get an offset per step too.
        matrix_of: says which layers are linear, and what their matrices are; `nn.Linear` by default.
        name_of: what a correction is called, by the path of what it corrects; that path itself by default.

    Raises:
        ValueError: if `num_steps` is below 1 or `rank` below 0, if `skip_first` leaves no step, if there is no
            linear layer inside, or one is corrected already; in a call, if the step has no correction. They are never
            used in turn.

    Reference: Bae et al., 2024, arXiv 2410.20672; the vectors' offsets are ours.
    """

    def __init__(
        self,
        module: nn.Module,
        num_steps: int,
        rank: int,
        *,
        skip_first: bool = False,
        vectors: bool = False,
        matrix_of: MatrixOf = linear_matrix,
        name_of: Callable[[str], str] = str,
    ):
        super().__init__()
        self.num_steps = require_whole("num_steps", num_steps, at_least=1)
        self.first, rank = int(skip_first), require_whole("rank", rank, at_least=0)
        if self.num_steps == self.first:
            raise ValueError("num_steps is 1 and skip_first leaves the first step bare: there is none to correct.")
        num_corrected = self.num_steps - self.first
        matrices = _matrices(module, matrix_of) if rank > 0 else {}
        for name in matrices:
            make_correctable(name, module.get_submodule(name))
        self.transposed = {f"{name}.weight" for name, matrix in matrices.items() if matrix.transposed}
        self.layers = {name: LowRank(matrix, num_corrected, rank) for name, matrix in matrices.items()}
        given = {name: vector for name, vector in module.named_parameters() if vector.ndim == 1 and vectors}
        self.vectors = {name: Offset(vector, num_corrected) for name, vector in given.items()}
        _plant(self, {name_of(path): part for path, part in (self.layers | self.vectors).items()})

    def forward(self, module: nn.Module, step: int, *arguments: Any, **named: Any) -> Any:
        """`module(*arguments, **named)` under the corrections of this step."""
        return functional_call(module, self.at(module, step), arguments, named, tie_weights=False)

    def at(self, module: nn.Module, step: int) -> dict[str, Tensor]:
        """What a step puts into the module: factors by the names under which the layers read them, and vectors."""
        if not 0 <= step < self.num_steps:
            raise ValueError(
                f"step {step + 1} has no correction, since they were made for {self.num_steps} steps: ask for at most "
                f"num_steps={self.num_steps}."
            )
        place = max(step - self.first, 0)
        factors = {
            _path(module, at, name): x for at, layer in self.layers.items() for name, x in layer.at(place).items()
        }
        offsets = {_path(module, *_split(name)): vector.offset[place] for name, vector in self.vectors.items()}
        if step < self.first:  # zeros: at depth 1 too every correction then has a gradient, as data-parallel runs need
            factors, offsets = ({name: 0 * x for name, x in group.items()} for group in (factors, offsets))
        return factors | {name: module.get_parameter(name) + offset for name, offset in offsets.items()}

    @torch.no_grad()
    def fit(self, tied: nn.Module, steps: Sequence[nn.Module]) -> None:
        """Makes the tied module at each step as near as the rank allows to another one of the same form.

        At full rank, and with `vectors`, it is those modules, up to rounding.

        Raises:
            ValueError: if these are not one module for each step, or not of the form of the tied one.
        """
        if len(steps) != self.num_steps:
            raise ValueError(f"steps holds {len(steps)} modules, but must hold one for each of {self.num_steps} steps.")
        wanted = [dict(step.named_parameters()) for step in steps[self.first :]]
        weights = {f"{name}.weight": layer for name, layer in self.layers.items()}
        for name, correction in (weights | self.vectors).items():
            base = tied.get_parameter(name)
            if any(name not in step or step[name].shape != base.shape for step in wanted):
                raise ValueError(f"The blocks must be alike to share weights, but {name!r} is not the same in all.")
            residuals = torch.stack([at_least_float32(step[name]) - base for step in wanted])
            correction.fit(residuals.mT if name in self.transposed else residuals)

    def cost(self) -> BlockCost:
        """Both factors of one step of every layer, per token, at as many steps as there are."""
        factors = [factor[0].numel() for layer in self.layers.values() for factor in (layer.A, layer.B)]
        return BlockCost(linear=2 * sum(factors), max_steps=self.num_steps)

    def widest(self) -> int:
        """The widest output that is corrected."""
        return max((layer.B.shape[1] for layer in self.layers.values()), default=0)


class RelaxedStack(nn.Module):
    """A stack whose tied weights get a low-rank correction at each step; parameters of the stack keep their names.

    At rank 0, and before anything is learned, it is the stack that it wraps.

    Args:
        stack: the tied blocks: a `Stack`, or another module that has `blocks` and is called as one.
        num_steps: how many steps there are corrections for.
        rank: of each correction.
        skip_first: the first step runs the bare tied weights.
        vectors: biases and the scales of norms get an offset per step too.

    Raises:
        ValueError: as `StepCorrections`; in a forward, at a step beyond the corrections.

    Reference: Bae et al., 2024, arXiv 2410.20672.
    """

    def __init__(self, stack: nn.Module, num_steps: int, rank: int, *, skip_first: bool = False, vectors: bool = False):
        super().__init__()
        if not isinstance(getattr(stack, "blocks", None), nn.ModuleList):
            raise ValueError(
                f"stack is of {type(stack).__name__}, but must hold its blocks as `blocks`: give rd.Stack(blocks), or "
                "model.core.stack of a model."
            )
        self.blocks = stack.blocks
        self.corrections = StepCorrections(stack, num_steps, rank, skip_first=skip_first, vectors=vectors)
        self._tied = (stack,)  # in a tuple, so that the blocks have one name alone

    def forward(
        self, x: Float[Tensor, "batch token dim"], at: At, step: int = 0, kv: Sequence[KeyValues] | None = None
    ) -> Float[Tensor, "batch token dim"]:
        """The stack's output under the corrections of this step."""
        return self.corrections(self._tied[0], step, x, at, step, kv)

    def cost(self) -> BlockCost:
        """The stack and the factors of one step."""
        tied = self._tied[0].cost()
        # Before they are summed, a layer's output and its correction are alive beside what the stack itself holds.
        live = tuple(moment.plus(Moment(numbers=self.corrections.widest())) for moment in tied.live)
        return tied._replace(live=live).plus(self.corrections.cost())


def _matrices(module: nn.Module, matrix_of: MatrixOf) -> dict[str, Matrix]:
    asked = {name: matrix_of(layer) for name, layer in module.named_modules()}
    found = {name: matrix for name, matrix in asked.items() if matrix is not None}
    if not found or "" in found:  # the module itself has the empty name
        raise ValueError(f"module is a {type(module).__name__}, but must contain linear layers (nn.Linear).")
    return found


def _split(name: str) -> tuple[str, str]:
    path, _, last = name.rpartition(".")
    return path, last


def _path(module: nn.Module, path: str, name: str) -> str:
    """Where a layer holds a tensor, also if something was wrapped around the layer since, such as another adapter."""
    holders = module.get_submodule(path).named_modules(prefix=path)
    place = next((at for at, part in holders if name in part._parameters or name in part._buffers), None)
    if place is None:
        raise ValueError(f"{type(module).__name__} has no {path}.{name}: it is not the module that was corrected.")
    return f"{place}.{name}".lstrip(".")


def _plant(root: nn.Module, parts: Mapping[str, nn.Module]) -> None:
    """Adds each part under its dotted name, through plain modules on the way."""
    for path, part in parts.items():
        *parents, name = path.split(".")
        place = root
        for parent in parents:
            if parent not in dict(place.named_children()):
                place.add_module(parent, nn.Module())
            place = place.get_submodule(parent)
        place.add_module(name, part)
