"""What a run of the study does, read from a TOML file."""

from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import nearby  # noqa: F401  (finds the settings of the CommonGen recipe)
from ordered_keys import DA, SEQ2SEQ
from study_settings import (
    AdapterSettings,
    BaseSettings,
    GuideSettings,
    Row,
    RowSettings,
    require_decoding,
)
from toml_sections import read_section, read_table

from nado.errors import InputError

NADO, WARM_UP = "nado", "warm_up"  # what a guide is trained for
P, Q, REFERENCES = "p", "q", "references"  # what it learns from
HINDSIGHT = "hindsight"  # or from texts of p with keys that they happen to have: draws from q* for these


@dataclass(frozen=True)
class KeyDraw:
    """What is drawn, from p and from q̂."""

    lists: int = 12_000  # key lists that p writes texts for
    own_lists: bool = False  # also of keys in p's own texts (hindsight): it knows the training texts by heart
    shorter: float = 0.0  # share of the seq2seq base's lists that lose some of their keys
    samples: int = 8  # of each
    references: int = 48_000  # texts with their own keys, for a warm-up
    hindsight: int = 100_000  # texts of a p that sees no keys, each with some of the keys in it
    hindsight_lists: int = 1  # how often each, with other keys: so that it is the keys that count
    guided: int = 8_000  # texts of a round that q̂ begins
    guided_share: float = 0.9
    mean_prefix: float = 24.0  # tokens that q̂ writes on average, where p completes
    batch: int = 4096
    chunk: int = 16_384
    held_out: float = 0.02
    seed: int = 0


@dataclass(frozen=True)
class OwnTexts:
    """Texts of its own from which p learns to read keys: it need not read a small corpus too often."""

    count: int = 0
    temperature: float = 0.9
    epochs: float = 2.0  # passes over the corpus before it writes them
    seed: int = 4


@dataclass(frozen=True)
class GuideStage:
    """One stage of a guide's training; a guide that starts from another is a further round of it."""

    name: str
    title: str
    base: str  # seq2seq or da
    learn: tuple[str, ...]  # from: p, q (q̂ of the guide it starts from), references, hindsight
    start: str = ""
    objective: str = NADO
    complete_from_p: bool = True  # q̂ writes a prefix of a text of the round, p the rest
    learning_rate: float = 3e-4
    seconds: float = 60.0
    steps: int = 20_000
    whole: bool = False  # all of its steps, however long they take
    seed: int = 0

    def shape(self, guide: "GuideShape") -> GuideSettings:
        """The settings of its network and training, as the CommonGen recipe has them."""
        return GuideSettings(
            title=self.title,
            size=guide.size,
            layers=guide.layers,
            heads=guide.heads,
            batch=guide.batch,
            consistency_weight=guide.consistency_weight,
            compiled=guide.compiled,
            learning_rate=self.learning_rate,
            seconds=self.seconds,
            steps=self.steps,
            whole=self.whole,
            seed=self.seed,
        )


@dataclass(frozen=True)
class GuideShape:
    """What all guides share."""

    size: int = 768
    layers: int = 4
    heads: int = 12
    batch: int = 768
    consistency_weight: float = 1.0
    compiled: bool = False  # on a GPU: half a minute for the first guide


@dataclass(frozen=True)
class Reserved:
    """Seconds that are kept free before a deadline: for a line of the table, a round's draws, other draws."""

    greedy: float = 6.0
    sample: float = 8.0
    beam: float = 20.0
    search: float = 15.0
    round: float = 45.0
    samples: float = 60.0

    LINES: ClassVar = ("greedy", "sample", "beam", "search")


@dataclass(frozen=True)
class KeySettings:
    """A whole run."""

    base: BaseSettings = field(default_factory=BaseSettings)
    adapter: AdapterSettings = field(default_factory=AdapterSettings)
    own: OwnTexts = field(default_factory=OwnTexts)
    draw: KeyDraw = field(default_factory=KeyDraw)
    shape: GuideShape = field(default_factory=GuideShape)
    reserved: Reserved = field(default_factory=Reserved)
    guides: tuple[GuideStage, ...] = ()
    rows: tuple[RowSettings, ...] = ()
    group: str = ""  # what stands above these lines where a study has several tables

    def describe(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    def rows_of(self, system: str) -> list[tuple[Row, RowSettings]]:
        """The lines of one system."""
        pairs = [(row, section) for section in self.rows for row in section.rows()]
        return [(row, section) for row, section in pairs if row.system == system]

    def of_base(self, base: str) -> "KeySettings":
        """The part of the study that is about one of the two bases."""
        return self._of({base, *(each.name for each in self.guides if each.base == base)})

    def of_guides(self, names: Collection[str]) -> "KeySettings":
        """The same with these guides alone."""
        self._require_guides(names)
        chosen = self._of({SEQ2SEQ, DA, *names})
        _require_sense(chosen)
        return chosen

    def with_given(self, names: Collection[str]) -> "KeySettings":
        """The same where these guides were trained before: nothing is drawn for them, none comes first."""
        self._require_guides(names)
        guides = [replace(each, start="", learn=()) if each.name in names else each for each in self.guides]
        return replace(self, guides=tuple(guides))

    def _require_guides(self, names: Collection[str]) -> None:
        known = [each.name for each in self.guides]
        if unknown := set(names) - set(known):
            raise InputError(
                f"some of the guides {', '.join(known)}", unknown.pop(), "Check its spelling, and --only."
            )

    def _of(self, systems: Collection[str]) -> "KeySettings":
        """The guides and lines of some systems."""
        guides = tuple(each for each in self.guides if each.name in systems)
        rows = [
            replace(each, systems=tuple(name for name in each.systems if name in systems))
            for each in self.rows
        ]
        return replace(self, guides=guides, rows=tuple(each for each in rows if each.systems))

    def stage(self, name: str) -> GuideStage:
        """A guide by its name."""
        return next(each for each in self.guides if each.name == name)


def read_key_settings(path: Path) -> KeySettings:
    """Settings from a file."""
    table = read_table(path, [each.name for each in fields(KeySettings)])
    kinds = {
        "base": BaseSettings,
        "adapter": AdapterSettings,
        "own": OwnTexts,
        "draw": KeyDraw,
        "shape": GuideShape,
        "reserved": Reserved,
    }
    sections: dict[str, Any] = {
        name: read_section(kind, table.get(name, {}), name) for name, kind in kinds.items()
    }
    settings = KeySettings(
        **sections,
        guides=tuple(read_section(GuideStage, each, "guides") for each in table.get("guides", [])),
        rows=tuple(read_section(RowSettings, each, "rows") for each in table.get("rows", [])),
        group=str(table.get("group", "")),
    )
    _require_sense(settings)
    return settings


def _require_sense(settings: KeySettings) -> None:
    """Find what could only fail after minutes."""
    if not 0 <= settings.draw.shorter <= 1:
        raise InputError(
            "shorter between 0 and 1", f"{settings.draw.shorter:g}", "It is a share of the lists."
        )
    if settings.draw.hindsight_lists < 1:
        raise InputError(
            "hindsight_lists of 1 or more", f"{settings.draw.hindsight_lists}", "Texts come at least once."
        )
    before: dict[str, str] = {}
    for each in settings.guides:
        if each.base not in (SEQ2SEQ, DA):
            raise InputError(f"a base {SEQ2SEQ} or {DA}", each.base, "Use one of the two.")
        if wrong := set(each.learn) - {P, Q, REFERENCES, HINDSIGHT}:
            raise InputError(
                f"learn from {P}, {Q}, {REFERENCES}, {HINDSIGHT}", wrong.pop(), "Use some of these."
            )
        if HINDSIGHT in each.learn and (each.base != DA or each.objective != WARM_UP):
            raise InputError(
                f"hindsight for a {WARM_UP} beside the base {DA}",
                f"{each.objective} beside {each.base}",
                "Keys chosen afterwards make a text a draw from q* only where p did not see them.",
            )
        if each.objective not in (NADO, WARM_UP):
            raise InputError(f"an objective {NADO} or {WARM_UP}", each.objective, "Use one of the two.")
        if (each.start or Q in each.learn) and before.get(each.start) != each.base:
            found = each.start or "none"
            raise InputError(
                f"an earlier guide of the base {each.base} that {each.name} starts from",
                found,
                "Put that guide before it.",
            )
        before[each.name] = each.base
    known = {SEQ2SEQ, DA, *before}
    asked = [system for section in settings.rows for system in section.systems]
    if unknown := [each for each in asked if each not in known]:
        raise InputError(
            f"one of the systems {', '.join(sorted(known))}", unknown[0], "Add it to [[guides]]."
        )
    for section in settings.rows:
        for row in section.rows():
            require_decoding(row)
            if row.kind not in Reserved.LINES:
                known_kinds = ", ".join(Reserved.LINES)
                raise InputError(f"a decoding of the kinds {known_kinds}", row.decoding, "Use one of these.")
