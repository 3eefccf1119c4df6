"""Oracles that rest on small optional packages: sentiment (VADER) and language (py3langid)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nado.errors import InputError, MissingPackageError
from nado.oracles.description import UNSAID
from nado.oracles.protocol import BoolArray, Oracle
from nado.oracles.scored import ScoredOracle, read_steps
from nado.oracles.suggestion import suggest

SENTIMENTS = ("positive", "negative", "neutral")


@dataclasses.dataclass(frozen=True)
class Sentiment(ScoredOracle):
    """Whether VADER finds the text positive, negative or neutral; None reads that from the condition.

    VADER's compound score lies in [−1, 1]: positive from `threshold` on, negative up to −`threshold`,
    neutral in between. 0.05 is the threshold its authors recommend. With `steps` it says of every prefix
    which of these compound scores it has reached, which guides are told.
    """

    sentiment: str | None = None
    threshold: float = 0.05
    steps: tuple[float, ...] = dataclasses.field(default=(), metadata=UNSAID)

    cheap = True
    name = "sentiment"

    def __post_init__(self) -> None:
        if self.sentiment is not None:
            _check_choice(self.sentiment, SENTIMENTS, "sentiment")
        if not 0 < self.threshold <= 1:
            raise InputError("a threshold above 0 and at most 1", f"{self.threshold}", "Try 0.05.")
        object.__setattr__(self, "steps", read_steps(self.steps, -1, 1))

    def scores(self, conditions: Sequence[str], texts: Sequence[str]) -> NDArray[np.float64]:
        """The compound score of each text, whichever sentiment is asked for."""
        score = _vader().polarity_scores
        return np.array([score(text)["compound"] for text in texts], dtype=np.float64)

    def passing(self, conditions: Sequence[str], scores: NDArray[np.float64]) -> BoolArray:
        """Whether each score is of the sentiment asked for."""
        wanted = np.array(_asked(self.sentiment, conditions, SENTIMENTS, "sentiment"), dtype=object)
        found = np.where(scores >= self.threshold, "positive", "neutral")
        return np.asarray(np.where(scores <= -self.threshold, "negative", found) == wanted, dtype=bool)


@dataclasses.dataclass(frozen=True)
class Language(Oracle):
    """Whether the text is in a language ("en", "es", …); None reads the code from the condition.

    The language must be the most probable one and have at least `threshold` of the probability.
    """

    language: str | None = None
    threshold: float = 0.5

    cheap = True
    name = "language"

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise InputError("a threshold between 0 and 1", f"{self.threshold}", "Try 0.5.")

    def judge(self, conditions: Sequence[str], texts: Sequence[str]) -> BoolArray:
        """Whether each text is in the language asked for."""
        identifier = _identifier()
        wanted = _asked(self.language, conditions, identifier.labels, "language")
        answers = []
        for text, code in zip(texts, wanted, strict=True):
            language, probability = identifier.classify(text)
            answers.append(language == code and probability >= self.threshold)
        return np.array(answers, dtype=bool)


def _asked(fixed: str | None, conditions: Sequence[str], choices: Sequence[str], what: str) -> list[str]:
    wanted = [fixed] * len(conditions) if fixed is not None else [c.strip() for c in conditions]
    for choice in set(wanted):
        _check_choice(choice, choices, what)
    return wanted


def _check_choice(choice: str, choices: Sequence[str], what: str) -> None:
    if choice not in choices:
        raise InputError(f"a known {what}", repr(choice), suggest(choice, choices))


@functools.cache
def _vader() -> Any:
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError as error:
        raise MissingPackageError("vaderSentiment", "oracles", "the sentiment oracle") from error
    return SentimentIntensityAnalyzer()


@functools.cache
def _identifier() -> Any:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        raise MissingPackageError("py3langid", "oracles", "the language oracle") from error
    # An identifier of our own: the module's shared one can be reconfigured by anyone.
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
