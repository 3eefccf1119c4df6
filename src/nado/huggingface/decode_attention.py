"""Attention of one new token per row over a slot cache, as one Triton kernel.

At thousands of rows and tens of columns, general attention kernels spend their time on tiles that are nearly
empty. Here one program takes one row and one key–value head, reads its keys and values once, and serves all
query heads of the group from them: the time is that of reading the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_SMALLEST_DOT = 16  # tensor cores multiply tiles of at least 16 × 16
_TILE_BYTES = 2**15  # keys, or values, held at once: both must fit into the smallest shared memory


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query, key, value, mask, output, scale,
    key_row, key_head, key_column, value_row, value_head, value_column, mask_row,
    heads: tl.constexpr, group: tl.constexpr, size: tl.constexpr, width: tl.constexpr,
    GROUP: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    members = tl.arange(0, GROUP)
    places = tl.arange(0, SIZE)
    own = (members[:, None] < group) & (places[None, :] < size)
    at = row * heads * size + (head * group + members[:, None]) * size + places[None, :]
    asked = tl.load(query + at, mask=own, other=0.0)  # (GROUP, SIZE)

    best = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    mixed = tl.zeros([GROUP, SIZE], tl.float32)
    for first in range(0, width, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        seen = tl.load(mask + row * mask_row + columns, mask=columns < width, other=0) != 0
        # Columns that are not this row's are not read at all: half the width, on average.
        inside = seen[:, None] & (places[None, :] < size)
        keys = tl.load(
            key + row * key_row + head * key_head + columns[:, None] * key_column + places[None, :],
            mask=inside, other=0.0,
        )  # fmt: skip
        scores = tl.dot(asked, tl.trans(keys), input_precision="ieee") * scale  # (GROUP, COLUMNS)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        # Before any column is seen the maximum is −inf, and −inf − (−inf) must not become NaN.
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(scores - safe[:, None])
        kept = tl.exp(best - safe)
        total = total * kept + tl.sum(weights, axis=1)
        values = tl.load(
            value + row * value_row + head * value_head + columns[:, None] * value_column + places[None, :],
            mask=inside, other=0.0,
        )  # fmt: skip
        mixed = mixed * kept[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        best = higher
    tl.store(output + at, (mixed / total[:, None]).to(output.dtype.element_ty), mask=own)


@torch.library.custom_op("nado::decode_attention", mutates_args=())
def decode_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Softmax attention of one query a row: query (B, H, D), key and value (B, G, W, D), mask bool (B, W)."""
    batch, heads, size = query.shape
    groups, width = key.shape[1], key.shape[2]
    query, mask = query.contiguous(), mask.contiguous()
    output = torch.empty_like(query)
    padded = max(_SMALLEST_DOT, triton.next_power_of_2(size))
    columns = min(128, triton.next_power_of_2(width), _TILE_BYTES // (padded * key.element_size()))
    # Triton launches on the current device, which need not be the one the model is on.
    with torch.cuda.device_of(query):
        _attend[(batch, groups)](
            query, key, value, mask, output, scale,
            key.stride(0), key.stride(1), key.stride(2), value.stride(0), value.stride(1), value.stride(2),
            mask.stride(0), heads, heads // groups, size, width,
            GROUP=max(_SMALLEST_DOT, triton.next_power_of_2(heads // groups)),
            COLUMNS=max(_SMALLEST_DOT, columns), SIZE=padded, num_warps=2,
        )  # fmt: skip
    return output


@decode_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    return query.new_empty(query.shape)
