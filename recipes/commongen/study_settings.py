"""What a run of the study does, read from a TOML file: unknown names are errors, not silence."""

import tomllib
from dataclasses import asdict, dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from nado.errors import InputError
from nado.guide import Reads

SectionT = TypeVar("SectionT")

BASE, UNTRAINED = "base", "untrained"  # the systems that need no training


@dataclass(frozen=True)
class BaseSettings:
    """The base model."""

    length_limit: int = 32


@dataclass(frozen=True)
class TextSettings:
    """Which training texts the base is fine-tuned on, and in what form."""

    sentences: bool = False  # captions are made sentences: a capital, a full stop
    repeats_well_formed: int = 1  # times that a text which was one already is learned in a pass
    large: int = 4  # concepts of a large set
    repeats_large: int = 1  # times that a text of a large set is
    seed: int = 0


@dataclass(frozen=True)
class AdapterSettings:
    """How the base is fine-tuned."""

    epochs: float = 3.0
    rank: int = 24
    learning_rate: float = 1e-3
    dropout: float = 0.05
    rows: int = 20
    width: int = 256
    seed: int = 0


@dataclass(frozen=True)
class DrawSettings:
    """What is drawn from p."""

    samples: int = 12
    large: int = 4
    samples_large: int = 32
    sets: int = 0  # of the training sets, 0 for all
    new_sets: int = 0  # sets made of pieces of theirs, drawn for instead; p has not learned these
    batch: int = 8192
    chunk: int = 65536
    held_out: float = 0.02
    dev_samples: int = 64
    seed: int = 0

    def samples_of(self, concepts: int) -> int:
        """Texts drawn of a set of this many concepts."""
        return self.samples_large if concepts >= self.large else self.samples


@dataclass(frozen=True)
class GuideSettings:
    """One guide: its shape and how it is trained."""

    title: str
    reads: Reads = "states"
    size: int = 768
    layers: int = 4
    heads: int = 12
    dropout: float = 0.0
    bare: bool = False  # labels of whole texts alone: no parts, no progress, no stop labels
    learning_rate: float = 3e-4
    batch: int = 1024
    consistency_weight: float = 1.0
    compiled: bool = False  # on a GPU: half a minute, then twice as fast
    steps: int = 20_000  # at most
    seconds: float = 100.0  # at most; less where a deadline is near
    seed: int = 0


@dataclass(frozen=True)
class Row:
    """One line of the table: which system writes, and how."""

    system: str
    decoding: str  # greedy, beam or sample
    strength: float
    exact_end: bool
    seed: int = 0

    @property
    def name(self) -> str:
        """A name for files."""
        seed = f"-seed{self.seed}" if self.decoding == "sample" else ""
        if self.system == BASE:
            return f"{self.system}-{self.decoding}{seed}"
        end = "exact" if self.exact_end else "free"
        return f"{self.system}-{self.decoding}-strength{self.strength:g}-{end}{seed}"


@dataclass(frozen=True)
class RowSettings:
    """Lines of the table that differ in these respects, every combination of them."""

    systems: tuple[str, ...]
    decodings: tuple[str, ...] = ("greedy",)
    strengths: tuple[float, ...] = (1.0,)
    exact_end: tuple[bool, ...] = (False,)
    seeds: tuple[int, ...] = (0,)
    batch: int = 1024  # sets at once; a quarter of them with beams
    beams: int = 5

    def rows(self) -> list[Row]:
        """One of each."""
        several = product(self.systems, self.decodings, self.strengths, self.exact_end, self.seeds)
        return [Row(*each) for each in several]


@dataclass(frozen=True)
class CostSettings:
    """What sampling costs, and soft rates."""

    guide: str = "main"
    light: str = "light"
    rare: tuple[float, float] = (0.02, 0.10)
    rare_samples: int = 64
    middle: tuple[float, float] = (0.1, 0.9)
    rates: tuple[float, ...] = (0.2, 0.5, 0.8)
    rate_samples: int = 8
    batch: int = 2048
    seed: int = 1


@dataclass(frozen=True)
class Settings:
    """A whole run."""

    base: BaseSettings = field(default_factory=BaseSettings)
    texts: TextSettings = field(default_factory=TextSettings)
    adapter: AdapterSettings = field(default_factory=AdapterSettings)
    draw: DrawSettings = field(default_factory=DrawSettings)
    guides: dict[str, GuideSettings] = field(default_factory=dict)
    rows: tuple[RowSettings, ...] = ()
    costs: CostSettings | None = None

    def describe(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    def rows_of(self, system: str) -> list[tuple[Row, RowSettings]]:
        """The lines of one system."""
        pairs = [(row, section) for section in self.rows for row in section.rows()]
        return [(row, section) for row, section in pairs if row.system == system]


def read_settings(path: Path) -> Settings:
    """Settings from a file."""
    with path.open("rb") as file:
        table = tomllib.load(file)
    _require_known(table, [each.name for each in fields(Settings)], path.name)
    settings = Settings(
        base=_section(BaseSettings, table.get("base", {}), "base"),
        texts=_section(TextSettings, table.get("texts", {}), "texts"),
        adapter=_section(AdapterSettings, table.get("adapter", {}), "adapter"),
        draw=_section(DrawSettings, table.get("draw", {}), "draw"),
        guides={
            name: _section(GuideSettings, each, f"guides.{name}")
            for name, each in table.get("guides", {}).items()
        },
        rows=tuple(_section(RowSettings, each, "rows") for each in table.get("rows", [])),
        costs=_section(CostSettings, table["costs"], "costs") if "costs" in table else None,
    )
    _require_systems(settings)
    return settings


def _section(kind: type[SectionT], table: dict[str, Any], where: str) -> SectionT:
    _require_known(table, [each.name for each in fields(kind)], where)  # type: ignore[arg-type]
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}
    return kind(**values)


def _require_known(table: dict[str, Any], names: list[str], where: str) -> None:
    unknown = [name for name in table if name not in names]
    if unknown:
        raise InputError(f"the names {', '.join(names)} in {where}", f"{unknown[0]}", "Check its spelling.")


def _require_systems(settings: Settings) -> None:
    known = [BASE, UNTRAINED, *settings.guides]
    asked = [system for section in settings.rows for system in section.systems]
    asked += [settings.costs.guide] if settings.costs is not None else []
    unknown = [system for system in asked if system not in known]
    if unknown:
        raise InputError(f"one of the systems {', '.join(known)}", unknown[0], "Add it to [guides].")
    decodings = {each for section in settings.rows for each in section.decodings}
    if wrong := decodings - {"greedy", "beam", "sample"}:
        raise InputError("decodings greedy, beam or sample", f"{wrong.pop()}", "Use one of these.")
