"""What a report says: plain values, checked when they are put together, the same after a trip through JSON.

Every number that was estimated is a `Measure`, with its interval, n and caveat; nothing here computes one.
"""

from dataclasses import dataclass
from typing import Any

from nado.errors import InputError, MismatchError
from nado.metrics import Bin, Comparison, Measure
from nado.report.records import from_record, to_record

SCHEMA = 1


@dataclass(frozen=True)
class Fact:
    """One thing a reader has to know: the base's name, the oracle, a seed."""

    name: str
    value: str


@dataclass(frozen=True)
class Point:
    """A point of a curve, with its interval and how much it rests on where that is known."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    n: int | None = None


@dataclass(frozen=True)
class Curve:
    """Points in order, under one name."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Chart:
    """Curves over one axis. With `ticks` the axis is not numbers but names: x is a place among them."""

    title: str
    x: str
    y: str
    curves: tuple[Curve, ...]
    note: str = ""
    ticks: tuple[str, ...] = ()
    from_zero: bool = True  # whether 0 means something on the vertical axis, and so has to be seen


@dataclass(frozen=True)
class Histogram:
    """Counts between edges; `zeros` counts what has no place on the axis, such as weights of 0."""

    title: str
    x: str
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    zeros: int = 0

    def __post_init__(self) -> None:
        if len(self.edges) != len(self.counts) + 1:
            raise InputError(
                "one edge more than counts in a histogram",
                f"{len(self.edges)} edges and {len(self.counts)} counts",
                "Give the edges as numpy.histogram returns them.",
            )


@dataclass(frozen=True)
class Weights:
    """What the importance weights of a system's texts are worth."""

    measures: tuple[Measure, ...]
    histogram: Histogram | None = None


@dataclass(frozen=True)
class System:
    """One way of writing texts, and what its texts come to."""

    name: str
    detail: str = ""  # how it decodes, in a few words
    measures: tuple[Measure, ...] = ()
    cost: tuple[Measure, ...] = ()
    weights: Weights | None = None


@dataclass(frozen=True)
class Pair:
    """Two systems compared on the same prompts, the first minus the second."""

    first: str
    second: str
    result: Comparison


@dataclass(frozen=True)
class Round:
    """One round of training: what its proposal wrote, and what the guide writes after it."""

    number: int
    oracle: str
    proposal: str
    drawn: int
    before: Measure  # satisfaction of what was drawn, before training on it
    effective_share: float  # of what was drawn, by its weights
    after: Measure | None = None  # satisfaction of the guided model after training


@dataclass(frozen=True)
class Rate:
    """A satisfaction rate that was asked for, and the one that came."""

    system: str
    requested: float
    achieved: Measure


@dataclass(frozen=True)
class Calibration:
    """Does R come true as often as it says? By bins of R, by position and, for R(x), by prompt."""

    system: str
    bins: tuple[Bin, ...]
    method: str
    ece: Measure | None = None
    brier: Measure | None = None
    positions: tuple[Bin, ...] = ()
    prompts: tuple[Bin, ...] = ()


@dataclass(frozen=True)
class TokenTrace:
    """One token as base and guide saw it; a log that is None is that of a chance of 0."""

    text: str  # its piece of the text; empty for EOS and for part of a character
    log_p: float | None
    log_q: float | None
    log_r: float | None = None  # R after it; None where R is 0 or was not recorded (see `ExampleText.has_r`)
    base_choice: str = ""  # what the base alone likes best here
    log_p_base_choice: float | None = None
    ends: bool = False  # it is EOS


@dataclass(frozen=True)
class ExampleText:
    """A text of one system; with `tokens`, how the guide saw each of them."""

    system: str
    text: str
    satisfied: bool | None = None  # None where no oracle was asked
    finished: bool = True
    tokens: tuple[TokenTrace, ...] = ()
    has_r: bool = False  # whether the tokens have R
    log_r_start: float | None = None  # R(x), where it is known

    def __post_init__(self) -> None:
        joined = "".join(token.text for token in self.tokens)
        if self.tokens and joined != self.text:
            raise MismatchError(
                f"tokens that make up the text {self.text[:40]!r}",
                f"{joined[:40]!r}",
                "Cut the text with cut_text, or leave the tokens out.",
            )


@dataclass(frozen=True)
class Example:
    """What several systems wrote about one prompt."""

    prompt: str
    condition: str
    texts: tuple[ExampleText, ...]


@dataclass(frozen=True)
class Examples:
    """Texts to read, and how they were chosen: a reader has to know that nobody picked them."""

    how: str
    examples: tuple[Example, ...]


@dataclass(frozen=True)
class Report:
    """What was measured, of one run or of several systems. What was not measured is left empty."""

    title: str
    summary: str = ""
    facts: tuple[Fact, ...] = ()
    systems: tuple[System, ...] = ()
    headline: tuple[str, ...] = ()  # names of the measures in the first table; by default the first six
    pairs: tuple[Pair, ...] = ()
    training: tuple[Chart, ...] = ()
    rounds: tuple[Round, ...] = ()
    rates: tuple[Rate, ...] = ()
    calibration: tuple[Calibration, ...] = ()
    consistency: Chart | None = None
    examples: Examples | None = None
    notes: tuple[str, ...] = ()
    versions: tuple[Fact, ...] = ()

    def __post_init__(self) -> None:
        names = [system.name for system in self.systems]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InputError(
                "a name of its own for every system", f"{twice[0]!r} twice", "Say in it what differs."
            )

    def to_json(self) -> dict[str, Any]:
        """JSON-ready values; a number that is not finite is refused, with its place."""
        record = to_record(self, "report")
        return {"schema": SCHEMA, **record}

    @classmethod
    def from_json(cls, value: Any) -> "Report":
        """A report from what `to_json` gave; anything else is refused, with its place."""
        if not isinstance(value, dict) or "schema" not in value:
            raise InputError(
                "a report as JSON", "something else", "Give a report.json that nado has written."
            )
        if value["schema"] != SCHEMA:
            raise InputError(
                f"a report of schema {SCHEMA}",
                f"schema {value['schema']!r}",
                "Read it with the version of nado that wrote it, or make it again.",
            )
        report = from_record(cls, {name: each for name, each in value.items() if name != "schema"}, "report")
        assert isinstance(report, cls)
        return report
