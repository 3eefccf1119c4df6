"""Attention of one token a row over grouped heads: by hand, on a CPU, and a GPU's kernel."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from nado.huggingface.attention import grouped_attention


def textbook(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Query (B, H, T, D), key and value (B, G, W, D), bool mask (B, 1, T, W), every head its own keys."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ value


def tensors(
    batch: int, heads: int, groups: int, size: int, width: int, steps: int = 1, value_size: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch * heads + width)
    query = torch.randn(batch, heads, steps, size, generator=generator)
    key = torch.randn(batch, groups, width, size, generator=generator)
    value = torch.randn(batch, groups, width, value_size or size, generator=generator)
    mask = torch.rand(batch, 1, steps, width, generator=generator) < 0.6
    mask[..., 0] = True
    return query, key, value, mask


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **settings: object) -> Tensor:
    module = nn.Module()
    module.num_key_value_groups = query.shape[1] // key.shape[1]
    module.is_causal = True
    return grouped_attention(module, query, key, value, mask, **settings)[0].transpose(1, 2)


@pytest.mark.parametrize("shape", [(3, 4, 4, 8, 20), (3, 4, 2, 8, 20), (2, 6, 1, 12, 33), (1, 9, 3, 64, 16)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_grouped_attention_is_attention(shape: tuple[int, ...], scale: float | None) -> None:
    query, key, value, mask = tensors(*shape)
    expected = textbook(query, key, value, mask, scale or shape[3] ** -0.5)
    torch.testing.assert_close(attend(query, key, value, mask, scaling=scale), expected, atol=1e-5, rtol=1e-5)


def test_a_query_with_any_strides() -> None:
    """As models make it: heads split off the last axis, then transposed."""
    query, key, value, mask = tensors(3, 4, 2, 8, 20)
    split = query.squeeze(2).reshape(3, 1, 32).view(3, 1, 4, 8).transpose(1, 2)
    wide = torch.stack([query, query], dim=-1)[..., 0]
    expected = textbook(query, key, value, mask, 8**-0.5)
    for same in (split, wide):
        torch.testing.assert_close(attend(same, key, value, mask), expected, atol=1e-5, rtol=1e-5)


def test_values_of_another_size() -> None:
    query, key, value, mask = tensors(3, 4, 2, 8, 20, value_size=5)
    expected = textbook(query, key, value, mask, 8**-0.5)
    torch.testing.assert_close(attend(query, key, value, mask), expected, atol=1e-5, rtol=1e-5)


def test_several_tokens_a_row_go_to_transformers() -> None:
    query, key, value, mask = tensors(3, 4, 2, 8, 20, steps=5)
    expected = textbook(query, key, value, mask, 8**-0.5)
    torch.testing.assert_close(attend(query, key, value, mask), expected, atol=1e-5, rtol=1e-5)


def test_a_mask_for_each_head_goes_to_transformers() -> None:
    """Some architectures mask heads apart; folding heads into positions took the wrong head's mask."""
    query, key, value, _ = tensors(3, 4, 2, 8, 20)
    mask = torch.rand(3, 4, 1, 20, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[..., 0] = True
    expected = textbook(query, key, value, mask, 8**-0.5)
    torch.testing.assert_close(attend(query, key, value, mask), expected, atol=1e-5, rtol=1e-5)


def test_an_added_mask_goes_to_transformers() -> None:
    query, key, value, mask = tensors(3, 4, 2, 8, 20)
    added = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -1e30)
    expected = textbook(query, key, value, mask, 8**-0.5)
    torch.testing.assert_close(attend(query, key, value, added), expected, atol=1e-5, rtol=1e-5)


def test_no_mask_goes_to_transformers() -> None:
    query, key, value, mask = tensors(3, 4, 2, 8, 20)
    expected = textbook(query, key, value, torch.ones_like(mask), 8**-0.5)
    torch.testing.assert_close(attend(query, key, value, None), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("setting", [{"softcap": 0.5}, {"position_bias": torch.randn(3, 4, 1, 20)}])
def test_other_kinds_of_attention_are_for_transformers_to_take_or_refuse(setting: dict[str, Any]) -> None:
    """What changes the scores was dropped without a word. Releases differ in what they do with it."""
    query, key, value, mask = tensors(3, 4, 2, 8, 20)

    def outcome(function: Callable[..., tuple[Tensor, Any]]) -> Tensor | str:
        module = nn.Module()
        module.num_key_value_groups, module.is_causal = 2, True
        try:
            return function(module, query, key, value, mask, **setting)[0]
        except ValueError as error:
            return str(error)

    ours, theirs = outcome(grouped_attention), outcome(sdpa_attention_forward)
    assert type(ours) is type(theirs)
    assert torch.equal(ours, theirs) if isinstance(ours, Tensor) else ours == theirs


# --- the kernel, in Triton's interpreter --------------------------------------------------------------

CASES = [
    # batch, query heads, groups, head size, width
    (3, 4, 4, 16, 20),
    (2, 6, 2, 16, 33),
    (2, 4, 1, 12, 130),  # an odd head size; more than one tile of columns
    (1, 9, 3, 64, 16),
    (2, 3, 1, 40, 7),
    (1, 2, 1, 256, 300),  # a large head: smaller tiles
]


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_kernel_is_attention() -> None:
    """In another process: Triton decides whether it interprets when it is imported.

    The interpreter multiplies bfloat16 as if it were integers: that needs a GPU, below.
    """
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("ok") == 4 * len(CASES)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_kernel_is_attention_on_a_gpu(dtype: str) -> None:
    main(getattr(torch, dtype), "cuda")


def compare(case: SimpleNamespace, dtype: torch.dtype) -> None:
    from nado.huggingface.decode_attention import decode_attention

    query, key, value, mask = case.query.to(dtype), case.key.to(dtype), case.value.to(dtype), case.mask
    found = decode_attention(query[:, :, 0], key, value, mask[:, 0, 0], 0.2)
    repeats = query.shape[1] // key.shape[1]
    expected = scaled_dot_product_attention(
        query.float(),
        key.float().repeat_interleave(repeats, dim=1),
        value.float().repeat_interleave(repeats, dim=1),
        attn_mask=mask,
        scale=0.2,
    )[:, :, 0]
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)
    print("ok")


def main(dtype: torch.dtype, device: str = "cpu") -> None:
    for shape in CASES:
        query, key, value, mask = (tensor.to(device) for tensor in tensors(*shape))
        compare(SimpleNamespace(query=query, key=key, value=value, mask=mask), dtype)
        # As in a slot cache: keys and values are slices of one tensor, rows look at their first columns.
        both = torch.stack([key, value], dim=1)
        lengths = torch.arange(1, len(query) + 1, device=device) * mask.shape[-1] // len(query)
        filled = (torch.arange(mask.shape[-1], device=device) < lengths[:, None])[:, None, None]
        slots = SimpleNamespace(query=query, key=both[:, 0], value=both[:, 1], mask=filled)
        compare(slots, dtype)


if __name__ == "__main__":
    main(torch.float32)
    main(torch.float16)
