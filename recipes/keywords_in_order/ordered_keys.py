"""Texts with keys that stand in them in this order and form, and how base, guide and oracle read the keys."""

import gzip
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nado.errors import InputError
from nado.oracles import Keywords
from nado.prompts import Prompt
from nado.storage import write_bytes

SEQ2SEQ, DA = "seq2seq", "da"  # the base reads the keys, or it has only learned the domain

# Whole words alone: no part of "don't" or "well-made" is one for the oracle.
_WORD = re.compile(r"(?<![\w'’-])[^\W\d_]{2,}(?![\w'’-])")
# Words that say little: no keys. Everything else is as likely as anything else.
_FUNCTION_WORDS = frozenset(
    (Path(__file__).parent / "function_words.txt").read_text(encoding="utf-8").split()
)


@dataclass(frozen=True)
class KeyedText:
    """Keys, and a text that has them in order; `sees` says whether the base reads them."""

    number: int
    keys: tuple[str, ...]
    text: str
    sees: bool = True

    @property
    def prompt(self) -> Prompt:
        """What the base reads, and what guide and oracle read."""
        return Prompt(" ".join(self.keys) + " =" if self.sees else "", ", ".join(self.keys))

    @property
    def targets(self) -> tuple[str, ...]:
        """What the base learns to write."""
        return (self.text,)


def ordered_oracle() -> Keywords:
    """C: all keys, in their exact form as whole words, in order; upper and lower case are one."""
    return Keywords(inflections=False, in_order=True)


def choose_keys(text: str, count: int, chooser: random.Random) -> tuple[str, ...]:
    """`count` words of a text at random, in the order in which they stand; fewer where it has fewer."""
    words = [match.group().lower() for match in _WORD.finditer(text)]
    places = [at for at, word in enumerate(words) if word not in _FUNCTION_WORDS]
    return tuple(words[at] for at in sorted(chooser.sample(places, min(count, len(places)))))


def keys_in_texts(texts: Sequence[str], seed: int, *, counts: Sequence[int]) -> list[tuple[str, ...]]:
    """Keys that each text happens to have, as many as one of `counts`; none where it has fewer."""
    chooser, found = random.Random(seed), []
    for text in texts:
        count = chooser.choice(counts)
        keys = choose_keys(text, count, chooser)
        found.append(keys if len(keys) == count else ())
    return found


def draw_count(keys: int, fewer: float, chooser: random.Random) -> int:
    """How many keys a training text gets: `keys`, or with the chance `fewer` any smaller number from 2 on."""
    return chooser.randint(2, keys - 1) if keys > 2 and chooser.random() < fewer else keys


def shorten_keys(keys: tuple[str, ...], share: float, chooser: random.Random) -> tuple[str, ...]:
    """The same keys, or with the chance `share` any smaller number of them from 2 on, still in order."""
    count = draw_count(len(keys), share, chooser)
    if count == len(keys):
        return keys
    return tuple(keys[at] for at in sorted(chooser.sample(range(len(keys)), count)))


def read_keyed(path: Path) -> list[dict[str, Any]]:
    """The records of a prepared `.jsonl.gz` file."""
    if not path.is_file():
        raise InputError(f"the prepared file {path}", "none", "Make it with prepare_keys.py.")
    lines = gzip.decompress(path.read_bytes()).decode("utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


def write_keyed(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """One JSON object a line, packed without a time stamp: equal records make equal files."""
    content = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in records).encode()
    packed = gzip.compress(content, 9, mtime=0)
    write_bytes(path, packed)
