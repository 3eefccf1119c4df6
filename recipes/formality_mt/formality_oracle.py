"""The oracle: is this English text formal? Logistic regression on words *and marks*, with a threshold.

Words alone miss half of it: "don't", a missing capital, "..." and "!!" are how informal writing looks. So
marks, contractions and capitals are spelled out as words before the library's `LinearClassifier` counts.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nado.oracles.linear_classifier import LinearClassifier
from nado.oracles.scored import ScoredOracle

_PIECE = re.compile(r"[^\W\d_]+|\d+|\.\.+|[.,!?;:\"'’()%$-]")
_NAMES = {
    ".": "markstop",
    ",": "markcomma",
    "!": "markshout",
    "?": "markquestion",
    ";": "marksemicolon",
    ":": "markcolon",
    '"': "markquote",
    "(": "markopen",
    ")": "markclose",
    "%": "markpercent",
    "$": "markmoney",
    "-": "markdash",
}
_JOINED = re.compile(r"([^\W\d_])['’]([^\W\d_])")
_REMEMBERED = 2_000_000  # texts


class FormalityOracle(ScoredOracle):
    """Whether the probability that a text is formal reaches `threshold`.

    Of a prefix it volunteers which of the `steps` that probability has reached: how formal a text is by now
    says far more of what can still be made of it than whether it would pass.
    """

    cheap = True
    name = "formality"

    def __init__(self, folder: str | Path, threshold: float = 0.5, steps: Sequence[float] = ()) -> None:
        """`folder` is where a `LinearClassifier` was saved that was fitted to texts spelled out."""
        self.classifier = LinearClassifier.load(folder, threshold=threshold)
        self.threshold, self.steps = threshold, tuple(steps)

    @property
    def spec(self) -> str:
        """What tells this oracle from another: the classifier's own settings and weights, and the steps."""
        return f"formality({self.classifier.spec}{self.said_steps})"

    def scores(self, conditions: Sequence[str], texts: Sequence[str]) -> NDArray[np.float64]:
        """How likely each text is formal; what it translates does not matter."""
        return self.probabilities(texts)

    def probabilities(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """How likely each text is formal."""
        return self.classifier.probabilities([spell_out(text) for text in texts])


class RememberedFormality(FormalityOracle):
    """The same oracle, not asked twice about a text: most prefixes of a line begin one of another line, too.

    Not for an audit, which asks twice on purpose.
    """

    def __init__(self, oracle: FormalityOracle) -> None:
        self.classifier, self.threshold, self.steps = oracle.classifier, oracle.threshold, oracle.steps
        self._found: dict[str, float] = {}

    def probabilities(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """How likely each text is formal; only new ones are looked at."""
        if len(self._found) + len(texts) > _REMEMBERED:
            self._found.clear()
        fresh = [text for text in dict.fromkeys(texts) if text not in self._found]
        self._found.update(zip(fresh, super().probabilities(fresh).tolist(), strict=True))
        return np.array([self._found[text] for text in texts], dtype=np.float64)


def spell_out(text: str) -> str:
    """A text in which marks, capitals and words of one letter are words of two letters and more.

    "I don't know..." becomes "capstart wordi don joint know markdots".
    """
    text = _JOINED.sub(r"\1 join\2", text.strip())
    words = ["capstart" if text[:1].isupper() else "lowstart"]
    for piece in _PIECE.findall(text):
        if piece[0].isalpha():
            words.append(piece if len(piece) > 1 else f"word{piece}")
            if len(piece) > 1 and piece.isupper():
                words.append("allcaps")
        elif piece[0].isdigit():
            words.append("number")
        else:
            words.append("markdots" if piece.startswith("..") else _NAMES.get(piece, "markother"))
    return " ".join(words)
