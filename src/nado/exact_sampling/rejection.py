"""Quasi-rejection: accept a text of q with probability min(1, w / β).

Where β is at least every weight there is, the accepted texts are independent draws from q* itself, however
few they are. Where some weights are larger, they are draws from q_β ∝ q·min(w, β), and q_β misses part of q*:

    TV(q*, q_β) ≤ E_q[(w − β)⁺] / E_q[w],

the share of q* that lies above the bound. A larger β misses less and accepts less.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nado.errors import InputError
from nado.exact_sampling.weighted import WeightedTexts
from nado.metrics.measure import Measure, Metric, divide_sums, join_notes, mean
from nado.metrics.resampling import DEFAULT, Resampling
from nado.metrics.shares import share
from nado.noise import uniforms

_ACCEPTING = -(3 << 32)  # the counter of the choice to accept


@dataclass(frozen=True, eq=False)
class Rejection:
    """What was accepted, and what is known of the difference between it and q*."""

    rows: Tensor  # accepted rows of the weighted texts
    texts: list[list[str]]  # of each group
    bound: Tensor  # (G,) β
    exceeded: Tensor  # (G,) how many weights were above it
    acceptance: Measure  # share of texts accepted
    missed: Measure  # share of q* above the bound: at least the total variation, and 0 for a bound that holds
    total_variation: Measure  # between what is accepted and q*

    @property
    def exact(self) -> bool:
        """Whether no weight was above the bound: if none can be, the accepted texts are draws from q*."""
        return not bool(self.exceeded.any())


def reject(
    weighted: WeightedTexts,
    bound: float | Sequence[float],
    *,
    seed: int = 0,
    resampling: Resampling = DEFAULT,
) -> Rejection:
    """Accept each text with probability min(1, w / bound); `bound` is one number, or one a group.

    The bound must not be taken from these very texts: take it from theory or from texts of another seed.
    """
    require_independent(weighted)
    bounds = as_bounds(weighted, bound)  # (G,)
    log_weights = weighted.grouped_log_weights
    chance = (log_weights - bounds.log()[:, None]).clamp(max=0.0).exp()
    places = torch.arange(len(weighted)).view_as(chance)
    accepted = uniforms(seed, places, torch.full_like(places, _ACCEPTING)) < chance
    rows = places[accepted]
    texts: list[list[str]] = [[] for _ in weighted.groups]
    for row in rows.tolist():
        texts[row // weighted.size].append(weighted.texts[row])
    return Rejection(
        rows=rows,
        texts=texts,
        bound=bounds,
        exceeded=(log_weights > bounds.log()[:, None]).sum(dim=-1),
        acceptance=share(
            "accepted",
            accepted.flatten().numpy(),
            number_groups(weighted),
            method="share of texts of q accepted",
        ),
        missed=_measure_missed(weighted, bounds, resampling),
        total_variation=_measure_total_variation(weighted, bounds),
    )


def expected_acceptance(
    weighted: WeightedTexts, bound: float | Sequence[float], resampling: Resampling = DEFAULT
) -> Measure:
    """E_q[min(1, w / bound)]: what share rejection would accept, without the noise of doing it."""
    require_independent(weighted)
    log_bound = as_bounds(weighted, bound).log()[:, None]
    chance = (weighted.grouped_log_weights - log_bound).clamp(max=0.0).exp()
    metric = mean("accepted", chance.flatten().tolist(), method="mean of min(1, w / bound)", unit="share")
    return metric.measure(number_groups(weighted), resampling)


def number_groups(weighted: WeightedTexts) -> list[int] | None:
    """The group of each text; None for a single group, of which texts are resampled instead."""
    if len(weighted.groups) == 1:
        return None
    return [row // weighted.size for row in range(len(weighted))]


def require_independent(weighted: WeightedTexts) -> None:
    """Refuse particles, which have been chosen by their weights already."""
    if not weighted.independent:
        raise InputError(
            "texts drawn one by one from q", "the particles of SMC", "Draw them with draw_weighted."
        )


def as_bounds(weighted: WeightedTexts, bound: float | Sequence[float]) -> Tensor:
    """One positive number a group: (G,), float64."""
    groups = len(weighted.groups)
    bounds = torch.as_tensor(bound, dtype=torch.float64)
    if bounds.shape not in ((), (groups,)) or not bool(((bounds > 0) & bounds.isfinite()).all()):
        raise InputError(
            f"one bound above 0, or one for each of {groups} groups",
            f"{bound}",
            "A bound is the largest weight w = p·C / q that texts may have.",
        )
    return bounds.expand(groups).contiguous()


def _measure_missed(weighted: WeightedTexts, bounds: Tensor, resampling: Resampling) -> Measure:
    """E_q[(w − β)⁺] / E_q[w] within a group, mean over those with any weight at all."""
    name, method = "missed", "Σ (w − β)⁺ / Σ w within a prompt"
    weights, cut = _relative(weighted, bounds)  # (G', N)
    if not len(weights):
        return Measure(name, None, len(weighted), unit="share", method=method, note="no text satisfies")
    above = weights - cut
    if len(weighted.groups) == 1:
        rows = torch.stack([above[0], weights[0]], dim=1).numpy()
        metric = Metric(name, rows, divide_sums, method, "share")
    else:
        shares = (above.sum(dim=-1) / weights.sum(dim=-1)).numpy()
        metric = mean(name, shares, method=f"{method}, mean over prompts", unit="share")
    left_out = len(weighted.groups) - len(weights)
    note = f"{left_out} prompts left out: none of their texts satisfies" if left_out else None
    tail = "weights that were not drawn are not counted: with a heavy tail this reads low"
    measured = metric.measure(None, resampling)
    return replace(measured, n=len(weighted), note=join_notes(measured.note, note, tail))


def _measure_total_variation(weighted: WeightedTexts, bounds: Tensor) -> Measure:
    """Σ (w / Σw − min(w, β) / Σmin(w, β))⁺ within a group, mean over groups: the plug-in estimate."""
    weights, cut = _relative(weighted, bounds)
    excess = weights / weights.sum(dim=-1, keepdim=True) - cut / cut.sum(dim=-1, keepdim=True)
    return Measure(
        name="TV(q*, accepted)",
        value=float(excess.clamp(min=0).sum(dim=-1).mean()) if len(excess) else None,
        n=len(weighted),
        unit="share",
        method="plug-in estimate within a prompt, mean over prompts",
        note="no interval: it is at most the missed share, which has one",
    )


def _relative(weighted: WeightedTexts, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """w and min(w, β) over the largest w of each group that weighs anything at all: (G', N) each."""
    log_weights = weighted.grouped_log_weights
    top = log_weights.amax(dim=-1, keepdim=True)
    some = ~top.isneginf().squeeze(-1)
    log_weights, top, log_bound = log_weights[some], top[some], bounds.log()[some, None]
    return (log_weights - top).exp(), (torch.minimum(log_weights, log_bound) - top).exp()
