"""What a run of the study does, read from a TOML file: unknown names are errors, not silence."""

import re
import tomllib
from dataclasses import asdict, dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from nado.errors import InputError
from nado.guide import Reads
from nado.heads import HeadKind, Matrix
from nado.proposals import Proposal, TruncatedTopP

SectionT = TypeVar("SectionT")

BASE, UNTRAINED = "base", "untrained"  # the systems that need no training
VERIFIED, SMC = "verified", "smc"
GREEDY = "greedy"
SEARCH = "search"  # beams that rank prefixes by p·R; `beam` is transformers' own, by products of q
_FEWEST_SECONDS = 20.0
_SHARED = ("base", "texts", "adapter", "draw")  # sections that one file can take from another


@dataclass(frozen=True)
class BaseSettings:
    """The base model, and what makes it p."""

    length_limit: int = 32
    temperature: float = 1.0  # p is the fine-tuned model at this temperature, whatever is done with it
    half: bool = False  # bfloat16 on a CPU too, where it has instructions for it; on a GPU it always is


@dataclass(frozen=True)
class TextSettings:
    """Which training texts the base is fine-tuned on, and in what form."""

    sentences: bool = False  # captions are made sentences: a capital, a full stop
    turns: int = 1  # times that a text is learned in a pass: after its set, then after others of its concepts
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
    top_p: float = 1.0  # below 1 the tail is cut and nothing corrects for it, as in the paper: an ablation
    batch: int = 8192
    chunk: int = 65536
    held_out: float = 0.02
    dev_samples: int = 64
    seed: int = 0

    @property
    def stage(self) -> str:
        """The stage's name: an ablation keeps what the main run has drawn."""
        return "samples" if self.top_p == 1 else f"samples-top{self.top_p:g}"

    @property
    def proposal(self) -> Proposal:
        """What samples are drawn from."""
        if self.top_p == 1:
            return Proposal()
        return Proposal((TruncatedTopP(self.top_p),), uncorrected=True)

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
    head: HeadKind = "sigmoid"
    matrix: Matrix = "tied"
    progress: bool = True  # it reads which concepts are still missing; without it there are no parts either
    parts: bool = True  # it also learns which concepts will be there
    stops: bool = True  # it learns at every prefix what would be if the text ended there
    bare: bool = False  # none of the three: labels of whole texts alone
    measured: bool = False  # whenever the held-out loss is, greedy texts for the dev sets are scored
    learning_rate: float = 3e-4
    batch: int = 1024
    consistency_weight: float = 1.0
    log_consistency_weight: float = 0.0
    compiled: bool = False  # on a GPU: half a minute for the first guide of a size
    steps: int = 20_000  # at most
    seconds: float = 100.0  # at most; less where a deadline is near
    whole: bool = False  # all of its steps, for which `seconds` are set aside, or nothing: guides to compare
    seed: int = 0

    @property
    def fewest_seconds(self) -> float:
        """Seconds without which it is not begun: the guide of a moment says nothing about guides."""
        return self.seconds if self.whole else min(self.seconds, _FEWEST_SECONDS)

    def is_told(self, kind: str) -> bool:
        """Whether it learns from stops, progress or parts."""
        asked: bool = getattr(self, kind)
        return asked and not self.bare and (kind != "parts" or self.progress)


@dataclass(frozen=True)
class Row:
    """One line of the table: which system writes, and how."""

    system: str
    decoding: str  # greedy, beam, search, sample, verified, smc; greedy, search and smc with a number
    strength: float
    exact_end: bool
    seed: int = 0
    doubt: float = 0.0

    @property
    def kind(self) -> str:
        """The decoding without the number behind it."""
        return self.decoding.rstrip("0123456789.x")

    @property
    def number(self) -> str:
        """What is behind it: a length penalty and, after an x, how many beams; or particles, or a run."""
        return self.decoding.removeprefix(self.kind)

    @property
    def particles(self) -> int:
        """Particles of SMC; 0 for other decodings."""
        return int(self.number) if self.kind == SMC else 0

    @property
    def unrepeated(self) -> int:
        """Tokens of a run that may not come twice, its prompt counted; 0 where any may. Greedy texts loop."""
        return int(self.number or 0) if self.kind == GREEDY else 0

    @property
    def length_penalty(self) -> float:
        """Of beams by p·R."""
        return float(self.number.split("x")[0] or 1)

    def beams(self, usual: int) -> int:
        """How many of these."""
        return int(self.number.partition("x")[2] or usual)

    @property
    def base_decoding(self) -> str:
        """How p writes the texts that this line is compared with."""
        return self.decoding if self.kind in (GREEDY, "beam", SEARCH) else "sample"

    @property
    def name(self) -> str:
        """A name for files."""
        seed = f"-seed{self.seed}" if self.base_decoding == "sample" else ""
        if self.system == BASE:
            return f"{self.system}-{self.decoding}{seed}"
        end = "exact" if self.exact_end else "free"
        doubt = f"-doubt{self.doubt:g}" if self.doubt else ""
        return f"{self.system}-{self.decoding}-strength{self.strength:g}{doubt}-{end}{seed}"


@dataclass(frozen=True)
class RowSettings:
    """Lines of the table that differ in these respects, every combination of them."""

    systems: tuple[str, ...]
    decodings: tuple[str, ...] = ("greedy",)
    strengths: tuple[float, ...] = (1.0,)
    exact_end: tuple[bool, ...] = (False,)
    seeds: tuple[int, ...] = (0,)
    doubts: tuple[float, ...] = (0.0,)
    batch: int = 1024  # sets at once; a quarter of them with beams
    beams: int = 5
    budget: int = 16  # draws for a verified text

    def rows(self) -> list[Row]:
        """One of each."""
        several = product(
            self.systems, self.decodings, self.strengths, self.exact_end, self.seeds, self.doubts
        )
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
class FinalSettings:
    """The configuration that is chosen on dev, and writes for the test sets and for unseen words."""

    system: str = "main"
    decoding: str = "beam"
    exact_end: bool = True
    coverage: float = 97.0  # of the choosing sets; of the lines that reach it the one with the best BLEU-4
    verified_strength: float = 1.0
    verified_exact_end: bool = True
    unseen: tuple[tuple[str, ...], ...] = ()  # sets with words that no training sentence has


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
    final: FinalSettings | None = None
    group: str = ""  # what its lines are about, where they belong into a table of their own

    def describe(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    def rows_of(self, system: str) -> list[tuple[Row, RowSettings]]:
        """The lines of one system."""
        pairs = [(row, section) for section in self.rows for row in section.rows()]
        return [(row, section) for row, section in pairs if row.system == system]


def read_settings(path: Path) -> Settings:
    """Settings from a file.

    One that is `like` another takes from it how p is made, what is drawn and guides of the same name; what it
    says itself comes first. `every_guide` stands for what all guides of the file have in common.
    """
    with path.open("rb") as file:
        table = tomllib.load(file)
    if like := table.pop("like", None):
        with (path.parent / like).open("rb") as file:
            other = tomllib.load(file)
        table |= {name: other.get(name, {}) | table.get(name, {}) for name in _SHARED}
        known = other.get("guides", {})
        table["guides"] = {name: known.get(name, {}) | each for name, each in table.get("guides", {}).items()}
    alike = table.pop("every_guide", {})
    _require_known(table, [each.name for each in fields(Settings)], path.name)
    settings = Settings(
        base=_section(BaseSettings, table.get("base", {}), "base"),
        texts=_section(TextSettings, table.get("texts", {}), "texts"),
        adapter=_section(AdapterSettings, table.get("adapter", {}), "adapter"),
        draw=_section(DrawSettings, table.get("draw", {}), "draw"),
        guides={
            name: _section(GuideSettings, alike | each, f"guides.{name}")
            for name, each in table.get("guides", {}).items()
        },
        rows=tuple(_section(RowSettings, each, "rows") for each in table.get("rows", [])),
        costs=_section(CostSettings, table["costs"], "costs") if "costs" in table else None,
        final=_section(FinalSettings, table["final"], "final") if "final" in table else None,
        group=table.get("group", ""),
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
    asked += [settings.final.system] if settings.final is not None else []
    unknown = [system for system in asked if system not in known]
    if unknown:
        raise InputError(f"one of the systems {', '.join(known)}", unknown[0], "Add it to [guides].")
    for section in settings.rows:
        for row in section.rows():
            require_decoding(row)


def require_decoding(row: Row) -> None:
    """Refuse a line that nobody knows how to write."""
    number, guided = row.number, row.system != BASE
    known = {
        GREEDY: not number or (number.isdigit() and int(number) > 1),
        SEARCH: re.fullmatch(r"(\d+(\.\d+)?)?(x\d+)?", number) is not None,
        SMC: guided and number.isdigit() and int(number) > 1,
        VERIFIED: guided and not number,
    }
    if not known.get(row.kind, row.decoding in ("beam", "sample")):
        names = "greedy, greedy4, beam, search, search0.5, search0.5x15, sample, and guided verified or smc16"
        raise InputError(f"one of the decodings {names}", row.decoding, "Use one of these.")
