"""Base sampling with an exact end: the oracle is asked before every end, and nothing else is changed.

The part of q's own machinery that needs no learning, alone: what a guide adds has to be more than this.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nado.baselines.method import Method, Provisions, Sampled, Settings, System
from nado.following import Standing
from nado.guidance import Guidance
from nado.guided_language_model import GuidedLanguageModel


class NoGuide:
    """A follower to which every token is as good as any other: R = 1."""

    progress_bits = 0
    fingerprint = "none"

    def start(self, prompts: Sequence[str], conditions: Sequence[str]) -> None:
        """There is nothing to know."""

    def select(self, state: None, rows: Tensor) -> None:
        """There is nothing to keep."""

    def refill(self, state: None, rows: Tensor, prompts: Sequence[str], conditions: Sequence[str]) -> None:
        """There is nothing to begin."""

    def log_r(self, state: Any, standing: Standing) -> Tensor:
        """log 1."""
        return torch.zeros_like(standing.log_p)

    def rewind(self, state: None) -> None:
        """There is nothing to forget."""


class BaseExactEnd(Method):
    """Texts of p that may end only where the oracle says yes."""

    name = "base sampling, exact end"
    source = "the base, asked before every end"

    def obstacle(self, given: Provisions) -> str | None:
        """It needs an oracle that can be asked at every step, and texts that end themselves."""
        if not given.oracle.cheap:
            return f"the oracle {given.oracle.name} is too slow to be asked at every token"
        return (
            None if given.base.completion == "eos" else 'texts do not end themselves: completion is "limit"'
        )

    def prepare(self, given: Provisions, settings: Settings) -> System:
        """The base with its end in the oracle's hands."""
        model = GuidedLanguageModel(
            given.base, NoGuide(), guidance=Guidance(exact_end=True), oracle=given.oracle
        )
        return Sampled(model, given.rows)
