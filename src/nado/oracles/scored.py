"""Oracles that rest on a number, and that can say of a prefix how far the number has risen.

Whether a prefix would pass as it stands is one bit. How far from passing it is says more of what can still
be made of it; recipes/formality_mt/README.md and recipes/dial say what guides made of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real

import numpy as np
from numpy.typing import NDArray

from nado.errors import InputError
from nado.oracles.protocol import BoolArray, Oracle


class ScoredOracle(Oracle):
    """Whether the score of a text reaches `threshold`; of a prefix, which of the `steps` it has reached.

    Subclasses write `scores`, and `passing` where something else than one threshold decides. Without steps
    the progress of a prefix is the one answer.
    """

    threshold: float
    steps: tuple[float, ...] = ()

    @property
    def said_steps(self) -> str:
        """The steps, for a `spec`: nothing where there are none, so that it is what it was without them."""
        return f", steps={list(self.steps)}" if self.steps else ""

    def scores(self, conditions: Sequence[str], texts: Sequence[str]) -> NDArray[np.float64]:
        """The number of each text, which prefixes have as well."""
        raise NotImplementedError(f"{type(self).__name__} must define scores(conditions, texts)")

    def passing(self, conditions: Sequence[str], scores: NDArray[np.float64]) -> BoolArray:
        """Which scores are good enough."""
        return np.asarray(scores >= self.threshold)

    def judge(self, conditions: Sequence[str], texts: Sequence[str]) -> BoolArray:
        """Whether the score of each text is good enough."""
        return self.passing(conditions, self.scores(conditions, texts))

    def judge_progress(self, conditions: Sequence[str], prefixes: Sequence[str]) -> list[BoolArray]:
        """For every step whether the prefix has reached it."""
        return self.read_prefixes(conditions, prefixes)[0]

    def progress_names(self, condition: str) -> list[str]:
        """A step each; without steps the one question."""
        return [f"{self.name} {step:g}" for step in self.steps] or [self.name]

    def read_prefixes(
        self, conditions: Sequence[str], prefixes: Sequence[str]
    ) -> tuple[list[BoolArray], BoolArray]:
        """Progress and stop label by one look at each prefix."""
        found = self.scores(conditions, prefixes)
        stops = self.passing(conditions, found)
        return list(reached(found, self.steps) if self.steps else stops[:, None]), stops


def reached(scores: NDArray[np.float64], steps: Sequence[float]) -> BoolArray:
    """Which steps each score has reached: (N, K)."""
    return np.asarray(scores[:, None] >= np.asarray(steps, dtype=np.float64)[None, :])


def read_steps(given: object, lowest: float, highest: float) -> tuple[float, ...]:
    """Steps as an oracle keeps them; what no scores can be is refused."""
    several = given.tolist() if isinstance(given, np.ndarray) else given
    if (
        isinstance(several, str | bytes)
        or not isinstance(several, Sequence)
        or not all(map(_is_number, several))
    ):
        raise InputError("numbers as steps", repr(given), "Write a list: steps = [0.25, 0.5, 0.75].")
    steps = tuple(map(float, several))  # 0 and 0.0 are one question, so they need one fingerprint
    if wrong := [each for each in steps if not lowest <= each <= highest]:
        raise InputError(
            f"steps between {lowest:g} and {highest:g}", f"{wrong[0]:g}", "They are scores of prefixes."
        )
    if list(steps) != sorted(set(steps)):
        raise InputError("steps in ascending order, each once", repr(given), "Sort them.")
    return steps


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
