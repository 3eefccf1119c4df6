"""Proposals: what samples are drawn from, and the exact log-probability of having drawn them.

A proposal is a mixture of components. One component is picked per sequence, and token i records
log m(y≤i) − log m(y<i), where m(y≤i) = Σ_k π_k Π_{j≤i} q_k(y_j) is the mixture's own probability of the
prefix: any component could have written it. With one component that is its log-probability.

With `complete_from_p` the proposal writes only a prefix of random length and p itself writes the rest.
What follows the prefix is then an unbiased sample of p's completions of it, with no weight at all. At every
step p takes over with the same chance, 1 / (mean_prefix + 1), so prefix lengths are geometric: most end well
inside texts that are far shorter than the length limit, where a uniform length would mostly lie behind their
end. The log proposal is that of the text *given* its prefix length, for which E[w] = 1 holds as well.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nado.errors import CoverageError, InputError, MismatchError
from nado.language_model import LanguageModel
from nado.warpers import Warpers

P_SHARE = 0.1  # what a guided proposal leaves p at least, so that no weight exceeds 10
PREFIX_SHARE = 1 / 8  # of the length limit: how long prefixes are on average when nobody says
ESS_SHARE = 0.05  # an effective sample size below this share of the samples is warned of
MEAN_ERRORS = 4.0  # standard errors by which a mean weight may miss 1: by chance 6 in 100,000 times more

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tempered:
    """p with its next-token distribution flattened (above 1) or sharpened (below 1). 1 is p itself."""

    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise InputError(
                "a finite temperature above 0", f"{self.temperature}", "Use 1 to draw from p itself."
            )

    def describe(self) -> dict[str, Any]:
        """JSON-ready values that identify the component."""
        return {"kind": "tempered", "temperature": self.temperature}

    def name(self) -> str:
        """As the column `proposal` shows it."""
        return "p" if self.temperature == 1 else f"p at temperature {self.temperature:g}"

    def log_proposal(self, log_p: Tensor, other: Tensor | None) -> Tensor:
        """Next-token log-probabilities (B, V)."""
        return log_p if self.temperature == 1 else (log_p / self.temperature).log_softmax(dim=-1)


@dataclass(frozen=True)
class Guided:
    """Another language model over the same vocabulary, usually p guided by a half-trained guide (q̂)."""

    model: LanguageModel[Any]

    def describe(self) -> dict[str, Any]:
        """JSON-ready values that identify the component."""
        return {"kind": "guided", "fingerprint": self.model.fingerprint}

    def name(self) -> str:
        """As the column `proposal` shows it."""
        return f"guided {self.model.fingerprint[:8]}"

    def log_proposal(self, log_p: Tensor, other: Tensor | None) -> Tensor:
        """Next-token log-probabilities (B, V)."""
        assert other is not None
        return other


@dataclass(frozen=True)
class TruncatedTopP:
    """p cut to its likeliest tokens with mass `top_p`, as the paper draws. Only for ablations: it does not
    cover p, so its weights are wrong, and samples drawn from it are stamped `uncorrected`.
    """

    top_p: float = 0.8

    def __post_init__(self) -> None:
        Warpers(top_p=self.top_p)  # which says what is wrong with it

    def describe(self) -> dict[str, Any]:
        """JSON-ready values that identify the component."""
        return {"kind": "uncorrected top-p", "top_p": self.top_p}

    def name(self) -> str:
        """As the column `proposal` shows it."""
        return f"p cut to top-p {self.top_p:g}, uncorrected"

    def log_proposal(self, log_p: Tensor, other: Tensor | None) -> Tensor:
        """Next-token log-probabilities (B, V)."""
        return Warpers(top_p=self.top_p).apply(log_p, (), torch.zeros(len(log_p), device=log_p.device))


Component: TypeAlias = Tempered | Guided | TruncatedTopP


@dataclass(frozen=True)
class Proposal:
    """Components with their shares, and whether p completes what they begin.

    `mean_prefix` is how many tokens they write on average before p takes over, if the text lasts that
    long: about half the length of a typical text is a good choice, None is an eighth of the length limit.
    `uncorrected` lets a truncated component through, for an ablation; the samples are stamped with it.
    """

    components: tuple[Component, ...] = (Tempered(),)
    shares: tuple[float, ...] = (1.0,)
    complete_from_p: bool = False
    mean_prefix: float | None = None
    uncorrected: bool = False
    models: tuple[LanguageModel[Any], ...] = field(init=False)

    def __post_init__(self) -> None:
        _require_shares(self.components, self.shares)
        _require_mean_prefix(self.mean_prefix, self.complete_from_p)
        models = tuple(part.model for part in self.components if isinstance(part, Guided))
        object.__setattr__(self, "models", models)

    @property
    def is_p(self) -> bool:
        """Whether this is p itself: then log proposal is log p and one look at it is enough."""
        return self.components == (Tempered(1.0),)

    def describe(self) -> dict[str, Any]:
        """JSON-ready values that identify the proposal in a manifest."""
        parts = [
            {"share": share, **part.describe()}
            for share, part in zip(self.shares, self.components, strict=True)
        ]
        return {
            "components": parts,
            "complete_from_p": self.complete_from_p,
            "mean_prefix": self.mean_prefix,
            "uncorrected": self.uncorrected,
        }

    def name(self) -> str:
        """A short name for the column `proposal`."""
        parts = [
            part.name() if share == 1 else f"{share:g}·{part.name()}"
            for share, part in zip(self.shares, self.components, strict=True)
        ]
        return " + ".join(parts) + (" then p" if self.complete_from_p else "")

    def require_covers(self, model: LanguageModel[Any]) -> None:
        """Refuse a proposal that cannot write everything p can write. Decided by structure, not by luck."""
        truncated = [part for part in self.components if isinstance(part, TruncatedTopP)]
        if truncated and not self.uncorrected:
            raise CoverageError(
                "a proposal that can write everything p can",
                f"top_p={truncated[0].top_p}, which cuts off part of p",
                "Declare the truncation as Warpers of p, or set uncorrected=True for an ablation.",
            )
        own = sum(share for share, part in self._parts() if part == Tempered(1.0))
        if self.models and own < P_SHARE - 1e-9:
            raise CoverageError(
                f"a guided proposal mixed with p, with a share of p of at least {P_SHARE:g}",
                f"a share of p of {own:g}",
                "Mix it: guided_mixture(model, share=0.9).",
            )
        for other in self.models:
            _require_alike(model, other)
            _require_unmasked(other)

    def _parts(self) -> Sequence[tuple[float, Component]]:
        return list(zip(self.shares, self.components, strict=True))


def tempered(temperature: float) -> Proposal:
    """Draw from p at a temperature."""
    return Proposal((Tempered(temperature),))


def guided_mixture(
    model: LanguageModel[Any],
    share: float = 0.9,
    *,
    complete_from_p: bool = False,
    mean_prefix: float | None = None,
) -> Proposal:
    """Draw from a guided model q̂ with the given share, from p otherwise."""
    return Proposal(
        (Guided(model), Tempered()),
        (share, 1 - share),
        complete_from_p=complete_from_p,
        mean_prefix=mean_prefix,
    )


@dataclass
class Mixing:
    """What a mixture knows of its rows: which component writes each, and how likely each is to have."""

    picked: Tensor  # (B,) component that writes the row
    log_posterior: Tensor  # (B, K) log Pr[component | prefix], normalised
    switch: Tensor  # (B,) step at which p takes over

    def select(self, rows: Tensor) -> "Mixing":
        """The given rows."""
        return Mixing(self.picked[rows], self.log_posterior[rows], self.switch[rows])

    def put(self, rows: Tensor, fresh: "Mixing") -> None:
        """Replace the given rows."""
        self.picked[rows] = fresh.picked
        self.log_posterior[rows] = fresh.log_posterior
        self.switch[rows] = fresh.switch


def begin_mixing(proposal: Proposal, pick: Tensor, switch: Tensor, length_limit: int) -> Mixing:
    """Pick each row's component and switching step from two uniforms a row, (B,) each."""
    shares = torch.tensor(proposal.shares, dtype=torch.float64, device=pick.device)
    picked = (pick[:, None] >= shares.cumsum(0)).sum(dim=-1).clamp(max=len(shares) - 1)
    log_posterior = shares.log().float().expand(len(pick), -1).clone()
    if proposal.complete_from_p:
        steps = _prefix_lengths(switch, proposal.mean_prefix or PREFIX_SHARE * length_limit, length_limit)
    else:
        steps = torch.full_like(picked, length_limit)
    return Mixing(picked, log_posterior, steps)


def _prefix_lengths(noise: Tensor, mean: float, length_limit: int) -> Tensor:
    """Geometric numbers with the given mean, cut at L: Pr[length ≥ k] = (mean / (mean + 1))^k, inverted."""
    return (noise.log() / math.log(mean / (mean + 1))).clamp(max=length_limit).long()


def mixed_distribution(
    proposal: Proposal, mixing: Mixing, log_p: Tensor, others: Sequence[Tensor], steps: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The distribution each row's next token is drawn from (B, V), and every component's own."""
    guided = iter(others)
    components = [
        part.log_proposal(log_p, next(guided) if isinstance(part, Guided) else None)
        for part in proposal.components
    ]
    drawn_from = components[0]
    for index, component in enumerate(components[1:], start=1):
        drawn_from = torch.where((mixing.picked == index)[:, None], component, drawn_from)
    if proposal.complete_from_p:
        drawn_from = torch.where((steps >= mixing.switch)[:, None], log_p, drawn_from)
    return drawn_from, components


def record_token(
    mixing: Mixing, components: list[Tensor], tokens: Tensor, log_p_token: Tensor, steps: Tensor
) -> Tensor:
    """log m(y≤i) − log m(y<i) of the chosen tokens (B,); the posterior over components is updated."""
    chosen = torch.stack(
        [part.gather(-1, tokens[:, None]).squeeze(-1) for part in components], dim=-1
    )  # (B, K)
    joint = mixing.log_posterior + chosen
    log_proposal = joint.logsumexp(dim=-1)
    from_p = steps >= mixing.switch
    # Once p has taken over every component agrees with it: the posterior stays.
    mixing.log_posterior = torch.where(
        (from_p | log_proposal.isneginf())[:, None], mixing.log_posterior, joint - log_proposal[:, None]
    )
    return torch.where(from_p, log_p_token, log_proposal)


@dataclass(frozen=True)
class WeightSummary:
    """How far a proposal is from p, as its samples' weights show it."""

    samples: int
    mean: float  # 1 in expectation
    standard_error: float | None  # of that mean; None for a single sample
    largest: float
    effective_samples: float  # (Σ w)² / Σ w²

    def describe(self) -> dict[str, Any]:
        """As JSON-ready values, for a manifest or a report."""
        return asdict(self)

    def warnings(self) -> list[str]:
        """What is wrong with these weights, and what to do; nothing when they are fine."""
        found = []
        error = self.standard_error
        if error is not None and not abs(self.mean - 1) <= MEAN_ERRORS * error + 1e-4:
            found.append(
                f"the mean weight is {self.mean:.4g} ± {error:.2g}, not 1: the samples miss "
                "part of what p writes. Use a proposal nearer to p, or more samples."
            )
        share = self.effective_samples / self.samples
        if share < ESS_SHARE:
            found.append(
                f"{self.samples} weighted samples are worth {self.effective_samples:.1f} ({share:.2%}): a "
                "few carry all the weight. Use a proposal nearer to p, or a larger share of p."
            )
        return found


def summarise_weights(log_weights: NDArray[np.float64], *, warn: bool = True) -> WeightSummary:
    """Mean, standard error, largest and effective number of the weights; what is amiss is logged."""
    weights = np.exp(np.minimum(log_weights, 300.0))  # beyond that their squares leave float64
    error = float(weights.std(ddof=1) / len(weights) ** 0.5) if len(weights) > 1 else None
    relative = np.exp(log_weights - log_weights.max())  # so that large logs keep their digits
    effective = float(relative.sum() ** 2 / (relative**2).sum())
    summary = WeightSummary(len(weights), float(weights.mean()), error, float(weights.max()), effective)
    for warning in summary.warnings() if warn else ():
        _log.warning(warning)
    return summary


def _require_mean_prefix(mean_prefix: float | None, complete_from_p: bool) -> None:
    if mean_prefix is None:
        return
    if not complete_from_p:
        raise InputError("complete_from_p with a mean_prefix", "it off", "Set complete_from_p=True.")
    if not 0 < mean_prefix < math.inf:
        raise InputError(
            "a finite mean_prefix above 0",
            f"{mean_prefix}",
            "Use about half the length of a typical text, in tokens.",
        )


def _require_shares(components: tuple[Component, ...], shares: tuple[float, ...]) -> None:
    if not components or len(components) != len(shares):
        raise InputError(
            "one share for every component of a proposal",
            f"{len(components)} components and {len(shares)} shares",
            "Give as many shares as components.",
        )
    if any(share <= 0 for share in shares) or abs(sum(shares) - 1) > 1e-6:
        raise InputError(
            "positive shares that sum to 1",
            f"{list(shares)}",
            "Divide them by their sum; leave out components of 0.",
        )


def _require_unmasked(model: LanguageModel[Any]) -> None:
    """Refuse a guided model that cannot write everything."""
    guidance = getattr(model, "guidance", None)
    if guidance is None:
        return
    masks = {
        "an exact end": guidance.exact_end,
        f"a floor of {guidance.floor:g}": guidance.floor > 0,
        f"plausible {guidance.plausible:g}": guidance.plausible > 0,
    }
    if found := [what for what, masked in masks.items() if masked]:
        raise CoverageError(
            "a guided proposal that can write everything p can",
            found[0],
            "Draw with Guidance() alone: what is never drawn cannot be weighted.",
        )


_Alike: TypeAlias = Literal["vocabulary_size", "eos_id", "length_limit", "completion"]
_ALIKE: tuple[_Alike, ...] = ("vocabulary_size", "eos_id", "length_limit", "completion")


def _require_alike(model: LanguageModel[Any], other: LanguageModel[Any]) -> None:
    for name in _ALIKE:
        if getattr(model, name) != getattr(other, name):
            raise MismatchError(
                f"a guided proposal with the base's {name.replace('_', ' ')}, {getattr(model, name)}",
                f"{getattr(other, name)}",
                "Guide the same base, with the same limit and completion, that samples are drawn for.",
            )
