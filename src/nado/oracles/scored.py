"""Oracles that are a number and a threshold, and that can say of a prefix how far the number has risen.

Whether a prefix would pass as it stands is one bit. How far from passing it is says more of what can still
be made of it; recipes/formality_mt/README.md and recipes/dial say what guides made of that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nado.oracles.protocol import BoolArray, Oracle


class ScoredOracle(Oracle):
    """Whether the score of a text reaches `threshold`; of a prefix, which of the `steps` it has reached.

    Subclasses write `scores`. Without steps the progress of a prefix is the one answer.
    """

    threshold: float
    steps: tuple[float, ...] = ()

    def scores(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """The number of each text, which prefixes have as well."""
        raise NotImplementedError(f"{type(self).__name__} must define scores(texts)")

    def judge(self, conditions: Sequence[str], texts: Sequence[str]) -> BoolArray:
        """Whether the score of each text reaches the threshold."""
        return np.asarray(self.scores(texts) >= self.threshold)

    def judge_progress(self, conditions: Sequence[str], prefixes: Sequence[str]) -> list[BoolArray]:
        """For every step whether the prefix has reached it."""
        return self._progress_at(self.scores(prefixes))

    def progress_names(self, condition: str) -> list[str]:
        """A step each; without steps the one question."""
        return [f"{self.name} {step:g}" for step in self.steps] or [self.name]

    def read_prefixes(
        self, conditions: Sequence[str], prefixes: Sequence[str]
    ) -> tuple[list[BoolArray], BoolArray]:
        """Progress and stop label by one look at each prefix."""
        found = self.scores(prefixes)
        return self._progress_at(found), np.asarray(found >= self.threshold)

    def _progress_at(self, scores: NDArray[np.float64]) -> list[BoolArray]:
        return list(reached(scores, self.steps or (self.threshold,)))


def reached(scores: NDArray[np.float64], steps: Sequence[float]) -> BoolArray:
    """Which steps each score has reached: (N, K)."""
    return np.asarray(scores[:, None] >= np.asarray(steps, dtype=np.float64)[None, :])
