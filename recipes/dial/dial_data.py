"""Prompts of the dial: openings of review sentences, and prompts that invite toxic continuations."""

import gzip
import json
import random
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nado.errors import InputError
from nado.storage import write_bytes

REVIEW, TOXICITY = "review", "toxicity"
OPENINGS = Path(__file__).parent / "openings.jsonl"

_SOURCES = {
    "ccby_reviews": "sentence_polarity and product_reviews of NLTK's corpora (CC BY 4.0), as .jsonl",
    "paradetox": "paradetox.jsonl of s-nlp/paradetox (CC0)",
    "real_toxicity_prompts": "val5000.jsonl.gz, prompts of allenai/real-toxicity-prompts (local use only)",
}
_OPENING = re.compile(r"[a-z]+(?:'[a-z]+)?(?: [a-z]+(?:'[a-z]+)?){2,4}")


@dataclass(frozen=True)
class Opening:
    """What a text begins with; the base and the guide read it, the oracles judge only what follows."""

    kind: str
    split: str  # train or test
    prompt: str


def read_openings(path: Path) -> list[Opening]:
    """Prompts as `prepare_dial.py` writes them."""
    if not path.is_file():
        raise InputError("a file of prompts", f"nothing at {path}", "Make it with prepare_dial.py.")
    return [Opening(**record) for record in read_lines(path)]


def write_openings(path: Path, openings: Sequence[Opening]) -> None:
    """One JSON object a line."""
    content = "".join(json.dumps(asdict(each), ensure_ascii=False) + "\n" for each in openings)
    write_bytes(path, content.encode())


def review_openings(data: Path, *, train: int, test: int, seed: int) -> list[Opening]:
    """The first three to five words of review sentences, each once; those of the test are no one else's."""
    chooser = random.Random(seed)
    found: dict[str, None] = {}
    for name in ("sentence_polarity.jsonl", "product_review_sentences.jsonl"):
        for record in read_lines(require_file(data / "ccby_reviews" / name)):
            words = record["text"].split()
            count = chooser.choice((3, 4, 5))
            opening = " ".join(words[:count])
            if len(words) > count + 2 and _OPENING.fullmatch(opening):
                found[opening] = None
    return _split(REVIEW, list(found), train, test, chooser)


def toxicity_prompts(data: Path, *, train: int, test: int, seed: int) -> list[Opening]:
    """RealToxicityPrompts, each once."""
    records = read_lines(require_file(data / "real_toxicity_prompts" / "val5000.jsonl.gz"))
    found = {record["prompt"]["text"].strip(): None for record in records}
    return _split(TOXICITY, [each for each in found if each], train, test, random.Random(seed))


def _split(kind: str, prompts: list[str], train: int, test: int, chooser: random.Random) -> list[Opening]:
    prompts = sorted(prompts)
    chooser.shuffle(prompts)
    if len(prompts) < test + 1:
        raise InputError(
            f"more than {test} {kind} prompts", f"{len(prompts)}", "Get the whole corpus, or test on fewer."
        )
    parts = (("test", prompts[:test]), ("train", prompts[test : test + train]))
    return [Opening(kind, split, prompt) for split, several in parts for prompt in several]


def require_file(path: Path) -> Path:
    """The path, or what to get and where to put it."""
    if path.is_file():
        return path
    source = _SOURCES.get(path.parent.name, path.name)
    raise InputError(
        f"the corpus file {path}", "no such file", f"Get {source} and put it into {path.parent}."
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a `.jsonl` or `.jsonl.gz` file."""
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    try:
        return [json.loads(line) for line in text.split("\n") if line]
    except ValueError as error:
        raise InputError(f"one JSON object a line in {path}", f"{error}", "Get the file again.") from error
