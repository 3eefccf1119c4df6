"""Attention of one new token per row over grouped key–value heads, without copying the keys.

transformers repeats keys and values to the number of query heads whenever there is a mask. When each row
asks with a single token, the query heads of a group can stand in as query *positions* instead: the same
products, none of the copies. On a GPU one kernel does it all. Everything else goes to transformers' own
function.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "nado_grouped"

_HAS_TRITON = find_spec("triton") is not None
# What some architectures pass on to change the scores; transformers' own function takes it or refuses it.
_OTHER_ATTENTION = ("position_bias", "softcap", "s_aux")


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
    batch, heads, _, size = query.shape
    groups = key.shape[1]
    if not _is_grouped_step(query, value, attention_mask, kwargs):
        output, weights = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return output, weights
    assert attention_mask is not None
    if query.is_cuda and _HAS_TRITON and value.shape[-1] == size and key.stride(-1) == value.stride(-1) == 1:
        from nado.huggingface.decode_attention import decode_attention

        scale = scaling if scaling is not None else size**-0.5
        mixed = decode_attention(query[:, :, 0], key, value, attention_mask[:, 0, 0], scale)
        return mixed[:, None], None
    folded = query.reshape(batch, groups, heads // groups, size)  # (B, G, H/G, D)
    mask = attention_mask.expand(batch, 1, heads // groups, -1)
    mixed = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return mixed.reshape(batch, 1, heads, -1), None


def _is_grouped_step(query: Tensor, value: Tensor, mask: Tensor | None, settings: dict[str, Any]) -> bool:
    """One token a row, one boolean mask a row for all heads, and plain softmax attention."""
    return (
        query.shape[2] == 1
        and mask is not None
        and mask.dtype == torch.bool
        and mask.shape == (len(query), 1, 1, value.shape[2])
        and all(settings.get(name) is None for name in _OTHER_ATTENTION)
    )


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Switch a model that nado has loaded itself from `sdpa` to grouped attention."""
    if model.config._attn_implementation != "sdpa":
        return
    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
