"""Hosts that were read from a GGUF file."""

from typing import Any

MARKS = ("hf_quantizer", "quantization_method", "is_quantized")


def unmark_gguf(model: Any) -> None:
    """Makes a model that was read from a GGUF file one that can be saved and trained, which by its weights it is.

    Where transformers read all of the file into plain floats, it goes on calling the model quantised: `save_pretrained`
    and `Trainer` refuse it. Weights that are quantised still, by GGUF or by anything else, are left as they are.
    """
    said = getattr(getattr(model, "config", None), "quantization_config", None)
    quantizer = getattr(model, "hf_quantizer", None)
    if getattr(said, "quant_method", None) == "gguf" and not getattr(quantizer, "packed_modules", None):
        del model.config.quantization_config
        for mark in MARKS:
            vars(model).pop(mark, None)
