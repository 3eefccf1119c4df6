"""A linear classifier on tf-idf features, kept in files that are safe to load."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nado.errors import InputError, MissingPackageError
from nado.oracles.protocol import BoolArray, check_rows, check_threshold
from nado.oracles.scored import ScoredOracle, read_steps
from nado.storage import write_atomically, write_json

# scikit-learn's default token: two or more word characters.
_TOKEN = re.compile(r"\b\w\w+\b")
_WEIGHTS_FILE = "classifier.safetensors"
_CONFIG_FILE = "classifier.json"
_FORMAT = 1


class LinearClassifier(ScoredOracle):
    """Logistic regression on tf-idf features, with a threshold on its probability.

    With `steps` it says of every prefix which of these probabilities it has reached, which guides are told.
    Scoring needs numpy alone and its files are safetensors and JSON, so a classifier from elsewhere
    can be loaded without trusting whoever made it.
    """

    cheap = True
    name = "linear_classifier"

    def __init__(
        self,
        vocabulary: Sequence[str],
        idf: NDArray[np.float32],
        weights: NDArray[np.float32],
        bias: float,
        *,
        threshold: float = 0.5,
        max_ngram: int = 1,
        steps: Sequence[float] = (),
    ) -> None:
        check_threshold(threshold)
        if not len(vocabulary) == len(idf) == len(weights):
            raise InputError(
                "one idf and one weight for each term",
                f"{len(vocabulary)} terms, {len(idf)} idf values and {len(weights)} weights",
                "The files belong to different classifiers; save it again.",
            )
        self.vocabulary = tuple(vocabulary)
        self.idf = np.asarray(idf, dtype=np.float32)
        self.weights = np.asarray(weights, dtype=np.float32)
        self.bias = float(bias)
        self.threshold, self.steps = threshold, read_steps(steps, 0, 1)
        self.max_ngram = max_ngram
        rows = zip(self.vocabulary, self.idf.tolist(), self.weights.tolist(), strict=True)
        self._terms = {term: (idf, weight) for term, idf, weight in rows}

    @classmethod
    def fit(
        cls,
        texts: Sequence[str],
        labels: Sequence[bool] | BoolArray,
        *,
        threshold: float = 0.5,
        max_ngram: int = 2,
        max_terms: int = 50_000,
        regularisation: float = 1.0,
    ) -> LinearClassifier:
        """Fit to labelled texts with scikit-learn; the result no longer needs it."""
        try:
            from sklearn.feature_extraction.text import TfidfVectorizer
            from sklearn.linear_model import LogisticRegression
        except ImportError as error:
            raise MissingPackageError("scikit-learn", "oracles", "fitting a classifier") from error
        check_rows([""] * len(labels), texts, cls.name)
        satisfied = np.asarray(labels, dtype=bool)
        if satisfied.all() or not satisfied.any():
            raise InputError("texts of both kinds", "one kind only", "Add examples of the other.")
        vectoriser = TfidfVectorizer(ngram_range=(1, max_ngram), max_features=max_terms)
        model = LogisticRegression(C=1.0 / regularisation, max_iter=1000)
        model.fit(vectoriser.fit_transform(texts), satisfied)
        return cls(
            vectoriser.get_feature_names_out().tolist(),
            vectoriser.idf_,
            model.coef_[0],
            model.intercept_[0],
            threshold=threshold,
            max_ngram=max_ngram,
        )

    @property
    def spec(self) -> str:
        """The settings with a digest of vocabulary and weights."""
        digest = hashlib.sha256("\n".join(self.vocabulary).encode())
        digest.update(self.idf.tobytes() + self.weights.tobytes())
        return (
            f"linear_classifier(bias={self.bias!r}, threshold={self.threshold}, "
            f"max_ngram={self.max_ngram}, weights=#{digest.hexdigest()[:16]}{self.said_steps})"
        )

    def scores(self, conditions: Sequence[str], texts: Sequence[str]) -> NDArray[np.float64]:
        """The probability of each text."""
        return self.probabilities(texts)

    def probabilities(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """The probability of each text."""
        return np.array([1.0 / (1.0 + math.exp(-self._logit(text))) for text in texts], dtype=np.float64)

    def _logit(self, text: str) -> float:
        known = self._terms
        counts = Counter(term for term in _terms_of(text, self.max_ngram) if term in known)
        score, square = 0.0, 0.0
        for term, count in counts.items():
            idf, weight = known[term]
            score += count * idf * weight
            square += (count * idf) ** 2
        # Clamped so that exp cannot overflow; the probability is 0 or 1 to double precision there.
        return min(max(self.bias + (score / math.sqrt(square) if square else 0.0), -700.0), 700.0)

    def save(self, folder: str | Path) -> None:
        """Write two files into a folder."""
        from safetensors.numpy import save_file

        folder = Path(folder)
        tensors = {"idf": self.idf, "weights": self.weights}
        write_atomically(folder / _WEIGHTS_FILE, lambda path: save_file(tensors, path))
        config = {
            "format": _FORMAT,
            "bias": self.bias,
            "threshold": self.threshold,
            "max_ngram": self.max_ngram,
            "vocabulary": list(self.vocabulary),
        }
        write_json(folder / _CONFIG_FILE, config)

    @classmethod
    def load(
        cls, folder: str | Path, *, threshold: float | None = None, steps: Sequence[float] = ()
    ) -> LinearClassifier:
        """Read what `save` wrote; another threshold may be given, and steps for prefixes."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        folder = Path(folder)
        try:
            config = json.loads((folder / _CONFIG_FILE).read_text(encoding="utf-8"))
            tensors = load_file(folder / _WEIGHTS_FILE)
            if config["format"] != _FORMAT:
                raise ValueError(f"format {config['format']}")
            return cls(
                config["vocabulary"],
                tensors["idf"],
                tensors["weights"],
                config["bias"],
                threshold=config["threshold"] if threshold is None else threshold,
                max_ngram=config["max_ngram"],
                steps=steps,
            )
        except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"a folder with {_CONFIG_FILE} and {_WEIGHTS_FILE}",
                f"{folder}: {type(error).__name__}: {error}",
                "Make one with LinearClassifier.fit(...).save(folder).",
            ) from error


def _terms_of(text: str, max_ngram: int) -> list[str]:
    tokens = _TOKEN.findall(text.lower())
    terms = list(tokens)
    for n in range(2, max_ngram + 1):
        terms += [" ".join(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return terms
