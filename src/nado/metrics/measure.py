"""A metric is rows and a function of their sums; a measure is the number it comes to, with its interval.

ours = bleu(texts, references)                     # a Metric: one row a text
print(ours.measure(prompts))                       # a Measure: value, interval, n, and how it was made
print(compare(ours, corpus_bleu(others, references), prompts))    # a Comparison
"""

from collections.abc import Hashable, Sequence, Sized
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from nado.errors import InputError
from nado.metrics.resampling import (
    DEFAULT,
    SMALLEST,
    Combine,
    FloatArray,
    Resampling,
    percentile_interval,
    resample_sums,
    sum_by_prompt,
)


@dataclass(frozen=True)
class Measure:
    """One number and what is needed to read it.

    `value` is None where there is none (self-BLEU of single texts), `low` and `high` where no honest interval
    exists; `note` then says why. `n` counts texts, `prompts` what was resampled.
    """

    name: str
    value: float | None
    n: int
    low: float | None = None
    high: float | None = None
    prompts: int | None = None
    unit: str = ""
    method: str = ""
    note: str | None = None

    def describe(self) -> dict[str, Any]:
        """As JSON-ready values."""
        return asdict(self)

    def __str__(self) -> str:
        value = "–" if self.value is None else f"{self.value:.4g}"
        interval = "" if self.low is None or self.high is None else f" [{self.low:.4g}, {self.high:.4g}]"
        return f"{self.name} {value}{interval} (n = {self.n})" + (f"; {self.note}" if self.note else "")


@dataclass(frozen=True, eq=False)
class Metric:
    """What a corpus metric needs of each text, and what the sums of that come to.

    `rows` is (N, K), one row a text; `combine` turns sums (..., K) into values (...). `method` says how the
    value is made: tokeniser, averaging, options.
    """

    name: str
    rows: FloatArray
    combine: Combine
    method: str
    unit: str = ""
    note: str | None = None

    def __post_init__(self) -> None:
        require_finite(self.rows, self.name)

    @property
    def value(self) -> float | None:
        """The metric of all texts; None where it is not defined (0 / 0)."""
        value = float(self.combine(self.rows.sum(axis=0)))
        return value if np.isfinite(value) else None

    def measure(
        self,
        prompts: Sequence[Hashable] | None = None,
        resampling: Resampling = DEFAULT,
        *,
        over: str | None = None,
    ) -> Measure:
        """The value with a bootstrap interval over prompts; without `prompts` each text is its own.

        `over` names what is resampled where that is neither prompts nor texts.
        """
        over = over or name_groups(prompts)
        sums = sum_by_prompt(self.rows, prompts)
        low, high, note = self._interval(sums, resampling, over)
        return Measure(
            name=self.name,
            value=self.value,
            n=len(self.rows),
            low=low,
            high=high,
            prompts=len(sums),
            unit=self.unit,
            method=f"{self.method}; {resampling}, over {over}" if low is not None else self.method,
            note=join_notes(self.note, note),
        )

    def _interval(
        self, sums: FloatArray, resampling: Resampling, over: str
    ) -> tuple[float | None, float | None, str | None]:
        if len(sums) < SMALLEST:
            return None, None, too_small(len(sums), over)
        if self.value is None:
            return None, None, "not defined for these texts: nothing to divide by"
        values = self.combine(resample_sums(sums, resampling))
        if not np.isfinite(values).all():
            return None, None, "no interval: some resamples have nothing to divide by"
        low, high = percentile_interval(values, resampling.confidence)
        if high - low <= 1e-12 * max(1.0, abs(low)):
            return None, None, f"no interval: all {over} agree, so resampling them shows no spread"
        return low, high, None


def mean(name: str, values: ArrayLike, *, method: str = "mean over texts", unit: str = "") -> Metric:
    """The mean of one number a text."""
    column = as_column(values, name)
    return Metric(name, np.stack([column, np.ones_like(column)], axis=1), divide_sums, method, unit)


def ratio(
    name: str, numerators: ArrayLike, denominators: ArrayLike, *, method: str = "", unit: str = ""
) -> Metric:
    """A total over a total: base tokens for each satisfying text, log-probability for each token."""
    above, below = as_column(numerators, name), as_column(denominators, name)
    require_as_many(above, below, "numerators", "denominators")
    return Metric(name, np.stack([above, below], axis=1), divide_sums, method or "ratio of totals", unit)


def divide_sums(sums: FloatArray) -> FloatArray:
    """The first sum over the second; nan where the second is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(sums[..., 1] == 0, np.nan, sums[..., 0] / sums[..., 1])


def name_groups(prompts: Sequence[Hashable] | None) -> str:
    """What is resampled: prompts where they are given, else texts."""
    return "texts" if prompts is None else "prompts"


def too_small(groups: int, over: str) -> str:
    """What a measure says when its bootstrap interval would be wrong."""
    return f"n too small for a bootstrap interval: {groups} of the {SMALLEST} {over} it needs"


def join_notes(*notes: str | None) -> str | None:
    """The notes that there are, as one."""
    return "; ".join(note for note in notes if note) or None


# --- checks of arguments ------------------------------------------------------------------------------


def as_column(values: ArrayLike, name: str) -> FloatArray:
    """One finite float64 a text, or an error that names the metric."""
    column = np.asarray(values, dtype=np.float64)
    if column.ndim != 1:
        raise InputError(
            f"one number a text for {name}", f"an array of shape {column.shape}", "Give a flat list."
        )
    require_finite(column, name)
    return column


def require_finite(values: FloatArray, name: str) -> None:
    """Refuse no texts, and numbers that no mean survives."""
    if len(values) == 0:
        raise InputError(f"at least one text for {name}", "none", "Check what was generated or filtered.")
    bad = ~np.isfinite(values).reshape(len(values), -1).all(axis=1)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        found = values[row].reshape(-1)
        raise InputError(
            f"finite numbers for {name}",
            f"{found[~np.isfinite(found)][0]:g} in row {row}; {int(bad.sum())} such rows of {len(values)}",
            "Find what made them: a model that overflowed, or a text it cannot write.",
        )


def require_as_many(first: Sized, second: Sized, a: str, b: str) -> None:
    """Refuse two columns of different length."""
    if len(first) != len(second):
        raise InputError(
            f"as many {a} as {b}", f"{len(first)} {a} and {len(second)} {b}", "Give one of each a text."
        )


def require_texts(texts: Sequence[str], name: str) -> None:
    """Refuse a bare string, whose letters would pass for texts, no texts at all, and what is no string."""
    if isinstance(texts, str):
        raise InputError(f"a list of texts for {name}", "a bare string", "Put it in a list: [text].")
    if len(texts) == 0:
        raise InputError(f"at least one text for {name}", "none", "Check what was generated or filtered.")
    wrong = [text for text in texts if not isinstance(text, str)]
    if wrong:
        raise InputError(
            f"texts that are strings for {name}", f"{wrong[0]!r}", "Give an empty string for an empty text."
        )


def require_references(texts: Sequence[str], references: Sequence[Sequence[str]], name: str) -> None:
    """Refuse texts without references: they would silently score 0."""
    require_texts(texts, name)
    require_as_many(texts, references, "texts", "lists of references")
    for row, each in enumerate(references):
        if isinstance(each, str) or len(each) == 0 or not all(isinstance(one, str) for one in each):
            found = "a bare string" if isinstance(each, str) else "none" if len(each) == 0 else f"{each!r}"
            raise InputError(
                f"a list of at least one reference for each text of {name}",
                f"{found} for text {row}",
                "Give [[reference, …], …], and leave out texts that have none.",
            )
