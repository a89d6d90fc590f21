"""Recurrent models as lm-evaluation-harness sees them. It needs `lm-eval`, which the extra `eval` brings."""

# pyright: reportAttributeAccessIssue=false, reportMissingImports=false
# (It takes the launcher beside this file for the harness.)
import inspect
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from recurrent_depth.extras import require_extra

require_extra("lm_eval", "eval", "recurrent_depth.hf.harness")

# ruff: noqa: E402
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedModel

from recurrent_depth.arguments import require_whole
from recurrent_depth.depth import as_depth
from recurrent_depth.hf.loading import load_graft
from recurrent_depth.hf.sampled_depth import loops
from recurrent_depth.hf.saved_settings import read_object
from recurrent_depth.hf.saving import CONFIG, unsealed


class Grafts:
    """Loads folders of grafts, where the harness expects an Auto class."""

    from_pretrained = staticmethod(load_graft)


class RecurrentLM(HFLM):
    """The harness's own Hugging Face model, which also loads grafts and evaluates at a fixed number of steps.

    Args:
        pretrained: a folder of a native model or of a graft, or a model. What has no loop is the harness's `hf`.
        num_steps: how many steps every request takes; by default as many as the model does by itself. It stands in
            the results, beside the model's arguments.
        arguments: those of the harness's model `hf`.

    Raises:
        ModuleNotFoundError: at the import, if the harness is not installed.
        ValueError: if `num_steps` is not a whole number of at least 1, an argument is not known, there is no such
            folder, or the model has no steps.
    """

    def __init__(self, pretrained: str | PreTrainedModel, *, num_steps: int | None = None, **arguments: Any):
        asked = None if num_steps is None else require_whole("num_steps", num_steps, at_least=1)
        _check_names(arguments)
        super().__init__(pretrained, **arguments)
        found = loops(self.model)
        if not found:
            raise ValueError(
                f"{pretrained} has no steps: it is neither a graft nor a model of this library. The harness's own "
                "model, --model hf, evaluates it."
            )
        self.num_steps = as_depth(found[0].num_steps).num_steps if asked is None else asked

    def _get_config(self, pretrained: str, **arguments: Any) -> None:
        path = Path(pretrained) / CONFIG
        said = read_object(path) if path.exists() else {}
        if "recurrence" in said:
            self._config = CONFIG_MAPPING[said["model_type"]].from_dict(unsealed(said))
            return
        try:
            super()._get_config(pretrained, **arguments)
        except OSError:
            raise ValueError(
                f"pretrained is {pretrained!r}, but there is no such folder of a saved model, and none of this name "
                "can be downloaded."
            ) from None

    def _create_tokenizer(self, pretrained: Any, tokenizer: Any, **arguments: Any) -> None:
        if tokenizer is None and isinstance(pretrained, str) and getattr(self.config, "recurrence", None) is not None:
            # By itself it would read the configuration, which of some grafts only our loader can.
            begins = {} if arguments["add_bos_token"] is None else {"add_bos_token": arguments["add_bos_token"]}
            tokenizer = AutoTokenizer.from_pretrained(pretrained, config=self.config, **begins)
        super()._create_tokenizer(pretrained, tokenizer, **arguments)

    def _create_model(self, pretrained: str, **arguments: Any) -> None:
        if getattr(self.config, "recurrence", None) is not None:
            self.AUTO_MODEL_CLASS = Grafts
        try:
            super()._create_model(pretrained, **arguments)
        except TypeError as error:
            if "unexpected keyword argument" not in str(error):
                raise
            raise ValueError(f"The model's arguments cannot be right: {error}.") from None

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        mixed = self.mixed_precision_dtype
        with torch.no_grad(), torch.autocast(self.device.type, mixed, enabled=mixed is not None):
            return self.model(inps, num_steps=self.num_steps).logits

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **arguments: Any) -> Tensor:
        return super()._model_generate(context, max_length, stop, **arguments, num_steps=self.num_steps)

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes into the results, and the number of steps."""
        return {**super().get_model_info(), "num_steps": self.num_steps}


def _check_names(arguments: dict[str, Any]) -> None:
    """Refuses a misspelled argument, which would reach the model and be refused there by another name."""
    known = [*inspect.signature(HFLM.__init__).parameters, "num_steps"]
    for name in arguments.keys() - set(known):
        for meant in get_close_matches(name, known, n=1, cutoff=0.85):
            raise ValueError(f"{name} is no argument of the model; {meant} is.")
