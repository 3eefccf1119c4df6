"""Proposals: what samples are drawn from, and the exact log-probability of having drawn them.

A proposal is a mixture of components. One component is picked per sequence, and token i records
log m(y≤i) − log m(y<i), where m(y≤i) = Σ_k π_k Π_{j≤i} q_k(y_j) is the mixture's own probability of the
prefix: any component could have written it. With one component that is its log-probability.

With `complete_from_p` the proposal writes only a prefix of random length and p itself writes the rest.
What follows the prefix is then an unbiased sample of p's completions of it, with no weight at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from nado.errors import CoverageError, InputError, MismatchError
from nado.language_model import LanguageModel

GUIDED_SHARE_LIMIT = 0.9  # a guided proposal leaves p at least 0.1, so that no weight exceeds 10


@dataclass(frozen=True)
class Tempered:
    """p with its next-token distribution flattened (above 1) or sharpened (below 1). 1 is p itself."""

    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise InputError("a temperature above 0", f"{self.temperature}", "Use 1 to draw from p itself.")

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

    def describe(self) -> dict[str, Any]:
        """JSON-ready values that identify the component."""
        return {"kind": "uncorrected top-p", "top_p": self.top_p}

    def name(self) -> str:
        """As the column `proposal` shows it."""
        return f"p cut to top-p {self.top_p:g}, uncorrected"

    def log_proposal(self, log_p: Tensor, other: Tensor | None) -> Tensor:
        """Next-token log-probabilities (B, V)."""
        from nado.warpers import Warpers

        return Warpers(top_p=self.top_p).apply(log_p, (), torch.zeros(len(log_p), device=log_p.device))


Component: TypeAlias = Tempered | Guided | TruncatedTopP


@dataclass(frozen=True)
class Proposal:
    """Components with their shares, and whether p completes what they begin."""

    components: tuple[Component, ...] = (Tempered(),)
    shares: tuple[float, ...] = (1.0,)
    complete_from_p: bool = False
    uncorrected: bool = False
    models: tuple[LanguageModel[Any], ...] = field(init=False)

    def __post_init__(self) -> None:
        _require_shares(self.components, self.shares)
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
        return {"components": parts, "complete_from_p": self.complete_from_p, "uncorrected": self.uncorrected}

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
        guided = sum(share for share, part in self._parts() if isinstance(part, Guided))
        if guided > GUIDED_SHARE_LIMIT + 1e-9:
            raise CoverageError(
                f"a guided proposal mixed with p, with a share of at most {GUIDED_SHARE_LIMIT}",
                f"a share of {guided:g}",
                "Mix it: guided_mixture(model, share=0.9).",
            )
        for other in self.models:
            _require_alike(model, other)

    def _parts(self) -> Sequence[tuple[float, Component]]:
        return list(zip(self.shares, self.components, strict=True))


def tempered(temperature: float) -> Proposal:
    """Draw from p at a temperature."""
    return Proposal((Tempered(temperature),))


def guided_mixture(
    model: LanguageModel[Any], share: float = 0.9, *, complete_from_p: bool = False
) -> Proposal:
    """Draw from a guided model q̂ with the given share, from p otherwise."""
    return Proposal((Guided(model), Tempered()), (share, 1 - share), complete_from_p=complete_from_p)


@dataclass
class Mixing:
    """What a mixture knows of its rows: which component writes each, and how likely each is to have."""

    picked: Tensor  # (B,) component that writes the row
    log_posterior: Tensor  # (B, K) log Pr[component | prefix], normalised
    switch: Tensor  # (B,) step at which p takes over

    def select(self, rows: Tensor) -> "Mixing":
        """The given rows."""
        return Mixing(self.picked[rows], self.log_posterior[rows], self.switch[rows])


def begin_mixing(proposal: Proposal, pick: Tensor, switch: Tensor, length_limit: int) -> Mixing:
    """Pick each row's component and switching step from two uniforms a row, (B,) each."""
    shares = torch.tensor(proposal.shares, dtype=torch.float64, device=pick.device)
    picked = (pick[:, None] >= shares.cumsum(0)).sum(dim=-1).clamp(max=len(shares) - 1)
    log_posterior = shares.log().float().expand(len(pick), -1).clone()
    never = torch.full_like(picked, length_limit)
    return Mixing(
        picked, log_posterior, (switch * length_limit).long() if proposal.complete_from_p else never
    )


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
