"""What a looped model's forward gives beside what every model of transformers does."""

from dataclasses import dataclass
from typing import no_type_check

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast


# Accelerate makes outputs of a dictionary, in place of the first field: their types are not to be checked.
@no_type_check
@dataclass
class RecurrentDepthOutput(BaseModelOutputWithPast):
    """The states that the head reads, and what led to them.

    Attributes:
        last_hidden_state: (batch, token, dim), behind the final norm.
        hidden_states: with `output_hidden_states`, `prelude + steps + coda + 2` of them: the embedding, what each
            block of the prelude gives, the state after each step of the loop, what each block of the coda gives, and
            `last_hidden_state`.
        step_states: with `output_steps`, the state after each step: the loop's part of `hidden_states`.
        gates: with `output_steps`, what each step's gate kept, (batch, token), the mean over the features: the paper's
            g. 0 where a step replaces the state.
        losses: auxiliary losses by name, of routers and halting; None where there are none.
    """

    step_states: tuple[Tensor, ...] | None = None
    gates: tuple[Tensor, ...] | None = None
    losses: dict[str, Tensor] | None = None


@no_type_check
@dataclass
class RecurrentDepthCausalLMOutput(CausalLMOutputWithPast):
    """Logits, loss, and what led to them.

    Attributes:
        loss: with labels, the cross-entropy in nats per target, plus the auxiliary losses.
        logits: (batch, token, vocab).
        hidden_states: as `RecurrentDepthOutput` has them.
        step_states: as `RecurrentDepthOutput` has them.
        gates: as `RecurrentDepthOutput` has them.
        losses: as `RecurrentDepthOutput` has them.
    """

    step_states: tuple[Tensor, ...] | None = None
    gates: tuple[Tensor, ...] | None = None
    losses: dict[str, Tensor] | None = None
