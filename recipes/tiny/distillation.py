"""What the fine-tuned teacher is asked to write, and what of it is kept."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from documents import Documents
from numpy.typing import NDArray
from sentences import PLACEHOLDER, READABLE, UNFIT, WORDS
from torch import Tensor
from word_choice import MOST_WORDS, as_keyword, split_words

# What prompts are made of: a concept set of CommonGen, words of one sentence, words of different sentences;
# the rest are empty.
_SHARES = (0.35, 0.65, 0.72)
_LONGEST = 16  # tokens of a prompt: with more, drawing needs a wider cache and compiles its step again


def prompt_words(documents: Documents, count: int, generator: torch.Generator) -> Tensor:
    """Keywords of `count` prompts: (count, MOST_WORDS), −1 at the end, −1 alone for an empty prompt."""
    device = documents.given.device

    def sentences(pool: Tensor) -> Tensor:
        return pool[torch.randint(len(pool), (count,), generator=generator, device=device)]

    everything = torch.arange(len(documents), device=device)
    with_concepts = torch.nonzero(documents.given[:, 0] >= 0).squeeze(1)
    concepts = documents.given[sentences(with_concepts if len(with_concepts) else everything)]
    own = documents.choose_words(sentences(everything), generator)
    firsts = [documents.choose_words(sentences(everything), generator)[:, :1] for _ in range(3)]
    foreign = torch.cat([*firsts, own.new_full((count, MOST_WORDS - 3), -1)], dim=1)
    kind = torch.rand(count, 1, generator=generator, device=device)
    words = torch.where(kind < _SHARES[0], concepts, torch.where(kind < _SHARES[1], own, foreign))
    words = words.gather(1, (words < 0).long().argsort(dim=1, stable=True)).masked_fill(
        kind >= _SHARES[2], -1
    )
    return words.masked_fill((documents.prompt_lengths(words) > _LONGEST)[:, None], -1)


def keep_good(
    drawn: pa.Table, known: pa.Array, names: dict[str, str], *, drop_unlikely: float
) -> tuple[pa.Array, dict[str, int]]:
    """Which drawn texts to learn from, and how many are left after each filter.

    `drawn` has the columns text, finished and log_p (the mean over a text's tokens); `known` are keys of
    sentences that are not wanted: those held out, and those that are in the training text already.
    """
    texts = pc.utf8_trim_whitespace(drawn["text"].combine_chunks())
    left = {"drawn": len(texts)}
    kept = drawn["finished"].to_numpy().copy()
    left["finished"] = int(kept.sum())
    kept &= _matches(texts, READABLE) & ~_matches(texts, UNFIT) & ~_matches(texts, PLACEHOLDER)
    kept &= ~_matches(texts, "  | [.,!?;]")
    count = pc.list_value_length(pc.split_pattern(texts, " ")).to_numpy()
    kept &= (count >= WORDS[0]) & (count <= WORDS[1])
    left["readable"] = int(kept.sum())
    kept &= ~repeats(texts, names)
    left["without_repeats"] = int(kept.sum())
    keys = keys_of(texts)
    kept &= ~pc.is_in(keys, value_set=known).to_numpy(zero_copy_only=False)
    left["new"] = int(kept.sum())
    kept = _first_of_each(keys, kept)
    left["different"] = int(kept.sum())
    log_p = drawn["log_p"].to_numpy()
    if kept.any():
        kept &= log_p >= np.quantile(log_p[kept], drop_unlikely)
    left["likely"] = int(kept.sum())
    return texts.filter(pa.array(kept)), left


def repeats(texts: pa.Array, names: dict[str, str]) -> NDArray[np.bool_]:
    """Whether a text has a word twice in a row, or a content word twice at all."""
    rows, words, vocabulary = split_words(texts)
    lower = {word.lower() for word in vocabulary}
    number = {word: at for at, word in enumerate(sorted(lower))}
    folded = np.array([number[word.lower()] for word in vocabulary], dtype=np.int64)[words]
    content = np.array([bool(as_keyword(word, names, lower)) for word in vocabulary], dtype=bool)[words]
    found = np.zeros(len(texts), dtype=bool)
    found[rows[1:][(folded[1:] == folded[:-1]) & (rows[1:] == rows[:-1])]] = True
    pairs, count = np.unique(rows[content] * len(number) + folded[content], return_counts=True)
    found[pairs[count > 1] // max(1, len(number))] = True
    return found


def keys_of(texts: pa.Array) -> pa.Array:
    """`Sentence.key` of every text."""
    return pc.utf8_trim_whitespace(pc.replace_substring_regex(pc.utf8_lower(texts), "[^a-z0-9]+", " "))


def _matches(texts: pa.Array, pattern: str) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = pc.match_substring_regex(texts, pattern).to_numpy(zero_copy_only=False)
    return found


def _first_of_each(keys: pa.Array, kept: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Of kept texts with one key, the first alone."""
    numbers = keys.dictionary_encode().indices.to_numpy(zero_copy_only=False)
    places = np.flatnonzero(kept)
    _, first = np.unique(numbers[places], return_index=True)
    result = np.zeros_like(kept)
    result[places[first]] = True
    return result
