"""The native model as a model of transformers."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationMixin
from transformers.cache_utils import Cache, DynamicCache
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple

import recurrent_depth as rd
from recurrent_depth.depth import as_depth
from recurrent_depth.hf.attention import host_attention
from recurrent_depth.hf.auxiliary import with_auxiliary
from recurrent_depth.hf.cache import StepSlots
from recurrent_depth.hf.cache_views import model_views
from recurrent_depth.hf.configuration import RecurrentDepthConfig
from recurrent_depth.hf.generation_depth import told_depth
from recurrent_depth.hf.inputs import complete_mask, kept_tokens, require_together, require_tokens, where
from recurrent_depth.hf.outputs import RecurrentDepthCausalLMOutput, RecurrentDepthOutput
from recurrent_depth.hf.parts import policy_of
from recurrent_depth.hf.passing import hidden_states, recorded, run
from recurrent_depth.hf.pretrained import RecurrentDepthPreTrainedModel, mark_started
from recurrent_depth.hf.versions import CACHE
from recurrent_depth.update_answers import cost_of

logger = logging.get_logger(__name__)

NumSteps = int | rd.Depth | Sequence[int] | None


class RecurrentDepthModel(RecurrentDepthPreTrainedModel):
    """A looped model without its head: token ids to the states that the head reads.

    Attributes:
        transformer: the native model, which computes everything.
        kv: which steps' keys and values a cache stores.
        num_steps: the depth of a forward that is told none: full depth, unless it is set to something else, as
            `SampleDepth` does for each optimiser step.
        is_routed: whether a router picks tokens, so that a cache of transformers, which holds whole batches, will not
            do.
        gradient_checkpointing: whether each step is recomputed in the backward pass, never re-entrantly.
    """

    def __init__(self, config: RecurrentDepthConfig):
        super().__init__(config)
        self.transformer, self.kv = config.build(), policy_of(config.kv)
        self.num_steps: int | rd.Depth = self.transformer.num_steps
        self.is_routed = cost_of(self.transformer.core.update, self.num_steps).selects
        host_attention(self.transformer, config)
        mark_started(self)
        self.post_init()

    @property
    def gradient_checkpointing(self) -> bool:
        return self.transformer.core.checkpointing

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, value: bool) -> None:
        self.transformer.core.checkpointing = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        num_steps: NumSteps = None,
        output_hidden_states: bool | None = None,
        output_steps: bool = False,
        **unknown: Any,
    ) -> RecurrentDepthOutput:
        """The states that the head reads after `num_steps` steps; full depth by default.

        Args:
            input_ids: token ids, (batch, token).
            attention_mask: 1 at real tokens, 0 at padding, over all keys, (batch, key); or complete, (batch, 1, query,
                key), True or 0.0 where a token may look.
            position_ids: (batch, token); counted from each row's first real token by default.
            past_key_values: a cache, by its name up to transformers 5.23.
            cache: a cache, by its name from transformers 5.24 on.
            use_cache: whether a cache is made where none is given; by default as the configuration says, and in
                training mode not.
            num_steps: one number for all rows, an `rd.Depth`, or, without a cache, a number for each row.
            output_hidden_states: keep the states between the blocks; see `RecurrentDepthOutput`.
            output_steps: keep the state after each step, and what its gate kept.
            unknown: refused, unless None or False.

        Raises:
            ValueError: for what the native model refuses, for arguments that mean nothing here, for a cache beside a
                router, which leaves tokens out, and for weights that were spread over several devices or the disk.
        """
        tokens, native = require_tokens(input_ids, unknown), self.transformer
        require_together(native, tokens)
        between_too = bool(self.config.output_hidden_states if output_hidden_states is None else output_hidden_states)
        depth = as_depth(self.num_steps if num_steps is None else num_steps, batch=len(tokens))
        cache = self._cache(past_key_values if cache is None else cache, use_cache)
        given = where(tokens, attention_mask, position_ids, cache)
        slots = None if cache is None else self._slots(cache, depth)
        kv = None if slots is None else model_views(slots)
        with recorded(native, between_too) as between:
            passed = run(native, tokens, depth, given, kv, every_step=output_steps or between_too)
        if slots is not None:
            slots.close()
        with_cache: dict[str, Any] = {CACHE: cache}
        return RecurrentDepthOutput(
            last_hidden_state=passed.hidden,
            hidden_states=hidden_states(native, between, passed) if between_too else None,
            step_states=tuple(state.h for state in passed.states) if output_steps else None,
            gates=tuple(1 - state.write for state in passed.states) if output_steps else None,
            losses=passed.losses or None,
            **with_cache,
        )

    def _cache(self, cache: Cache | None, use_cache: bool | None) -> Cache | None:
        if self.is_routed and (cache is not None or use_cache):
            raise ValueError(
                "A router leaves tokens out, and a cache of transformers holds all of them: pass use_cache=False, or "
                "use rd.generate(model.native, ...), whose cache knows."
            )
        if cache is not None:
            return cache
        if self.training and self.gradient_checkpointing and use_cache:
            logger.warning_once("use_cache=True is passed over: recomputed steps would write to the cache twice.")
            return None
        wanted = self.config.use_cache and not (self.training or self.is_routed) if use_cache is None else use_cache
        return DynamicCache(config=self.config) if wanted else None

    def _slots(self, cache: Cache, depth: rd.Depth) -> StepSlots:
        layout = self.transformer.layout
        place = {"first": layout.prelude, "num_core": layout.core, "num_layers": layout.stored}
        return StepSlots(cache, **place, policy=self.kv, num_steps=depth.num_steps)


class RecurrentDepthForCausalLM(RecurrentDepthPreTrainedModel, GenerationMixin):
    """A looped language model: whatever transformers does with causal models, at any depth.

    `generate` takes `num_steps=` too.

    Attributes:
        model: the `RecurrentDepthModel`, whose native model has the head as well.
    """

    def __init__(self, config: RecurrentDepthConfig):
        super().__init__(config)
        self.model = RecurrentDepthModel(config)
        if self.model.is_routed:
            self.generation_config.use_cache = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        num_steps: NumSteps = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        **more: Any,
    ) -> RecurrentDepthCausalLMOutput:
        """Logits after `num_steps` steps, and with labels the loss.

        Args:
            input_ids: as `RecurrentDepthModel` takes it.
            attention_mask: as `RecurrentDepthModel` takes it.
            position_ids: as `RecurrentDepthModel` takes it.
            past_key_values: as `RecurrentDepthModel` takes it.
            cache: as `RecurrentDepthModel` takes it.
            labels: the tokens again, -100 where there is nothing to predict; they are shifted in here.
            use_cache: as `RecurrentDepthModel` takes it.
            num_steps: as `RecurrentDepthModel` takes it.
            logits_to_keep: logits of so many last tokens alone, or of the tokens at these indices; 0 for all.
            num_items_in_batch: targets in all batches whose gradients are added up; by default those in this one.
            more: `output_hidden_states` and `output_steps`; whatever else is refused, unless None or False.

        Raises:
            ValueError: as `RecurrentDepthModel`.
        """
        passed = {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": use_cache}
        passed |= {"cache": past_key_values if cache is None else cache, "num_steps": num_steps, "return_dict": True}
        made = self.model(input_ids, **passed, **more)
        hidden = made.last_hidden_state[:, kept_tokens(logits_to_keep)]
        logits = self.native.head(hidden, self.native.embed.token.weight)
        loss = None
        if labels is not None:
            loss = self._loss(logits, labels, num_items_in_batch, made.losses or {})
        kept = {name: made[name] for name in ("hidden_states", "step_states", "gates", "losses", CACHE) if name in made}
        return RecurrentDepthCausalLMOutput(loss=loss, logits=logits, **kept)

    def _loss(
        self, logits: Tensor, labels: Tensor, num_items: int | Tensor | None, losses: dict[str, Tensor]
    ) -> Tensor:
        sizes = {"vocab_size": self.config.vocab_size, "num_items_in_batch": num_items}
        return with_auxiliary(self.loss_function(logits=logits, labels=labels, **sizes), losses, labels, num_items)

    _prepare_generation_config = told_depth(GenerationMixin)

    def create_masks_for_generate(
        self, *, inputs_embeds: Tensor, attention_mask: Tensor | None, **named: Any
    ) -> Tensor:
        """The complete mask of a cache of fixed size, for `generate`."""
        return complete_mask(attention_mask, named[CACHE], inputs_embeds.shape[:2])


AutoConfig.register(RecurrentDepthConfig.model_type, RecurrentDepthConfig, exist_ok=True)
AutoModel.register(RecurrentDepthConfig, RecurrentDepthModel, exist_ok=True)
AutoModelForCausalLM.register(RecurrentDepthConfig, RecurrentDepthForCausalLM, exist_ok=True)
