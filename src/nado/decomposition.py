"""Closed forms, as pure functions of tensors in log space: what the guide's R does to the base's p.

R(x, y≤i) is the chance that a text which starts with y≤i and is finished by p satisfies the oracle.
Everything here is a function of two vectors over the next token v:

    log p(v | x, y<i)      from the base
    log R(x, y<i ⊕ v)      from the guide, or from a soft rate, a strength, a composition of guides

Tensors may have any leading shape; bf16 and half inputs are computed in float32, float64 stays. −inf is a
legal log-probability and a legal log R. What a zero does is written at each function.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nado.errors import CoverageError, InfeasibleError, InputError

# Log-odds beyond this, chances under 5 % or over 95 %, have a scale of their own in calibration.
_SURE = 3.0


class GuidedDistribution(NamedTuple):
    """The next-token distribution of the guided model, and its normaliser."""

    log_q: Tensor  # (..., V)
    log_s: Tensor  # (...)


class SoftCoefficients(NamedTuple):
    """log α and log β of a target rate; both have the shape of R(x)."""

    log_alpha: Tensor  # (...)
    log_beta: Tensor  # (...)


def at_least_float32(values: Tensor) -> Tensor:
    """The same values in a type whose sums of probabilities can be trusted."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def log_one_minus(log_r: Tensor) -> Tensor:
    """log(1 − R), accurate at both ends and with finite gradients; values above 0 count as 0."""
    log_r = at_least_float32(log_r).clamp(max=0.0)
    near_one = log_r > -math.log(2.0)
    if not (log_r.requires_grad and torch.is_grad_enabled()):  # where texts are written: half the passes
        return torch.where(near_one, torch.log(-torch.expm1(log_r)), torch.log1p(-torch.exp(log_r)))
    is_one = log_r == 0.0
    # Each branch sees only inputs where its own gradient is finite: `where` would otherwise multiply
    # the infinite gradient of the branch not taken by zero.
    close = torch.where(near_one & ~is_one, log_r, -1.0)
    far = torch.where(near_one, -1.0, log_r)
    result = torch.where(near_one, torch.log(-torch.expm1(close)), torch.log1p(-torch.exp(far)))
    return torch.where(is_one, -math.inf, result)


def mend_log_odds(log_odds: Tensor, scale: float, offset: float, sure_scale: float) -> Tensor:
    """Log-odds after calibration: `scale` times as far from a half, `sure_scale` where R is sure of itself.

    A guide that is too sure in the middle need not be so at the end of a text, where its labels had no noise:
    with one scale for both, R = 0.0007 became 0.008, and texts ended in vain. Rises with the log-odds for any
    scales above 0.
    """
    return torch.add(sure_scale * log_odds, _middle(log_odds), alpha=scale - sure_scale) + offset


def split_log_odds(log_odds: Tensor) -> tuple[Tensor, Tensor]:
    """The part of log-odds in the middle, of a size below 3, and the rest; both rise with their sum."""
    middle = _middle(log_odds)
    return middle, log_odds - middle


def _middle(log_odds: Tensor) -> Tensor:
    return _SURE * torch.tanh(log_odds / _SURE)


def log_difference(log_a: Tensor, log_b: Tensor) -> Tensor:
    """log a − log b for a ratio a / b where nothing divided by anything is nothing: 0 / 0 = 0."""
    is_zero = torch.isneginf(log_a)
    return torch.where(is_zero, -math.inf, log_a - torch.where(is_zero, 0.0, log_b))


# --- q from p and R -----------------------------------------------------------------------------------


def expected_log_r(log_p: Tensor, log_r: Tensor) -> Tensor:
    """log S = log Σ_v p(v) R(v), the left side of Eq. 6 and the normaliser of q; at step 1 it is R(x).

    With log(1 − R) in place of log R it gives log(1 − S), which keeps its digits where S is near 1.
    """
    joint = at_least_float32(log_p) + at_least_float32(log_r)  # (..., V)
    # Shifted by hand: the gradient of torch.logsumexp is nan in a row of −inf.
    peak = joint.detach().amax(dim=-1, keepdim=True)
    peak = torch.where(torch.isneginf(peak), 0.0, peak)
    total = torch.exp(joint - peak).sum(dim=-1)  # (...)
    is_zero = total == 0.0
    log_total = torch.log(torch.where(is_zero, 1.0, total)) + peak.squeeze(-1)
    return torch.where(is_zero, -math.inf, log_total)


def guided_distribution(log_p: Tensor, log_r: Tensor) -> GuidedDistribution:
    """Eq. 4: q(v) = p(v) R(v) / S. The paper's denominator R(y<i) is constant in v: normalising gives it.

    Where S = 0 nothing that p can write from here satisfies the oracle and q* is not defined: q is p
    there, so that a batch can go on, and log S = −inf makes the weight of such a text 0.
    """
    log_p = at_least_float32(log_p)
    log_s = expected_log_r(log_p, log_r)  # (...)
    lost = torch.isneginf(log_s).unsqueeze(-1)
    scaled = log_p + at_least_float32(log_r) - torch.where(lost, 0.0, log_s.unsqueeze(-1))
    return GuidedDistribution(torch.where(lost, log_p, scaled), log_s)


def close_at_limit(log_r: Tensor, eos_id: int, at_limit: Tensor) -> Tensor:
    """Set R(v) = 0 for every v but EOS in rows that stand before step L, as completion "eos" demands.

    A text cut at L is unsatisfied whatever it says, so this is exact, not learned. `at_limit` has the
    leading shape of `log_r`.
    """
    log_r = at_least_float32(log_r)
    ends = torch.arange(log_r.shape[-1], device=log_r.device) == eos_id  # (V,)
    return torch.where(at_limit.unsqueeze(-1) & ~ends, -math.inf, log_r)


# --- strength and soft rate ---------------------------------------------------------------------------


def apply_strength(log_r: Tensor, strength: float | Tensor) -> Tensor:
    """R^strength: 0 gives p back, 1 is the method itself, above 1 trades fidelity for satisfaction.

    A tensor of strengths has the leading shape of `log_r`, one strength a row. It is not checked here, in
    the loop that generates, where looking at a value would make a GPU wait: see `require_strength`.
    """
    log_r = at_least_float32(log_r)
    if not isinstance(strength, Tensor):
        require_strength(strength)
        return torch.zeros_like(log_r) if strength == 0 else log_r * strength
    power = strength.to(log_r.dtype).unsqueeze(-1)
    # 0 · −inf is nan: a guide of strength 0 multiplies by 1 everywhere.
    return torch.where(power == 0.0, 0.0, log_r * torch.where(power == 0.0, 1.0, power))


def require_strength(strength: float | Tensor) -> None:
    """Raise InputError unless every strength is finite and 0 or more."""
    power = torch.as_tensor(strength)
    if not bool((torch.isfinite(power) & (power >= 0)).all()):
        raise InputError(
            "a strength of 0 or more",
            f"strength {_worst(power)}",
            "Use 0 for the base alone, 1 for the method itself, 2 for a stronger pull.",
        )


def doubted_log_r(log_r: Tensor, doubt: float | Tensor) -> Tensor:
    """log(R + doubt·(1 − R)): R for an oracle that says yes anyway with this chance.

    Where R is far above `doubt` next to nothing changes; far below it R no longer depends on the token, and q
    is p. R = 0 stays 0: that is known, not learned, for a text that is cut is unsatisfied whatever an oracle
    says of it. A tensor of doubts has the leading shape of `log_r`, one a row.
    """
    log_r = at_least_float32(log_r)
    if not isinstance(doubt, Tensor) and doubt == 0:
        return log_r
    known = torch.isneginf(log_r)
    if isinstance(doubt, Tensor):
        doubt = doubt.to(log_r.dtype).unsqueeze(-1)
        known = known | (doubt == 0)
    return torch.where(known, log_r, torch.log(doubt + (1 - doubt) * torch.exp(log_r)))


def plausible_log_r(log_p: Tensor, log_r: Tensor, share: float | Tensor) -> Tensor:
    """log R, and 0 in place of R where p finds a token less than `share` times as likely as the likeliest.

    The likeliest of those whose R is not 0: what cannot be written, a refused end say, makes nothing
    implausible, and one token always stays. This holds a strong guide to what p would say. A tensor of
    shares has the leading shape of `log_r`, one a row.
    """
    if not isinstance(share, Tensor) and share == 0:
        return log_r
    log_share = share.to(log_p.dtype).log().unsqueeze(-1) if isinstance(share, Tensor) else math.log(share)
    possible = log_p.masked_fill(torch.isneginf(log_r), -math.inf)
    least = possible.amax(dim=-1, keepdim=True) + log_share
    return log_r.masked_fill(possible < least, -math.inf)


def soft_coefficients(
    log_r_start: Tensor, log_not_r_start: Tensor, target_rate: float | Tensor
) -> SoftCoefficients:
    """α = r / R(x) and β = (1 − r) / (1 − R(x)), one pair a row; `target_rate` is one number or one a row.

    log(1 − R(x)) is asked for beside log R(x) because it cannot be had from it when R(x) is near 1:
    `expected_log_r(log_p, log_one_minus(log_r))` keeps its digits. A target rate out of reach raises
    InfeasibleError: R(x) = 0 with r > 0, and R(x) = 1 with r < 1.
    """
    log_r_start, log_not_r_start = at_least_float32(log_r_start), at_least_float32(log_not_r_start)
    rate = torch.as_tensor(target_rate, dtype=log_r_start.dtype, device=log_r_start.device)
    if not bool(((rate >= 0) & (rate <= 1)).all()):
        raise InputError(
            "a target rate between 0 and 1",
            f"target rate {_worst(rate)}",
            "Give a share of texts: 0.8 is 80 %.",
        )
    rate = rate.expand_as(log_r_start)
    _require_feasible(log_r_start, rate > 0, rate, "0", "above 0")
    _require_feasible(log_not_r_start, rate < 1, rate, "1", "below 1")
    # log r − log R(x) with 0 / 0 = 0: at r = 0 (r = 1) the satisfied (unsatisfied) texts get no mass.
    return SoftCoefficients(
        log_difference(torch.log(rate), log_r_start), log_difference(torch.log1p(-rate), log_not_r_start)
    )


def soft_log_r(log_r: Tensor, coefficients: SoftCoefficients) -> Tensor:
    """log(αR + β(1 − R)): multiplied into p in place of R, it satisfies the oracle at rate r.

    r = 1 is the hard case (up to a constant), r = R(x) gives α = β = 1 and so p. `log_r` is (..., V)
    over coefficients (...).
    """
    log_r = at_least_float32(log_r)
    hit = coefficients.log_alpha.unsqueeze(-1) + log_r
    return torch.logaddexp(hit, coefficients.log_beta.unsqueeze(-1) + log_one_minus(log_r))


def _require_feasible(log_share: Tensor, wanted: Tensor, rate: Tensor, value: str, bound: str) -> None:
    """Raise where texts of a kind that the base never writes are wanted."""
    impossible = torch.isneginf(log_share) & wanted
    if not bool(impossible.any()):
        return
    row = int(impossible.flatten().nonzero()[0])
    kind = "satisfies" if value == "0" else "breaks"
    raise InfeasibleError(
        f"an R(x) other than {value} for a target rate {bound}",
        f"R(x) = {value} and target rate {float(rate.flatten()[row]):g} in row {row} of {rate.numel()}",
        f"The base never writes a text that {kind} the oracle here, so no guide can: change the prompt, "
        f"the base or the oracle, or ask for the rate {value}.",
    )


def _worst(values: Tensor) -> str:
    """The first value that no setting allows, else the first above 1: what an error shows."""
    flat = values.flatten()
    outside = ~((flat >= 0) & torch.isfinite(flat))
    outside = outside if bool(outside.any()) else flat > 1
    return f"{float(flat[outside][0]):g}"


# --- composition --------------------------------------------------------------------------------------


def conjoin(log_parts: Sequence[Tensor], log_finish: Tensor | None = None) -> Tensor:
    """log R of A & B & …: R_F · Π_k (R_k / R_F), exact where the parts are independent given the prefix.

    Under completion "eos" all parts share the event F, that the text ends itself, so they multiply
    *given F*. `log_finish` is log R_F; None means R_F = 1, right under completion "limit".
    """
    given_finish = [_given_finish(part, log_finish) for part in _require_parts(log_parts)]
    return _and_finish(torch.stack(given_finish).sum(dim=0), log_finish)


def disjoin(log_parts: Sequence[Tensor], log_finish: Tensor | None = None) -> Tensor:
    """log R of A | B | …: R_F · (1 − Π_k (1 − R_k / R_F)), exact where `conjoin` is."""
    misses = [log_one_minus(_given_finish(part, log_finish)) for part in _require_parts(log_parts)]
    return _and_finish(log_one_minus(torch.stack(misses).sum(dim=0)), log_finish)


def negate(log_r: Tensor, log_finish: Tensor | None = None) -> Tensor:
    """log R of ~A: R_F − R_A, always exact. Not 1 − R_A: a text that is cut satisfies neither A nor ~A."""
    return _and_finish(log_one_minus(_given_finish(log_r, log_finish)), log_finish)


def _require_parts(log_parts: Sequence[Tensor]) -> Sequence[Tensor]:
    if not log_parts:
        raise InputError("at least one log R to compose", "none", "Give the log R of each guide in a list.")
    return log_parts


def _given_finish(log_r: Tensor, log_finish: Tensor | None) -> Tensor:
    """log R_k − log R_F, the chance given that the text ends itself; ≤ 0 whatever rounding says."""
    log_r = at_least_float32(log_r)
    if log_finish is None:
        return log_r.clamp(max=0.0)
    never = torch.isneginf(at_least_float32(log_finish))
    conditional = log_difference(log_r, torch.where(never, 0.0, at_least_float32(log_finish)))
    return torch.where(never, -math.inf, conditional).clamp(max=0.0)


def _and_finish(log_given_finish: Tensor, log_finish: Tensor | None) -> Tensor:
    if log_finish is None:
        return log_given_finish.clamp(max=0.0)
    return (log_given_finish + at_least_float32(log_finish)).clamp(max=0.0)


# --- the weight of a text drawn from q ----------------------------------------------------------------


def hard_log_terminal(satisfied: Tensor) -> Tensor:
    """log C: the last factor of the weight, 0 or −inf. A text cut under completion "eos" has C = 0."""
    return torch.where(satisfied, 0.0, -math.inf)


def soft_log_terminal(satisfied: Tensor, coefficients: SoftCoefficients) -> Tensor:
    """log(αC + β(1 − C)): the last factor of the weight at a soft rate."""
    return torch.where(satisfied, coefficients.log_alpha, coefficients.log_beta)


def log_weight(log_s: Tensor, log_r: Tensor, log_terminal: Tensor, lengths: Tensor) -> Tensor:
    """log w = log C + Σ_i (log S_i − log R(y≤i)) = log (p·C / q), for texts drawn from q: (B,).

    `log_s` and `log_r` are (B, T): the normaliser of each step and the factor of the token chosen there,
    that is, what was actually multiplied in (after strength, soft rate or composition); `lengths` (B,)
    counts tokens, EOS included. E_q[w] = R(x) with the hard terminal and 1 with the soft one.
    """
    live = _within(lengths, log_s.shape[1], log_s.device)
    log_s, log_r = at_least_float32(log_s), at_least_float32(log_r)
    lost = (torch.isneginf(log_s) & live).any(dim=1) | torch.isneginf(log_terminal)
    steps = torch.where(live & ~lost.unsqueeze(1), log_s - log_r, 0.0)
    return torch.where(lost, -math.inf, steps.sum(dim=1) + log_terminal)


def smc_log_increments(log_s: Tensor, log_r: Tensor, log_terminal: Tensor, lengths: Tensor) -> Tensor:
    """What each step adds to a particle's log weight: (B, T + 1), arguments as for `log_weight`.

    Column 0 is log S_1, column i is log S_{i+1} − log R(y≤i), column `lengths` is log C − log R(y≤T).
    A finished particle keeps its weight: the columns after are 0. The rows sum to `log_weight`.
    """
    log_s, log_r = at_least_float32(log_s), at_least_float32(log_r)
    steps = log_s.shape[1]
    column = torch.arange(steps + 1, device=log_s.device)  # (T + 1,)
    end = lengths.unsqueeze(1)  # (B, 1)
    pad = torch.zeros_like(log_s[:, :1])
    gained = torch.where(column == end, log_terminal.unsqueeze(1), torch.cat([log_s, pad], dim=1))
    spent = torch.cat([pad, log_r], dim=1)
    return torch.where(column <= end, log_difference(gained, spent), 0.0)


def smc_log_increment(log_gained: Tensor, log_r_last: Tensor) -> Tensor:
    """One column of `smc_log_increments`, for a loop: log S_{i+1} (or log C at the end) − log R(y≤i)."""
    return log_difference(at_least_float32(log_gained), at_least_float32(log_r_last))


def _within(lengths: Tensor, steps: int, device: torch.device) -> Tensor:
    """True at the positions of a text, False at its padding: (B, T)."""
    return torch.arange(steps, device=device) < lengths.unsqueeze(1)


# --- proposals ----------------------------------------------------------------------------------------


def mixture_log_proposal(log_components: Tensor, log_shares: Tensor) -> Tensor:
    """Token by token, the log-probability of a text under a mixture of proposals: (K, B, T) → (B, T).

    One component k is picked a text, with probability π_k, so what token i must record is not a mixture
    of next-token probabilities but log m(y≤i) − log m(y<i) with m(y≤i) = Σ_k π_k Π_{j≤i} q_k(y_j | y<j).
    `log_components` holds log q_k of the chosen tokens, 0 at padding; `log_shares` (K,) is log π.
    """
    log_components, log_shares = at_least_float32(log_components), at_least_float32(log_shares)
    if abs(float(log_shares.exp().sum()) - 1.0) > 1e-4:
        raise InputError(
            "shares that sum to 1",
            f"a sum of {float(log_shares.exp().sum()):g}",
            "Divide the shares by their sum.",
        )
    prior = log_shares.view(-1, 1, 1).expand(-1, log_components.shape[1], 1)  # (K, B, 1)
    path = torch.cat([prior, log_components], dim=2).cumsum(dim=2)  # (K, B, T + 1)
    log_mass = torch.logsumexp(path, dim=0)  # (B, T + 1)
    return log_difference(log_mass[:, 1:], log_mass[:, :-1])


def require_coverage(log_p: Tensor, log_proposal: Tensor) -> None:
    """Raise CoverageError where p can write a token that the proposal cannot: two (..., V) tensors.

    A support, not a probability, is compared: a proposal that gives a token 1e-30 covers it.
    """
    missed = ~torch.isneginf(log_p) & torch.isneginf(log_proposal)
    if not bool(missed.any()):
        return
    mass = torch.where(missed, at_least_float32(log_p).exp(), 0.0).sum(dim=-1).max()
    raise CoverageError(
        "a proposal that can write every token p can write",
        f"{int(missed.sum())} entries that p can write and the proposal cannot, up to {float(mass):.3g} of "
        "p's mass at one step",
        "Turn top-k, top-p, exact end and masks off in the proposal, declare them part of p, or mix the "
        "proposal with p.",
    )
