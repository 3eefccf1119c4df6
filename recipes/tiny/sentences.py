"""Plain English sentences from three corpora: tidied, in ordinary casing and punctuation, each once."""

import gzip
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

WORDS = (2, 25)  # the fewest and most words of a sentence; 25 fit into 32 tokens of either vocabulary

_TYPOGRAPHY = str.maketrans(
    {"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "…": "...", "´": "'"}
)
_ATTACHED = [
    (re.compile(r"\s+([.,!?;:%)])"), r"\1"),
    (re.compile(r"\(\s+"), "("),
    (re.compile(r"\s+(n't|'s|'m|'re|'ve|'ll|'d)\b"), r"\1"),
    (re.compile(r'"\s+([^"]*?)\s*"'), r'"\1"'),
    (re.compile(r"([!?])\s+\1"), r"\1"),
]
_LONE_I = re.compile(r"\bi(?=('m|'ve|'ll|'d)?\b(?![.']))")
# These three are read by Arrow's engine too, for drawn sentences: nothing in them looks back or ahead.
READABLE = r"^[A-Z0-9\"'$][A-Za-z0-9 ,.'\"!?;:$%()&/-]*[.!?\"']$"
_WORD = re.compile(r"[A-Za-z]+")
_REPEATED = re.compile(r"\b(\w+) \1\b", re.IGNORECASE)
_DOUBLED_WELL = {"that", "had", "very", "bye", "ha", "no", "so", "really", "is", "do", "you", "in", "her"}
# What an entity's type was put in the place of its name by those who gathered the captions: no sentences.
PLACEHOLDER = (
    r"(?i)\b(biological (species|genus)|tourist attraction|automobile (model|make)"
    r"|organi[sz]ation (leader|founder)"
    r"|(olympic|football) (athlete|player|team|coach)|sports (team|league|facility|association)"
    r"|film (character|director|genre)|fictional universe|tv (program|character|genre)|recurring competition"
    r"|(pop|rock|hip hop|country|folk|heavy metal) artist|type of place of worship|place of worship"
    r"|digital art|vector|illustration|isolated on|seamless|stock photo|clip ?art|royalty|monarch"
    r"|(politician|actor|celebrity|author|athlete|noble person|person|cricketer|footballer) and "
    r"(politician|actor|celebrity|author|athlete|person|cricketer|footballer))\b"
    r"|^(politician|actor|celebrity|author|athlete|person|cricket|cricketer|footballer|golfer|model|builder"
    r"|politicians|religious|olympic|noble|basketball|baseball|ice hockey|invention|disease|filming|musical"
    r"|cuisine|ingredient|industry|profession|country|time|monarch|military|automobile|site) "
)
# The model ships inside a package and its samples are shown unfiltered: it never reads these.
UNFIT = (
    r"(?i)\b(fuck\w*|shit\w*|bitch\w*|whore\w*|slut\w*|cunt\w*|nigg\w*|fag\w*|rap(e|ed|ist|ists)|porn\w*|nude"
    r"|naked|sex\w*|suicide|virgin\w*|penis|vagina|breasts|prostitut\w*|condoms?|hitler|nazis?|asshole\w*)\b"
)


@dataclass(frozen=True)
class Sentence:
    """One sentence, where it is from, and the concepts it was written for (none outside CommonGen)."""

    text: str
    source: str
    words: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """What makes two sentences the same: their letters and digits."""
        return re.sub(r"[^a-z0-9]+", " ", self.text.lower()).strip()


def read_tatoeba(data: Path) -> Iterator[Sentence]:
    """The English side of the Spanish–English pairs."""
    with gzip.open(data / "tatoeba_spa_eng" / "spa-eng.tsv.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            yield Sentence(line.split("\t", 1)[0], "tatoeba")


def read_commongen(data: Path) -> Iterator[Sentence]:
    """CommonGen's training sentences with their concepts, in the given order."""
    with gzip.open(data / "commongen" / "train.jsonl.gz", "rt", encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            for text in record["targets"]:
                yield Sentence(text, "commongen", tuple(record["concepts"]))


def read_captions(data: Path) -> Iterator[Sentence]:
    """COCO captions."""
    with (data / "coco_captions" / "train.txt").open(encoding="utf-8") as lines:
        for line in lines:
            yield Sentence(line, "coco")


def find_names(sentences: Iterable[str]) -> dict[str, str]:
    """Words that are capitalised wherever they do not begin a sentence: lower case → as it is written.

    Captions are all in lower case; Tatoeba's own casing says what to capitalise in them.
    """
    counts: Counter[str] = Counter()
    for text in sentences:
        counts.update(_WORD.findall(re.sub(r'(^|[.!?"] *)"?\w+', " ", text)))
    return {
        word.lower(): word
        for word, count in counts.items()
        if count >= 5 and word.istitle() and len(word) > 2 and counts[word.lower()] * 50 < count
    }


def tidy(text: str, names: dict[str, str]) -> str:
    """The text with ordinary typography, casing and a full stop; what is already so stays as it is."""
    text = " ".join(unicodedata.normalize("NFC", text).translate(_TYPOGRAPHY).split())
    for pattern, replacement in _ATTACHED:
        text = pattern.sub(replacement, text)
    if text.islower() or not any(letter.isupper() for letter in text[1:]):
        text = _WORD.sub(lambda match: names.get(match[0], match[0]), text)
    text = _LONE_I.sub("I", text)
    text = text[:1].upper() + text[1:]
    return text + "." if text[-1:].isalnum() else text


def is_fit(sentence: Sentence) -> bool:
    """Whether a tidied sentence is one to learn from: readable, of ordinary length, fit to be shown."""
    text = sentence.text
    if not WORDS[0] <= len(text.split()) <= WORDS[1] or not re.match(READABLE, text):
        return False
    if sentence.source == "commongen" and re.search(PLACEHOLDER, text):
        return False
    repeated = _REPEATED.search(text)
    if repeated is not None and repeated[1].lower() not in _DOUBLED_WELL:
        return False
    return not re.search(UNFIT, text) and text.count('"') % 2 == 0


def clean(sentences: Iterable[Sentence], names: dict[str, str]) -> Iterator[Sentence]:
    """The fit ones among the tidied sentences, each once, the first time it comes."""
    seen: set[str] = set()
    for raw in sentences:
        sentence = Sentence(tidy(raw.text, names), raw.source, raw.words)
        if is_fit(sentence) and sentence.key not in seen:
            seen.add(sentence.key)
            yield sentence
