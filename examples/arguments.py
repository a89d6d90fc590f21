"""The arguments of `train.py`: their defaults are a small model for two CPU cores, or one of the paper's."""

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import tyro

Preset = Literal[
    "cpu",
    "gpt2_small",
    "gpt2_medium",
    "gpt2_large",
    "grt_small",
    "grt_medium",
    "grt_large",
    "grt_medium_isoparams",
    "grt_large_isoparams",
]


@dataclass(frozen=True)
class DataArguments:
    """What to train on."""

    data: Path | None = None
    """A text file, a folder of text files, or token ids (.bin or .npy of uint16). By default the Python standard
    library's own sources on this machine."""
    bpe: int | None = None
    """Train a byte-pair encoding of so many tokens on the text. By default every byte is a token."""
    gpt2_files: Path | None = None
    """A folder with GPT-2's encoder.json and vocab.bpe, to use its encoding."""
    vocab_size: int | None = None
    """How many ids a token file may hold; for token files only."""


@dataclass(frozen=True)
class ModelArguments:
    """Which models to train, one after the other, and their sizes. With --preset the preset says all this."""

    model: tuple[Literal["grt", "dense", "naive"], ...] = ("grt", "dense")
    """dense runs as many blocks as the GRT; naive is a plain loop that also stores as many."""
    layout: tuple[int, int, int, int] = (0, 2, 4, 0)
    """Blocks before the loop, in it, its steps, blocks behind it."""
    form: Literal["gpt2", "llama"] = "llama"
    """The family of blocks: LayerNorm, learned positions and GELU, or RMSNorm, rotary positions and SwiGLU."""
    dim: int = 128
    """The width."""
    num_heads: int = 4
    """Attention heads."""
    context_length: int = 256
    """Tokens per window."""
    init_std: float = 0.06
    """Standard deviation of the initial weights. GPT-2's 0.02 is meant for wider models."""
    gate_bias: float = 0.0
    """Where the gate starts: +4 keeps 98% of the state per step, as in the paper, and hardly opens in a short run."""
    state_noise: float = 0.1
    """Standard deviation of the noise on the projected state, in training."""
    gate_noise: float = 0.1
    """Standard deviation of the noise on the gate's logits, in training."""

    def __post_init__(self) -> None:
        _require_above(0, self, "init_std")
        _require_above(1, self, "context_length")
        _require_finite(self, "init_std", "gate_bias")


@dataclass(frozen=True)
class DepthArguments:
    """How many steps the loop takes in training; drawn once per optimizer step. Evaluation runs all of them."""

    depth: Literal["uniform", "fixed", "poisson"] = "uniform"
    """uniform: 1 to full depth, evenly. fixed: full depth. poisson: heavy-tailed, see --mean-steps."""
    mean_steps: float | None = None
    """For poisson: the draws average one more than this. By default they average full depth."""
    grad_steps: int | None = None
    """Back-propagate through the last so many steps only. By default through all."""

    def __post_init__(self) -> None:
        if self.mean_steps is not None and self.depth != "poisson":
            raise ValueError(f"mean_steps is {self.mean_steps}, but only --depth poisson has a mean to choose.")
        if self.mean_steps is not None:
            _require_above(0, self, "mean_steps")
            _require_finite(self, "mean_steps")
        if self.grad_steps is not None:
            _require_above(0, self, "grad_steps")


@dataclass(frozen=True)
class RecipeArguments:
    """How to train."""

    steps: int = 550
    """Optimizer steps."""
    batch_size: int = 8
    """Windows per process and forward."""
    accumulation: int = 1
    """Forwards per optimizer step."""
    lr: float = 3e-3
    """Peak learning rate of AdamW (betas 0.9 and 0.95)."""
    floor: float = 0.1
    """Where the cosine ends, as a share of the peak."""
    warmup: int | None = None
    """Steps of linear warm-up. By default a tenth of all, at most 20, or 2000 as in the paper with --preset."""
    weight_decay: float = 0.1
    """On matrices only."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    gate_lr_scale: float = 1.0
    """Multiplies the learning rate of the GRT's gate."""
    bf16: bool = False
    """Compute in bfloat16 where that is safe (autocast); the weights stay float32."""
    seed: int = 0
    """Of the weights, the batches, the depths and the noise."""
    checkpointing: bool = False
    """Keep one state per step and recompute the rest in the backward pass: less memory, more time."""
    compile: bool = False
    """Compile one step of the loop with torch.compile."""

    def __post_init__(self) -> None:
        _require_above(0, self, "steps", "batch_size", "accumulation", "lr", "clip", "gate_lr_scale")
        _require_above(-1, self, "seed")
        _require_finite(self, "lr", "gate_lr_scale", "weight_decay")
        if self.warmup is not None and not 0 <= self.warmup <= self.steps:
            raise ValueError(f"warmup is {self.warmup}, but must be from 0 to steps, {self.steps}.")
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor is {self.floor}, but must be a share of the learning rate, from 0 to 1.")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay is {self.weight_decay}, but must be at least 0.")


@dataclass(frozen=True)
class RunArguments:
    """Where the run lies and how often it reports. These may change when a run goes on."""

    out: Path = Path("runs/default")
    """Folder of logs, checkpoints, plot and metrics.json. An unfinished run that lies there goes on."""
    save_every: int = 100
    """Steps between checkpoints; the last two stay."""
    eval_every: int = 50
    """Steps between looks at the held-out text."""
    tensorboard: bool = False
    """Also write the log for TensorBoard."""

    def __post_init__(self) -> None:
        _require_above(0, self, "save_every", "eval_every")


@dataclass(frozen=True)
class Arguments:
    """Trains recurrent-depth Transformers on text and compares them.

    Run the same command again to go on where it stopped.
    """

    preset: Preset = "cpu"
    """One of the paper's models with the paper's recipe, or small models for two CPU cores."""
    data: DataArguments = field(default_factory=DataArguments)
    model: ModelArguments = field(default_factory=ModelArguments)
    depth: DepthArguments = field(default_factory=DepthArguments)
    recipe: RecipeArguments = field(default_factory=RecipeArguments)
    run: RunArguments = field(default_factory=RunArguments)

    def __post_init__(self) -> None:
        if self.preset != "cpu" and self.model != ModelArguments():
            changed = [k for k, v in asdict(self.model).items() if v != asdict(ModelArguments())[k]]
            raise ValueError(
                f"{', '.join(changed)} cannot be given with --preset {self.preset}, which says it already."
            )

    @property
    def warmup_steps(self) -> int:
        """Steps of linear warm-up, those asked for or the default."""
        if self.recipe.warmup is not None:
            return self.recipe.warmup
        return min(20 if self.preset == "cpu" else 2_000, self.recipe.steps // 10)


def _require_above(limit: int, arguments: object, *names: str) -> None:
    for name in names:
        value = getattr(arguments, name)
        if not value > limit:
            raise ValueError(f"{name} is {value}, but must be above {limit}.")


def _require_finite(arguments: object, *names: str) -> None:
    for name in names:
        if not math.isfinite(getattr(arguments, name)):
            raise ValueError(f"{name} is {getattr(arguments, name)}, but must be finite.")


# 491,520 tokens per step: 8 windows of 1,024 tokens, 60 times.
PAPER_RECIPE = RecipeArguments(
    steps=20_000, batch_size=8, accumulation=60, lr=6e-4, floor=0.1, weight_decay=0.1, clip=1.0, bf16=True
)


def parse(command_line: list[str] | None = None) -> Arguments:
    """Reads the command line; the defaults are those of the preset that it names.

    Raises:
        ValueError: for values that contradict each other.
    """

    @dataclass(frozen=True)
    class First:
        preset: Preset = "cpu"

    first, _ = tyro.cli(First, args=command_line, return_unknown_args=True, add_help=False)
    paper = Arguments(preset=first.preset, recipe=PAPER_RECIPE, run=RunArguments(save_every=500, eval_every=500))
    default = Arguments() if first.preset == "cpu" else paper
    return tyro.cli(Arguments, args=command_line, default=default, config=(tyro.conf.OmitArgPrefixes,))
