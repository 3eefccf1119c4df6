"""CIDEr-D as COCO takes it: tf-idf weighted n-gram agreement with the references, clipped, 0 to 10.

The rarity of an n-gram is counted over the references of *this* corpus, one document a text, so CIDEr of a
part of a corpus is another quantity. The interval resamples the scores of texts and keeps the rarities.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from nado.metrics.measure import Metric, mean, require_references
from nado.metrics.tokens import Ngrams, TokeniserName, count_ngrams, tokeniser

_ORDER = 4
_SIGMA = 6.0  # how fast a difference in length costs


class _Vector(NamedTuple):
    """The tf-idf weights of a text's n-grams, one mapping an order, their norms, and its length."""

    weights: list[dict[tuple[str, ...], float]]
    norms: list[float]
    length: int


def cider_d(
    texts: Sequence[str], references: Sequence[Sequence[str]], *, tokens: TokeniserName = "english"
) -> Metric:
    """The mean of CIDEr-D over texts (Vedantam et al. 2015; n = 4, σ = 6)."""
    require_references(texts, references, "CIDEr")
    cut = tokeniser(tokens)
    documents = [[_count_all(cut(one)) for one in several] for several in references]
    rarity = _Rarity(documents)
    scores = [
        _score(rarity.weigh(_count_all(cut(text))), [rarity.weigh(one) for one in several])
        for text, several in zip(texts, documents, strict=True)
    ]
    method = f"CIDEr-D, n = {_ORDER}, σ = {_SIGMA:g}, {tokens} tokens, case kept, idf of these references"
    metric = mean("CIDEr", scores, method=method, unit="0–10")
    if len(texts) > 1:
        return metric
    note = "one text: every n-gram is in every document, so all weigh 0"
    return Metric(metric.name, metric.rows, metric.combine, metric.method, metric.unit, note)


class _Rarity:
    """log(N / df) of every n-gram, where df counts the texts with a reference that has it."""

    def __init__(self, documents: Sequence[Sequence[list[Ngrams]]]) -> None:
        self.log_documents = math.log(len(documents))
        self.frequency: Counter[tuple[str, ...]] = Counter()
        for several in documents:
            self.frequency.update({ngram for one in several for counts in one for ngram in counts})

    def weigh(self, counts: list[Ngrams]) -> _Vector:
        weights = [
            {
                ngram: count * (self.log_documents - math.log(max(1, self.frequency[ngram])))
                for ngram, count in each.items()
            }
            for each in counts
        ]
        norms = [math.sqrt(sum(weight**2 for weight in each.values())) for each in weights]
        return _Vector(weights, norms, sum(counts[0].values()))


def _count_all(tokens: list[str]) -> list[Ngrams]:
    return [count_ngrams(tokens, order) for order in range(1, _ORDER + 1)]


def _score(text: _Vector, references: Sequence[_Vector]) -> float:
    """10 times the mean over references and orders."""
    total = sum(_agree(text, one, order) for one in references for order in range(_ORDER))
    return 10 * total / (_ORDER * len(references))


def _agree(text: _Vector, reference: _Vector, order: int) -> float:
    """A cosine in which no n-gram counts for more than the reference has of it, less for other lengths."""
    norms = text.norms[order] * reference.norms[order]
    if norms == 0:
        return 0.0
    there = reference.weights[order]
    shared = sum(
        min(weight, there[ngram]) * there[ngram]
        for ngram, weight in text.weights[order].items()
        if ngram in there
    )
    gap = text.length - reference.length
    return shared / norms * math.exp(-(gap**2) / (2 * _SIGMA**2))
