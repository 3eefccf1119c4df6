"""Any fitted scikit-learn classifier as an oracle."""

import hashlib
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nado.errors import InputError
from nado.oracles.protocol import check_threshold
from nado.oracles.scored import ScoredOracle, read_steps


class SklearnClassifier(ScoredOracle):
    """Any fitted scikit-learn estimator that turns texts into probabilities, held in memory.

    With `steps` it says of every prefix which of these probabilities it has reached, which guides are told.
    It is never read from or written to disk here: scikit-learn's own files execute code when read.
    """

    name = "sklearn_classifier"

    def __init__(
        self, estimator: Any, label: Any = True, threshold: float = 0.5, *, steps: Sequence[float] = ()
    ) -> None:
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
        self.threshold, self.steps = threshold, read_steps(steps, 0, 1)
        self._column = classes.index(label)

    @property
    def spec(self) -> str:
        """The settings with a digest of the estimator's state (which is written, never read)."""
        state = hashlib.sha256(pickle.dumps(self.estimator)).hexdigest()[:16]
        about = f"label={self.label!r}, threshold={self.threshold}, state=#{state}"
        return f"sklearn_classifier({about}{self.said_steps})"

    def scores(self, conditions: Sequence[str], texts: Sequence[str]) -> NDArray[np.float64]:
        """The probability of the label for each text."""
        if not len(texts):
            return np.zeros(0)
        return np.asarray(self.estimator.predict_proba(list(texts))[:, self._column], dtype=np.float64)
