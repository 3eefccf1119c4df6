"""What a word is: one definition for every oracle that counts or looks for words.

Texts are compared without case. A word is a run of letters, digits and underscores in which
apostrophes may stand ("don't" is one word, "dog" is not in "dog's"). Marks that belong to the letter
before them (Devanagari vowels, combining accents) do not end a word. Scripts written without spaces
(Chinese, Japanese, Thai …) have no words that could be told apart without a dictionary, so there a
form is found wherever it stands.
"""

import functools
import re
import sys
import unicodedata
from collections.abc import Iterator

# Character ranges of the scripts written without spaces.
UNSPACED = (
    "\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9d\U00020000-\U000323af"
)
_JOINER = "\u200d"
_VARIATION = "\ufe0f"
# Lower case, and a blank for everything that is in no word: one pass in C over ASCII bytes.
_ASCII_WORDS = bytes(
    ord(chr(i).lower()) if chr(i).isalnum() or chr(i) in "_'" else ord(" ") for i in range(128)
) + bytes(range(128, 256))


def normalise(text: str) -> str:
    """The text as it is compared: without case, composed, straight apostrophes, plain emoji."""
    if text.isascii():
        return text.lower()
    folded = unicodedata.normalize("NFC", text).casefold()
    return unicodedata.normalize("NFC", folded).replace("’", "'").replace(_VARIATION, "")


def split_words(text: str) -> list[str]:
    """The words of a text, normalised, in order."""
    if text.isascii() and "'" not in text:
        return text.encode().translate(_ASCII_WORDS).decode().split()
    return _word().findall(normalise(text))


def find_words(text: str) -> Iterator[re.Match[str]]:
    """The words of a normalised text with their places."""
    return _word().finditer(text)


def is_word(form: str) -> bool:
    """Whether a normalised form is exactly one word, so that looking it up among words finds it."""
    return _word().fullmatch(form) is not None


def find_form(form: str) -> str:
    """A pattern that finds a normalised form in a normalised text, as whole words.

    Where the form begins or ends with something that is no letter of a spaced script (an emoji, a
    plus sign, a Chinese character) there is no boundary to ask for.
    """
    blanks = r"\s+".join(re.escape(piece) for piece in form.split())
    return guard_left(form) + f"(?:{blanks})" + guard_right(form)


def guard_left(form: str) -> str:
    """What must not stand before a form."""
    letter = _letter()
    if re.match(letter, form):
        return f"(?<!{letter})(?<!{letter}')"
    # A joiner would make it the tail of another emoji.
    return "" if form[:1].isascii() or re.match(f"[{UNSPACED}]", form) else f"(?<!{_JOINER})"


def guard_right(form: str) -> str:
    """What must not stand after a form."""
    letter = _letter()
    if re.match(letter, form[-1:]):
        return f"(?!'?{letter})"
    return "" if form[-1:].isascii() or re.match(f"[{UNSPACED}]", form[-1:]) else f"(?!{_JOINER})"


@functools.cache
def _letter() -> str:
    """One character of a word, as a pattern of width one (so that it may stand in a lookbehind)."""
    return f"(?:[^\\W{UNSPACED}]|[{_marks()}])"


@functools.cache
def _word() -> re.Pattern[str]:
    inside = f"[^\\W{UNSPACED}]{_letter()}*"
    return re.compile(f"{inside}(?:'{inside})*")


@functools.cache
def _marks() -> str:
    """Combining marks of spaced scripts, and the (non-)joiners of Indic and Persian words."""
    spaced = re.compile(f"[^{UNSPACED}{_VARIATION}]")
    ranges: list[list[int]] = []
    for i in range(sys.maxunicode + 1):
        if unicodedata.category(chr(i)) in ("Mn", "Mc") and spaced.match(chr(i)):
            if ranges and ranges[-1][1] == i - 1:
                ranges[-1][1] = i
            else:
                ranges.append([i, i])
    return "".join(f"{chr(first)}-{chr(last)}" for first, last in ranges) + "\u200c" + _JOINER
