"""The judge: a second formality classifier, which sees spelling and style where the oracle sees words.

Guided texts are made to satisfy the oracle, so the oracle's own score of them proves little. The judge was
fitted to other sentences and looks at other things: runs of two to four characters with their case and marks,
and a dozen habits of style. Scoring needs numpy alone.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nado.errors import InputError
from nado.storage import read_json, write_atomically, write_json

_ORDERS = (2, 3, 4)
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")
_CONTRACTION = re.compile(r"['’](?:s|m|d|ll|re|ve|t)$", re.IGNORECASE)
_LATINATE = re.compile(r"(?:tion|sion|ment|ance|ence|ity|ive|ous|ate|ify)s?$", re.IGNORECASE)
_FILLER = re.compile(
    r"(?:ah|aha|eh|er|gee|gonna|gotta|ha|haha|hey|hm+|huh|kinda|like|lol|mhm|mm+|ok|okay|oh|okey|right|so"
    r"|uh|uhm|um|wanna|well|wow|ya|yay|yeah|yep|yup)$"
)
_I, _YOU = re.compile(r"(?:i|me|my|mine|we|us|our)$"), re.compile(r"(?:you|your|yours)$")
_WEIGHTS_FILE, _CONFIG_FILE = "judge.safetensors", "judge.json"


class StyleJudge:
    """Logistic regression on tf-idf of character runs, and on standardised habits of style."""

    def __init__(
        self,
        runs: Sequence[str],
        idf: NDArray[np.float32],
        weights: NDArray[np.float32],
        habits: NDArray[np.float32],
        bias: float,
    ) -> None:
        """`habits` (3, K): mean, deviation and weight of each habit."""
        self.runs, self.idf, self.weights, self.habits, self.bias = tuple(runs), idf, weights, habits, bias
        self._known = dict(zip(self.runs, zip(idf.tolist(), weights.tolist(), strict=True), strict=True))

    @classmethod
    def fit(
        cls, texts: Sequence[str], labels: Sequence[bool], *, most: int = 30_000, strength: float = 2.0
    ) -> "StyleJudge":
        """Fit to labelled texts with scikit-learn; the result no longer needs it."""
        from scipy.sparse import csr_matrix, hstack
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression

        if len(set(labels)) < 2:
            raise InputError("texts of both kinds", "one kind only", "Add examples of the other.")
        vectoriser = TfidfVectorizer(analyzer=runs_of, max_features=most, sublinear_tf=True, min_df=2)
        counted = vectoriser.fit_transform(texts)
        measured = np.array([habits_of(text) for text in texts])
        centre, spread = measured.mean(axis=0), measured.std(axis=0) + 1e-6
        model = LogisticRegression(C=strength, max_iter=2000)
        model.fit(hstack([counted, csr_matrix((measured - centre) / spread / len(centre) ** 0.5)]), labels)
        count = len(vectoriser.idf_)
        own = model.coef_[0][count:] / len(centre) ** 0.5
        return cls(
            vectoriser.get_feature_names_out().tolist(),
            vectoriser.idf_.astype(np.float32),
            model.coef_[0][:count].astype(np.float32),
            np.stack([centre, spread, own]).astype(np.float32),
            float(model.intercept_[0]),
        )

    def probabilities(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """How likely each text is formal."""
        return np.array([1 / (1 + math.exp(-self._log_odds(text))) for text in texts], dtype=np.float64)

    def _log_odds(self, text: str) -> float:
        score, square = 0.0, 0.0
        for run, count in Counter(runs_of(text)).items():
            if run in self._known:
                idf, weight = self._known[run]
                value = (1 + math.log(count)) * idf
                score += value * weight
                square += value * value
        centre, spread, weight = self.habits
        habits = float((((np.array(habits_of(text)) - centre) / spread) * weight).sum())
        found = self.bias + habits + (score / math.sqrt(square) if square else 0.0)
        return min(max(found, -700.0), 700.0)

    def save(self, folder: Path) -> None:
        """Write two files that are safe to load."""
        from safetensors.numpy import save_file

        tensors = {"idf": self.idf, "weights": self.weights, "habits": self.habits}
        write_atomically(folder / _WEIGHTS_FILE, lambda path: save_file(tensors, path))
        write_json(folder / _CONFIG_FILE, {"bias": self.bias, "runs": json.dumps(self.runs)})

    @classmethod
    def load(cls, folder: Path) -> "StyleJudge":
        """Read what `save` wrote."""
        from safetensors.numpy import load_file

        config, tensors = read_json(folder / _CONFIG_FILE), load_file(folder / _WEIGHTS_FILE)
        runs = json.loads(config["runs"])
        return cls(runs, tensors["idf"], tensors["weights"], tensors["habits"], config["bias"])


def runs_of(text: str) -> list[str]:
    """Every run of two to four characters, case kept, one blank at either end."""
    padded = f" {' '.join(text.split())} "
    return [padded[at : at + n] for n in _ORDERS for at in range(len(padded) - n + 1)]


def habits_of(text: str) -> list[float]:
    """Habits of style; none of them is the length of the text."""
    words = _WORD.findall(text)
    count, letters = max(1, len(words)), max(1, sum(map(str.isalpha, text)))
    lowered = [word.lower() for word in words]
    stripped = text.strip()
    return [
        sum(map(len, words)) / count,
        sum(len(word) >= 8 for word in words) / count,
        sum(bool(_CONTRACTION.search(word)) for word in words) / count,
        sum(bool(_LATINATE.search(word)) for word in words) / count,
        sum(bool(_FILLER.match(word)) for word in lowered) / count,
        sum(bool(_I.match(word)) for word in lowered) / count,
        sum(bool(_YOU.match(word)) for word in lowered) / count,
        len(set(lowered)) / count,
        sum(map(str.isupper, text)) / letters,
        float(stripped[:1].isupper()),
        float(stripped.endswith(".")),
        float(stripped.endswith("?")),
        text.count("!") / count,
        float("..." in text),
        text.count(",") / count,
    ]
