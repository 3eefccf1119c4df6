"""Coverage: the share of its condition's keywords that a text contains, in any inflection.

The matcher is the `Keywords` oracle, so that what is measured is what was trained for. Matching lemmas, or
substrings as some published numbers do, gives up to several points more: the method names the matcher.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nado.errors import InputError
from nado.metrics.measure import Measure, Metric, mean, require_as_many, require_texts
from nado.metrics.resampling import DEFAULT, Resampling
from nado.metrics.shares import share
from nado.oracles.keywords import Keywords


class Coverage(NamedTuple):
    """Mean coverage, and the share of texts that cover every keyword."""

    mean: Measure
    all_covered: Measure


def keyword_coverage(
    conditions: Sequence[str],
    texts: Sequence[str],
    keywords: Keywords | None = None,
    *,
    prompts: Sequence[Hashable] | None = None,
    resampling: Resampling = DEFAULT,
) -> Coverage:
    """Both coverages with intervals; texts of one condition count together, or of one prompt if given."""
    metric, complete = coverage_metric(conditions, texts, keywords)
    together = conditions if prompts is None else prompts
    return Coverage(
        metric.measure(together, resampling),
        share("all-covered", complete, together, confidence=resampling.confidence, method=metric.method),
    )


def coverage_metric(
    conditions: Sequence[str], texts: Sequence[str], keywords: Keywords | None = None
) -> tuple[Metric, NDArray[np.bool_]]:
    """Coverage as a metric, for comparisons, and whether each text covers all of its keywords."""
    require_texts(texts, "coverage")
    require_as_many(conditions, texts, "conditions", "texts")
    keywords = Keywords() if keywords is None else keywords
    if keywords.at_least is not None:
        raise InputError(
            "keywords that are each asked for",
            f"at_least={keywords.at_least}",
            "Leave at_least out: coverage counts all of them.",
        )
    parts = keywords.parts(conditions, texts)
    shares = np.array([each.mean() for each in parts])
    complete = np.array([bool(each.all()) for each in parts])
    return mean("coverage", shares, method=f"mean over texts; {_matcher(keywords)}", unit="share"), complete


def _matcher(keywords: Keywords) -> str:
    if not keywords.inflections:
        return "whole words, exact forms"
    source = "lemminflect" if keywords.forms is None else "prepared forms"
    return f"whole words, inflections by {source}" + (", in order" if keywords.in_order else "")
