"""Attention of one new token per row over grouped key–value heads, without copying the keys.

transformers repeats keys and values to the number of query heads whenever there is a mask. When each row
asks with a single token, the query heads of a group can stand in as query *positions* instead: the same
products, none of the copies. On a GPU one kernel does it all. Everything else goes to transformers' own
function.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "nado_grouped"


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Drop-in for transformers' `sdpa`: query (B, H, T, D), key and value (B, G, W, D)."""
    batch, heads, steps, size = query.shape
    groups = key.shape[1]
    if steps != 1 or attention_mask is None or attention_mask.shape[2] != 1:
        output, weights = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return output, weights
    if query.is_cuda:
        from nado.huggingface.decode_attention import decode_attention

        scale = scaling if scaling is not None else size**-0.5
        mixed = decode_attention(query[:, :, 0], key, value, attention_mask[:, 0, 0], scale)
        return mixed[:, None], None
    folded = query.view(batch, groups, heads // groups, size)  # (B, G, H/G, D)
    mask = attention_mask.expand(batch, 1, heads // groups, -1)
    mixed = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return mixed.reshape(batch, 1, heads, -1), None


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Switch a model that nado has loaded itself from `sdpa` to grouped attention."""
    if model.config._attn_implementation != "sdpa":
        return
    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
