"""Oracles that volunteer what they measure: a question, and beside it how far each gauge has risen so far.

A guide for sentiment that is only told whether a prefix is positive by now learns little about *how* positive
it is. VADER knows: its score is a gauge, read at every prefix as a few bits (at least −0.3, at least 0.05).
All guides of a study read the same gauges, whatever their own question is.
"""

import ast
import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nado.errors import InputError
from nado.oracles.language_tools import Sentiment
from nado.oracles.linear_classifier import LinearClassifier
from nado.oracles.protocol import BoolArray, Oracle
from nado.oracles.scored import ScoredOracle, reached

POSITIVE, CLEAN = "positive", "clean"  # the questions: positive in sentiment, free of toxicity

_REMEMBERED = 2**17  # scores of texts: a prefix is asked about for the progress and for the answer


class Gauge(Protocol):
    """A number that any text has, prefixes too, and the steps at which it is read."""

    @property
    def name(self) -> str:
        """What it measures."""
        ...

    @property
    def spec(self) -> str:
        """What tells it from another."""
        ...

    @property
    def steps(self) -> tuple[float, ...]:
        """Where it is read, ascending."""
        ...

    def scores(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """The number of each text."""
        ...


@dataclasses.dataclass(frozen=True)
class SentimentGauge:
    """VADER's compound score, −1 to 1."""

    steps: tuple[float, ...]
    name = "sentiment"

    @property
    def spec(self) -> str:
        """VADER has one version of itself."""
        return f"VADER at {list(self.steps)}"

    def scores(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """The score of each text."""
        return np.array([_compound(text) for text in texts], dtype=np.float64)


@dataclasses.dataclass(frozen=True)
class ToxicityGauge:
    """The probability that a classifier gives a text of being toxic."""

    classifier: LinearClassifier
    steps: tuple[float, ...]
    name = "toxicity"

    def __post_init__(self) -> None:
        cached = functools.lru_cache(_REMEMBERED)(lambda text: self.classifier.probabilities([text])[0])
        object.__setattr__(self, "_probability", cached)

    def __reduce__(self) -> Any:
        return ToxicityGauge, (self.classifier, self.steps)  # without what it remembers

    @property
    def spec(self) -> str:
        """The classifier's own, weights included."""
        return f"{self.classifier.spec} at {list(self.steps)}"

    def scores(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """The probability of each text."""
        ask: Callable[[str], float] = self._probability  # type: ignore[attr-defined]
        return np.array([ask(text) for text in texts], dtype=np.float64)


@dataclasses.dataclass(frozen=True)
class Reaches(ScoredOracle):
    """Whether a gauge has risen to a threshold. One score a text answers the question and the progress."""

    gauge: Gauge
    threshold: float

    cheap = True

    @property
    def name(self) -> str:
        """What it measures, and up to where."""
        return f"{self.gauge.name} of {self.threshold:g}"

    @property
    def spec(self) -> str:
        """The gauge and the threshold."""
        return f"reaches({self.gauge.spec}, {self.threshold!r})"

    def scores(self, conditions: Sequence[str], texts: Sequence[str]) -> NDArray[np.float64]:
        """The gauge's."""
        return self.gauge.scores(texts)


@dataclasses.dataclass(frozen=True)
class Gauged(Oracle):
    """Another oracle's question with gauges as its progress."""

    question: Oracle
    gauges: tuple[Gauge, ...]

    @property
    def cheap(self) -> bool:  # type: ignore[override]
        """As cheap as its question."""
        return self.question.cheap

    @property
    def name(self) -> str:
        """The question's."""
        return self.question.name

    @property
    def spec(self) -> str:
        """The question, and where which gauges are read."""
        return f"gauged({self.question.spec}, {', '.join(each.spec for each in self.gauges)})"

    def judge(self, conditions: Sequence[str], texts: Sequence[str]) -> BoolArray:
        """The question's answers."""
        return self.question(conditions, texts)

    def judge_progress(self, conditions: Sequence[str], prefixes: Sequence[str]) -> list[BoolArray]:
        """For every gauge and step whether the prefix has reached it."""
        if not self.gauges:
            return super().judge_progress(conditions, prefixes)
        return list(np.hstack([reached(each.scores(prefixes), each.steps) for each in self.gauges]))

    def progress_names(self, condition: str) -> list[str]:
        """A gauge and a step each."""
        if not self.gauges:
            return super().progress_names(condition)
        return [f"{each.name} {step:g}" for each in self.gauges for step in each.steps]


@functools.lru_cache(_REMEMBERED)
def _compound(text: str) -> float:
    return float(Sentiment().scores([""], [text])[0])


_OPERATORS = {ast.BitAnd: operator.and_, ast.BitOr: operator.or_}


def compose(formula: str, named: Mapping[str, Any]) -> Any:
    """`positive & ~clean` over anything that has these operators: oracles or guides."""
    try:
        return _compose(ast.parse(formula, mode="eval").body, named)
    except (KeyError, SyntaxError, TypeError) as error:
        known = ", ".join(named)
        raise InputError(f"a formula of {known} with &, | and ~", repr(formula), f"Check {error}.") from error


def _compose(node: ast.AST, named: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return named[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        return ~_compose(node.operand, named)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_compose(node.left, named), _compose(node.right, named))
    raise TypeError(ast.unparse(node))


def names_in(formula: str) -> set[str]:
    """What a formula is made of."""
    return {node.id for node in ast.walk(ast.parse(formula, mode="eval")) if isinstance(node, ast.Name)}
