"""Tiny random models of transformers, the same in every test: what gets grafted."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from recurrent_depth.hf import graft
from recurrent_depth.hf.versions import CACHE

VOCAB = 67
NAMES = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA = NAMES | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
WITH_HEADS = LLAMA | {"head_dim": 8}
SLIDING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"]
GPT2 = NAMES | {"n_embd": 32, "n_layer": 5, "n_head": 4, "n_positions": 64}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GEMMA = WITH_HEADS | {"sliding_window": 4, "layer_types": SLIDING}
BLOOM = NAMES | {"hidden_size": 32, "n_layer": 5, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0}
FALCON = NAMES | {"hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4, "alibi": False}
OPT = LLAMA | {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}
NEOX = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}

DECODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2 | NO_DROPOUT),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", WITH_HEADS),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", LLAMA | NEOX),
    "mistral": ("MistralForCausalLM", "MistralConfig", LLAMA | {"sliding_window": 4}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", GEMMA),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA),
    "phi": ("PhiForCausalLM", "PhiConfig", LLAMA | {"resid_pdrop": 0.0}),
    "opt": ("OPTForCausalLM", "OPTConfig", OPT),
    "bloom": ("BloomForCausalLM", "BloomConfig", BLOOM),
    "falcon": ("FalconForCausalLM", "FalconConfig", FALCON),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", GPT2 | NO_DROPOUT | {"rotary_dim": 4}),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", LLAMA),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", WITH_HEADS | MOE),
}

BERT = LLAMA | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
VIT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 4}
VIT |= {"image_size": 16, "patch_size": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertModel", "BertConfig", BERT),
    "vit": ("ViTModel", "ViTConfig", VIT),
    "dinov2": ("Dinov2Model", "Dinov2Config", VIT | {"mlp_ratio": 2}),
}


def host(name: str, **changes: Any) -> PreTrainedModel:
    """A model of a family, in evaluation mode; `changes` of its configuration."""
    model, config, settings = (DECODERS | ENCODERS)[name]
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**settings | changes)).eval()
    for parameter in made.parameters():  # 0.02 would leave all of a tiny model's logits alike
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.15)
    return made


def tokens(rows: int = 2, length: int = 9) -> Tensor:
    """Token ids without padding."""
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


def padded(lengths: tuple[int, ...] = (9, 4)) -> dict[str, Tensor]:
    """Rows of such lengths, padded on the left."""
    width = max(lengths)
    mask = torch.tensor([[0] * (width - length) + [1] * length for length in lengths])
    return {"input_ids": tokens(len(lengths), width) * mask, "attention_mask": mask}


def inputs(name: str) -> dict[str, Tensor]:
    """What a model of a family reads."""
    if name in ("vit", "dinov2"):
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))}
    return {"input_ids": tokens(), "attention_mask": torch.ones(2, 9, dtype=torch.long)}


def outcome(output: Any) -> Tensor:
    """Logits, or the last hidden state."""
    return output.logits if "logits" in output else output.last_hidden_state


def cache_of(output: Any) -> Any:
    """The cache of a forward, under this version's name."""
    return output.get(CACHE)


def randomise(part: nn.Module, std: float = 0.3) -> None:
    """Gives all parameters of a part other values, as training would."""
    for parameter in part.parameters():
        nn.init.normal_(parameter, std=std)


def grafted(name: str, num_steps: int = 3, **settings: Any) -> Any:
    """A graft of layers 1 to 3 whose recurrence has values as if it were trained, in evaluation mode."""
    model = graft(host(name), range(1, 4), num_steps, **settings)
    randomise(model.recurrence)
    return model
