"""Any fitted scikit-learn classifier as an oracle."""

import hashlib
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from nado.errors import InputError
from nado.oracles.protocol import BoolArray, Oracle, check_threshold


class SklearnClassifier(Oracle):
    """Any fitted scikit-learn estimator that turns texts into probabilities, held in memory.

    It is never read from or written to disk here: scikit-learn's own files execute code when read.
    """

    name = "sklearn_classifier"

    def __init__(self, estimator: Any, label: Any = True, threshold: float = 0.5) -> None:
        check_threshold(threshold)
        classes = list(getattr(estimator, "classes_", []))
        if not hasattr(estimator, "predict_proba") or not classes:
            raise InputError(
                "a fitted estimator with predict_proba",
                type(estimator).__name__,
                "Fit a pipeline of a vectoriser and a probabilistic classifier.",
            )
        if label not in classes:
            raise InputError(
                f"a label among {', '.join(map(str, classes))}", repr(label), "Choose one of them."
            )
        self.estimator = estimator
        self.label = label
        self.threshold = threshold
        self._column = classes.index(label)

    @property
    def spec(self) -> str:
        """The settings with a digest of the estimator's state (which is written, never read)."""
        state = hashlib.sha256(pickle.dumps(self.estimator)).hexdigest()[:16]
        return f"sklearn_classifier(label={self.label!r}, threshold={self.threshold}, state=#{state})"

    def judge(self, conditions: Sequence[str], texts: Sequence[str]) -> BoolArray:
        """Whether the probability of the label reaches the threshold for each text."""
        if not len(texts):
            return np.zeros(0, dtype=bool)
        satisfied: BoolArray = self.estimator.predict_proba(list(texts))[:, self._column] >= self.threshold
        return satisfied
