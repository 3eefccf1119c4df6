"""How good a guide is at being q*, read off weighted texts: each number with its interval and its caveat."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nado.exact_sampling.rejection import expected_acceptance, number_groups, require_independent
from nado.exact_sampling.weighted import WeightedTexts
from nado.metrics.divergence import effective_samples, kl_to_target
from nado.metrics.measure import Measure, Metric, join_notes, mean
from nado.metrics.resampling import DEFAULT, FloatArray, Resampling
from nado.metrics.shares import share
from nado.proposals import ESS_SHARE

_UNSEEN = "at target rate 0 no text is to satisfy: they say nothing of R(x)"


@dataclass(frozen=True)
class Diagnostics:
    """Measures of a guided model from texts drawn from q; means over prompts where there are several."""

    satisfied: Measure  # share of q's texts that satisfy the oracle
    ess: Measure  # how many texts of the target they are worth
    r_start: Measure  # R(x): the share of p's texts that satisfy it
    log_r_start: Measure
    mean_weight: Measure  # R(x) again; at a soft rate 1 if R(x) was right when α and β were made
    kl_to_target: Measure  # KL(q*‖q); at a soft rate from the soft target
    kl_from_base: Measure  # KL(q‖p)
    acceptance: Measure | None = None  # of rejection with the bound asked about

    def describe(self) -> dict[str, Any]:
        """As JSON-ready values."""
        return {field.name: measure.describe() for field, measure in self._measures()}

    def __str__(self) -> str:
        return "\n".join(str(measure) for _, measure in self._measures())

    def _measures(self) -> list[tuple[Any, Measure]]:
        pairs = [(field, getattr(self, field.name)) for field in fields(self)]
        return [(field, measure) for field, measure in pairs if measure is not None]


def diagnose(
    weighted: WeightedTexts, *, bound: float | Sequence[float] | None = None, resampling: Resampling = DEFAULT
) -> Diagnostics:
    """Measure q against q* and p. `bound` adds the acceptance rate of rejection with it.

    Estimates of KL(q*‖q) normalise the weights by their own sum: they read low when ESS is small, and say so.
    """
    require_independent(weighted)
    groups = number_groups(weighted)
    log_weights = weighted.log_weights.numpy()
    return Diagnostics(
        satisfied=share("satisfied", weighted.satisfied.numpy(), groups, method="share of texts of q"),
        ess=effective_samples(log_weights, groups),
        r_start=_measure_r_start(weighted, groups, resampling),
        log_r_start=_measure_log_r_start(weighted, resampling),
        mean_weight=_measure_mean("mean weight", log_weights, groups, resampling),
        kl_to_target=kl_to_target(log_weights, groups, resampling),
        kl_from_base=mean(
            "KL(q‖p)",
            (-weighted.log_ratio).tolist(),
            method="mean of log q − log p over texts of q",
            unit="nats",
        ).measure(groups, resampling),
        acceptance=None if bound is None else expected_acceptance(weighted, bound, resampling),
    )


def _measure_mean(
    name: str, log_weights: NDArray[np.float64], groups: list[int] | None, resampling: Resampling
) -> Measure:
    """The mean of w over texts of q: unbiased, with an interval that is too narrow where ESS is small."""
    metric = mean(name, np.exp(log_weights), method="mean of weights over texts of q", unit="share")
    worth = effective_samples(log_weights).value or 0.0
    few = f"ESS is {worth:.1f} of {len(log_weights)}: the interval is too narrow"
    measured = metric.measure(groups, resampling)
    return replace(
        measured, note=join_notes(measured.note, few if worth < ESS_SHARE * len(log_weights) else None)
    )


def _measure_r_start(weighted: WeightedTexts, groups: list[int] | None, resampling: Resampling) -> Measure:
    """R(x), averaged over prompts."""
    name = "Pr_p[C]"
    if not weighted.covering:
        return Measure(name, None, len(weighted), unit="share", note=_UNSEEN)
    return _measure_mean(name, weighted.hard_log_weights.numpy(), groups, resampling)


def _measure_log_r_start(weighted: WeightedTexts, resampling: Resampling) -> Measure:
    """log R(x) of one prompt by resampling its texts; of several the mean of the log of each estimate."""
    name = "log R(x)"
    if not weighted.covering:
        return Measure(name, None, len(weighted), unit="nats", note=_UNSEEN)
    estimates = weighted.log_r_start
    lost = int(estimates.isneginf().sum())
    if lost:
        note = (
            f"no text satisfies for {lost} of {len(estimates)} prompts: log R(x) is −∞ or below what n shows"
        )
        return Measure(name, None, len(weighted), prompts=len(estimates), unit="nats", note=note)
    if len(estimates) > 1:
        method = "mean over prompts of log mean w, each a little low (Jensen)"
        return replace(
            mean(name, estimates.tolist(), method=method, unit="nats").measure(None, resampling),
            n=len(weighted),
        )
    log_weights = weighted.hard_log_weights
    top = float(log_weights.max())
    rows = np.stack([(log_weights - top).exp().numpy(), np.ones(len(weighted))], axis=1)

    def combine(sums: FloatArray) -> FloatArray:
        with np.errstate(divide="ignore"):
            return np.log(sums[..., 0] / sums[..., 1]) + top

    method = "log of the mean of w over texts of q, which are resampled"
    return Metric(name, rows, combine, method, "nats").measure(None, resampling)
