"""Shares of texts: satisfaction, all-covered, finished. Wilson's interval, also when prompts repeat.

Wilson's interval is right for independent answers, near 0 and 1 too, where a bootstrap shows no spread.
Several texts of one prompt are not independent, so the number of texts is divided by the design effect: the
variance of the share over prompts, over what it would be for independent texts (Kish 1965).
"""

import statistics
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nado.errors import InputError
from nado.metrics.measure import Measure, require_as_many
from nado.metrics.resampling import FloatArray, sum_by_prompt
from nado.oracles.auditing import wilson_interval


def share(
    name: str,
    answers: ArrayLike,
    prompts: Sequence[Hashable] | None = None,
    *,
    confidence: float = 0.95,
    method: str = "share of texts",
) -> Measure:
    """The share of true answers with Wilson's interval; texts of one prompt count together."""
    column = as_answers(answers, name)
    if prompts is not None:
        require_as_many(column, prompts, "answers", "prompts")
    groups = sum_by_prompt(np.stack([column, np.ones(len(column))], axis=1).astype(np.float64), prompts)
    effective = effective_texts(groups)
    z = normal_quantile(confidence)
    rate = float(column.mean())
    low, high = wilson_interval_of_rate(rate, effective, z)
    counted = "" if effective == len(column) else f" at {effective:.1f} effective texts"
    return Measure(
        name=name,
        value=rate,
        n=len(column),
        low=low,
        high=high,
        prompts=len(groups),
        unit="share",
        method=f"{method}; {confidence:.0%} Wilson interval{counted}",
        note="one prompt: the interval is for other texts of it, not for other prompts"
        if len(groups) == 1 and len(column) > 1
        else None,
    )


def effective_texts(groups: FloatArray) -> float:
    """How many independent texts these are worth, from (successes, texts) of each prompt: (G, 2).

    Never more than there are. With one prompt, or when all texts agree, the design effect cannot be seen: the
    first counts texts (its interval is about this prompt alone), the second counts prompts.
    """
    count, texts = len(groups), float(groups[:, 1].sum())
    if count in (1, int(texts)):
        return texts
    rate = float(groups[:, 0].sum()) / texts
    if rate in (0.0, 1.0):
        return float(count)
    residual = groups[:, 0] - rate * groups[:, 1]
    variance = count / (count - 1) * float((residual**2).sum()) / texts**2
    # Prompts that happen to agree with the mean would promise more texts than there are.
    return min(texts, rate * (1 - rate) / variance) if variance > 0 else texts


def wilson_interval_of_rate(rate: float, trials: float, z: float) -> tuple[float, float]:
    """Wilson's interval for a rate over a number of trials that need not be whole."""
    return wilson_interval(rate * trials, trials, z)  # type: ignore[arg-type]


def normal_quantile(confidence: float) -> float:
    """z such that a standard normal lies within ±z with this probability."""
    if not 0 < confidence < 1:
        raise InputError("a confidence between 0 and 1", f"{confidence:g}", "Use 0.95.")
    return statistics.NormalDist().inv_cdf((1 + confidence) / 2)


def as_answers(answers: ArrayLike, name: str) -> NDArray[np.bool_]:
    """One boolean a text; numbers other than 0 and 1 are refused, nan included."""
    column = np.asarray(answers)
    if column.ndim != 1 or len(column) == 0:
        raise InputError(
            f"one answer for each of at least one text for {name}",
            f"an array of shape {column.shape}",
            "Give a flat list of true and false.",
        )
    if column.dtype != np.bool_:
        if column.dtype.kind not in "iuf" or not np.isin(column, (0, 1)).all():
            raise InputError(
                f"true or false for each text of {name}",
                f"an array of {column.dtype} with other values",
                "Compare scores with a threshold first.",
            )
        column = column.astype(bool)
    return column
