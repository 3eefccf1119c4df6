"""The bootstrap: how far a number would move if other prompts had been asked.

What is resampled are *sums*, not texts. A metric of a corpus is a function of sums over its texts (matching
n-grams, lengths, log-probabilities), so a resample is one row of counts times the matrix of per-prompt sums,
and a thousand resamples of BLEU are one matrix product. Texts of one prompt stay together: they are alike,
and to count them as independent would make every interval too narrow.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from nado.errors import InputError

FloatArray: TypeAlias = NDArray[np.float64]
Combine: TypeAlias = Callable[[FloatArray], FloatArray]

# Below this many prompts a percentile interval that calls itself 95 % covers less than about 93 %.
SMALLEST = 20
_BLOCK = 4_000_000  # resampling counts held at once


@dataclass(frozen=True)
class Resampling:
    """How intervals are made: percentile bootstrap, from a seed of its own."""

    resamples: int = 1000
    confidence: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        if self.resamples < 100 or not 0 < self.confidence < 1:
            raise InputError(
                "at least 100 resamples and a confidence between 0 and 1",
                f"{self.resamples} resamples and a confidence of {self.confidence:g}",
                "Use Resampling(resamples=1000, confidence=0.95).",
            )

    def __str__(self) -> str:
        return f"{self.confidence:.0%} percentile bootstrap, {self.resamples} resamples, seed {self.seed}"


DEFAULT = Resampling()


def sum_by_prompt(rows: FloatArray, prompts: Sequence[Hashable] | None) -> FloatArray:
    """Sums over the texts of each prompt, prompts in order of appearance: (N, K) → (G, K).

    Without prompts every text is one of its own.
    """
    if prompts is None:
        return rows
    if len(prompts) != len(rows):
        raise InputError(
            f"a prompt for each of {len(rows)} texts", f"{len(prompts)} prompts", "Give one a text."
        )
    number: dict[Hashable, int] = {}
    places = np.array([number.setdefault(prompt, len(number)) for prompt in prompts], dtype=np.intp)
    sums = np.zeros((len(number), *rows.shape[1:]))
    np.add.at(sums, places, rows)
    return sums


def resample_sums(sums: FloatArray, resampling: Resampling) -> FloatArray:
    """Total sums of each resample of the prompts: (G, K) → (resamples, K).

    Two systems with the same number of prompts and the same seed get the same resamples.
    """
    groups = len(sums)
    generator = np.random.default_rng(resampling.seed)
    block = max(1, _BLOCK // groups)
    parts = []
    for first in range(0, resampling.resamples, block):
        size = min(block, resampling.resamples - first)
        parts.append(draw_counts(generator, groups, size).astype(np.float64) @ sums)
    return np.concatenate(parts)


def draw_counts(generator: np.random.Generator, groups: int, size: int) -> NDArray[np.int64]:
    """How often each prompt is in each resample: (size, G). Much quicker than drawing multinomials."""
    drawn = generator.integers(groups, size=(size, groups))
    drawn += groups * np.arange(size)[:, None]
    return np.bincount(drawn.ravel(), minlength=size * groups).reshape(size, groups)


def percentile_interval(values: FloatArray, confidence: float) -> tuple[float, float]:
    """The middle part of the resampled values."""
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def sign_p_value(differences: FloatArray) -> float:
    """Two-sided p-value of resampled differences against 0: small when nearly all have one sign.

    It agrees with the percentile interval, and is never 0: so many resamples cannot show less.
    """
    below, above = int((differences <= 0).sum()), int((differences >= 0).sum())
    return min(1.0, 2 * (1 + min(below, above)) / (1 + len(differences)))
