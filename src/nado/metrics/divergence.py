"""Distances between distributions, estimated from texts drawn from q.

    KL(q ‖ p)     how far guiding has moved the model: the mean of log q − log p over texts of q
    KL(q* ‖ q)    how far it still is from the target, by weights w = p·C / q that normalise themselves
    ESS           how many texts of q* the weighted ones are worth

Weights are normalised within a prompt: q* of one prompt says nothing about another. `log_weights` are log w,
−inf for a text that fails; any common factor a prompt, such as R(x), cancels.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from nado.errors import InputError
from nado.metrics.measure import Measure, Metric, as_column, join_notes, mean, require_as_many
from nado.metrics.resampling import DEFAULT, FloatArray, Resampling
from nado.objective import SELF_NORMALISATION_MINIMUM
from nado.proposals import ESS_SHARE, summarise_weights


def kl_from_base(
    log_q: ArrayLike,
    log_p: ArrayLike,
    prompts: Sequence[Hashable] | None = None,
    resampling: Resampling = DEFAULT,
) -> Measure:
    """KL(q ‖ p) in nats a text, from log q and log p of whole texts drawn from q; unbiased."""
    column_q, column_p = as_column(log_q, "KL(q‖p): log q"), as_column(log_p, "KL(q‖p): log p")
    require_as_many(column_q, column_p, "values of log q", "values of log p")
    metric = mean("KL(q‖p)", column_q - column_p, method="mean of log q − log p over texts of q", unit="nats")
    return metric.measure(prompts, resampling)


def effective_samples(log_weights: ArrayLike, prompts: Sequence[Hashable] | None = None) -> Measure:
    """ESS = (Σ w)² / Σ w² within each prompt, summed over prompts; a prompt whose texts all fail has 0."""
    groups = _by_prompt(log_weights, prompts)
    sizes = [_effective(each) for each in groups]
    n = sum(len(each) for each in groups)
    lost = sum(size == 0 for size in sizes)
    total = sum(sizes)
    notes = [
        f"{lost} of {len(groups)} prompts have no text of positive weight" if lost else None,
        f"ESS is small: {total:.1f} of {n} ({total / n:.2%})" if total < ESS_SHARE * n else None,
    ]
    return Measure(
        name="ESS",
        value=total,
        n=n,
        prompts=len(groups),
        unit="texts",
        method="(Σ w)² / Σ w² within a prompt, summed",
        note=join_notes(*notes),
    )


def kl_to_target(
    log_weights: ArrayLike, prompts: Sequence[Hashable] | None = None, resampling: Resampling = DEFAULT
) -> Measure:
    """KL(q* ‖ q) in nats a text: Σ w̃ log(n w̃) within a prompt, mean over prompts, from texts drawn from q.

    It cannot exceed log n, so it reads low when few texts carry the weight. Prompts with fewer than 32 texts,
    or with none of positive weight, are left out and counted in the note.
    """
    groups = _by_prompt(log_weights, prompts)
    usable = [each for each in groups if len(each) >= SELF_NORMALISATION_MINIMUM and np.isfinite(each.max())]
    left_out = len(groups) - len(usable)
    skipped = (
        f"{left_out} of {len(groups)} prompts left out: fewer than {SELF_NORMALISATION_MINIMUM} texts, or "
        "none of positive weight"
    )
    n = sum(len(each) for each in usable)
    if not usable:
        return Measure("KL(q*‖q)", None, n, prompts=0, unit="nats", note=f"n too small: {skipped}")
    metric = mean(
        "KL(q*‖q)",
        [_kl_of_weights(each) for each in usable],
        method="Σ w̃ log(n w̃), self-normalised within a prompt, mean over prompts",
        unit="nats",
    )
    measured = (
        metric.measure(None, resampling, over="prompts")
        if len(usable) > 1
        else _one_prompt(usable[0], resampling)
    )
    note = join_notes(measured.note, skipped if left_out else None, _reads_low(usable))
    return replace(measured, n=n, note=note)


def rate_from_weights(
    log_weights: ArrayLike, prompts: Sequence[Hashable] | None = None, resampling: Resampling = DEFAULT
) -> Measure:
    """The satisfaction rate of p, estimated from texts of q: the mean of w = p·C / q, unbiased for R(x)."""
    column = _as_log_weights(log_weights)
    if column.max() > 700:
        raise InputError(
            "weights p·C / q that fit a number", f"log w = {column.max():g}", "Check log p and log q."
        )
    metric = mean("Pr_p[C]", np.exp(column), method="mean of w = p·C / q over texts of q", unit="share")
    total, n = effective_samples(column).value or 0.0, len(column)
    measured = metric.measure(prompts, resampling)
    low = f"ESS is {total:.1f} of {n}: the interval is too narrow" if total < ESS_SHARE * n else None
    return replace(measured, note=join_notes(measured.note, low))


def _kl_of_weights(log_weights: FloatArray) -> float:
    """Σ w̃ log(n w̃), with 0 log 0 = 0."""
    relative = log_weights - log_weights.max()
    log_share = relative - math.log(np.exp(relative).sum())
    positive = np.isfinite(log_share)
    kl = float((np.exp(log_share[positive]) * log_share[positive]).sum()) + math.log(len(log_weights))
    return max(0.0, kl)  # rounding: equal weights are at 0


def _one_prompt(log_weights: FloatArray, resampling: Resampling) -> Measure:
    """For a single prompt texts are resampled: each has w and w log w, and KL is a function of their sums."""
    relative = np.exp(log_weights - log_weights.max())
    logs = np.where(relative > 0, np.log(np.where(relative > 0, relative, 1.0)), 0.0)
    rows = np.stack([relative, relative * logs, np.ones_like(relative)], axis=1)
    method = "Σ w̃ log(n w̃), self-normalised, one prompt, its texts resampled"
    return Metric("KL(q*‖q)", rows, _combine_kl, method, "nats").measure(None, resampling)


def _combine_kl(sums: FloatArray) -> FloatArray:
    """KL from Σ w, Σ w log w and n."""
    total, weighted, count = sums[..., 0], sums[..., 1], sums[..., 2]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.maximum(0.0, weighted / total - np.log(total) + np.log(count))


def _reads_low(groups: Sequence[FloatArray]) -> str | None:
    """A warning where few texts carry the weight."""
    sizes = [_effective(each) for each in groups]
    poor = [
        (size, len(each)) for size, each in zip(sizes, groups, strict=True) if size < ESS_SHARE * len(each)
    ]
    if not poor:
        return None
    size, count = min(poor)
    where = "" if len(groups) == 1 else f" at {len(poor)} of {len(groups)} prompts, down to {size:.1f}"
    value = f"{size:.1f} of {count}" if len(groups) == 1 else "small"
    return f"ESS is {value}{where}: this reads low, and cannot exceed log n = {math.log(count):.2f}"


def _effective(log_weights: FloatArray) -> float:
    if not np.isfinite(log_weights.max()):
        return 0.0
    return summarise_weights(log_weights, warn=False).effective_samples


def _by_prompt(log_weights: ArrayLike, prompts: Sequence[Hashable] | None) -> list[FloatArray]:
    column = _as_log_weights(log_weights)
    if prompts is None:
        return [column]
    require_as_many(column, prompts, "log weights", "prompts")
    rows: dict[Hashable, list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows.setdefault(prompt, []).append(row)
    return [column[each] for each in rows.values()]


def _as_log_weights(log_weights: ArrayLike) -> FloatArray:
    column = np.asarray(log_weights, dtype=np.float64)
    if column.ndim != 1 or len(column) == 0:
        raise InputError(
            "one log weight for each of at least one text", f"shape {column.shape}", "Give a flat list."
        )
    if np.isnan(column).any() or np.isposinf(column).any():
        raise InputError(
            "log weights that are numbers or −inf",
            f"{int((np.isnan(column) | np.isposinf(column)).sum())} of {len(column)} that are nan or +inf",
            "A text q cannot write has no weight: check that it was drawn from q.",
        )
    return column
