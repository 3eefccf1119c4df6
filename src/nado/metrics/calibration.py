"""Calibration of R: does it come true as often as it says?

Predictions are probabilities, outcomes are what the oracle said of texts that *p* finished (a prediction is
about p's completions, so texts of q do not test it). Rows may be positions of texts, all of one text sharing
its outcome: then `texts` names the text of each row, and intervals are about texts.
"""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nado.errors import InputError
from nado.metrics.measure import Measure, Metric, as_column, mean, require_as_many
from nado.metrics.resampling import DEFAULT, FloatArray, Resampling
from nado.metrics.shares import as_answers, share

RATIO_TEXTS = 30  # a bin with fewer rows says nothing about a ratio


@dataclass(frozen=True)
class Bin:
    """Rows whose prediction, position or prompt is alike: what was promised, and what came."""

    name: str
    n: int
    predicted: float  # mean prediction
    rate: float  # share of successes
    low: float | None  # interval of that share
    high: float | None
    lower: float | None = None  # the bin's edges, where it is one of predictions
    upper: float | None = None


@dataclass(frozen=True)
class Reliability:
    """Bins of predictions with their success rates, and the two numbers that sum them up."""

    bins: tuple[Bin, ...]
    ece: Measure
    brier: Measure
    method: str

    def describe(self) -> dict[str, Any]:
        """As JSON-ready values."""
        return asdict(self)


def reliability(
    predicted: ArrayLike,
    outcomes: ArrayLike,
    texts: Sequence[Hashable] | None = None,
    *,
    bins: int = 10,
    spacing: Literal["width", "mass"] = "width",
    resampling: Resampling = DEFAULT,
) -> Reliability:
    """The reliability table, expected calibration error and Brier score of predicted probabilities.

    `spacing` cuts [0, 1] into equal widths, or the predictions into equally many: better when most are tiny.
    """
    chances, answers = _require_pairs(predicted, outcomes, texts)
    edges = _edges(chances, bins, spacing)
    places = np.clip(np.searchsorted(edges, chances, side="right") - 1, 0, len(edges) - 2)
    table = tuple(
        _summarise(
            f"{edges[k]:.3g}–{edges[k + 1]:.3g}",
            chances,
            answers,
            places == k,
            texts,
            (edges[k], edges[k + 1]),
        )
        for k in np.unique(places)
    )
    method = f"{len(edges) - 1} bins of equal {spacing}"
    ece = _ece_metric(chances, answers, places, len(edges) - 1, method).measure(
        texts, resampling, over="texts"
    )
    brier = mean("Brier", (chances - answers) ** 2, method="mean of (R − C)²")
    return Reliability(table, ece, brier.measure(texts, resampling, over="texts"), method)


def calibration_by(
    keys: Sequence[Hashable],
    predicted: ArrayLike,
    outcomes: ArrayLike,
    texts: Sequence[Hashable] | None = None,
) -> tuple[Bin, ...]:
    """Mean prediction against success rate for each key, in order: positions, or prompts with their R(x)."""
    chances, answers = _require_pairs(predicted, outcomes, texts)
    require_as_many(keys, chances, "keys", "predictions")
    rows: dict[Hashable, list[int]] = {}
    for row, key in enumerate(keys):
        rows.setdefault(key, []).append(row)
    return tuple(_summarise(str(key), chances, answers, np.array(rows[key]), texts) for key in _sort(rows))


def largest_ratio(table: Sequence[Bin], *, least: int = RATIO_TEXTS) -> Measure:
    """The largest of mean R / success rate and its inverse over bins: an *estimate* of δ, no bound.

    Averaging within bins hides what cancels there, and small bins are noisy; bins with fewer than `least`
    rows are left out, and bins without a success (where the ratio has no bound) are counted in the note.
    """
    counted = [each for each in table if each.n >= least]
    usable = [each for each in counted if each.rate > 0 and each.predicted > 0]
    ratios = [max(each.predicted / each.rate, each.rate / each.predicted) for each in usable]
    notes = ["an estimate over bins, not a bound"]
    if len(counted) > len(usable):
        notes.append(f"{len(counted) - len(usable)} bins without a success or prediction left out")
    if len(table) > len(counted):
        notes.append(f"{len(table) - len(counted)} bins with fewer than {least} rows left out")
    return Measure(
        name="largest ratio of R to success rate",
        value=max(ratios, default=None),
        n=sum(each.n for each in usable),
        unit="ratio",
        method="max over bins of mean R / rate or its inverse",
        note="; ".join(notes),
    )


def mean_by_position(
    name: str, values: ArrayLike, lengths: ArrayLike, resampling: Resampling = DEFAULT
) -> tuple[Measure, ...]:
    """The mean over texts of (B, T) values at each position below `lengths` (B,): consistency residuals."""
    table, ends = np.asarray(values, dtype=np.float64), np.asarray(lengths)
    if table.ndim != 2 or ends.shape != table.shape[:1] or len(table) == 0:
        raise InputError(
            f"values (texts, positions) and one length a text for {name}",
            f"shapes {table.shape} and {ends.shape}",
            "Pad shorter texts; what lies past a length is not read.",
        )
    columns = [table[ends > position, position] for position in range(int(ends.max()))]
    method = "mean over the texts that are this long"
    return tuple(
        mean(f"{name} at {position}", column, method=method).measure(None, resampling)
        for position, column in enumerate(columns, start=1)
        if len(column)
    )


def _sort(keys: Iterable[Hashable]) -> list[Hashable]:
    """Positions in order; prompts as they came."""
    several = list(keys)
    numbers = [key for key in several if isinstance(key, int | np.integer)]
    return sorted(numbers) if len(numbers) == len(several) else several  # type: ignore[return-value]


def _summarise(
    name: str,
    chances: FloatArray,
    answers: NDArray[np.bool_],
    rows: NDArray[Any],
    texts: Sequence[Hashable] | None,
    edges: tuple[float, float] | None = None,
) -> Bin:
    """One bin from the rows selected by a mask or by their numbers."""
    chosen = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
    clusters = None if texts is None else [texts[int(row)] for row in chosen]
    rate = share(name, answers[chosen], clusters)
    lower, upper = (None, None) if edges is None else (float(edges[0]), float(edges[1]))
    predicted = float(chances[chosen].mean())
    return Bin(name, len(chosen), predicted, float(rate.value or 0.0), rate.low, rate.high, lower, upper)


def _ece_metric(
    chances: FloatArray, answers: NDArray[np.bool_], places: NDArray[np.intp], bins: int, method: str
) -> Metric:
    """Σ_b n_b / n · |mean R − rate| = Σ_b |Σ (R − C)| / n: a function of one sum a bin, and of n."""
    rows = np.zeros((len(chances), bins + 1))
    rows[np.arange(len(chances)), places] = chances - answers
    rows[:, -1] = 1.0
    return Metric(
        "ECE",
        rows,
        lambda sums: np.abs(sums[..., :-1]).sum(axis=-1) / sums[..., -1],
        f"Σ n_b / n · |mean R − rate|, {method}; it and its interval read high when bins are small",
    )


def _edges(chances: FloatArray, bins: int, spacing: str) -> FloatArray:
    if bins < 1 or spacing not in ("width", "mass"):
        raise InputError(
            'at least 1 bin, of equal "width" or "mass"', f"{bins} of {spacing!r}", "Use bins=10."
        )
    if spacing == "width":
        return np.linspace(0.0, 1.0, bins + 1)
    edges = np.unique(np.quantile(chances, np.linspace(0.0, 1.0, bins + 1)))
    return edges if len(edges) > 1 else np.array([edges[0], math.nextafter(edges[0], 2.0)])


def _require_pairs(
    predicted: ArrayLike, outcomes: ArrayLike, texts: Sequence[Hashable] | None
) -> tuple[FloatArray, NDArray[np.bool_]]:
    chances, answers = as_column(predicted, "calibration"), as_answers(outcomes, "calibration")
    require_as_many(chances, answers, "predictions", "outcomes")
    if texts is not None:
        require_as_many(texts, chances, "texts", "predictions")
    outside = (chances < 0) | (chances > 1 + 1e-6)
    if outside.any():
        raise InputError(
            "predicted probabilities between 0 and 1",
            f"{chances[outside][0]:g}",
            "Give R itself: the exponential of log R.",
        )
    return np.minimum(chances, 1.0), answers
