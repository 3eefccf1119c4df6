"""Which words of a sentence can be its keywords: found for millions of sentences at once, without a loop."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

MOST_WORDS = 5  # keywords in a prompt
CANDIDATES = 12  # words of a sentence that are remembered as possible keywords
SHORTEST = 3  # letters of a keyword

# Words that say nothing about what a sentence is about.
_STOP_WORDS = """
a about above after again against all almost along already also although always am among an and another any
anyone anything are around as ask at away back be became because been before being below between both but by
came can cannot come could did do does doing done down during each either else enough even ever every
everyone everything few for from get gets getting give go goes going gone got had has have having he her
here hers herself him himself his how if in inside into is isn it its itself just keep know let like lot
made make makes many may maybe me might mine more most much must my myself near never next no nobody none
nor not nothing now of off often on once one only onto or other others our ours out outside over own please
put quite rather really said same saw say says see seem seems shall she should since so some someone
something soon still such sure take than that the their theirs them themselves then there these they thing
things think this those though through till to together too took toward towards two under until up upon us
use used very want wants was way we well went were what whatever when where whether which while who whom
whose why will with within without would yes yet you your yours yourself don didn doesn won wasn aren couldn
wouldn shouldn three four five six seven eight nine ten
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())


@dataclass(frozen=True)
class Candidates:
    """Possible keywords of sentences, as numbers of `words`; −1 where a sentence has fewer."""

    words: list[str]
    lemma: NDArray[np.int64]  # (W,) the number of each word's base form, often its own
    table: NDArray[np.int32]  # (S, CANDIDATES)


def find_candidates(
    texts: pa.Array, lemmas: dict[str, str], names: dict[str, str], more: list[str]
) -> Candidates:
    """The content words of every sentence. `more` are further words that are to have a number."""
    rows, surface, vocabulary = split_words(texts)
    lower = {word for word in vocabulary if word.islower()}
    keywords = [as_keyword(word, names, lower) for word in vocabulary]
    known = {word for word in keywords if word}
    known |= {lemmas[word] for word in known if word in lemmas}
    words = sorted(known | set(more))
    number = {word: index for index, word in enumerate(words)}
    lemma = np.array([number[lemmas.get(word, word)] if word in known else number[word] for word in words])
    of_surface = np.array([number[word] if word else -1 for word in keywords], dtype=np.int64)
    found = of_surface[surface]
    table = _pad(rows[found >= 0], found[found >= 0], len(texts), len(words))
    return Candidates(words, lemma, table)


def as_keyword(word: str, names: dict[str, str], lower: set[str]) -> str:
    """The word as a person would ask for it: in lower case unless it is a name; "" if it says too little."""
    small = word.lower()
    if len(word) < SHORTEST or not word.isalpha() or small in STOP_WORDS:
        return ""
    if small in names:
        return names[small]
    return small if small in lower or word.isupper() else word


def split_words(texts: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.int64], list[str]]:
    """All words of all texts: which text each is of, which word it is, and the words."""
    spaced = pc.replace_substring_regex(texts, "[^A-Za-z']+", " ")
    parts: Any = pc.split_pattern(pc.utf8_trim_whitespace(spaced), " ")
    encoded = pc.list_flatten(parts).dictionary_encode()
    rows = pc.list_parent_indices(parts).to_numpy()
    words = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return rows.astype(np.int64), words, encoded.dictionary.to_pylist()


def _pad(rows: NDArray[np.int64], words: NDArray[np.int64], count: int, vocabulary: int) -> NDArray[np.int32]:
    """Each row's different words side by side: (count, CANDIDATES), −1 where there are fewer."""
    different = np.unique(rows * vocabulary + words)
    rows, words = different // vocabulary, different % vocabulary
    first = np.searchsorted(rows, np.arange(count))
    place = np.arange(len(rows)) - first[rows]
    table = np.full((count, CANDIDATES), -1, dtype=np.int32)
    fits = place < CANDIDATES
    table[rows[fits], place[fits]] = words[fits]
    return table
