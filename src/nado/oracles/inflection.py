"""The forms a word may take: from a dictionary (lemminflect), or made by rule where it knows none."""

import functools
import json
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nado.errors import InputError, MissingPackageError
from nado.oracles.words import normalise

Forms = Mapping[str, Sequence[str]]


@functools.cache
def inflect(word: str) -> frozenset[str]:
    """Every form of a word: of the word itself, or of its lemma where it is an inflected form.

    A word the dictionary does not know, or knows in one form only, also gets forms made by rule.
    """
    lemminflect = _import_lemminflect()
    word = normalise(word)
    known = _flatten(lemminflect.getAllInflections(word))
    if not known:
        for lemma in _flatten(lemminflect.getAllLemmas(word)):
            known |= _flatten(lemminflect.getAllInflections(lemma))
    known = {normalise(form) for form in known} | {word}
    return frozenset(known if len(known) > 1 else form_by_rule(word))


def form_by_rule(word: str) -> frozenset[str]:
    """The regular forms of a word, whatever it is: plural, third person, past and -ing.

    Words of other scripts, and words too short to bend without hitting another ("a" → "as"), stay.
    """
    word = normalise(word)
    if len(word) < 3 or not all(_is_latin(letter) for letter in word):
        return frozenset({word})
    before_last = word[-2] not in "aeiou"
    if word.endswith(("s", "x", "z", "ch", "sh")):
        return frozenset({word, word + "es", word + "ed", word + "ing"})
    if word.endswith("y") and before_last:
        return frozenset({word, word[:-1] + "ies", word[:-1] + "ied", word + "ing"})
    if word.endswith("e"):
        return frozenset({word, word + "s", word + "d", word[:-1] + "ing"})
    forms = {word, word + "s", word + "ed", word + "ing"}
    if word[-1] not in "aeiouwxy" and not before_last:  # blog → blogged
        forms |= {word + word[-1] + "ed", word + word[-1] + "ing"}
    return frozenset(forms)


def prepare_forms(words: Iterable[str]) -> dict[str, list[str]]:
    """The forms of many words, to be saved as JSON and used where lemminflect is not installed."""
    return {word: sorted(inflect(word)) for word in sorted(set(words))}


def read_forms(forms: Forms | str | Path) -> dict[str, tuple[str, ...]]:
    """Prepared forms from a mapping or a JSON file, normalised; the word itself is always a form."""
    content: Any = forms
    if isinstance(forms, (str, Path)):
        try:
            content = json.loads(Path(forms).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(
                "a JSON file that maps words to their forms",
                f"{forms}: {error}",
                "Make one with prepare_forms and json.dump.",
            ) from error
    if not isinstance(content, Mapping) or any(isinstance(v, str) for v in content.values()):
        raise InputError(
            "word forms as a mapping from a word to a list of forms",
            f"{type(content).__name__}",
            'Write {"dog": ["dog", "dogs"]}.',
        )
    return {
        normalise(word): tuple(dict.fromkeys(normalise(form) for form in (word, *forms)))
        for word, forms in content.items()
    }


def _flatten(by_tag: Mapping[str, Sequence[str]]) -> set[str]:
    return {form for forms in by_tag.values() for form in forms}


def _is_latin(letter: str) -> bool:
    return letter.isalpha() and unicodedata.name(letter, "").startswith("LATIN")


def _import_lemminflect() -> Any:
    try:
        import lemminflect
    except ImportError as error:
        raise MissingPackageError(
            "lemminflect", "oracles", "inflected keywords without prepared forms"
        ) from error
    return lemminflect
