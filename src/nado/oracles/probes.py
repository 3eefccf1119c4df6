"""Probes for spurious features: how well something trivial about a text predicts an oracle's answers.

Every probe is fitted on one half of the texts and scored on the other, both ways round, so that picking
the best of many characters or words does not raise an alarm by itself: on answers that have nothing to
do with the feature the AUC is 0.5 on average, however many were tried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nado.oracles.protocol import BoolArray
from nado.oracles.words import split_words

Floats = NDArray[np.float64]

#: With fewer texts of one class an AUC is too noisy to warn of.
MINIMUM_PER_CLASS = 20
_CHARACTERS = 80
_WORDS = 500
_BINS = 20


class Evidence(NamedTuple):
    """How well a feature predicts unseen answers (0.5: not at all), and what it is."""

    auc: float
    what: str


def area_under_curve(scores: Floats, answers: BoolArray) -> float:
    """The probability that a satisfied text scores above an unsatisfied one; ties count half."""
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]  # mean rank within ties, from 1
    positive = int(answers.sum())
    negative = len(answers) - positive
    if not positive or not negative:
        return 0.5
    return float((ranks[answers].sum() - positive * (positive + 1) / 2) / (positive * negative))


def _halves(answers: BoolArray) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Two halves with the same share of each class, the same ones every time."""
    order = np.random.default_rng(0).permutation(len(answers))
    order = np.concatenate([order[answers[order]], order[~answers[order]]])
    return order[0::2], order[1::2]


def _cross_fit(
    answers: BoolArray, fit_and_score: Callable[[NDArray[np.int64], NDArray[np.int64]], tuple[Floats, str]]
) -> Evidence:
    first, second = _halves(answers)
    aucs, names = [], []
    for seen, unseen in ((first, second), (second, first)):
        scores, name = fit_and_score(seen, unseen)
        aucs.append(area_under_curve(scores, answers[unseen]))
        names.append(name)
    return Evidence(float(np.mean(aucs)), names[int(np.argmax(aucs))])


def _by_category(categories: NDArray[Any], answers: BoolArray, name: str) -> Evidence:
    """Score each category by its share of satisfied texts, drawn towards the overall share."""

    def fit_and_score(seen: NDArray[np.int64], unseen: NDArray[np.int64]) -> tuple[Floats, str]:
        kinds, inverse = np.unique(categories, return_inverse=True)
        total = np.bincount(inverse[seen], minlength=len(kinds))
        satisfied = np.bincount(inverse[seen], weights=answers[seen], minlength=len(kinds))
        return ((satisfied + answers[seen].mean()) / (total + 1))[inverse[unseen]], name

    return _cross_fit(answers, fit_and_score)


def _by_number(numbers: Floats, answers: BoolArray, name: str) -> Evidence:
    """Bins, and not the number itself: "between 5 and 10 words" is trivial too, but not monotone."""
    edges = np.unique(np.quantile(numbers, np.linspace(0, 1, _BINS + 1)[1:-1]))
    return _by_category(np.searchsorted(edges, numbers, side="right"), answers, name)


def _by_best_column(columns: Floats, names: Sequence[str], answers: BoolArray) -> Evidence:
    """The single column that separates the seen half best, in the direction seen there."""

    def fit_and_score(seen: NDArray[np.int64], unseen: NDArray[np.int64]) -> tuple[Floats, str]:
        aucs = np.array([area_under_curve(column[seen], answers[seen]) for column in columns.T])
        best = int(np.argmax(np.abs(aucs - 0.5)))
        return columns[unseen, best] * (1 if aucs[best] >= 0.5 else -1), names[best]

    return _cross_fit(answers, fit_and_score)


def _by_all_columns(columns: Floats, answers: BoolArray, name: str) -> Evidence:
    """A ridge regression on all columns: catches a count over several of them."""
    scale = columns.std(axis=0)
    columns = (columns - columns.mean(axis=0)) / np.where(scale > 0, scale, 1.0)

    def fit_and_score(seen: NDArray[np.int64], unseen: NDArray[np.int64]) -> tuple[Floats, str]:
        design, target = columns[seen], answers[seen] - answers[seen].mean()
        gram = design.T @ design + 0.01 * len(seen) * np.eye(design.shape[1])
        return columns[unseen] @ np.linalg.solve(gram, design.T @ target), name

    return _cross_fit(answers, fit_and_score)


def _character_counts(texts: Sequence[str]) -> tuple[Floats, list[str]]:
    counts = [Counter(text) for text in texts]
    common = [c for c, _ in sum(counts, Counter()).most_common(_CHARACTERS)] or [" "]
    return np.array([[count[c] for c in common] for count in counts], dtype=np.float64), common


def _probe_characters(texts: Sequence[str], answers: BoolArray) -> Evidence:
    """Counts and shares: an oracle that runs over the characters may add them up or average them."""
    counts, _ = _character_counts(texts)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    summed = _by_all_columns(counts, answers, "A count over single characters")
    averaged = _by_all_columns(shares, answers, "A mean over single characters")
    return max(summed, averaged)


def _probe_one_character(texts: Sequence[str], answers: BoolArray) -> Evidence:
    counts, common = _character_counts(texts)
    return _by_best_column(counts, [f"The number of {c!r}" for c in common], answers)


def _probe_one_word(texts: Sequence[str], answers: BoolArray) -> Evidence:
    present = [set(split_words(text)) for text in texts]
    common = [w for w, _ in Counter(w for words in present for w in words).most_common(_WORDS)] or [""]
    columns = np.array([[w in words for w in common] for words in present], dtype=np.float64)
    return _by_best_column(columns, [f"The word {w!r}" for w in common], answers)


def _probe_place(read: Callable[[str], str], name: str) -> Callable[[Sequence[str], BoolArray], Evidence]:
    def probe(texts: Sequence[str], answers: BoolArray) -> Evidence:
        return _by_category(np.array([read(text) for text in texts]), answers, name)

    return probe


def _probe_length(count: Callable[[str], int], name: str) -> Callable[[Sequence[str], BoolArray], Evidence]:
    def probe(texts: Sequence[str], answers: BoolArray) -> Evidence:
        return _by_number(np.array([count(text) for text in texts], dtype=np.float64), answers, name)

    return probe


PROBES: dict[str, Callable[[Sequence[str], BoolArray], Evidence]] = {
    "length in words": _probe_length(lambda text: len(split_words(text)), "The number of words"),
    "length in characters": _probe_length(len, "The number of characters"),
    "first character": _probe_place(lambda text: text[:1], "The first character"),
    "last character": _probe_place(lambda text: text[-1:], "The last character"),
    "first word": _probe_place(lambda text: text.split(None, 1)[0] if text.split() else "", "The first word"),
    "one character": _probe_one_character,
    "characters": _probe_characters,
    "one word": _probe_one_word,
}
