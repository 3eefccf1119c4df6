"""What a guide reads of its base: states along a text, and the base's own embedding matrices.

A guide never runs the base itself. Training reads states for whole texts at once (and may keep them: the
base is frozen), decoding reads them step by step from the forward pass that is made anyway.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from nado.language_model import LanguageModel


@runtime_checkable
class Reader(Protocol):
    """A frozen base as a guide sees it. Positions i = 0 … T − 1 stand before token i + 1."""

    @property
    def model(self) -> LanguageModel[Any]:
        """The base: its vocabulary, limit, completion, fingerprint and device."""
        ...

    @property
    def state_size(self) -> int:
        """Width of a state."""
        ...

    @property
    def condition_vocabulary_size(self) -> int:
        """How many ids `encode_conditions` may return."""
        ...

    @property
    def input_embeddings(self) -> Tensor | None:
        """The base's token embeddings (V, D), frozen; None where the base has none."""
        ...

    @property
    def output_embeddings(self) -> Tensor | None:
        """The base's output matrix (V, D), frozen; None where the base has none."""
        ...

    def encode_conditions(self, conditions: Sequence[str]) -> list[list[int]]:
        """Conditions as token sequences."""
        ...

    def read(self, prompts: Sequence[str], tokens: Tensor, lengths: Tensor) -> Tensor:
        """The base's state at every position of `tokens` (B, T): (B, T, state_size)."""
        ...

    def current(self, state: Any) -> Tensor:
        """What it would have read where a stepped batch stands, given the batch's state: (B, state_size)."""
        ...

    def logits(self, states: Tensor, generated: Tensor) -> Tensor:
        """Numbers whose softmax is p at states (N, state_size), `generated` (N,) tokens in: (N, V)."""
        ...
