"""What is served: a base, its guides by name, and their oracles. Nothing of it comes from a request."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from nado.composition import Composition
from nado.errors import InputError
from nado.guide_files import load_guide
from nado.huggingface import CausalModel, EncoderDecoderModel
from nado.huggingface.reading import HuggingFaceReader
from nado.language_model import is_refillable
from nado.oracles import load_oracle
from nado.oracles.loading import saved_oracle
from nado.prefixes import names_for
from nado.serving.voices import Member
from nado.storage import read_json
from nado.study.guides import GuideInUse, use_guide

log = logging.getLogger(__name__)


class GuideSource(NamedTuple):
    """A guide as the operator names it."""

    name: str
    folder: Path
    oracle: dict[str, Any] | None = None  # its table; None for the one the guide's folder names


@dataclass(frozen=True)
class ServedModel:
    """A base and its guides."""

    name: str  # what clients call it
    base: CausalModel | EncoderDecoderModel
    members: tuple[Member, ...]
    template: str | None = None  # how the base's prompt is made from a condition
    exact_end: bool | None = None  # None: wherever the oracles are cheap
    _pairs: dict[frozenset[str], None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (isinstance(self.base, CausalModel) and is_refillable(self.base)):
            raise InputError(
                "a base whose rows can be replaced while others go on (a causal model with full attention)",
                type(self.base.model).__name__,
                "Serve another base; this one can be used with nado generate.",
            )
        names = [each.name for each in self.members]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise InputError(
                "guides with names of their own", f"{repeated[0]!r} twice", "Write --guide NAME=FOLDER."
            )

    @cached_property
    def by_name(self) -> dict[str, Member]:
        """Guides by name."""
        return {each.name: each for each in self.members}

    @property
    def default_guides(self) -> dict[str, float]:
        """What a request gets that names no guides: the first one."""
        return {self.members[0].name: 1.0} if self.members else {}

    @property
    def chats(self) -> bool:
        """Whether the base has a chat template."""
        return bool(getattr(self.base.tokenizer, "chat_template", None))

    def choose(self, names: Sequence[str]) -> tuple[Member, ...]:
        """Guides by name; an unknown name is an error, and so are guides that do not go together."""
        unknown = [name for name in names if name not in self.by_name]
        if unknown:
            known = ", ".join(self.by_name) or "none"
            raise InputError(f"guides that are served here ({known})", repr(unknown[0]), "Name one of them.")
        chosen = tuple(self.by_name[name] for name in names)
        if len(chosen) > 1 and frozenset(names) not in self._pairs:
            Composition("&", tuple(each.guide for each in chosen))
            self._pairs[frozenset(names)] = None
        return chosen

    def ends_exactly(self, members: Sequence[Member]) -> bool:
        """Whether texts of these guides end only where their oracles say yes."""
        possible = self.base.completion == "eos" and all(each.oracle is not None for each in members)
        if not (members and possible):
            return False
        cheap = all(each.oracle is not None and each.oracle.cheap for each in members)
        return cheap if self.exact_end is None else self.exact_end


def load_served(
    sources: Sequence[GuideSource],
    *,
    name: str | None = None,
    exact_end: bool | None = None,
    allow_other_base: bool = False,
    base: Mapping[str, Any] | None = None,
) -> ServedModel:
    """Load guides and the one base they share; `base` changes values of the first guide's base."""
    first, *others = sources
    used = use_guide(first.folder, oracle=first.oracle, allow_other_base=allow_other_base, **(base or {}))
    members = [Member(first.name, used.guide, used.oracle)]
    members += [_add(used, each, allow_other_base) for each in others]
    return ServedModel(name or first.name, used.base, tuple(members), used.template, exact_end)


def _add(used: GuideInUse, source: GuideSource, allow_other_base: bool) -> Member:
    """Another guide for a base that is loaded already."""
    oracle = saved_oracle(source.folder) if source.oracle is None else load_oracle(source.oracle)
    reader = used.guide.reader
    assert isinstance(reader, HuggingFaceReader)
    names = names_for(source.folder, oracle)
    guide = load_guide(source.folder, reader, allow_other_base=allow_other_base, part_names=names)
    if oracle is None and guide.config.progress_bits:
        wanted = read_json(source.folder / "config.json").get("oracle_name") or "it was trained for"
        raise InputError(
            f"the oracle {wanted}, whose progress the guide {source.name} reads",
            "none",
            "Name it: --oracle NAME=file.py:name. No file is executed that you have not named.",
        )
    return Member(source.name, guide, oracle)


def default_sources() -> list[GuideSource]:
    """The guides that are served where none is named: the embedded ones, that for keywords first."""
    from nado.tiny import GUIDES, locate_guide

    return [GuideSource(name, locate_guide(name)) for name in GUIDES]
