"""The keywords of an oracle as token sequences: what a decoder has to write for each of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nado.baselines.method import SHARED, Provisions
from nado.huggingface import CausalModel, EncoderDecoderModel
from nado.oracles.keywords import Keywords
from nado.oracles.protocol import AllOf, Oracle

Sequences = frozenset[tuple[int, ...]]


@dataclass(frozen=True)
class Forms:
    """Every way to write one keyword, in tokens: behind other words, and as the first word of a text."""

    inside: Sequences
    first: Sequences

    def nexts(self, written: Sequence[int]) -> dict[int, float]:
        """Tokens that begin the keyword or go on with it here, each with the share that is then written."""
        found: dict[int, float] = {}
        for sequence in self.first if not written else self.inside:
            found[sequence[0]] = max(found.get(sequence[0], 0.0), 1 / len(sequence))
        for sequence in self.inside | self.first:
            for done in range(1, min(len(sequence), len(written) + 1)):
                anchored = sequence in self.inside or done == len(written)
                if anchored and tuple(written[-done:]) == sequence[:done]:
                    share = (done + 1) / len(sequence)
                    found[sequence[done]] = max(found.get(sequence[done], 0.0), share)
        return found


class KeywordForms:
    """The forms of the keywords of conditions, remembered."""

    def __init__(self, base: Any, oracle: Keywords) -> None:
        self.oracle = oracle
        self._base = base
        self._known: dict[str, Forms] = {}

    def of(self, condition: str) -> list[Forms]:
        """One `Forms` for each keyword, in the order of the oracle's bits of progress."""
        return [self._forms(word) for word in self.oracle.keywords_of(condition)]

    def _forms(self, keyword: str) -> Forms:
        if keyword not in self._known:
            # A phrase has no list of forms: it is looked for by a pattern, and written as it stands.
            forms = sorted(self.oracle._key(keyword).words) or [keyword]
            capital = [form[:1].upper() + form[1:] for form in forms]
            inside = self._encode([f" {form}" for form in forms])
            self._known[keyword] = Forms(inside, self._encode([*forms, *capital, *(f" {f}" for f in forms)]))
        return self._known[keyword]

    def _encode(self, texts: list[str]) -> Sequences:
        unknown = self._base.tokenizer.unk_token_id
        rows = (tuple(row) for row in self._base.encode_texts(texts))
        return frozenset(row for row in rows if row and unknown not in row)


def find_keywords(oracle: Oracle) -> Keywords | None:
    """The part of an oracle that asks for keywords, if it has one."""
    if isinstance(oracle, Keywords):
        return oracle
    members = oracle.members if isinstance(oracle, AllOf) else ()
    return next((member for member in members if isinstance(member, Keywords)), None)


def no_keywords(given: Provisions) -> str | None:
    """Why keywords cannot be written token by token here."""
    if find_keywords(given.oracle) is None:
        return f"the oracle {given.oracle.name} asks for no keywords"
    if not isinstance(given.base, CausalModel | EncoderDecoderModel):
        return f"{type(given.base).__name__} has no tokenizer for keywords"
    return None


def keyword_forms(given: Provisions) -> KeywordForms:
    """The oracle's keywords in the base's tokens."""
    keywords = find_keywords(given.oracle)
    assert keywords is not None
    return given.remember(f"{SHARED}keyword forms", lambda: KeywordForms(given.base, keywords))
