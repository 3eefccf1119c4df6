"""The demo's oracle, and a pattern for your own: a class with `judge`, and more where it knows more."""

from collections.abc import Sequence

import numpy as np

from nado.oracles import Oracle
from nado.oracles.protocol import BoolArray
from nado.oracles.text_rules import count_words

MULTIPLE = 4


class WordsInFours(Oracle):
    """Whether the number of words is a multiple of four: anyone can count, and no single word tells."""

    name = "words in fours"
    cheap = True  # it may be asked at every step of decoding

    def judge(self, conditions: Sequence[str], texts: Sequence[str]) -> BoolArray:
        """One answer a text."""
        counts = _counts(texts)
        return (counts > 0) & (counts % MULTIPLE == 0)

    def judge_progress(self, conditions: Sequence[str], prefixes: Sequence[str]) -> list[BoolArray]:
        """What a prefix tells the guide: how many words beyond a multiple of four it has."""
        return list(_counts(prefixes)[:, None] % MULTIPLE == np.arange(MULTIPLE))

    def progress_names(self, condition: str) -> list[str]:
        """A name for each of these."""
        return [f"{number} words over" for number in range(MULTIPLE)]


def _counts(texts: Sequence[str]) -> np.ndarray:
    return np.array([count_words(text) for text in texts])
