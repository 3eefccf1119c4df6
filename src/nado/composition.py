"""Guides combined: `a & b`, `a | b`, `~a`, in log space.

A composition is a formula over guides of one base. It is exact where the parts are independent given every
prefix; elsewhere the weight of a text corrects it (Semantics 11).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from nado.decomposition import conjoin, disjoin, negate
from nado.errors import InputError, MismatchError

if TYPE_CHECKING:
    from nado.guide import Guide

Operator = Literal["&", "|", "~"]

_CUT_SHARE = 0.01  # of the training texts


class Composable:
    """What guides and compositions share: the operators."""

    def __and__(self, other: Composable) -> Composition:
        return Composition("&", (self, other))

    def __or__(self, other: Composable) -> Composition:
        return Composition("|", (self, other))

    def __invert__(self) -> Composition:
        return Composition("~", (self,))


@dataclass(frozen=True, eq=False)
class Composition(Composable):
    """An operator and what it joins."""

    operator: Operator
    members: tuple[Composable, ...]
    measured: bool = False  # its texts are judged, so that it need not be right of texts that are cut

    def __post_init__(self) -> None:
        first, *others = leaves(self)
        for other in others:
            _require_alike(first, other)
        for guide in (first, *others):
            if not self.measured:
                _require_finishing(guide)
            if self.operator != "&":  # a product of shapes is one; a sum of them is not
                require_probability(guide, f"for {self.operator}", "Train it further without warm_up.")

    def combine(self, log_parts: Iterator[Tensor], log_finish: Tensor | None = None) -> Tensor:
        """log R of the formula, from the leaves' log R in order; `log_finish` is log R_F, None means 1."""
        parts = [
            member.combine(log_parts, log_finish) if isinstance(member, Composition) else next(log_parts)
            for member in self.members
        ]
        if self.operator == "~":
            return negate(parts[0], log_finish)
        return (conjoin if self.operator == "&" else disjoin)(parts, log_finish)


def leaves(formula: Composable) -> list[Guide]:
    """The guides of a formula, from left to right."""
    from nado.guide import Guide

    if isinstance(formula, Composition):
        return [leaf for member in formula.members for leaf in leaves(member)]
    assert isinstance(formula, Guide)
    return [formula]


def combine(formula: Composable, log_parts: Sequence[Tensor], log_finish: Tensor | None = None) -> Tensor:
    """log R of a formula from the log R of its leaves."""
    if isinstance(formula, Composition):
        return formula.combine(iter(log_parts), log_finish)
    return log_parts[0]


def _require_finishing(guide: Guide) -> None:
    """R_F, the chance that a text ends itself, is taken to be 1: refused where that is wrong."""
    cut = guide.config.cut_share
    if guide.config.completion == "eos" and cut > _CUT_SHARE:
        raise InputError(
            f"guides whose training texts ended themselves, all but {_CUT_SHARE:.0%} of them",
            f"one with {cut:.1%} cut at the length limit of {guide.config.length_limit}",
            "Raise the length limit and train again: composition takes it that texts end.",
        )


def require_probability(guide: Guide, purpose: str, hint: str) -> None:
    """Refuse a guide whose R is known but for a factor: one that was only warmed up."""
    if guide.config.shape_only:
        raise InputError(
            f"a guide whose R is a probability, {purpose}",
            "one that was only warmed up: its R is known up to a factor at every prefix",
            hint,
        )


def _require_alike(first: Guide, other: Guide) -> None:
    for name in ("base_fingerprint", "vocabulary_size", "eos_id", "length_limit", "completion"):
        mine, found = getattr(first.config, name), getattr(other.config, name)
        if mine != found:
            raise MismatchError(
                f"guides of one base: {name.replace('_', ' ')} {mine}",
                f"{found}",
                "Train both guides for the same base, warpers, limit and completion.",
            )
