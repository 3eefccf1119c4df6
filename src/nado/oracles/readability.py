"""Readability: the two Flesch formulas, on our own count of syllables."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nado.errors import InputError
from nado.oracles.description import UNSAID
from nado.oracles.protocol import BoolArray
from nado.oracles.scored import ScoredOracle, read_steps
from nado.oracles.text_rules import count_sentences
from nado.oracles.words import split_words

_VOWELS = re.compile(r"[aeiouyàâäáãåæèéêëìíîïòóôöõøœùúûüýÿ]+")


@dataclasses.dataclass(frozen=True)
class Readability(ScoredOracle):
    """Whether an English text is as easy, or as hard, to read as asked for.

    `measure` is "ease" (Flesch reading ease: 100 very easy, 0 very hard) or "grade" (Flesch–Kincaid
    school grade). A text without words satisfies nothing. With `steps` it says of every prefix which of
    these scores it has reached, which guides are told.
    """

    minimum: float | None = None
    maximum: float | None = None
    measure: str = "ease"
    steps: tuple[float, ...] = dataclasses.field(default=(), metadata=UNSAID)

    cheap = True
    name = "readability"

    def __post_init__(self) -> None:
        if self.measure not in ("ease", "grade"):
            raise InputError("a measure among ease, grade", repr(self.measure), "Choose one of them.")
        if self.minimum is None and self.maximum is None:
            raise InputError("a minimum or a maximum readability", "neither", "Give at least one of them.")
        object.__setattr__(self, "steps", read_steps(self.steps, -np.inf, np.inf))

    def scores(self, conditions: Sequence[str], texts: Sequence[str]) -> NDArray[np.float64]:
        """How easy or hard each text is; NaN without words."""
        return np.array([flesch(text, self.measure) for text in texts], dtype=np.float64)

    def passing(self, conditions: Sequence[str], scores: NDArray[np.float64]) -> BoolArray:
        """Whether each score lies between the bounds."""
        low = -np.inf if self.minimum is None else self.minimum
        high = np.inf if self.maximum is None else self.maximum
        return (scores >= low) & (scores <= high)  # NaN, for a text without words, is in no range


def flesch(text: str, measure: str = "ease") -> float:
    """Flesch reading ease, or Flesch–Kincaid grade; NaN for a text without words."""
    words = split_words(text)
    if not words:
        return float("nan")
    per_sentence = len(words) / max(1, count_sentences(text))
    per_word = sum(count_syllables(word) for word in words) / len(words)
    if measure == "grade":
        return 0.39 * per_sentence + 11.8 * per_word - 15.59
    return 206.835 - 1.015 * per_sentence - 84.6 * per_word


def count_syllables(word: str) -> int:
    """Groups of vowels, less the silent endings of English; at least one. Right for most common words."""
    word = word.lower().split("'")[0]
    groups = len(_VOWELS.findall(word))
    silent_e = word.endswith("e") and not re.search(r"([^aeiouy]l|[aeiouy])e$", word)
    silent_es = re.search(r"[^aeiouylscxzgh]es$", word) is not None
    silent_ed = re.search(r"([^aeiouytdl]|[aeiouyl]l)ed$", word) is not None
    hiatus = len(re.findall(r"i[ao]|[^aeiougp]eo|uou|[^q]ua[lt]", word))  # li-on, vi-deo, u-su-al
    hiatus -= len(re.findall(r"[tscg]i[ao]", word))  # but na-tion, so-cial
    return max(1, groups + hiatus - silent_e - silent_es - silent_ed)
