"""The two formality classifiers: an oracle on words and a judge on style, from halves that share nothing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from formality_data import Rated, decided, halve, read_rated
from formality_oracle import spell_out
from numpy.typing import ArrayLike, NDArray
from style_judge import StyleJudge

from nado.oracles.linear_classifier import LinearClassifier

ORACLE, JUDGE = "oracle", "judge"  # their folders


class Scorer(Protocol):
    """A classifier."""

    def probabilities(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """How likely each text is formal."""
        ...


class SpelledOut(NamedTuple):
    """What the oracle's threshold is applied to, before it is in a folder."""

    classifier: LinearClassifier

    def probabilities(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """How likely each text is formal."""
        return self.classifier.probabilities([spell_out(text) for text in texts])


class Classifiers(NamedTuple):
    """Both of them, with what they are worth on the half that each has not seen."""

    oracle: SpelledOut
    judge: StyleJudge
    held_out: dict[str, dict[str, Any]]

    def save(self, folder: Path) -> None:
        """Two folders."""
        self.oracle.classifier.save(folder / ORACLE)
        self.judge.save(folder / JUDGE)


def fit_classifiers(data: Path, *, seed: int = 0) -> Classifiers:
    """Fit the oracle to one half and the judge to the other."""
    first, second = halve(read_rated(data), seed)
    learned = decided(first)
    words = LinearClassifier.fit(
        [spell_out(each.text) for each in learned],
        [each.formal for each in learned],
        max_ngram=2,
        max_terms=30_000,
        regularisation=0.2,
    )
    learned = decided(second)
    judge = StyleJudge.fit([each.text for each in learned], [each.formal for each in learned])
    held_out = {ORACLE: rate_classifier(SpelledOut(words), second), JUDGE: rate_classifier(judge, first)}
    return Classifiers(SpelledOut(words), judge, held_out)


def rate_classifier(scorer: Scorer, rated: Sequence[Rated]) -> dict[str, Any]:
    """AUC on the sign of the score, and rank correlation with the score itself, also within domains."""
    domains = sorted({each.domain for each in rated})
    found = _rate(scorer, rated)
    found["auc_by_domain"] = {
        domain: _rate(scorer, [each for each in rated if each.domain == domain])["auc"] for domain in domains
    }
    return found


def _rate(scorer: Scorer, rated: Sequence[Rated]) -> dict[str, Any]:
    predicted = scorer.probabilities([each.text for each in rated])
    scores = np.array([each.score for each in rated])
    clear = scores != 0
    formal = scores[clear] > 0
    return {
        "sentences": len(rated),
        "auc": round(auc(predicted[clear], formal), 4),
        "accuracy": round(float(np.mean((predicted[clear] >= 0.5) == formal)), 4),
        "spearman": round(spearman(predicted, scores), 4),
    }


def auc(predicted: ArrayLike, positive: ArrayLike) -> float:
    """The chance that a positive is ranked above a negative; ties count half."""
    hits = np.asarray(positive, dtype=bool)
    ranks = rank(predicted)
    above, below = int(hits.sum()), int((~hits).sum())
    if not above or not below:
        return float("nan")
    return float((ranks[hits].sum() - above * (above + 1) / 2) / (above * below))


def spearman(first: ArrayLike, second: ArrayLike) -> float:
    """The correlation of ranks."""
    return float(np.corrcoef(rank(first), rank(second))[0, 1])


def rank(values: ArrayLike) -> NDArray[np.float64]:
    """Ranks from 1; equal values share the mean of theirs."""
    _, places, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[places], dtype=np.float64)
