"""Diversity: how much texts repeat one another, and how long they are."""

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

from nado.errors import InputError
from nado.metrics.bleu import bleu_of_rows, closest_length
from nado.metrics.measure import Measure, Metric, mean, require_as_many, require_texts
from nado.metrics.resampling import DEFAULT, FloatArray, Resampling
from nado.metrics.tokens import TokeniserName, count_ngrams, tokeniser


def distinct(texts: Sequence[str], order: int, *, tokens: TokeniserName = "english") -> Measure:
    """Distinct-`order`: different n-grams over all n-grams of all texts (Li et al. 2016), 0 to 1.

    It falls as the number of words grows: compare it only between equally many texts of like length.
    """
    require_texts(texts, f"distinct-{order}")
    if order < 1:
        raise InputError("n-grams of at least 1 token", f"{order}", "Use 1, 2 or 3.")
    cut = tokeniser(tokens)
    counts: Counter[tuple[str, ...]] = Counter()
    for text in texts:
        counts.update(count_ngrams(cut(text), order))
    total = counts.total()
    return Measure(
        name=f"distinct-{order}",
        value=len(counts) / total if total else None,
        n=len(texts),
        unit="share",
        method=f"different {order}-grams over all {total}, {tokens} tokens, case kept",
        # A resample repeats texts, so its distinct-n is lower than any real corpus would have.
        note=f"no interval: resampling repeats texts. It falls with the number of {order}-grams"
        if total
        else f"no text has {order} tokens",
    )


def self_bleu(
    texts: Sequence[str],
    prompts: Sequence[Hashable] | None = None,
    order: int = 4,
    *,
    tokens: TokeniserName = "english",
    resampling: Resampling = DEFAULT,
) -> Measure:
    """BLEU of each text against the other texts of its prompt (Zhu et al. 2018), 0 to 100: low is diverse.

    Without prompts every text is compared with all others, which is about the corpus, and there is no
    interval: no text is independent of any other. Prompts with one text say nothing and are left out.
    """
    name = f"self-BLEU-{order}"
    require_texts(texts, name)
    if prompts is not None:
        require_as_many(texts, prompts, "texts", "prompts")
    keys = [0] * len(texts) if prompts is None else list(prompts)
    groups: dict[Hashable, list[int]] = {}
    for row, key in enumerate(keys):
        groups.setdefault(key, []).append(row)
    several = [rows for rows in groups.values() if len(rows) > 1]
    if not several:
        note = "n too small: no prompt has two texts to compare"
        return Measure(name, None, len(texts), prompts=len(groups), unit="0–100", note=note)
    cut = [tokeniser(tokens)(text) for text in texts]
    counted = [_match_others([cut[row] for row in rows], order) for rows in several]
    kept = [keys[row] for rows in several for row in rows]
    metric = bleu_of_rows(name, np.concatenate(counted), order, order, tokens)
    return metric.measure(kept, resampling)


def length(texts: Sequence[str], *, tokens: TokeniserName = "english") -> Metric:
    """The mean number of tokens, punctuation included unless the tokens are "words"."""
    require_texts(texts, "length")
    cut = tokeniser(tokens)
    counts = [len(cut(text)) for text in texts]
    return mean("length", counts, method=f"mean over texts, {tokens} tokens", unit="tokens")


def _match_others(texts: list[list[str]], most: int) -> FloatArray:
    """BLEU's rows of each text with all others as references: (N, 2·most + 2).

    The clip of an n-gram is its highest count in any other text, so the two highest counts overall are
    enough: one pass, not one for each pair of texts.
    """
    rows = np.zeros((len(texts), 2 * most + 2))
    for order in range(1, most + 1):
        counted = [count_ngrams(text, order) for text in texts]
        highest: dict[tuple[str, ...], tuple[int, int]] = {}
        for counts in counted:
            for ngram, count in counts.items():
                first, second = highest.get(ngram, (0, 0))
                highest[ngram] = (count, first) if count > first else (first, max(count, second))
        for row, counts in enumerate(counted):
            rows[row, order - 1] = sum(min(count, _others(highest[n], count)) for n, count in counts.items())
            rows[row, most + order - 1] = max(0, len(texts[row]) - order + 1)
    lengths = Counter(map(len, texts))
    for row, text in enumerate(texts):
        others = [each for each, count in lengths.items() if count > (each == len(text))]
        rows[row, -2:] = len(text), closest_length(len(text), others)
    return rows


def _others(highest: tuple[int, int], own: int) -> int:
    """The highest count among the other texts: the second one where the first may be this text's own."""
    return highest[1] if own == highest[0] else highest[0]
