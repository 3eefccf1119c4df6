"""Corpus BLEU as CommonGen and COCO take it: closest reference length, no smoothing, case and marks kept.

Not comparable with sacrebleu's: the tokens differ (see `nado.metrics.translation`).
"""

from collections.abc import Sequence

import numpy as np

from nado.metrics.measure import Metric, require_references
from nado.metrics.resampling import FloatArray
from nado.metrics.tokens import Ngrams, TokeniserName, count_ngrams, tokeniser

ORDER = 4


def corpus_bleu(
    texts: Sequence[str],
    references: Sequence[Sequence[str]],
    order: int = ORDER,
    *,
    tokens: TokeniserName = "english",
) -> Metric:
    """BLEU-`order`, 0 to 100: a row a text of matches, n-grams and lengths."""
    return corpus_bleus(texts, references, (order,), tokens=tokens)[0]


def corpus_bleus(
    texts: Sequence[str],
    references: Sequence[Sequence[str]],
    orders: Sequence[int] = (1, 2, 3, 4),
    *,
    tokens: TokeniserName = "english",
) -> list[Metric]:
    """BLEU of several orders from one look at the texts."""
    require_references(texts, references, "BLEU")
    cut, most = tokeniser(tokens), max(orders)
    rows = np.array(
        [
            _count_matches(cut(text), [cut(one) for one in several], most)
            for text, several in zip(texts, references, strict=True)
        ],
        dtype=np.float64,
    )
    return [bleu_of_rows(f"BLEU-{order}", rows, most, order, tokens) for order in orders]


def bleu_of_rows(name: str, rows: FloatArray, most: int, order: int, tokens: str) -> Metric:
    """BLEU-`order` from rows counted up to n-grams of `most`."""
    return Metric(
        name,
        rows,
        lambda sums: combine_bleu(sums, most, order),
        f"corpus BLEU, {tokens} tokens, case kept, closest reference length, no smoothing",
        "0–100",
    )


def combine_bleu(sums: FloatArray, most: int, order: int) -> FloatArray:
    """BLEU of summed rows (..., 2·most + 2): 100 · BP · (Π matches / n-grams)^(1/order); 0 if any is 0."""
    matches, ngrams = sums[..., :order], sums[..., most : most + order]
    length, closest = sums[..., -2], sums[..., -1]
    with np.errstate(divide="ignore", invalid="ignore"):
        log_precision = np.log(matches / ngrams).mean(axis=-1)
        log_penalty = np.minimum(0.0, 1 - closest / length)
        score = 100 * np.exp(log_precision + log_penalty)
    return np.where((matches > 0).all(axis=-1), score, 0.0)


def _count_matches(text: list[str], references: list[list[str]], most: int) -> list[int]:
    """Clipped matches of each order, n-grams of each order, length, closest reference length."""
    matches, ngrams = [], []
    for order in range(1, most + 1):
        allowed: Ngrams = count_ngrams(references[0], order)
        for reference in references[1:]:
            allowed |= count_ngrams(reference, order)
        found = count_ngrams(text, order)
        matches.append(sum((found & allowed).values()))
        ngrams.append(max(0, len(text) - order + 1))
    return [*matches, *ngrams, len(text), closest_length(len(text), [len(one) for one in references])]


def closest_length(length: int, lengths: Sequence[int]) -> int:
    """The reference length nearest to the text's; of two as near, the shorter."""
    return min(lengths, key=lambda each: (abs(each - length), each))
