"""Spanish with its English: pairs to train the base on, sources to draw from, and the test sets.

The sources of the test are what a speech recogniser wrote: lower case, no marks. So every written sentence is
learned in that form too, and every spoken one with both transcripts.
"""

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raw_files import read_lines, read_records

NOTHING = "None"  # how the fluent references say that nothing of an utterance is worth keeping
_TATOEBA, _SPEECH = "tatoeba_spa_eng", "fisher_callhome"
_TEST = "tatoeba-challenge-test-v2023-09-26.eng-spa.tsv.gz"
_LEARNED = ("callhome_train", "fisher_dev2")  # the base is trained on these
_UNSEEN = ("fisher_dev", "callhome_devtest", "callhome_evltest")  # and has never seen these
_UNRECOGNISED = "<unk>"
_WORD = re.compile(r"\w+")
_MARKS = re.compile(r"[^\w\s'-]|(?<!\w)['-]|['-](?!\w)")
_LONGEST = 60  # words of a pair that is learned
_UNEVEN = 3.0  # how many times longer one side may be; recognised speech is sometimes half missing


@dataclass(frozen=True)
class Pair:
    """A Spanish sentence and an English one."""

    spanish: str
    english: str


def tidy(text: str) -> str:
    """One form for equal texts: composed letters, single blanks, no mark of unrecognised words."""
    return " ".join(unicodedata.normalize("NFC", text.replace(_UNRECOGNISED, " ")).split())


def as_spoken(text: str) -> str:
    """A written sentence as a recogniser writes it: lower case, no marks."""
    return tidy(_MARKS.sub(" ", text.lower()))


def key_of(text: str) -> str:
    """What two sentences share that differ in case and marks alone."""
    return " ".join(_WORD.findall(tidy(text).lower()))


def read_tatoeba(data: Path) -> tuple[list[Pair], list[Pair]]:
    """Training pairs none of whose sides is in the test set, and the test set."""
    learned = _read_pairs(data / _TATOEBA / "spa-eng.tsv.gz", "Spanish–English sentence pairs")
    test = _read_pairs(data / _TATOEBA / _TEST, "a test set of Spanish–English pairs")
    spanish, english = ({key_of(side) for side in sides} for sides in zip(*map(_sides, test), strict=True))
    kept = [
        pair
        for pair in learned
        if key_of(pair.spanish) not in spanish and key_of(pair.english) not in english
    ]
    return list(dict.fromkeys(kept)), test


def _sides(pair: Pair) -> tuple[str, str]:
    return pair.spanish, pair.english


def _read_pairs(path: Path, what: str) -> list[Pair]:
    rows = [line.split("\t") for line in read_lines(path, what)]
    return [
        Pair(tidy(row[1]), tidy(row[0]))
        for row in rows
        if len(row) >= 2 and row[0].strip() and row[1].strip()
    ]


def read_speech(data: Path, name: str) -> list[dict[str, Any]]:
    """The utterances of one part of Fisher or CALLHOME."""
    return read_records(data / _SPEECH / f"{name}.jsonl", "utterances with translations")


def training_pairs(data: Path, written: Iterable[Pair]) -> list[Pair]:
    """Everything the base learns from, each pair once."""
    pairs: dict[Pair, None] = {}
    for pair in written:
        pairs[pair] = None
        pairs[Pair(as_spoken(pair.spanish), pair.english)] = None
    for name in _LEARNED:
        for record in read_speech(data, name):
            sources = dict.fromkeys(tidy(record[side]) for side in ("es_oracle", "es_asr"))
            pairs |= {Pair(source, tidy(each)): None for source in sources for each in record["en_refs"]}
    return [pair for pair in pairs if _is_even(pair)]


def _is_even(pair: Pair) -> bool:
    sizes = sorted((len(pair.spanish.split()), len(pair.english.split())))
    return sizes[0] > 0 and sizes[1] <= _LONGEST and sizes[1] <= _UNEVEN * sizes[0] + 3


def drawing_sources(data: Path, learned: Iterable[Pair], count: int, longest: int) -> list[str]:
    """Sources of the test's kind that the base has not been trained on, the better transcripts first."""
    known = {pair.spanish for pair in learned}
    tested = {tidy(record["es_oracle"]) for record in read_speech(data, "fisher_test")}
    found: dict[str, None] = {}
    for side in ("es_oracle", "es_asr"):
        for name in _UNSEEN:
            for record in read_speech(data, name):
                source = tidy(record[side])
                if source and source not in tested and len(source.split()) <= longest:
                    found.setdefault(source)
    # Short answers are in every part of the corpus: those that were learned come last.
    return sorted(found, key=lambda source: source in known)[:count]


def read_test_records(data: Path) -> list[dict[str, Any]]:
    """Fisher test: source, the four original references, the fluent ones where there are any."""
    fluent = {
        record["id"]: [tidy(each) for each in record["fluent_refs"] if each.strip() != NOTHING]
        for record in read_records(data / "fluent_fisher" / "test.jsonl", "fluent references of Fisher test")
    }
    return [
        {
            "id": record["id"],
            "source": tidy(record["es_oracle"]),
            "original": [tidy(each) for each in record["en_refs"]],
            "fluent": fluent.get(record["id"], []),
        }
        for record in read_speech(data, "fisher_test")
    ]
