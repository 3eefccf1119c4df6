"""Pavlick and Tetreault's sentences with formality scores, in two halves that share no sentence."""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from raw_files import require_file

_TOKENISED = ("answers", "email")  # domains whose sentences are written with blanks around every mark
_JOINS = (
    (re.compile(r" +([.,!?;:%)\]}]|\.\.\.)"), r"\1"),
    (re.compile(r"([(\[{$#]) +"), r"\1"),
    (re.compile(r" +('(?:s|m|d|ll|re|ve|t)\b|n't\b)", re.IGNORECASE), r"\1"),
    (re.compile(r"(?:``|\") +([^\"]*?) +(?:''|\")"), r'"\1"'),
    (re.compile(r"(\w) - (\w)"), r"\1-\2"),
)


@dataclass(frozen=True)
class Rated:
    """A sentence and how formal people found it, −3 to 3."""

    text: str
    score: float
    domain: str

    @property
    def formal(self) -> bool:
        """Whether people found it more formal than not."""
        return self.score > 0


def read_rated(data: Path) -> list[Rated]:
    """All sentences, each once, in ordinary writing: tokens would give their domain away, not their style."""
    path = require_file(
        data / "pavlick_formality" / "pavlick_formality.jsonl", "sentences rated for formality"
    )
    found: dict[str, Rated] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        text = record["text"].strip()
        text = detokenise(text) if record["domain"] in _TOKENISED else text
        if text:
            found.setdefault(text.lower(), Rated(text, float(record["score"]), record["domain"]))
    return list(found.values())


def detokenise(text: str) -> str:
    """A sentence of a treebank's tokens as people write it."""
    for pattern, joined in _JOINS:
        text = pattern.sub(joined, text)
    return text


def halve(rated: Sequence[Rated], seed: int = 0) -> tuple[list[Rated], list[Rated]]:
    """Two halves at random: one for the oracle, one for the judge."""
    order = list(rated)
    random.Random(seed).shuffle(order)
    middle = len(order) // 2
    return order[:middle], order[middle:]


def decided(rated: Sequence[Rated]) -> list[Rated]:
    """Those that are not exactly between formal and informal."""
    return [each for each in rated if each.score != 0]
