"""Metrics: what was measured, on how many texts, how, and how sure that is.

    from nado.metrics import compare, corpus_bleu

    ours = corpus_bleu(texts, references)
    print(ours.measure(prompts))                    # BLEU-4 27.48 [26.17, 28.78] (n = 993)
    print(compare(ours, corpus_bleu(base_texts, references), prompts))

Everything here is a pure function of texts, numbers and a seed; only `perplexity` asks a model. Texts of one
prompt are resampled together, so give `prompts` wherever a prompt has several texts.
"""

from nado.metrics.bleu import corpus_bleu, corpus_bleus
from nado.metrics.calibration import (
    Bin,
    Reliability,
    calibration_by,
    largest_ratio,
    mean_by_position,
    reliability,
)
from nado.metrics.cider import cider_d
from nado.metrics.coverage import Coverage, coverage_metric, keyword_coverage
from nado.metrics.divergence import effective_samples, kl_from_base, kl_to_target, rate_from_weights
from nado.metrics.diversity import distinct, length, self_bleu
from nado.metrics.likelihood import perplexity, perplexity_of_log_p, score_tokens
from nado.metrics.measure import Measure, Metric, mean, ratio
from nado.metrics.pairs import Comparison, adjust_holm, compare, compare_ratings, compare_shares
from nado.metrics.resampling import Resampling
from nado.metrics.rouge import rouge_l
from nado.metrics.shares import share
from nado.metrics.tokens import tokenise_english
from nado.metrics.translation import chrf, sacre_bleu

__all__ = [
    "Bin",
    "Comparison",
    "Coverage",
    "Measure",
    "Metric",
    "Reliability",
    "Resampling",
    "adjust_holm",
    "calibration_by",
    "chrf",
    "cider_d",
    "compare",
    "compare_ratings",
    "compare_shares",
    "corpus_bleu",
    "corpus_bleus",
    "coverage_metric",
    "distinct",
    "effective_samples",
    "keyword_coverage",
    "kl_from_base",
    "kl_to_target",
    "largest_ratio",
    "length",
    "mean",
    "mean_by_position",
    "perplexity",
    "perplexity_of_log_p",
    "rate_from_weights",
    "ratio",
    "reliability",
    "rouge_l",
    "sacre_bleu",
    "score_tokens",
    "self_bleu",
    "share",
    "tokenise_english",
]
