"""Losses and weights, as pure functions: what the guide is asked to get right, and on which texts.

The losses never see the vocabulary. They take what is left of it after a step is summed up: the log R of
the tokens that were chosen and the log S of every step. A training loop computes these in chunks without
keeping a (B, T, V) tensor; `reduce_vocabulary` computes them from full tensors.

Positions. A text has `lengths` tokens, EOS included; a batch is padded on the right to T. Columns of a
(B, T + 1) tensor are prefixes: column i belongs to y≤i, column 0 to the empty prefix, whose value is
R(x) = S_1. Columns of a (B, T) tensor are steps: column i predicts token i + 1 from y≤i.

Each loss returns its terms position by position, 0 at padding, so that a caller can weight them
(`average`) and a report can show where the loss sits.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nado.decomposition import at_least_float32, expected_log_r, log_difference, log_one_minus
from nado.errors import InputError
from nado.language_model import Completion, is_finished

StopGradient = Literal["neither", "sum", "prefix"]
WeightForm = Literal["whole", "suffix"]

# The finite stand-in for log 0 inside a loss: one contradicted certainty must not turn a batch into inf.
LOG_FLOOR = -100.0

# Chances below this are all the same to `log_consistency_loss`: e^−12 is one text in 160,000.
LOG_CONSISTENCY_FLOOR = -12.0

# Below this many texts of a prompt, dividing by their mean weight is more biased than it is worth.
SELF_NORMALISATION_MINIMUM = 32


class Reduced(NamedTuple):
    """What the losses need of (B, T, V) tensors of log p and log R."""

    log_r: Tensor  # (B, T + 1): log R(x, y≤i), column 0 = log R(x)
    log_not_r: Tensor  # (B, T + 1): log(1 − R), with its digits where R is near 1
    log_s: Tensor  # (B, T): log Σ_v p(v) R(y≤i ⊕ v)
    log_not_s: Tensor  # (B, T): log(1 − S)


class ImportanceWeights(NamedTuple):
    """Weights of drawn texts, and what a report says about them."""

    weights: Tensor  # (B, T + 1), 0 at padding
    mean: float  # of the raw whole-text weights: 1 when the proposal is what it says it is
    ess: float  # effective number of texts, of B, under the raw whole-text weights
    self_normalised: float  # share of the weights divided by their prompt's mean
    clipped: float  # share of the weights cut to `clip`


class Balance(NamedTuple):
    """How to see as many satisfied texts as unsatisfied ones, and what that does to R."""

    weights: Tensor  # (B,)
    offset: Tensor  # (B,): the log-odds added to R by these weights, one value a prompt


def reduce_vocabulary(log_p: Tensor, log_r: Tensor, tokens: Tensor) -> Reduced:
    """Sum (B, T, V) tensors of log p and log R up to what the losses need; `tokens` (B, T)."""
    log_r = at_least_float32(log_r)
    log_not_r = log_one_minus(log_r)
    log_s, log_not_s = expected_log_r(log_p, log_r), expected_log_r(log_p, log_not_r)  # (B, T)
    chosen = tokens.unsqueeze(-1)

    def with_start(start: Tensor, values: Tensor) -> Tensor:
        return torch.cat([start[:, :1], values.gather(-1, chosen).squeeze(-1)], dim=1)

    return Reduced(with_start(log_s, log_r), with_start(log_not_s, log_not_r), log_s, log_not_s)


def label_finished(satisfied: Tensor, ended: Tensor, completion: Completion) -> Tensor:
    """C as training sees it: the oracle's answer, and under completion "eos" False for a text cut at L."""
    return satisfied & is_finished(ended, completion)


# --- losses -------------------------------------------------------------------------------------------


def success_loss(
    log_r: Tensor, satisfied: Tensor, lengths: Tensor, log_not_r: Tensor | None = None
) -> Tensor:
    """L_CE: cross-entropy of R(x, y≤i) and C(x, y) at i = 0 … T, start and EOS included: (B, T + 1).

    `satisfied` (B,) is C after `label_finished`. With texts from p its minimiser is the exact R.
    """
    log_not_r = log_one_minus(log_r) if log_not_r is None else log_not_r
    terms = _cross_entropy(log_r, log_not_r, satisfied.unsqueeze(1))
    return torch.where(prefix_mask(lengths, log_r.shape[1]), terms, 0.0)


def consistency_loss(reduced: Reduced, lengths: Tensor, stop_gradient: StopGradient = "neither") -> Tensor:
    """Eq. 6 as a loss: f_KL(S_{i+1}, R(x, y≤i)) at i = 1 … T − 1: (B, T + 1).

    f_KL is the KL of two Bernoullis. At i = 0 it is 0 by construction, R(x) being S_1, and after the last
    token nothing is predicted. `stop_gradient` names the side held fixed: "sum" makes S a target for the
    prefix, "prefix" the reverse, "neither" trains both as the paper does.
    """
    terms = bernoulli_kl(
        *_held((reduced.log_s[:, 1:], reduced.log_not_s[:, 1:]), stop_gradient == "sum"),
        *_held((reduced.log_r[:, 1:-1], reduced.log_not_r[:, 1:-1]), stop_gradient == "prefix"),
    )
    terms = torch.nn.functional.pad(terms, (1, 1))  # (B, T + 1)
    return torch.where(interior_mask(lengths, terms.shape[1]), terms, 0.0)


def log_consistency_loss(
    reduced: Reduced, lengths: Tensor, stop_gradient: StopGradient = "neither"
) -> Tensor:
    """Eq. 6 once more, as a Huber loss of log S_{i+1} − log R(x, y≤i) at i = 1 … T − 1: (B, T + 1).

    What decodes is the ratio of R's, and where a text is about to end in vain all of them are small: f_KL of
    0.005 and 0.0002 is next to nothing, though one lets the text end and the other does not. Both losses are
    0 at the exact R and only there.
    """
    log_s = reduced.log_s[:, 1:].detach() if stop_gradient == "sum" else reduced.log_s[:, 1:]
    log_r = reduced.log_r[:, 1:-1].detach() if stop_gradient == "prefix" else reduced.log_r[:, 1:-1]
    log_r, log_s = (at_least_float32(each).clamp(min=LOG_CONSISTENCY_FLOOR) for each in (log_r, log_s))
    terms = torch.nn.functional.huber_loss(log_r, log_s, reduction="none")
    terms = torch.nn.functional.pad(terms, (1, 1))  # (B, T + 1)
    return torch.where(interior_mask(lengths, terms.shape[1]), terms, 0.0)


def stop_loss(
    log_r_eos: Tensor,
    satisfied_if_stopped: Tensor,
    lengths: Tensor,
    asked: Tensor | None = None,
    log_not_r_eos: Tensor | None = None,
) -> Tensor:
    """Cross-entropy of R(x, y≤i ⊕ EOS) and C(x, y≤i), a noiseless label at every prefix: (B, T).

    Column i of `log_r_eos` and `satisfied_if_stopped` (B, T) is the text stopped after y≤i, i = 0 … T − 1.
    `asked` (B, T) marks where the oracle was asked; None means everywhere.
    """
    log_not_r_eos = log_one_minus(log_r_eos) if log_not_r_eos is None else log_not_r_eos
    terms = _cross_entropy(log_r_eos, log_not_r_eos, satisfied_if_stopped)
    counted = prefix_mask(lengths - 1, terms.shape[1])
    return torch.where(counted if asked is None else counted & asked, terms, 0.0)


def warm_up_loss(reduced: Reduced, log_p: Tensor, satisfied: Tensor, lengths: Tensor) -> Tensor:
    """−log q(y_i | x, y<i) = −(log p + log R − log S) at each token of a satisfied text: (B, T).

    `log_p` (B, T) is that of the chosen tokens and takes no gradient: it only makes the value a
    likelihood. log q is blind to a factor per prefix, so this fixes the shape of R over v and nothing
    else: after warm-up alone R(x), S and a soft rate mean nothing.
    """
    log_q = log_difference(log_p.detach() + reduced.log_r[:, 1:], reduced.log_s)
    counted = prefix_mask(lengths - 1, log_q.shape[1]) & satisfied.unsqueeze(1)
    return torch.where(counted, -log_q.clamp(min=LOG_FLOOR), 0.0)


def average(terms: Tensor, counted: Tensor, weights: Tensor | None = None) -> Tensor:
    """Σ weights · terms / number of counted positions; `weights` (B,) or the shape of `terms`.

    The denominator does not see the weights: raw importance weights keep the mean unbiased, and
    self-normalised ones already have mean 1.
    """
    if weights is not None:
        terms = terms * (weights.unsqueeze(1) if weights.dim() == 1 else weights)
    return torch.where(counted, terms, 0.0).sum() / counted.sum().clamp(min=1)


def prefix_mask(lengths: Tensor, columns: int) -> Tensor:
    """True at the prefixes y≤0 … y≤T of each text, False at padding: (B, columns)."""
    return torch.arange(columns, device=lengths.device) <= lengths.unsqueeze(1)


def interior_mask(lengths: Tensor, columns: int) -> Tensor:
    """True at the prefixes y≤1 … y≤T−1, where consistency says something: (B, columns)."""
    return prefix_mask(lengths - 1, columns) & (torch.arange(columns, device=lengths.device) > 0)


def bernoulli_kl(log_a: Tensor, log_not_a: Tensor, log_b: Tensor, log_not_b: Tensor) -> Tensor:
    """KL(a ‖ b) of two Bernoullis from the logs of both sides of each; 0 log 0 = 0."""
    return _relative_entropy(log_a, log_b) + _relative_entropy(log_not_a, log_not_b)


def _relative_entropy(log_a: Tensor, log_b: Tensor) -> Tensor:
    """a (log a − log b), floored so that a value and its gradient are finite at a = 0 and at b = 0."""
    log_a, log_b = at_least_float32(log_a), at_least_float32(log_b)
    return torch.exp(log_a) * (log_a.clamp(min=LOG_FLOOR) - log_b.clamp(min=LOG_FLOOR))


def _cross_entropy(log_r: Tensor, log_not_r: Tensor, satisfied: Tensor) -> Tensor:
    log_r, log_not_r = at_least_float32(log_r), at_least_float32(log_not_r)
    return -torch.where(satisfied, log_r.clamp(min=LOG_FLOOR), log_not_r.clamp(min=LOG_FLOOR))


def _held(pair: tuple[Tensor, Tensor], stopped: bool) -> tuple[Tensor, Tensor]:
    return (pair[0].detach(), pair[1].detach()) if stopped else pair


# --- importance weights -------------------------------------------------------------------------------


def importance_log_weights(log_p: Tensor, log_proposal: Tensor, lengths: Tensor, form: WeightForm) -> Tensor:
    """log w of each prefix position, from the token-wise log p and log proposal (B, T): (B, T + 1).

    "whole": log p(y) − log proposal(y), the same at every position; texts then stand for texts of p.
    "suffix": only the ratio of what comes after y≤i, far less variance and all that an unbiased
    R(x, y≤i) needs; prefixes then stay as the proposal drew them. The last column of a text is 0.
    """
    steps = log_p.shape[1]
    live = torch.arange(steps, device=log_p.device) < lengths.unsqueeze(1)
    ratio = torch.where(live, at_least_float32(log_p) - at_least_float32(log_proposal), 0.0)
    # Reversed cumulative sum: column i holds Σ_{j > i}.
    suffix = torch.nn.functional.pad(ratio.flip(1).cumsum(1).flip(1), (0, 1))  # (B, T + 1)
    return suffix if form == "suffix" else suffix[:, :1].expand(-1, steps + 1)


def importance_weights(
    log_p: Tensor,
    log_proposal: Tensor,
    lengths: Tensor,
    prompt_ids: Tensor,
    form: WeightForm = "suffix",
    clip: float | None = 10.0,
) -> ImportanceWeights:
    """Weights to multiply into the loss terms, self-normalised where a prompt has texts enough.

    Weights are divided by their mean over the texts of the same prompt (`prompt_ids` (B,)) that reach the
    position, if those are at least 32; elsewhere they stay raw and are cut to `clip` (None: never).
    """
    log_w = importance_log_weights(log_p, log_proposal, lengths, form)  # (B, T + 1)
    _require_drawable(log_w)
    counted = prefix_mask(lengths, log_w.shape[1])
    raw = torch.where(counted, log_w.exp(), 0.0)
    scale, normalised = _self_normalisation(raw, counted, prompt_ids, form)
    clipped = counted & ~normalised & (raw > (math.inf if clip is None else clip))
    whole = importance_log_weights(log_p, log_proposal, lengths, "whole")[:, 0]
    return ImportanceWeights(
        torch.where(clipped, clip or 0.0, raw * scale),
        float(whole.exp().mean()),
        float(effective_sample_size(whole)),
        float(normalised.sum() / counted.sum()),
        float(clipped.sum() / counted.sum()),
    )


def _self_normalisation(
    raw: Tensor, counted: Tensor, prompt_ids: Tensor, form: WeightForm
) -> tuple[Tensor, Tensor]:
    """What to multiply each raw weight by, 1 where texts are too few, and where they are not: (B, T + 1)."""
    group, number = _sum_by_prompt(counted.to(raw.dtype), prompt_ids)  # (B,), (prompts, T + 1)
    total = _sum_by_prompt(raw, prompt_ids)[1]  # (prompts, T + 1)
    if form == "whole":
        # A whole-text weight has mean 1 over all texts, not over those that are long enough to get here;
        # a suffix weight has mean 1 after every prefix.
        number, total = number[:, :1].expand_as(number), total[:, :1].expand_as(total)
    enough = (number >= SELF_NORMALISATION_MINIMUM) & (total > 0)
    scale = torch.where(enough, number / torch.where(enough, total, 1.0), 1.0)
    return scale[group], enough[group] & counted


def effective_sample_size(log_w: Tensor, dim: int = -1) -> Tensor:
    """ESS = (Σ w)² / Σ w², between 1 and the number of texts; 0 when every weight is 0."""
    log_w = at_least_float32(log_w)
    # Relative to the largest, so that large logs keep their digits.
    weights = torch.exp(log_difference(log_w, log_w.amax(dim=dim, keepdim=True).expand_as(log_w)))
    total = weights.sum(dim=dim)
    return total**2 / (weights**2).sum(dim=dim).clamp(min=1e-30)


def _require_drawable(log_w: Tensor) -> None:
    """A text that the proposal could not have drawn shows as a weight of +inf or nan."""
    broken = ~(log_w < math.inf)
    if bool(broken.any()):
        row = int(broken.any(dim=1).nonzero()[0])
        raise InputError(
            "texts that their proposal can draw",
            f"row {row} of {log_w.shape[0]}, to which its recorded log_proposal gives probability 0",
            "Record log_proposal in the loop that draws the text, token by token, from the very distribution "
            "it samples.",
        )


def _sum_by_prompt(values: Tensor, prompt_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The group of each row, (B,), and the sum of `values` (B, …) over each group."""
    prompts, group = torch.unique(prompt_ids, return_inverse=True)
    sums = values.new_zeros((len(prompts), *values.shape[1:]))
    return group, sums.index_add(0, group, values)


# --- balanced labels ----------------------------------------------------------------------------------


def balance_offset(rate: Tensor, balanced_rate: float | Tensor) -> Tensor:
    """The log-odds that R gains when the share of satisfied texts is moved from `rate` to `balanced_rate`.

    Choosing satisfied and unsatisfied texts of one prompt at other rates than p does multiplies the odds
    of R(x, y≤i) by one constant, whatever the prefix.
    """
    rate = at_least_float32(rate)
    balanced = torch.as_tensor(balanced_rate, dtype=rate.dtype, device=rate.device)
    return torch.logit(balanced) - torch.logit(rate)


def balance_labels(
    satisfied: Tensor, prompt_ids: Tensor, balanced_rate: float = 0.5, weights: Tensor | None = None
) -> Balance:
    """Weights that give the satisfied texts of each prompt the share `balanced_rate`, and the offset.

    `weights` (B,) are the texts' own importance weights, 1 when None. A prompt with one label only cannot
    be balanced: its weights stay and its offset is 0.
    """
    own = torch.ones_like(satisfied, dtype=torch.float32) if weights is None else at_least_float32(weights)
    group, total = _sum_by_prompt(own, prompt_ids)
    rate = (_sum_by_prompt(own * satisfied, prompt_ids)[1] / total)[group]  # (B,)
    mixed = (rate > 0) & (rate < 1)
    rate = torch.where(mixed, rate, balanced_rate)
    factor = torch.where(satisfied, balanced_rate / rate, (1 - balanced_rate) / (1 - rate))
    return Balance(own * factor, balance_offset(rate, balanced_rate))


def shift_log_odds(log_r: Tensor, log_not_r: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """log R and log(1 − R) after adding `offset` (B,) to the log-odds of R (B, …).

    The success loss on balanced texts is taken at the shifted R; the guide's own R stays that of p, and so
    do consistency, stop labels and S, which are never shifted.
    """
    shifted = at_least_float32(log_r) + offset.view(-1, *[1] * (log_r.dim() - 1))
    log_total = torch.logaddexp(shifted, at_least_float32(log_not_r))
    return shifted - log_total, log_not_r - log_total
