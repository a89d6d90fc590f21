"""What every Hugging Face model of ours has in common: where it stands in the library, and how its weights start."""

from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

import recurrent_depth as rd
from recurrent_depth.hf.configuration import RecurrentDepthConfig
from recurrent_depth.initialisation import initialise


class RecurrentDepthPreTrainedModel(PreTrainedModel):
    """A model of transformers around the native one, `native`."""

    config_class = RecurrentDepthConfig
    config: RecurrentDepthConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _no_split_modules = ["RecurrentDepthModel"]  # no module within it but the blocks is called as a whole
    _skip_keys_device_placement = ["cache", "past_key_values"]

    @property
    def native(self) -> rd.RecurrentTransformer:
        """The library's own model, which computes everything: for `rd.generate`, `rd.accounting`, `compile_step`."""
        return self._base.transformer

    @property
    def _base(self) -> Any:
        return self.base_model

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Gives every weight that was not loaded its start, as the builder does: the gate its bias, and so on."""
        with guard_torch_init_functions():  # leaves alone what was loaded
            initialise(self.native)
            for policy in self._base.kv.modules():
                if callable(getattr(policy, "reset_parameters", None)):
                    policy.reset_parameters()

    def _init_weights(self, module: nn.Module) -> None:
        """Starts a layer that takes the place of another one, such as a longer embedding."""
        std, draw = self.native.weight_start
        if isinstance(module, nn.Linear | nn.Embedding):
            draw(module.weight, std)
            bias: Any = getattr(module, "bias", None)
            if bias is not None:
                nn.init.zeros_(bias)

    def get_input_embeddings(self) -> nn.Module:
        """The table of the tokens."""
        return self.native.embed.token

    def set_input_embeddings(self, value: Any) -> None:
        """Puts another table in its place."""
        self.native.embed.token = value

    def get_output_embeddings(self) -> nn.Module | None:
        """The head's linear layer; None where the head is the table of the tokens."""
        return self.native.head.linear if isinstance(self.native.head, rd.Head) else None

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        """Puts another linear layer into the head."""
        self.native.head.linear = new_embeddings

    def resize_token_embeddings(self, *arguments: Any, **named: Any) -> nn.Module:
        """Changes the size of the vocabulary.

        Raises:
            ValueError: for `"ple"`, which has tables of its own.
        """
        if self.config.builder == "ple" and any((*arguments, *named.values())):
            raise ValueError("A ple model has an embedding of each token for each step: its vocabulary has one size.")
        return super().resize_token_embeddings(*arguments, **named)


def mark_started(module: nn.Module) -> None:
    """Tells transformers that the builder has given all weights their start; those on the meta device have none."""
    for tensor in chain(module.parameters(), module.buffers()):
        if tensor.device.type != "meta":
            tensor._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue]
