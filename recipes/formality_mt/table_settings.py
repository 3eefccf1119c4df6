"""The table: what its lines are, and what is varied around a study, read from a TOML file.

Unknown names are errors, not silence.
"""

import tomllib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from nado.errors import InputError

BASE, BEST_OF, FUDGE, VERIFIED = "base", "best_of", "fudge", "verified"  # systems; the others are guides
GREEDY, BEAM, SAMPLE = "greedy", "beam", "sample"

SectionT = TypeVar("SectionT")


@dataclass(frozen=True)
class Row:
    """One line of the table: which system writes, and how."""

    system: str
    title: str
    decoding: str
    strength: float = 1.0
    doubt: float = 0.0
    plausible: float = 0.0

    @property
    def name(self) -> str:
        """A name for files."""
        strength = "" if self.strength == 1 else f"-strength{self.strength:g}"
        doubt = f"-doubt{self.doubt:g}" if self.doubt else ""
        plausible = f"-plausible{self.plausible:g}" if self.plausible else ""
        return f"{self.system}-{self.decoding}{strength}{doubt}{plausible}"


@dataclass(frozen=True)
class SearchSettings:
    """How the lines of the table are decoded."""

    beams: int = 5
    batch: int = 1024  # sources side by side
    beam_batch: int = 256  # the same with beams, each of which keeps keys and values of the whole source

    def sizes(self, decoding: str) -> tuple[int, int]:
        """Beams, and sources side by side."""
        return (self.beams, self.beam_batch) if decoding == BEAM else (1, self.batch)


@dataclass(frozen=True)
class BestOfSettings:
    """Best of n samples of the base."""

    count: int = 8
    seed: int = 0


@dataclass(frozen=True)
class FudgeSettings:
    """The baseline that learns from the same samples."""

    temperature: float = 1.0
    texts: int = 40_000
    strengths: tuple[float, ...] = (1.0, 2.0)
    beam_strengths: tuple[float, ...] = (1.0,)
    seed: int = 0


@dataclass(frozen=True)
class VerifiedSettings:
    """Draws from a guided model until the oracle says yes."""

    guide: str
    budget: int = 16
    seed: int = 0


@dataclass(frozen=True)
class RoundSettings:
    """Further texts for a guide that goes on from another one: begun by q̂ or by a sharper p, ended by p.

    Greedy decoding follows the likeliest tokens, which samples of p seldom do for long; labels behind such
    beginnings say what R is there, with no weights behind them.
    """

    start: str  # the guide it goes on from, trained on samples of the same temperature
    texts: int = 4  # for every source
    mean_prefix: float = 8.0  # tokens before p takes over
    share: float = 0.5  # of the beginnings are q̂'s
    strength: float = 4.0  # of q̂
    doubt: float = 0.3
    sharp: float = 0.4  # share of the beginnings that a sharper p writes; the rest are p's
    sharp_temperature: float = 0.5
    seed: int = 5


@dataclass(frozen=True)
class GuideVariant:
    """A guide of the table: what differs from the study's own."""

    title: str
    temperature: float = 1.0  # its samples were drawn at
    round: RoundSettings | None = None
    consistency_weight: float | None = None  # None: the study's
    log_consistency_weight: float | None = None  # likewise
    learning_rate: float | None = None  # likewise
    strengths: tuple[float, ...] = (1.0,)
    doubts: tuple[float, ...] = (0.0,)  # each with every strength
    plausibles: tuple[float, ...] = (0.0,)  # each with every strength and doubt, greedily
    beam_strengths: tuple[float, ...] = ()  # the same with beams
    beam_doubts: tuple[float, ...] = (0.0,)
    seconds: float = 60.0  # of training at most; less where a deadline is near


@dataclass(frozen=True)
class TableSettings:
    """The whole table."""

    guides: dict[str, GuideVariant]
    search: SearchSettings = field(default_factory=SearchSettings)
    best_of: BestOfSettings | None = None
    fudge: FudgeSettings | None = None
    verified: VerifiedSettings | None = None

    @property
    def temperatures(self) -> list[float]:
        """Every temperature that samples are drawn at."""
        fudge = [] if self.fudge is None else [self.fudge.temperature]
        return list(dict.fromkeys([*(each.temperature for each in self.guides.values()), *fudge]))

    def describe(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def read_table(path: Path) -> TableSettings:
    """Settings from a file."""
    if not path.is_file():
        raise InputError(
            f"the table's settings {path}", "no such file", "Use recipes/formality_mt/table.toml."
        )
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    _require_known(table, [each.name for each in fields(TableSettings)], path.name)
    guides = {name: _guide(each, f"guides.{name}") for name, each in table.get("guides", {}).items()}
    if not guides:
        raise InputError(f"at least one [guides.NAME] in {path.name}", "none", "Add one with a title.")
    _require_starts(guides)
    verified = _optional(VerifiedSettings, table, "verified")
    if verified is not None and verified.guide not in guides:
        raise InputError(f"one of the guides {', '.join(guides)}", verified.guide, "Name it in [verified].")
    return TableSettings(
        guides=guides,
        search=_section(SearchSettings, table.get("search", {}), "search"),
        best_of=_optional(BestOfSettings, table, "best_of"),
        fudge=_optional(FudgeSettings, table, "fudge"),
        verified=verified,
    )


def _guide(table: dict[str, Any], where: str) -> GuideVariant:
    own = {"round": _section(RoundSettings, table["round"], f"{where}.round")} if "round" in table else {}
    return _section(GuideVariant, {**table, **own}, where)


def _require_starts(guides: dict[str, GuideVariant]) -> None:
    """A guide goes on from one that stands before it and has read the same samples."""
    earlier: list[str] = []
    for name, each in guides.items():
        if each.round is not None:
            alike = [other for other in earlier if guides[other].temperature == each.temperature]
            if each.round.start not in alike:
                raise InputError(
                    f"a guide before {name}, of the same temperature, to start from",
                    each.round.start,
                    f"Name one of these: {', '.join(alike)}." if alike else "Put it behind such a guide.",
                )
        earlier.append(name)


def _optional(kind: type[SectionT], table: dict[str, Any], name: str) -> SectionT | None:
    return _section(kind, table[name], name) if name in table else None


def _section(kind: type[SectionT], table: dict[str, Any], where: str) -> SectionT:
    known = fields(kind)  # type: ignore[arg-type]
    _require_known(table, [each.name for each in known], where)
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in table.items()})


def _require_known(table: dict[str, Any], names: list[str], where: str) -> None:
    unknown = [name for name in table if name not in names]
    if unknown:
        raise InputError(f"the names {', '.join(names)} in {where}", unknown[0], "Check its spelling.")
