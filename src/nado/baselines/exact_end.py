"""The base with an exact end, sampled or searched: the oracle is asked before every end, and that is all.

The part of q's own machinery that needs no learning, alone: what a guide adds has to be more than this.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nado.baselines.beam import Beam
from nado.baselines.greedy import Searched
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
        """Samples."""
        return Sampled(_asked_before_ends(given), given.rows)


class BeamExactEnd(Beam):
    """The base's likeliest texts that may end only where the oracle says yes."""

    name = "beam search, exact end"
    source = "the base, asked before every end"

    def obstacle(self, given: Provisions) -> str | None:
        """What keeps one from beams, or from exact ends."""
        return super().obstacle(given) or BaseExactEnd().obstacle(given)

    def prepare(self, given: Provisions, settings: Settings) -> System:
        """The search."""
        model = _asked_before_ends(given)
        return Searched(model, settings["beams"], settings["length_penalty"], given.rows)


def _asked_before_ends(given: Provisions) -> GuidedLanguageModel:
    guidance = Guidance(exact_end=True)
    return GuidedLanguageModel(given.base, NoGuide(), guidance=guidance, oracle=given.oracle)
