"""CommonGen's concept sets, the form in which base, guide and oracle read them, and what p learns of them."""

import gzip
import json
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from study_settings import TextSettings

from nado.errors import InputError
from nado.prompts import Prompt

_SIZES = (3, 3, 4, 5)  # of recombined sets: as often as dev has them
_TRIES = 20  # concepts drawn for a recombined set; some have no neighbours
_PATIENCE = 50  # tries for each recombined set, most of which are new in real data
_CHOOSING = 5  # every fifth dev set is for choosing between configurations; the others are reported


@dataclass(frozen=True)
class ConceptSet:
    """A set of concepts and the sentences people wrote with them."""

    number: int
    concepts: tuple[str, ...]
    targets: tuple[str, ...]
    sees: bool = True  # whether the base reads them

    @property
    def prompt(self) -> Prompt:
        """What the base reads, and what guide and oracle read."""
        return Prompt(" ".join(self.concepts) + " =" if self.sees else "", ", ".join(self.concepts))

    @property
    def reported(self) -> bool:
        """Whether it is one of those that are reported: the file is ordered by size, so all sizes are."""
        return self.number % _CHOOSING != 0


def read_sets(path: Path) -> list[ConceptSet]:
    """Sets from a `.jsonl` or `.jsonl.gz` file."""
    content = path.read_bytes()
    lines = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [
        ConceptSet(each["id"], tuple(each["concepts"]), tuple(each.get("targets", ()))) for each in records
    ]


def learned_sets(sets: Sequence[ConceptSet], settings: TextSettings) -> list[ConceptSet]:
    """What p learns from: a set and some of its sentences each, some more than once.

    A set that comes again comes with its concepts in another order: they are a set, and what is written
    with them does not depend on it.
    """
    chosen = random.Random(settings.seed)
    return [again for each in sets for again in _repeated(each, settings, chosen)]


def _repeated(one: ConceptSet, settings: TextSettings, chosen: random.Random) -> Iterable[ConceptSet]:
    large = settings.repeats_large if len(one.concepts) >= settings.large else 1
    times = {
        target: large * (settings.repeats_well_formed if is_well_formed(target) else 1)
        for target in one.targets
    }
    for turn in range(max(times.values(), default=0)):
        targets = [target for target in one.targets if times[target] > turn]
        if settings.sentences:
            targets = [as_sentence(target) for target in targets]
        order = one.concepts if turn == 0 else tuple(chosen.sample(one.concepts, len(one.concepts)))
        yield replace(one, concepts=order, targets=tuple(targets))


def recombine(
    sets: Sequence[ConceptSet], count: int, seed: int, but: Sequence[ConceptSet] = ()
) -> list[ConceptSet]:
    """New sets of concepts that go together: some of a set, joined by others' through what they share.

    p knows the training sets by heart, and satisfies them more often than any it has not seen. A guide is
    for the latter. None of the sets `but` is among them.
    """
    chosen = random.Random(seed)
    found = {frozenset(each.concepts): each for each in (*sets, *but)}
    known = len(found)
    owners: dict[str, list[ConceptSet]] = {}
    for each in sets:
        for concept in each.concepts:
            owners.setdefault(concept, []).append(each)
    tries = 0
    while len(found) < known + count:
        tries += 1
        if tries > _PATIENCE * (count + 100):
            raise InputError(
                f"{count:,} new sets of {len(sets):,} training sets",
                f"{len(found) - known:,} after {tries:,} tries",
                "Ask for fewer, or give more sets.",
            )
        size, begun = chosen.choice(_SIZES), chosen.choice(sets).concepts
        concepts = chosen.sample(begun, min(len(begun), size - 1))
        for _ in range(_TRIES):
            other = chosen.choice(owners[chosen.choice(concepts)])
            added = chosen.choice(other.concepts)
            concepts += [added] if added not in concepts else []
            if len(concepts) == size:
                new = ConceptSet(len(found), tuple(chosen.sample(concepts, size)), ())
                found.setdefault(frozenset(concepts), new)
                break
    return list(found.values())[known:]


def is_well_formed(text: str) -> bool:
    """Whether a text begins and ends as a sentence does; most of the training texts are captions."""
    return text[:1].isupper() and text.endswith((".", "!", "?")) and not text.endswith((" .", " !", " ?"))


def as_sentence(text: str) -> str:
    """A caption as a sentence: a capital, a full stop, and no blank before punctuation."""
    text = re.sub(r" +([.,!?;:])", r"\1", " ".join(text.split())).rstrip(" ,;:-")
    ended = text if text.endswith((".", "!", "?")) else f"{text}."
    return ended[:1].upper() + ended[1:]
