"""Keywords: whether a text contains the words its condition asks for, in any inflection."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nado.errors import InputError
from nado.oracles.description import describe
from nado.oracles.inflection import Forms, form_by_rule, inflect, read_forms
from nado.oracles.protocol import BoolArray, Oracle, hold_together, shorten
from nado.oracles.words import (
    find_form,
    find_words,
    guard_left,
    guard_right,
    is_word,
    normalise,
    split_words,
)

# Conditions seldom repeat without end; past this many the compiled ones are dropped and made again.
_CACHE_LIMIT = 200_000


class Key(NamedTuple):
    """One keyword, ready to be looked for: by plain words where possible, else by patterns."""

    words: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]


@dataclasses.dataclass(frozen=True)
class Keywords(Oracle):
    """Whether the text contains every keyword of its condition ("dog, ball, New York").

    `words` fixes the keywords for every row; None reads them from the condition. `at_least` asks for
    that many of them only. `in_order` asks for them one after the other. Without `inflections` only
    the exact form counts. `forms` (a mapping, or a JSON file) replaces the dictionary: words it does
    not list get forms by rule, so that the answers do not depend on what is installed.

    Parts: one for each keyword. In order, a part holds when its keyword stands after all earlier ones.
    """

    words: str | Sequence[str] | None = None
    inflections: bool = True
    in_order: bool = False
    at_least: int | None = None
    forms: Forms | str | Path | None = None
    _known: dict[str, tuple[str, ...]] | None = dataclasses.field(init=False, repr=False, compare=False)
    _keys: dict[str, tuple[Key, ...]] = dataclasses.field(init=False, repr=False, compare=False)
    _single: dict[str, Key] = dataclasses.field(init=False, repr=False, compare=False)

    cheap = True
    name = "keywords"

    def __post_init__(self) -> None:
        object.__setattr__(self, "_known", None if self.forms is None else read_forms(self.forms))
        object.__setattr__(self, "_keys", {})
        object.__setattr__(self, "_single", {})
        if self.at_least is not None and (self.in_order or self.at_least < 1):
            raise InputError(
                "at_least of 1 or more, and not together with in_order",
                f"at_least={self.at_least}, in_order={self.in_order}",
                "Leave one of the two out.",
            )
        if self.words is not None:
            self._read("")  # a mistake in fixed words is found now, not at the first text

    @property
    def spec(self) -> str:
        """The arguments, with the content of `forms` in place of its path."""
        forms = None if self._known is None else describe(self._known)
        return (
            f"keywords(words={describe(self.words)}, inflections={self.inflections}, "
            f"in_order={self.in_order}, at_least={self.at_least}, forms={forms})"
        )

    def judge(self, conditions: Sequence[str], texts: Sequence[str]) -> BoolArray:
        """Whether each text has the keywords of its condition."""
        return np.fromiter(map(self._holds, conditions, texts), dtype=bool, count=len(texts))

    def judge_parts(self, conditions: Sequence[str], texts: Sequence[str]) -> list[BoolArray]:
        """Which keywords each text has; one part, the answer, when only some of them are asked for."""
        if self.at_least is not None:
            return super().judge_parts(conditions, texts)
        return _to_arrays(list(map(self._find, conditions, texts)))

    def judge_progress(self, conditions: Sequence[str], prefixes: Sequence[str]) -> list[BoolArray]:
        """Which keywords each prefix has, and with `at_least` whether they are enough."""
        return self.read_prefixes(conditions, prefixes)[0]

    def part_names(self, condition: str) -> list[str]:
        """The keywords."""
        return [self.name] if self.at_least is not None else self.keywords_of(condition)

    def progress_names(self, condition: str) -> list[str]:
        """The keywords, and the answer when only some of them are asked for."""
        return self.keywords_of(condition) + ([self.name] if self.at_least is not None else [])

    def read_prefixes(
        self, conditions: Sequence[str], prefixes: Sequence[str]
    ) -> tuple[list[BoolArray], BoolArray]:
        """Progress and stop label from one look at each prefix."""
        rows = list(map(self._find, conditions, prefixes))
        if self.at_least is None:
            bits = _to_arrays(rows)
            return bits, hold_together(bits)
        stops = [sum(found) >= self.at_least for found in rows]
        counted = [[*found, stop] for found, stop in zip(rows, stops, strict=True)]
        return _to_arrays(counted), np.array(stops, dtype=bool)

    def keywords_of(self, condition: str) -> list[str]:
        """The keywords a condition asks for, in order."""
        given = condition if self.words is None else self.words
        pieces = given.split(",") if isinstance(given, str) else given
        words = [piece.strip() for piece in pieces if piece.strip()]
        if len(words) < (self.at_least or 1):
            raise InputError(
                f"at least {self.at_least or 1} keywords separated by commas",
                shorten(given) if isinstance(given, str) else f"{given!r}",
                'Write the condition as "dog, ball, New York".',
            )
        return words

    def _holds(self, condition: str, text: str) -> bool:
        if self.in_order or self.at_least is not None:
            found = self._find(condition, text)
            return all(found) if self.at_least is None else sum(found) >= self.at_least
        words = set(split_words(text))
        # A loop of its own and not all(self._find(…)): most texts fail early, and this is the hot path.
        for key in self._keys.get(condition) or self._read(condition):
            if key.words.isdisjoint(words) and not _matches(key, text):
                return False
        return True

    def _find(self, condition: str, text: str) -> list[bool]:
        keys = self._keys.get(condition) or self._read(condition)
        if self.in_order:
            return _find_in_order(keys, text)
        words = set(split_words(text))
        return [not key.words.isdisjoint(words) or _matches(key, text) for key in keys]

    def _read(self, condition: str) -> tuple[Key, ...]:
        if len(self._keys) >= _CACHE_LIMIT:
            self._keys.clear()
        keys = tuple(self._key(word) for word in self.keywords_of(condition))
        self._keys[condition] = keys
        return keys

    def _key(self, keyword: str) -> Key:
        if keyword not in self._single:
            self._single[keyword] = self._compile(keyword)
        return self._single[keyword]

    def _compile(self, keyword: str) -> Key:
        whole = normalise(keyword)
        if self._known is not None and self.inflections and whole in self._known:
            return _key_of_forms(self._known[whole])
        if is_word(whole):
            return _key_of_forms(self._forms_of(whole))
        return Key(frozenset(), (re.compile(self._phrase(keyword)),))

    def _phrase(self, keyword: str) -> str:
        """A pattern for what is more than one word. A capital marks a name, which does not bend."""
        pieces = []
        for piece in re.split(r"(\s+|[^\w']+)", " ".join(keyword.split())):
            form = normalise(piece)
            bends = is_word(form) and piece == piece.lower()
            choices = sorted(self._forms_of(form)) if bends else [form]
            escaped = "|".join(re.escape(choice) for choice in choices)
            pieces.append(r"\s+" if piece == " " else f"(?:{escaped})")
        whole = normalise(keyword)
        return guard_left(whole) + "".join(pieces) + guard_right(whole)

    def _forms_of(self, word: str) -> frozenset[str]:
        if not self.inflections:
            return frozenset({word})
        if self._known is None:
            return inflect(word)
        return frozenset(self._known.get(word) or form_by_rule(word))


@dataclasses.dataclass(frozen=True)
class ForbiddenWords(Oracle):
    """Whether the text contains none of the given words, or of those in its condition.

    Takes what `Keywords` takes; by default only the exact forms are forbidden.
    """

    words: str | Sequence[str] | None = None
    inflections: bool = False
    forms: Forms | str | Path | None = None
    _present: Keywords = dataclasses.field(init=False, repr=False, compare=False)

    cheap = True
    name = "forbidden_words"

    def __post_init__(self) -> None:
        present = Keywords(self.words, inflections=self.inflections, at_least=1, forms=self.forms)
        object.__setattr__(self, "_present", present)

    @property
    def spec(self) -> str:
        """``~`` and the spec of the keywords it forbids."""
        return f"~{self._present.spec}"

    def judge(self, conditions: Sequence[str], texts: Sequence[str]) -> BoolArray:
        """Whether each text is free of the words."""
        return ~self._present(conditions, texts)


def _key_of_forms(forms: Iterable[str]) -> Key:
    """Plain words are looked up in a set, which is much quicker than any pattern."""
    plain = frozenset(form for form in forms if is_word(form))
    return Key(plain, tuple(re.compile(find_form(form)) for form in forms if form not in plain))


def _to_arrays(rows: list[list[bool]]) -> list[BoolArray]:
    """Each row as an array: one array for all of them, of which the rows are views."""
    flat = np.array(list(itertools.chain.from_iterable(rows)), dtype=bool)
    ends = list(itertools.accumulate(map(len, rows)))
    return [flat[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _matches(key: Key, text: str) -> bool:
    if not key.patterns:
        return False
    text = normalise(text)
    return any(pattern.search(text) for pattern in key.patterns)


def _find_words_in_order(keys: Sequence[Key], words: Sequence[str]) -> list[bool]:
    """The same where every keyword is a single word: one walk through the words, as this is a hot path."""
    rest, found = iter(words), 0
    for key in keys:
        if not any(word in key.words for word in rest):
            break
        found += 1
    return [True] * found + [False] * (len(keys) - found)


def _find_in_order(keys: Sequence[Key], text: str) -> list[bool]:
    """Take the earliest end of each keyword after the last: if any placing in order exists, this one does."""
    if not any(key.patterns for key in keys):
        return _find_words_in_order(keys, split_words(text))
    text = normalise(text)
    words = [(match.group(), *match.span()) for match in find_words(text)]
    found, place = [], 0
    for key in keys:
        ends = [end for word, start, end in words if start >= place and word in key.words][:1]
        ends += [match.end() for pattern in key.patterns if (match := pattern.search(text, place))]
        found.append(bool(ends))
        place = min(ends, default=len(text) + 1)
    return found
