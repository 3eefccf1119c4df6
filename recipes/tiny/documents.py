"""Sentences after keywords or by themselves, put together on the device as rows of tokens without padding.

Every piece a document can be made of (an opening, a keyword, " =", a sentence, the end) is tokenised once
and kept in one flat tensor. A document is then a short list of piece numbers, so that each pass over the
sentences can have new keywords in a new order at the cost of a gather.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from sentences import Sentence
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from word_choice import MOST_WORDS, find_candidates

from nado.errors import InputError

# The first pieces of every table; words and sentences follow.
_NOTHING, _FREE_OPENING, _KEYWORD_OPENING, _EQUALS, _END = range(5)
_COUNTS = (0.1, 0.2, 0.35, 0.2, 0.15)  # how many keywords a prompt has: 1 … MOST_WORDS
_LEMMA_SHARE = 0.7  # keywords in their base form, as CommonGen's are; the others as they stand
_GIVEN_SHARE = 0.7  # prompts of sentences with given concepts that have those
_CHUNK = 100_000  # texts tokenised at once
_CHECKED = 300  # sentences whose tokens are compared with the tokenizer's own
IGNORED = -100  # the label of a token that is not to be learned


@dataclass(frozen=True)
class Words:
    """The tables `prepare.py` wrote about words."""

    lemmas: dict[str, str]
    names: dict[str, str]


@dataclass(frozen=True)
class Pieces:
    """Token rows of unequal length: row i is `length[i]` tokens of `values` from `first[i]` on."""

    values: Tensor
    first: Tensor
    length: Tensor

    def row(self, number: int) -> list[int]:
        """The tokens of one row."""
        first, length = int(self.first[number]), int(self.length[number])
        return [int(token) for token in self.values[first : first + length].tolist()]

    def to(self, device: torch.device) -> "Pieces":
        """The same on a device."""
        return Pieces(self.values.to(device), self.first.to(device), self.length.to(device))

    def flatten(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of the given rows (N,), one row after the other, and which of the N each is of."""
        length = self.length[numbers]
        of = torch.repeat_interleave(torch.arange(len(numbers), device=numbers.device), length)
        begins = length.cumsum(0) - length
        inside = torch.arange(len(of), device=of.device) - begins[of]
        return self.values[self.first[numbers][of] + inside], of


@dataclass(frozen=True)
class Batch:
    """Rows of documents, one after the other: all (B, T)."""

    tokens: Tensor
    labels: Tensor  # the next token, or IGNORED
    document: Tensor
    position: Tensor  # counted from the document's own beginning

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, chosen: slice) -> "Batch":
        """Some of the rows."""
        return Batch(self.tokens[chosen], self.labels[chosen], self.document[chosen], self.position[chosen])


@dataclass(frozen=True)
class Documents:
    """Sentences, their possible keywords, and all their pieces as tokens, on one device."""

    pieces: Pieces
    words: list[str]
    lemma: Tensor  # (W,)
    candidates: Tensor  # (S, CANDIDATES), −1 where there are fewer
    given: Tensor  # (S, MOST_WORDS), −1 likewise

    def __len__(self) -> int:
        return len(self.given)

    def choose_words(self, sentences: Tensor, generator: torch.Generator) -> Tensor:
        """New keywords for each of these sentences (N,), in random order: (N, MOST_WORDS), −1 at the end."""
        drawn = _shuffle(self.candidates[sentences], generator)[:, :MOST_WORDS]
        shape, device = drawn.shape, drawn.device
        shares = torch.tensor(_COUNTS, device=device)
        count = torch.multinomial(shares, len(drawn), replacement=True, generator=generator) + 1
        drawn = drawn.masked_fill(torch.arange(MOST_WORDS, device=device) >= count[:, None], -1)
        based = torch.rand(shape, generator=generator, device=device) < _LEMMA_SHARE
        drawn = torch.where(based & (drawn >= 0), self.lemma[drawn.clamp(min=0)], drawn)
        given = _shuffle(self.given[sentences], generator)
        taken = torch.rand(len(drawn), generator=generator, device=device) < _GIVEN_SHARE
        return torch.where((taken & (given[:, 0] >= 0))[:, None], given, drawn)

    def compose(self, sentences: Tensor, words: Tensor) -> Tensor:
        """Piece numbers (N, MOST_WORDS + 4) of documents; with no words a sentence stands by itself."""
        count, bare = len(self.words), 5
        asked = words[:, :1] >= 0  # (N, 1)
        spaced = bare + count
        own = bare + 2 * count + sentences[:, None]
        keywords = torch.where(words >= 0, words + spaced, _NOTHING)
        keywords[:, :1] = torch.where(asked, words[:, :1] + bare, _NOTHING)
        opening = torch.where(asked, _KEYWORD_OPENING, _FREE_OPENING)
        equals = torch.where(asked, _EQUALS, _NOTHING)
        body = torch.where(asked, own + len(self), own)
        return torch.cat([opening, keywords, equals, body, torch.full_like(body, _END)], dim=1)

    def prompt_lengths(self, words: Tensor) -> Tensor:
        """Tokens of the prompts these keywords make: (N,)."""
        pieces = self.compose(torch.zeros(len(words), dtype=torch.long, device=words.device), words)
        return self.pieces.length[pieces[:, :-2]].sum(dim=1)

    def prompts(self, words: Tensor) -> list[str]:
        """The prompts themselves; "" for no keywords."""
        names = self.words
        rows = ([names[at] for at in row if at >= 0] for row in words.tolist())
        return [f"{' '.join(row)} =" if row else "" for row in rows]

    def stream(
        self, sentences: Tensor, width: int, generator: torch.Generator, *, keyword_share: float = 0.5
    ) -> Batch:
        """The given sentences with new keywords (or none) as rows of `width` tokens."""
        words = self.choose_words(sentences, generator)
        free = torch.rand(len(words), generator=generator, device=words.device) >= keyword_share
        return self.pack(self.compose(sentences, words.masked_fill(free[:, None], -1)), width)

    def pack(self, composed: Tensor, width: int) -> Batch:
        """Documents one after the other, cut into rows; what is left over at the end is dropped.

        A document that begins in the row before is not learned from: its beginning cannot be seen.
        """
        documents, parts = composed.shape
        tokens, of = self.pieces.flatten(composed.reshape(-1))
        document, part = of // parts, of % parts
        place = torch.arange(len(tokens), device=tokens.device)
        length = torch.bincount(document, minlength=documents)
        begins = (length.cumsum(0) - length)[document]
        follows = (
            (document[1:] == document[:-1]) & (part[1:] >= parts - 2) & (begins >= place - place % width)[:-1]
        )
        labels = torch.where(follows, tokens[1:], IGNORED)
        rows = len(labels) // width
        flat = (tokens, labels, document, place - begins)
        return Batch(*(each[: rows * width].view(rows, width).long() for each in flat))

    def pad(self, composed: Tensor) -> Batch:
        """One document a row, padded at the end: for measuring, where every token must count."""
        documents, parts = composed.shape
        tokens, of = self.pieces.flatten(composed.reshape(-1))
        document, part = of // parts, of % parts
        length = torch.bincount(document, minlength=documents)
        place = torch.arange(len(tokens), device=tokens.device) - (length.cumsum(0) - length)[document]
        shape = (documents, int(length.max()))
        table = torch.zeros(shape, dtype=torch.long, device=tokens.device)
        labels = torch.full(shape, IGNORED, device=tokens.device)
        table[document, place] = tokens.long()
        learned = part >= parts - 2
        labels[document[learned], place[learned] - 1] = tokens[learned].long()
        position = torch.arange(shape[1], device=tokens.device).expand(shape)
        return Batch(table, labels, torch.zeros_like(table), position)


def batches(
    documents: Documents,
    pool: Tensor,
    rows: int,
    width: int,
    generator: torch.Generator,
    *,
    chunk: int = 1 << 17,
) -> Iterator[Batch]:
    """Batches of `rows` rows for ever, the sentences of `pool` in a new order with new keywords each pass."""
    held: Batch | None = None
    while True:
        order = pool[torch.randperm(len(pool), generator=generator, device=pool.device)]
        for sentences in order.split(chunk):
            fresh = documents.stream(sentences, width, generator)
            held = fresh if held is None else _join(held, fresh)
            for at in range(0, len(held) - rows + 1, rows):
                yield held.rows(slice(at, at + rows))
            held = held.rows(slice(len(held) - len(held) % rows, None))


def read_documents(
    sentences: Sequence[Sentence], tokenizer: PreTrainedTokenizerBase, words: Words, device: torch.device
) -> Documents:
    """All pieces of the sentences, tokenised as this tokenizer reads prompts and texts."""
    texts = pa.array([each.text for each in sentences])
    concepts = sorted({word for each in sentences for word in each.words})
    found = find_candidates(texts, words.lemmas, words.names, concepts)
    number = {word: index for index, word in enumerate(found.words)}
    given = np.full((len(sentences), MOST_WORDS), -1, dtype=np.int64)
    for row, each in enumerate(sentences):
        if each.words:
            given[row, : len(each.words)] = [number[word] for word in each.words[:MOST_WORDS]]
    pieces = _join_pieces(
        [
            _ragged([[], *openings(tokenizer), encode(tokenizer, [" ="])[0], [tokenizer.eos_token_id]]),
            _tokenise(tokenizer, found.words),
            _tokenise(tokenizer, [f" {word}" for word in found.words]),
        ]
    ).to(device)
    pieces = _join_pieces([pieces, *_tokenise_sentences(tokenizer, texts, device)])
    tensors = (
        torch.from_numpy(array.astype(np.int64)).to(device) for array in (found.lemma, found.table, given)
    )
    return Documents(pieces, found.words, *tensors)


def openings(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """What stands before a text without a prompt, and before a prompt of keywords.

    The first is what `CausalModel.encode` makes of an empty prompt.
    """
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    bare = encode(tokenizer, ["dog"])[0]
    whole = list(tokenizer("dog")["input_ids"])
    return list(tokenizer("")["input_ids"]) or [first], whole[: len(whole) - len(bare)]


def encode(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Token ids without special ones, on all cores."""
    return [
        each.ids for each in tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    ]


def _tokenise(tokenizer: Any, texts: list[str]) -> Pieces:
    """Chunk by chunk: a tokenizer's own records of a million texts would be gigabytes."""
    parts = [_ragged(encode(tokenizer, texts[at : at + _CHUNK])) for at in range(0, len(texts), _CHUNK)]
    return _join_pieces(parts)


def _tokenise_sentences(tokenizer: Any, texts: pa.Array, device: torch.device) -> tuple[Pieces, Pieces]:
    """Every sentence by itself, and after a space.

    Byte-level tokenizers never join what a space parts, so each different word is tokenised once: seconds
    instead of a minute for millions of sentences. A few hundred sentences are checked against the tokenizer.
    """
    split = pc.split_pattern(texts, " ")
    words = pc.list_flatten(split).dictionary_encode()
    different = words.dictionary.to_pylist()
    table = _join_pieces(
        [_tokenise(tokenizer, different), _tokenise(tokenizer, [f" {word}" for word in different])]
    ).to(device)
    numbers = _to_device(words.indices, device) + len(different)
    sentence = _to_device(pc.list_parent_indices(split), device)
    begins = torch.ones_like(sentence, dtype=torch.bool)
    begins[1:] = sentence[1:] != sentence[:-1]
    bare = _assemble(table, torch.where(begins, numbers - len(different), numbers), sentence, len(texts))
    spaced = _assemble(table, numbers, sentence, len(texts))
    for at in range(0, len(texts), max(1, len(texts) // _CHECKED)):
        text = texts[at].as_py()
        _require_equal(bare.row(at), encode(tokenizer, [text])[0], text)
        _require_equal(spaced.row(at), encode(tokenizer, [f" {text}"])[0], text)
    return bare, spaced


def _to_device(numbers: pa.Array, device: torch.device) -> Tensor:
    return torch.from_numpy(numbers.to_numpy(zero_copy_only=False).astype(np.int64)).to(device)


def _assemble(table: Pieces, numbers: Tensor, sentence: Tensor, count: int) -> Pieces:
    """Rows made of the given pieces, each of which belongs to a sentence."""
    values, of = table.flatten(numbers)
    length = torch.bincount(sentence[of], minlength=count)
    return Pieces(values, length.cumsum(0) - length, length)


def _require_equal(pieces: list[int], whole: list[int], text: str) -> None:
    if pieces != whole:
        raise InputError(
            "a tokenizer that parts words at spaces",
            f"other tokens for {text!r} than for its words",
            "Use a byte-level teacher such as SmolLM2.",
        )


def _ragged(rows: list[list[int]]) -> Pieces:
    length = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    values = np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=int(length.sum()))
    return Pieces(*map(torch.from_numpy, (values, length.cumsum() - length, length)))


def _join_pieces(parts: list[Pieces]) -> Pieces:
    values = torch.cat([each.values for each in parts])
    length = torch.cat([each.length for each in parts])
    return Pieces(values, length.cumsum(0) - length, length)


def _join(one: Batch, other: Batch) -> Batch:
    """Rows under one another. Documents are numbered anew in each, but no row has documents of both."""
    return Batch(*(torch.cat(pair) for pair in zip(vars(one).values(), vars(other).values(), strict=True)))


def _shuffle(words: Tensor, generator: torch.Generator) -> Tensor:
    """Each row in a random order, −1 last."""
    keys = torch.rand(words.shape, generator=generator, device=words.device) + 2.0 * (words < 0)
    return words.gather(1, keys.argsort(dim=1))
