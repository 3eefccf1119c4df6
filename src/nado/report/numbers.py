"""How numbers are written: the same in every table, chart and format, with digits that mean something."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from nado.metrics import Measure
from nado.metrics.resampling import SMALLEST

MINUS = "\N{MINUS SIGN}"


@dataclass(frozen=True)
class Style:
    """How the numbers of one column are written, so that they can be compared at a glance."""

    percent: bool = False
    decimals: int = 2
    scientific: bool = False

    def write(self, value: float, *, signed: bool = False) -> str:
        """One number with its unit sign."""
        return self.write_bare(value, signed=signed) + ("%" if self.percent else "")

    def write_bare(self, value: float, *, signed: bool = False) -> str:
        """One number without its unit sign."""
        sign = "+" if signed else ""
        scaled = 100 * value if self.percent else value
        if self.scientific and scaled:
            return f"{scaled:{sign}.2e}".replace("-", MINUS)
        # Rounded first: −0.004 is 0.00, not −0.00.
        return f"{round(scaled, self.decimals) + 0.0:{sign},.{self.decimals}f}".replace("-", MINUS)

    def write_interval(self, low: float, high: float, *, signed: bool = False) -> str:
        """An interval in brackets."""
        return f"[{self.write_bare(low, signed=signed)}, {self.write_bare(high, signed=signed)}]"


def style_of(values: Iterable[float | None], unit: str = "") -> Style:
    """The style of a column: shares as percentages, else by the largest number in it."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if unit == "share":
        return Style(percent=True, decimals=1)
    largest = max((abs(value) for value in known), default=0.0)
    if 0 < largest < 1e-3 or largest >= 1e12:
        return Style(scientific=True)
    if all(value == int(value) for value in known):
        return Style(decimals=0)
    return Style(decimals=_decimals(largest))


def _decimals(largest: float) -> int:
    if largest >= 1000:
        return 0
    if largest >= 100:
        return 1
    return 2 if largest >= 1 else 3 if largest >= 0.1 else 4


def style_of_measures(measures: Iterable[Measure | None]) -> Style:
    """The style of a column of measures."""
    known = [each for each in measures if each is not None]
    return style_of([each.value for each in known], known[0].unit if known else "")


def write_chance(log_chance: float | None) -> str:
    """A probability from its log, None being 0: a percentage, small ones in scientific notation."""
    if log_chance is None:
        return "0%"
    chance = math.exp(log_chance)
    return f"{chance:.1%}" if chance >= 0.001 else f"{chance:.0e}".replace("e-0", "e-").replace("-", MINUS)


def write_factor(difference: float | None) -> str:
    """How many times likelier: from log q − log p, which is −inf where q is 0."""
    if difference is None:
        return "×1"
    if math.isinf(difference):
        return "×0" if difference < 0 else "×∞"
    factor = math.exp(min(difference, 700))
    return f"×{factor:.3g}" if 0.01 <= factor < 1e4 else f"×{factor:.0e}".replace("-", MINUS)


def write_p_value(p_value: float | None) -> str:
    """A p-value; below a thousandth its digits say nothing."""
    if p_value is None:
        return "–"
    return "< 0.001" if p_value < 0.001 else f"{p_value:.3f}"


def is_small(measure: Measure) -> bool:
    """Whether so few texts or prompts stand behind a number that it settles nothing."""
    groups = measure.n if measure.prompts is None else measure.prompts
    return measure.value is not None and min(groups, measure.n) < SMALLEST
