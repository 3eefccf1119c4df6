"""One step of guided decoding, from p and R to q: doubt, strength, soft rate, exact end, dead ends.

Whatever is asked for, one factor f(v) is multiplied into p(v) and the product is normalised: q = p·f / S with
S = Σ_v p(v) f(v). The weight of a text, and so everything exact, needs only f and S (Semantics 4).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from nado.composition import require_probability
from nado.decomposition import (
    SoftCoefficients,
    apply_strength,
    doubted_log_r,
    expected_log_r,
    guided_distribution,
    log_one_minus,
    plausible_log_r,
    require_strength,
    soft_coefficients,
    soft_log_r,
)
from nado.errors import InputError

if TYPE_CHECKING:
    from nado.guide import Guide

# What a target rate below 1 goes without, and why.
_WITHOUT_RATE = {
    "doubt": "A rate below 1 lets unsatisfied texts be already",
    "plausible": "A rate is one of all texts that p can write",
}


@dataclass(frozen=True)
class Guidance:
    """How a guide is applied. The default is the method itself."""

    strength: float = 1.0  # R to this power: 0 is the base alone, above 1 pulls harder and leaves q*
    target_rate: float = 1.0  # share of texts that shall satisfy the oracle; 1 is all of them
    floor: float = 0.0  # a row whose chance of success S falls below this is declared a dead end
    exact_end: bool = False  # ask the oracle whether a text may end here, and let it end only then
    doubt: float = 0.0  # R far below this is not believed: a text that is as good as lost goes on as p would
    plausible: float = 0.0  # tokens that p finds less than this share as likely as the likeliest are left out

    def __post_init__(self) -> None:
        require_strength(self.strength)
        for name in ("target_rate", "floor", "doubt", "plausible"):
            if not 0 <= getattr(self, name) <= 1:
                hint = "It is a share." if name == "plausible" else "It is a probability."
                raise InputError(f"{name} between 0 and 1", f"{getattr(self, name)}", hint)
        if self.target_rate < 1 and self.strength != 1:
            raise InputError(
                "strength 1 with a target rate below 1",
                f"strength {self.strength:g} and target rate {self.target_rate:g}",
                "A target rate is defined for R itself: use one of the two.",
            )
        for name, why in _WITHOUT_RATE.items():
            if self.target_rate < 1 and getattr(self, name):
                raise InputError(
                    f"no {name} with a target rate below 1",
                    f"{name} {getattr(self, name):g} and target rate {self.target_rate:g}",
                    f"{why}: use one of the two.",
                )
        if self.target_rate < 1 and self.exact_end:
            raise InputError(
                "no exact end with a target rate below 1",
                f"exact_end and target rate {self.target_rate:g}",
                "An exact end satisfies the oracle always: turn it off.",
            )

    @property
    def soft(self) -> bool:
        """Whether texts shall satisfy the oracle at a rate below 1."""
        return self.target_rate < 1

    @property
    def plain(self) -> bool:
        """Whether R itself is multiplied in, so that S_1 estimates R(x)."""
        return self.strength == 1 and not self.soft and not self.doubt and not self.plausible


def require_scale(guidance: Guidance, guides: Iterable[Guide]) -> None:
    """Refuse what compares R with a number where R has no scale: after a warm-up alone."""
    asked = {"target_rate": guidance.soft, "doubt": guidance.doubt, "floor": guidance.floor}
    name = next((name for name, wanted in asked.items() if wanted), None)
    if name is not None:
        hint = f"Train it further without warm_up, or leave {name} out."
        for guide in guides:
            require_probability(guide, f"which {name} is compared with", hint)


class GuidedStep(NamedTuple):
    """The next-token distribution of the guided model, and what it is made of."""

    log_q: Tensor  # (..., V)
    log_s: Tensor  # (...): the normaliser S
    log_factor: Tensor  # (..., V): what was multiplied into p


def guide_step(
    log_p: Tensor,
    log_r: Tensor,
    guidance: Guidance,
    *,
    soft: SoftCoefficients | None = None,
    stops: Tensor | None = None,
    eos_id: int | None = None,
    exact: Tensor | None = None,
    plausible: Tensor | None = None,
) -> GuidedStep:
    """q from p and the guide's R, both (..., V).

    `soft` are a soft rate's coefficients, made once a text by `begin_soft`. `stops` (...) are the oracle's
    answers about the texts as they stand, for an exact end: they replace R(EOS), in rows that are `exact`
    (...) where not all of them are to end so. `plausible` (...) are shares of their own where rows differ.
    """
    share = guidance.plausible if plausible is None else plausible
    log_r = doubted_log_r(log_r, guidance.doubt)
    if guidance.soft:
        assert soft is not None
        factor = soft_log_r(log_r, soft)
    elif guidance.strength == 1:
        factor = log_r
    else:
        factor = apply_strength(log_r, guidance.strength)
    if not guidance.exact_end:
        factor = plausible_log_r(log_p, factor, share)
        return GuidedStep(*guided_distribution(log_p, factor), factor)
    # After the strength: 0 leaves the guide out, not the oracle.
    factor, ends = _answer_ends(factor, stops, eos_id, exact)
    factor = plausible_log_r(log_p, factor, share)
    log_q, log_s = guided_distribution(log_p, factor)
    lost = torch.isneginf(log_s) if exact is None else torch.isneginf(log_s) & exact
    # A GPU would have to wait for the answer, and a graph has no branches.
    if lost.device.type == "cpu" and not torch.compiler.is_compiling() and not bool(lost.any()):
        return GuidedStep(log_q, log_s, factor)
    return GuidedStep(torch.where(lost.unsqueeze(-1), _going_on(log_q, ends), log_q), log_s, factor)


def _answer_ends(
    log_r: Tensor, stops: Tensor | None, eos_id: int | None, exact: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """R with the oracle's answers in place of R(EOS), and where in a row (V,) EOS is."""
    assert stops is not None
    assert eos_id is not None
    ends = torch.arange(log_r.shape[-1], device=log_r.device) == eos_id
    answered = ends if exact is None else ends & exact.unsqueeze(-1)
    answers = torch.where(stops, 0.0, -math.inf).to(log_r.dtype)
    return torch.where(answered, answers.unsqueeze(-1), log_r), ends


def _going_on(log_p: Tensor, ends: Tensor) -> Tensor:
    """p without EOS: a text that cannot be satisfied any more is cut at the limit rather than finished."""
    others = log_p.masked_fill(ends, -math.inf)
    rest = others.logsumexp(dim=-1, keepdim=True)
    return torch.where(torch.isneginf(rest), log_p, others - rest)


def chance(
    step: GuidedStep,
    log_p: Tensor,
    log_r: Tensor,
    guidance: Guidance,
    *,
    stops: Tensor | None = None,
    eos_id: int | None = None,
) -> Tensor:
    """log Σ_v p(v) R(v): how likely success still is, whatever is made of R to decode with.

    Where the end is exact, R(EOS) is what the oracle says, here as in `guide_step`.
    """
    if guidance.plain:
        return step.log_s
    if guidance.exact_end:
        log_r, _ = _answer_ends(log_r, stops, eos_id)
    return expected_log_r(log_p, log_r)


def begin_soft(log_p: Tensor, log_r: Tensor, guidance: Guidance) -> SoftCoefficients | None:
    """The coefficients of a soft rate, from the first step of each text; None where none is asked for."""
    if not guidance.soft:
        return None
    return soft_coefficients(
        expected_log_r(log_p, log_r), expected_log_r(log_p, log_one_minus(log_r)), guidance.target_rate
    )
