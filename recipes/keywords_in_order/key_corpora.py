"""Training texts and test keys of three corpora, in one form: Yelp passages, news, review sentences."""

import gzip
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ordered_keys import choose_keys

from nado.errors import InputError

_SOURCES = {
    "yelp_pointer": "test.jsonl: POINTER's 1,000 Yelp key lists and references (local use only)",
    "yelp_reviews": "reviews_10k.jsonl.gz: 10,000 Yelp reviews with stars (local use only)",
    "emnlp_news": "valid.txt, test.txt and test_keys_generated.jsonl of EMNLP 2017 WMT News (local use only)",
    "ccby_reviews": "movie_review_sentences.jsonl.gz: NLTK's movie_reviews by sentences (CC BY 4.0)",
}
_SHARED = 10  # words in a row that a training text must not share with a test text
_TESTED = 1000


@dataclass(frozen=True)
class Corpus:
    """What is learned, what is tested, and how many keys a text has."""

    keys: int
    training: list[str]
    tested: list[dict[str, Any]]  # id, keys, text


def read_corpus(name: str, data: Path, *, news_keys: str, seed: int) -> Corpus:
    """One of the three."""
    chooser = random.Random(seed)
    if name == "yelp":
        return _yelp(data, chooser)
    if name == "news":
        return _news(data, news_keys)
    if name == "reviews":
        return _reviews(data, chooser)
    raise InputError("one of the corpora yelp, news, reviews", name, "Choose one of them.")


# --- Yelp -----------------------------------------------------------------------------------------------


def _yelp(data: Path, chooser: random.Random) -> Corpus:
    """POINTER's test; passages of whole reviews to learn, written as its references are."""
    tested = _records(data / "yelp_pointer" / "test.jsonl")
    reviews = [each["text"] for each in _records(data / "yelp_reviews" / "reviews_10k.jsonl.gz")]
    known = _runs_of(each["text"] for each in tested)
    written = (like_pointer(each) for each in reviews)
    passages = [part for each in written for part in cut_passages(each, chooser)]
    return Corpus(7, [each for each in passages if not shares_run(each, known)], tested)


def like_pointer(text: str) -> str:
    """Lower case, no apostrophes, marks by themselves: "Don't go!!" becomes "don t go !"."""
    text = re.sub(r"['’`]", " ", text.lower())
    text = re.sub(r"([.,!?:])[.,!?:\s]*|([()])", r" \1\2 ", text)
    return " ".join(re.sub(r"[^a-z0-9.,!?:()$ ]", " ", text).split())


def cut_passages(text: str, chooser: random.Random, *, least: int = 15, most: int = 78) -> Iterator[str]:
    """A text as passages of whole sentences, each about as long as a number between the two."""
    passage: list[str] = []
    wanted = chooser.randint(least + 5, most)
    for sentence in re.findall(r"[^.!?]+[.!?]?", text):
        words = sentence.split()
        if passage and len(passage) + len(words) > wanted:
            yield from _long_enough(passage, least, most)
            passage, wanted = [], chooser.randint(least + 5, most)
        passage += words
    yield from _long_enough(passage, least, most)


def _long_enough(passage: list[str], least: int, most: int) -> Iterator[str]:
    if least <= len(passage) <= most:
        yield " ".join(passage)


# --- News -----------------------------------------------------------------------------------------------


def _news(data: Path, keys: str) -> Corpus:
    """The first 1,000 sentences of the test part; the others, and the validation part, to learn."""
    folder = data / "emnlp_news"
    records = _records(folder / "test_keys_generated.jsonl")
    if keys not in records[0]:
        names = ", ".join(name for name in records[0] if name.startswith("keys"))
        raise InputError(f"one of the key lists {names}", keys, "Choose one of them.")
    tested = [{"id": each["id"], "keys": each[keys], "text": each["text"]} for each in records]
    asked = {each["text"] for each in tested}
    known = _runs_of(asked)
    lines = [*_lines(folder / "valid.txt"), *_lines(folder / "test.txt")]
    return Corpus(4, [each for each in dict.fromkeys(lines) if not shares_run(each, known)], tested)


# --- reviews --------------------------------------------------------------------------------------------


def _reviews(data: Path, chooser: random.Random) -> Corpus:
    """Sentences of film reviews that may be passed on; tested on documents that nothing is learned from."""
    by_document: dict[str, list[str]] = {}
    for each in _records(data / "ccby_reviews" / "movie_review_sentences.jsonl.gz"):
        if 8 <= len(each["text"].split()) <= 32:
            by_document.setdefault(each["doc"], []).append(each["text"])
    documents = sorted(by_document)
    chooser.shuffle(documents)
    tested: list[dict[str, Any]] = []
    while documents and len(tested) < _TESTED:
        for text in by_document.pop(documents.pop()):
            keys = choose_keys(text, 4, chooser)
            if len(keys) == 4:
                tested.append({"id": len(tested), "keys": list(keys), "text": text})
    tested = tested[:_TESTED]
    known = _runs_of(each["text"] for each in tested)
    learned = dict.fromkeys(text for document in documents for text in by_document[document])
    return Corpus(4, [each for each in learned if not shares_run(each, known)], tested)


# --- what they share ------------------------------------------------------------------------------------


def _runs_of(texts: Any) -> set[tuple[str, ...]]:
    """Every run of `_SHARED` words, and every whole text that is shorter."""
    return {run for text in texts for run in _runs(text)}


def _runs(text: str) -> Iterator[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    for at in range(max(1, len(words) - _SHARED + 1)):
        yield tuple(words[at : at + _SHARED])


def shares_run(text: str, known: set[tuple[str, ...]]) -> bool:
    """Whether a text has as many words in a row with a known one."""
    return any(run in known for run in _runs(text))


def require_corpus(path: Path) -> Path:
    """The path, or what to get and where to put it."""
    if path.is_file():
        return path
    source = _SOURCES.get(path.parent.name, path.name)
    raise InputError(
        f"the corpus file {path}", "no such file", f"Get {source} and put it into {path.parent}."
    )


def _lines(path: Path) -> list[str]:
    content = require_corpus(path).read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    return [line.strip() for line in text.split("\n") if line.strip()]


def _records(path: Path) -> list[dict[str, Any]]:
    try:
        found: Sequence[dict[str, Any]] = [json.loads(line) for line in _lines(path)]
    except ValueError as error:
        raise InputError(f"one JSON object a line in {path}", f"{error}", "Get the file again.") from error
    if not found:
        raise InputError(f"records in {path}", "none", "Get the file again.")
    return list(found)
