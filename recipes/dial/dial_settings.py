"""What a run of the dial does, read from a TOML file."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import around  # noqa: F401  (finds the settings that recipes share)
from gauges import CLEAN, POSITIVE, names_in
from study_settings import GuideSettings
from toml_sections import read_section, read_table

from nado.dial import STRENGTHS
from nado.errors import InputError

RATES = tuple(number / 10 for number in range(11))


@dataclass(frozen=True)
class OracleSettings:
    """The two questions, and where their gauges are read at every prefix; none without steps."""

    positive_from: float = 0.05  # of VADER's compound score
    toxic_from: float = 0.3  # of the classifier's probability
    sentiment_steps: tuple[float, ...] = (-0.6, -0.3, -0.05, 0.05, 0.3, 0.6)
    toxicity_steps: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.55, 0.75)


@dataclass(frozen=True)
class DialDraw:
    """What is drawn from p for the training prompts."""

    prompts: int = 0  # of each kind at most, 0 for all
    samples: int = 12
    batch: int = 8192
    chunk: int = 32768
    held_out: float = 0.05
    seed: int = 0


@dataclass(frozen=True)
class CurveSettings:
    """How a curve is measured."""

    rates: tuple[float, ...] = RATES  # as soft rates
    prompts: int = 512  # of the held-out prompts at most
    texts: int = 4  # of each prompt; one of them is chosen by its weight for the corrected curve
    base_texts: int = 16  # of p, of each prompt
    batch: int = 2048
    seconds: float = 8.0  # kept free for each point before the deadline
    seed: int = 1


@dataclass(frozen=True)
class StopSettings:
    """A dial of measured stops: how texts of every strength are judged, on prompts its guide has not seen."""

    strengths: tuple[float, ...] = STRENGTHS
    rates: tuple[float, ...] = RATES  # what the dial is then turned to
    prompts: int = 0  # of the question's kind, where those held out are too few (0: these alone)
    texts: int = 8  # of each prompt, at every strength
    seed: int = 2


@dataclass(frozen=True)
class FormulaSettings:
    """Guides combined."""

    formula: str
    rates: tuple[float, ...] = (1.0,)  # as soft rates
    stops: bool = False  # it has a dial of measured stops, too


@dataclass(frozen=True)
class DialSettings:
    """A whole run."""

    length_limit: int = 24
    questions: tuple[str, ...] = (POSITIVE, CLEAN)
    half: bool = False  # bfloat16 on a CPU too, where it has instructions for it
    oracles: OracleSettings = field(default_factory=OracleSettings)
    draw: DialDraw = field(default_factory=DialDraw)
    guide: GuideSettings = field(default_factory=lambda: GuideSettings("4 × 768, states"))
    curve: CurveSettings = field(default_factory=CurveSettings)
    dial: StopSettings = field(default_factory=StopSettings)
    formulas: tuple[FormulaSettings, ...] = ()

    def describe(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def read_dial_settings(path: Path) -> DialSettings:
    """Settings from a file."""
    table = read_table(path, ("base", "oracles", "draw", "guide", "curve", "dial", "formulas"))
    base = table.get("base", {})
    unknown = set(base) - {"length_limit", "questions", "half"}
    if unknown:
        raise InputError(
            "the names length_limit, questions, half in base", f"{unknown.pop()}", "Check its spelling."
        )
    settings = DialSettings(
        length_limit=base.get("length_limit", 24),
        questions=tuple(base.get("questions", (POSITIVE, CLEAN))),
        half=base.get("half", False),
        oracles=read_section(OracleSettings, table.get("oracles", {}), "oracles"),
        draw=read_section(DialDraw, table.get("draw", {}), "draw"),
        guide=read_section(GuideSettings, {"title": "guide", **table.get("guide", {})}, "guide"),
        curve=read_section(CurveSettings, table.get("curve", {}), "curve"),
        dial=read_section(StopSettings, table.get("dial", {}), "dial"),
        formulas=tuple(read_section(FormulaSettings, each, "formulas") for each in table.get("formulas", [])),
    )
    _require_questions(settings)
    return settings


def _require_questions(settings: DialSettings) -> None:
    known = {POSITIVE, CLEAN}
    used = set(settings.questions)
    for formula in settings.formulas:
        used |= names_in(formula.formula)
        if not names_in(formula.formula) <= set(settings.questions):
            raise InputError(
                f"formulas over {', '.join(settings.questions)}",
                formula.formula,
                "Add what is missing to questions in [base].",
            )
    if unknown := used - known:
        raise InputError(f"questions {POSITIVE} and {CLEAN}", f"{unknown.pop()}", "Use one of these.")
