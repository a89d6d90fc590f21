"""The attention function that a configuration of transformers names, in place of torch's kernels."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from recurrent_depth.attention import Attention, attend, causal_mask


class HostedAttention:
    """Attends as the configuration says at the moment: `"sdpa"`, `"eager"`, `"flex_attention"`, or one registered.

    For `"sdpa"` it is the library's own call of torch's kernels. Others are called as transformers calls them: flex
    attention with a mask of blocks, the rest with one that is added to the scores.

    Args:
        config: whose `_attn_implementation` counts.
        num_groups: query heads per head of keys and values.
    """

    is_causal = True
    training = False  # read by flex attention alone, which would compile once more

    def __init__(self, config: PreTrainedConfig, num_groups: int):
        self.config, self.num_key_value_groups = config, num_groups

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
        """What each query gathers."""
        name = self.config._attn_implementation
        if name in (None, "sdpa"):
            return attend(queries, keys, values, mask, causal=causal)
        if mask is None and causal:
            mask = causal_mask(queries.new_ones(1, keys.shape[2], dtype=torch.bool), queries.shape[2])[:, None]
        hidden: Any = None
        if mask is not None:
            mask = mask.expand(len(queries), 1, *mask.shape[2:])
            hidden = blocks_of(mask) if name == "flex_attention" else added(mask, queries.dtype)
        function = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
        gathered, _ = function(self, queries, keys, values, hidden, scaling=queries.shape[-1] ** -0.5, dropout=0.0)
        return gathered.transpose(1, 2)


def host_attention(model: nn.Module, config: PreTrainedConfig) -> None:
    """Lets every attention of a model attend as a configuration says."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = HostedAttention(config, module.num_heads // module.num_kv_heads)


def added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores where a mask is False: as good as minus infinity."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


def blocks_of(mask: Tensor) -> BlockMask:
    """A mask as flex attention reads it: on CPU it reads one that is added to scores beyond its end, in torch 2.13."""
    batch, _, num_queries, num_keys = mask.shape
    shape = {"B": batch, "H": None, "Q_LEN": num_queries, "KV_LEN": num_keys, "device": mask.device.type}
    return create_block_mask(lambda row, _head, query, key: mask[row, 0, query, key], **shape)


def eager(
    module: HostedAttention,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Attention written out: (batch, token, head, size), and the weights."""
    keys, values = (x.repeat_interleave(module.num_key_value_groups, dim=1) for x in (keys, values))
    scores = queries @ keys.transpose(2, 3) * scaling
    weights = (scores if mask is None else scores + mask).softmax(-1, dtype=torch.float32).to(queries.dtype)
    return (weights @ values).transpose(1, 2), weights
