"""Rules about the text alone: patterns, length, beginnings and ends, JSON."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nado.errors import InputError
from nado.oracles.protocol import BoolArray, Oracle
from nado.oracles.words import split_words

# A sentence ends with one or more of these, at a blank or at the end of the text.
_SENTENCE_END = re.compile(r"[.!?…]+[\"'”’)\]]*(?=\s|$)|[。！？]+")


@dataclasses.dataclass(frozen=True)
class Pattern(Oracle):
    """Whether a regular expression is found in the text (`whole`: matches all of it)."""

    pattern: str
    whole: bool = False
    ignore_case: bool = False
    _search: Callable[[str], Any] = dataclasses.field(init=False, repr=False, compare=False)

    cheap = True
    name = "pattern"

    def __post_init__(self) -> None:
        try:
            compiled = re.compile(self.pattern, re.IGNORECASE if self.ignore_case else 0)
        except re.error as error:
            raise InputError(
                "a regular expression", f"{self.pattern!r}: {error}", "See the documentation of Python's re."
            ) from error
        object.__setattr__(self, "_search", compiled.fullmatch if self.whole else compiled.search)

    def judge(self, conditions: Sequence[str], texts: Sequence[str]) -> BoolArray:
        """Whether it is found in each text."""
        return np.array([self._search(text) is not None for text in texts], dtype=bool)


@dataclasses.dataclass(frozen=True)
class Length(Oracle):
    """Whether the text has at least `minimum` and at most `maximum` words, characters or sentences.

    Parts: one for each bound that is given.
    """

    minimum: int | None = None
    maximum: int | None = None
    unit: str = "words"

    cheap = True
    name = "length"

    def __post_init__(self) -> None:
        if self.unit not in _COUNT:
            raise InputError(f"a unit among {', '.join(_COUNT)}", repr(self.unit), "Choose one of them.")
        if self.minimum is None and self.maximum is None:
            raise InputError("a minimum or a maximum length", "neither", "Give at least one of them.")
        if self.minimum is not None and self.maximum is not None and self.minimum > self.maximum:
            raise InputError(
                "a minimum that is not above the maximum",
                f"minimum {self.minimum} and maximum {self.maximum}",
                "Swap them.",
            )

    def judge(self, conditions: Sequence[str], texts: Sequence[str]) -> BoolArray:
        """Whether each text is neither too short nor too long."""
        satisfied: BoolArray = np.logical_and.reduce(self._bounds(texts), axis=1)
        return satisfied

    def judge_parts(self, conditions: Sequence[str], texts: Sequence[str]) -> list[BoolArray]:
        """For each text: long enough, short enough."""
        return list(self._bounds(texts))

    def part_names(self, condition: str) -> list[str]:
        """The bounds that are given."""
        bounds = (("at least", self.minimum), ("at most", self.maximum))
        return [f"{how} {limit} {self.unit}" for how, limit in bounds if limit is not None]

    def _bounds(self, texts: Sequence[str]) -> BoolArray:
        counts = np.array([_COUNT[self.unit](text) for text in texts], dtype=int)
        bounds = []
        if self.minimum is not None:
            bounds.append(counts >= self.minimum)
        if self.maximum is not None:
            bounds.append(counts <= self.maximum)
        return np.stack(bounds, axis=1)  # (B, bounds)


@dataclasses.dataclass(frozen=True)
class StartsWith(Oracle):
    """Whether the text begins with the given string, or with its condition; leading blanks are ignored.

    Progress: whether it does, and whether it still can.
    """

    start: str | None = None
    ignore_case: bool = False

    cheap = True
    name = "starts_with"

    def judge(self, conditions: Sequence[str], texts: Sequence[str]) -> BoolArray:
        """Whether each text begins that way."""
        rows = self._pairs(conditions, texts)
        return np.array([text.startswith(start) for start, text in rows], dtype=bool)

    def judge_progress(self, conditions: Sequence[str], prefixes: Sequence[str]) -> list[BoolArray]:
        """Whether each prefix begins that way, and whether it may yet."""
        rows = self._pairs(conditions, prefixes)
        return [
            np.array([prefix.startswith(start), prefix.startswith(start) or start.startswith(prefix)])
            for start, prefix in rows
        ]

    def progress_names(self, condition: str) -> list[str]:
        """Two facts about the prefix."""
        return [self.name, "may still start so"]

    def _pairs(self, conditions: Sequence[str], texts: Sequence[str]) -> list[tuple[str, str]]:
        starts = conditions if self.start is None else [self.start] * len(texts)
        rows = [(start.lstrip(), text.lstrip()) for start, text in zip(starts, texts, strict=True)]
        return [(s.casefold(), t.casefold()) for s, t in rows] if self.ignore_case else rows


@dataclasses.dataclass(frozen=True)
class EndsWith(Oracle):
    """Whether the text ends with the given string, or with its condition; trailing blanks are ignored."""

    end: str | None = None
    ignore_case: bool = False

    cheap = True
    name = "ends_with"

    def judge(self, conditions: Sequence[str], texts: Sequence[str]) -> BoolArray:
        """Whether each text ends that way."""
        ends = conditions if self.end is None else [self.end] * len(texts)
        rows = [(end.rstrip(), text.rstrip()) for end, text in zip(ends, texts, strict=True)]
        if self.ignore_case:
            rows = [(end.casefold(), text.casefold()) for end, text in rows]
        return np.array([text.endswith(end) for end, text in rows], dtype=bool)


@dataclasses.dataclass(frozen=True)
class Json(Oracle):
    """Whether the whole text is JSON (strictly: no NaN), and an object with these `keys` if any."""

    keys: Sequence[str] = ()

    cheap = True
    name = "json"

    def __post_init__(self) -> None:
        if isinstance(self.keys, str):
            raise InputError("a list of keys", f"the single string {self.keys!r}", "Put it into a list.")

    def judge(self, conditions: Sequence[str], texts: Sequence[str]) -> BoolArray:
        """Whether each text parses."""
        return np.array([self._parses(text) for text in texts], dtype=bool)

    def _parses(self, text: str) -> bool:
        try:
            value = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            return False
        return not self.keys or (isinstance(value, dict) and all(key in value for key in self.keys))


def count_words(text: str) -> int:
    """The words of a text; "don't" is one."""
    return len(split_words(text))


def count_sentences(text: str) -> int:
    """Sentences by their final marks; a rest without one counts. Abbreviations are not recognised."""
    pieces = _SENTENCE_END.split(text)
    return sum(any(c.isalnum() for c in piece) for piece in pieces)


def _refuse_constant(name: str) -> None:
    raise ValueError(name)  # NaN and Infinity, which Python reads and JSON does not know


_COUNT: dict[str, Callable[[str], int]] = {
    "words": count_words,
    "characters": len,
    "sentences": count_sentences,
}
