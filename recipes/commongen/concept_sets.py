"""CommonGen's concept sets, the form in which base, guide and oracle read them, and what p learns of them."""

import gzip
import json
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from study_settings import TextSettings

from nado.errors import InputError
from nado.prompts import Prompt

_SIZES = (3, 3, 4, 5)  # of sets that are made: as often as dev has them
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


def learned_sets(
    sets: Sequence[ConceptSet], settings: TextSettings, forms: Mapping[str, Iterable[str]]
) -> list[ConceptSet]:
    """What p learns from: every sentence after its set, and in further turns after others of its concepts.

    Three of four training sets have three concepts, and half of the dev sets more; a sentence has five on
    average. `forms` are the forms of each concept.
    """
    first = [replace(each, targets=_written(each.targets, settings)) for each in sets]
    chosen, known = random.Random(settings.seed), concepts_by_form(sets, forms)
    again = [
        replace(each, concepts=choose_concepts(target, known, chosen, each.concepts), targets=(target,))
        for _ in range(1, settings.turns)
        for each in first
        for target in each.targets
    ]
    return [*first, *again]


def _written(targets: Iterable[str], settings: TextSettings) -> tuple[str, ...]:
    return tuple(as_sentence(each) if settings.sentences else each for each in targets)


def concepts_by_form(sets: Sequence[ConceptSet], forms: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """Which concepts of the training sets a word can stand for."""
    found: dict[str, list[str]] = {}
    for concept in dict.fromkeys(concept for each in sets for concept in each.concepts):
        for form in {concept, *forms.get(concept, ())}:
            found.setdefault(form.lower(), []).append(concept)
    return found


def choose_concepts(
    text: str, known: Mapping[str, list[str]], chosen: random.Random, otherwise: Sequence[str] = ()
) -> tuple[str, ...]:
    """Some concepts of a text, as many as dev sets have, in any order; of `otherwise` where it has few."""
    words = re.findall(r"\w+", text.lower())
    found = list(dict.fromkeys(concept for word in words for concept in known.get(word, ())))
    pool = found if len(found) >= min(_SIZES) else otherwise
    return tuple(chosen.sample(pool, min(len(pool), chosen.choice(_SIZES))))


def concepts_in_texts(
    texts: Sequence[str], seed: int, *, known: Mapping[str, list[str]]
) -> list[tuple[str, ...]]:
    """Some concepts of each text; none where it has few."""
    chosen = random.Random(seed)
    return [choose_concepts(text, known, chosen) for text in texts]


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


def as_sentence(text: str) -> str:
    """A caption as a sentence: a capital, a full stop, and no blank before punctuation."""
    text = re.sub(r" +([.,!?;:])", r"\1", " ".join(text.split())).rstrip(" ,;:-")
    ended = text if text.endswith((".", "!", "?")) else f"{text}."
    return ended[:1].upper() + ended[1:]
