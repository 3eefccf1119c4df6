"""sacrebleu's BLEU and chrF, for translation: its own tokens and options, with its signature on record."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from nado.metrics.measure import Metric, require_references
from nado.metrics.resampling import FloatArray


def sacre_bleu(texts: Sequence[str], references: Sequence[Sequence[str]], **options: Any) -> Metric:
    """sacrebleu's corpus BLEU, 0 to 100; `options` are those of sacrebleu.metrics.BLEU."""
    from sacrebleu.metrics.bleu import BLEU

    # force: texts that end in " ." are what they are, not a mistake to be warned of.
    return _metric("sacreBLEU", BLEU(**{"force": True, **options}), texts, references)


def chrf(texts: Sequence[str], references: Sequence[Sequence[str]], **options: Any) -> Metric:
    """sacrebleu's corpus chrF, 0 to 100 (word_order=2 gives chrF++); `options` are those of CHRF."""
    from sacrebleu.metrics.chrf import CHRF

    return _metric("chrF", CHRF(**options), texts, references)


def _metric(name: str, scorer: Any, texts: Sequence[str], references: Sequence[Sequence[str]]) -> Metric:
    """A sacrebleu scorer as a metric; texts may have different numbers of references."""
    require_references(texts, references, name)
    streams = [list(stream) for stream in itertools.zip_longest(*references)]
    # The statistics behind corpus_score, before they are summed: what its own significance tests resample.
    rows = np.array(scorer._extract_corpus_statistics(list(texts), streams), dtype=np.float64)
    scorer.corpus_score(list(texts), streams)  # which counts the references for the signature
    return Metric(name, rows, lambda sums: _score_sums(scorer, sums), str(scorer.get_signature()), "0–100")


def _score_sums(scorer: Any, sums: FloatArray) -> FloatArray:
    """The scorer's value of each row of sums: (..., K) → (...)."""
    flat = sums.reshape(-1, sums.shape[-1]).astype(np.int64)
    values = [scorer._compute_score_from_stats(row.tolist()).score for row in flat]
    return np.array(values, dtype=np.float64).reshape(sums.shape[:-1])
