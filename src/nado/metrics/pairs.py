"""Two systems on the same prompts: is the difference more than luck?

Pairing removes what the prompts themselves vary, which is most of the noise. For corpus metrics both systems
are resampled together; answers of yes and no take McNemar's exact test, ratings Wilcoxon's signed ranks.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from nado.errors import InputError, MismatchError
from nado.metrics.measure import Metric, as_column, mean, name_groups, require_as_many, too_small
from nado.metrics.resampling import (
    DEFAULT,
    SMALLEST,
    FloatArray,
    Resampling,
    percentile_interval,
    resample_sums,
    sign_p_value,
    sum_by_prompt,
)
from nado.metrics.shares import as_answers

EXACT_WILCOXON = 200  # up to this many differences the distribution of the rank sum is enumerated


@dataclass(frozen=True)
class Comparison:
    """A difference between two systems, first minus second, and how likely luck alone would make it.

    `p_value` is two-sided; None where the data cannot say, and then `note` says why.
    """

    name: str
    difference: float | None
    p_value: float | None
    n: int
    low: float | None = None
    high: float | None = None
    method: str = ""
    note: str | None = None

    def describe(self) -> dict[str, Any]:
        """As JSON-ready values."""
        return asdict(self)

    def describe_difference(self) -> dict[str, float | None]:
        """The same without how it was made: for a table whose lines say that once."""
        return {"difference": self.difference, "low": self.low, "high": self.high, "p_value": self.p_value}

    def __str__(self) -> str:
        difference = "–" if self.difference is None else f"{self.difference:+.4g}"
        interval = "" if self.low is None or self.high is None else f" [{self.low:+.4g}, {self.high:+.4g}]"
        p_value = "" if self.p_value is None else f", p = {self.p_value:.3g}"
        return f"{self.name} {difference}{interval}{p_value} (n = {self.n})" + (
            f"; {self.note}" if self.note else ""
        )


def compare(
    first: Metric,
    second: Metric,
    prompts: Sequence[Hashable] | None = None,
    resampling: Resampling = DEFAULT,
) -> Comparison:
    """A corpus metric of two systems, texts in the same order: paired bootstrap over prompts."""
    if first.method != second.method or first.name != second.name:
        raise MismatchError(
            f"the same metric of both systems, {first.name} ({first.method})",
            f"{second.name} ({second.method})",
            "Measure both with the same options.",
        )
    require_as_many(first.rows, second.rows, "texts of the first system", "texts of the second")
    a, b = first.value, second.value
    if a is None or b is None:
        return Comparison(first.name, None, None, len(first.rows), note="one of the values is not defined")
    over = name_groups(prompts)
    joint = sum_by_prompt(np.concatenate([first.rows, second.rows], axis=1), prompts)
    if len(joint) < SMALLEST:
        return Comparison(first.name, a - b, None, len(joint), note=too_small(len(joint), over))
    sums, width = resample_sums(joint, resampling), first.rows.shape[1]
    differences = first.combine(sums[:, :width]) - second.combine(sums[:, width:])
    if not np.isfinite(differences).all():
        note = "no interval: some resamples have nothing to divide by"
        return Comparison(first.name, a - b, None, len(joint), note=note)
    low, high = percentile_interval(differences, resampling.confidence)
    method = f"paired, {resampling}, over {over}"
    return Comparison(first.name, a - b, sign_p_value(differences), len(joint), low, high, method)


def compare_shares(
    name: str,
    first: ArrayLike,
    second: ArrayLike,
    prompts: Sequence[Hashable] | None = None,
    resampling: Resampling = DEFAULT,
) -> Comparison:
    """Shares of yes: exact McNemar test for one text a prompt, paired bootstrap over prompts for several."""
    a, b = as_answers(first, name), as_answers(second, name)
    require_as_many(a, b, "answers of the first system", "answers of the second")
    paired = compare(mean(name, a), mean(name, b), prompts, resampling)
    if prompts is not None and len(set(prompts)) < len(prompts):
        return paired
    only_first, only_second = int((a & ~b).sum()), int((b & ~a).sum())
    method = (
        f"exact McNemar test, {only_first} prompts only the first satisfies, {only_second} only the second"
    )
    return Comparison(
        name,
        paired.difference,
        mcnemar_p_value(only_first, only_second),
        len(a),
        paired.low,
        paired.high,
        method + (f"; interval: {paired.method}" if paired.low is not None else ""),
        paired.note,
    )


def mcnemar_p_value(only_first: int, only_second: int) -> float:
    """Two-sided exact p-value: were the disagreements split by a fair coin? 1 without disagreements."""
    total, fewer = only_first + only_second, min(only_first, only_second)
    ways = tail = 1  # of k = 0 heads; whole numbers, so exact at any size
    for heads in range(1, fewer + 1):
        ways = ways * (total - heads + 1) // heads
        tail += ways
    return min(1.0, 2 * (tail / (1 << total)))


def compare_ratings(name: str, first: ArrayLike, second: ArrayLike) -> Comparison:
    """Ratings of the same items under two systems: Wilcoxon's signed-rank test."""
    a, b = as_column(first, name), as_column(second, name)
    require_as_many(a, b, "ratings of the first system", "ratings of the second")
    differences = a - b
    moved = differences[np.abs(differences) > 1e-9]  # means of ratings differ by rounding
    if len(moved) == 0:
        return Comparison(name, 0.0, None, len(a), note="no item was rated differently")
    p_value, how = wilcoxon_p_value(moved)
    zeros = len(a) - len(moved)
    method = f"Wilcoxon signed-rank test, {how}, {zeros} equal pairs left out"
    note = f"n too small: {len(moved)} differing pairs can never reach p < 0.05" if len(moved) < 6 else None
    return Comparison(name, float(differences.mean()), p_value, len(a), method=method, note=note)


def wilcoxon_p_value(differences: ArrayLike) -> tuple[float, str]:
    """Two-sided p-value of nonzero differences, and how: exact (ties included) or by the normal law."""
    column = as_column(differences, "Wilcoxon's test")
    if (column == 0).any():
        raise InputError("differences other than 0", "a 0", "Leave out equal pairs first.")
    ranks = _rank(np.abs(column))
    positive = float(ranks[column > 0].sum())
    if len(column) <= EXACT_WILCOXON:
        return _exact_tail(ranks, positive), "exact"
    centre = ranks.sum() / 2
    deviation = math.sqrt(float((ranks**2).sum()) / 4)  # ties are in the ranks already
    return math.erfc(abs(positive - centre) / deviation / math.sqrt(2)), "normal approximation"


def adjust_holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjustment: p-values that stay honest when several comparisons are made at once."""
    order = sorted(range(len(p_values)), key=lambda k: p_values[k])
    adjusted, running = [0.0] * len(p_values), 0.0
    for place, k in enumerate(order):
        running = max(running, min(1.0, (len(p_values) - place) * p_values[k]))
        adjusted[k] = running
    return adjusted


def _rank(values: FloatArray) -> FloatArray:
    """Ranks from 1; equal values share the mean of theirs."""
    rounded = np.round(values, 9)
    _, places, counts = np.unique(rounded, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[places], dtype=np.float64)


def _exact_tail(ranks: FloatArray, positive: float) -> float:
    """Under chance every rank is positive or negative by a fair coin: enumerate the sum of the positive ones.

    Twice the ranks are whole numbers also with ties, so the distribution is a table over them.
    """
    doubled = np.rint(2 * ranks).astype(int)
    chances = np.zeros(int(doubled.sum()) + 1)
    chances[0] = 1.0
    for rank in doubled:
        shifted = np.zeros_like(chances)
        shifted[rank:] = chances[: len(chances) - rank]
        chances = (chances + shifted) / 2
    place = round(2 * positive)
    return min(1.0, 2 * float(min(chances[: place + 1].sum(), chances[place:].sum())))
