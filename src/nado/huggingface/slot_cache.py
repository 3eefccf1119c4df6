"""A key–value cache of fixed width whose rows each have their own length, so that they can be refilled.

transformers' static cache keeps one length for the whole batch: all rows must start together. Here a row
is a slot; it writes its next key at its own length, and only the columns before that are looked at. Shapes
never change, so a step can be captured in a CUDA graph, and a row's keys always lie in the same order, so
what it computes does not depend on when it started.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin


class _SlotLayer(CacheLayerMixin):
    """One layer's keys and values, (B, heads, width, head_dim) each; row b is written at lengths[b]."""

    is_compileable = True
    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, lengths: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys, self.values, self.lengths = keys, values, lengths
        self.rows = torch.arange(len(lengths), device=lengths.device)
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: a slot layer is born with its tensors."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.keys[self.rows, :, self.lengths] = key_states[:, :, 0]
        self.values[self.rows, :, self.lengths] = value_states[:, :, 0]
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        # Positions and masks are always given explicitly; the batch has no one length.
        return 0

    def get_max_length(self) -> int:
        return int(self.keys.shape[2])


class SlotCache:
    """Where each row stands, and the keys and values of what it has read, all layers in one tensor."""

    def __init__(self, states: Tensor, lengths: Tensor) -> None:
        self.states = states  # (layers, 2, B, heads, width, head_dim): keys, then values
        self.lengths = lengths  # (B,) tokens read so far
        self.cache = Cache(layers=[_SlotLayer(keys, values, lengths) for keys, values in states])

    @classmethod
    def empty(cls, like: Tensor, batch: int, width: int) -> "SlotCache":
        """Slots with the layers, heads, dtype and device of stacked states."""
        layers, pair, _, heads, _, size = like.shape
        lengths = torch.zeros(batch, dtype=torch.long, device=like.device)
        return cls(like.new_zeros(layers, pair, batch, heads, width, size), lengths)

    @property
    def width(self) -> int:
        """How many tokens a row can hold."""
        return int(self.states.shape[4])

    def mask(self) -> Tensor:
        """Which columns a row may look at once its next token is written: bool (B, 1, 1, width)."""
        columns = torch.arange(self.width, device=self.lengths.device)
        return (columns[None, :] <= self.lengths[:, None])[:, None, None, :]

    def advance(self) -> None:
        """Count the token just written; a row that has ended but is still stepped stays where it is."""
        self.lengths.add_(1).clamp_(max=self.width - 1)

    def insert(self, rows: Tensor, states: Tensor, sources: Tensor, lengths: Tensor) -> None:
        """Put left-padded prompts (rows `sources` of stacked `states`, of these `lengths`) into `rows`."""
        padded = states.shape[4]
        columns = torch.arange(padded, device=rows.device)
        # Moved to the left edge; what wraps round to the right of a shorter prompt lies past its length.
        moved = (columns[None, :] + padded - lengths[:, None]) % padded  # (R, P)
        # Indices around a slice put the indexed axes first: (R, P, layers, 2, heads, head_dim).
        prompts = states[:, :, sources[:, None], :, moved]
        self.states[:, :, rows[:, None], :, columns[None, :]] = prompts
        self.lengths[rows] = lengths

    def select(self, rows: Tensor) -> "SlotCache":
        """A copy holding the given rows, in that order."""
        return SlotCache(self.states.index_select(2, rows), self.lengths[rows])

    def reorder(self, rows: Tensor) -> None:
        """Hold the given rows, as many as there are, in that order and in the same tensors."""
        self.states.copy_(self.states.index_select(2, rows))
        self.lengths.copy_(self.lengths[rows])

    def widen(self, width: int) -> "SlotCache":
        """A copy with room for longer rows."""
        wider = SlotCache.empty(self.states, len(self.lengths), width)
        wider.states[..., : self.width, :] = self.states
        wider.lengths.copy_(self.lengths)
        return wider


def stack_states(cache: DynamicCache) -> Tensor | None:
    """A prefilled cache as one tensor (layers, 2, B, heads, T, head_dim); None when its layers differ."""
    layers: list[Any] = cache.layers
    pairs = [(layer.keys, layer.values) for layer in layers]
    if len({(tensor.shape, tensor.dtype) for pair in pairs for tensor in pair}) > 1:
        return None
    return torch.stack([torch.stack(pair) for pair in pairs])
