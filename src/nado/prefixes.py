"""What an oracle says of texts that are still being written: progress, and whether they may end here.

Training reads the same from labels on disk (`sample_labels.py`); both go through `Oracle.read_prefixes`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nado.errors import InputError, MismatchError
from nado.oracles.protocol import AllOf, AnyOf, Combination, Not, Oracle
from nado.storage import read_json

if TYPE_CHECKING:
    from nado.guide import Guide

_REMEMBERED = 2**16  # prefixes whose answers are kept


class PrefixAnswers(NamedTuple):
    """One row a prefix."""

    progress: Tensor  # int8 (B, bits), −1 where there is no such bit
    stops: Tensor  # bool (B,): would the oracle be satisfied if the text ended here?


class PrefixReader:
    """Asks an oracle about prefixes, each different one once.

    It holds no state of the rows: answers depend on condition and tokens alone, so rows may be reordered,
    repeated and dropped at will.
    """

    def __init__(
        self, oracle: Oracle, decode: Callable[[Sequence[Sequence[int]]], list[str]], bits: int = 0
    ) -> None:
        self.oracle, self.bits = oracle, bits
        self._decode = decode
        self._answers: dict[tuple[str, str], tuple[NDArray[np.bool_], bool]] = {}
        self.calls = 0  # prefixes the oracle was asked about

    def read(self, conditions: Sequence[str], tokens: Sequence[Sequence[int]]) -> PrefixAnswers:
        """Progress and stop labels of each prefix, on the CPU."""
        return self.answer(list(zip(conditions, self._decode(tokens), strict=True)))

    def answer(self, keys: Sequence[tuple[str, str]]) -> PrefixAnswers:
        """The same of prefixes that are texts already, each with its condition."""
        self._ask([key for key in dict.fromkeys(keys) if key not in self._answers])
        progress = np.full((len(keys), self.bits), -1, dtype=np.int8)
        stops = np.empty(len(keys), dtype=bool)
        for row, key in enumerate(keys):
            own, stops[row] = self._answers[key]
            if self.bits:
                progress[row, : len(own)] = own
        if len(self._answers) > _REMEMBERED:
            self._answers.clear()
        return PrefixAnswers(torch.from_numpy(progress), torch.from_numpy(stops))

    def _ask(self, fresh: list[tuple[str, str]]) -> None:
        if not fresh:
            return
        bits, stops = self.oracle.read_prefixes([key[0] for key in fresh], [key[1] for key in fresh])
        most = max((len(own) for own in bits), default=0)
        if self.bits and most > self.bits:
            raise InputError(
                f"conditions with at most {self.bits} bits of progress, as this guide was trained with",
                f"one with {most}",
                "Use fewer parts in a condition, or train a guide with more progress_bits.",
            )
        self.calls += len(fresh)
        for key, own, stop in zip(fresh, bits, stops.tolist(), strict=True):
            self._answers[key] = (own, stop)


class JointReader:
    """Asks for several guides at once: each is told the progress of its own oracle, one after the other.

    Whether a text may end is for `oracle`. Guides that are told the same share its answers.
    """

    def __init__(
        self,
        oracle: Oracle,
        told: Sequence[tuple[Oracle, int]],
        decode: Callable[[Sequence[Sequence[int]]], list[str]],
        *,
        ends: bool,
    ) -> None:
        """`told` are an oracle and a number of bits for each guide; `ends`: whether ends are asked for."""
        self.oracle, self._decode = oracle, decode
        self.seconds = 0.0  # spent on answers
        readers: dict[tuple[int, int], PrefixReader] = {}
        self._told: list[PrefixReader] = []
        for own, bits in told:
            if bits:
                self._told.append(readers.setdefault((id(own), bits), PrefixReader(own, decode, bits)))
        self.bits = sum(each.bits for each in self._told)
        of_oracle = [each for each in readers.values() if each.oracle is oracle]
        self._ends = next(iter(of_oracle), PrefixReader(oracle, decode)) if ends else None
        others = [] if self._ends is None or of_oracle else [self._ends]
        self._readers = [*readers.values(), *others]

    @property
    def calls(self) -> int:
        """Different prefixes that were asked about, of however many oracles: as many as of the busiest."""
        return max((each.calls for each in self._readers), default=0)

    def read(
        self,
        conditions: Sequence[str],
        tokens: Sequence[Sequence[int]],
        ending: Sequence[bool] | None = None,
    ) -> PrefixAnswers:
        """Progress, all guides' side by side, and stop labels of each prefix, on the CPU.

        `ending` says of which prefixes the end is asked for; the others may end. None is all.
        """
        began = time.perf_counter()
        keys = list(zip(conditions, self._decode(tokens), strict=True))
        told = {reader: reader.answer(keys) for reader in dict.fromkeys(self._told)}
        stops = torch.ones(len(keys), dtype=torch.bool)
        asked = [row for row in range(len(keys)) if ending is None or ending[row]]
        if self._ends in told:
            stops[asked] = told[self._ends].stops[asked]
        elif self._ends is not None and asked:
            stops[asked] = self._ends.answer([keys[row] for row in asked]).stops
        self.seconds += time.perf_counter() - began
        progress = [told[reader].progress for reader in self._told]
        nothing = torch.empty(len(keys), 0, dtype=torch.int8)
        return PrefixAnswers(torch.cat([nothing, *progress], dim=1), stops)


def told_by(guides: "Sequence[Guide]", oracle: Oracle) -> list[Oracle]:
    """Whose progress each guide of a formula is told: of the part of `oracle` it was trained for, or of all.

    A combination's progress is that of its members, one after the other, which is what a guide for all of it
    has learned to read; a guide for one of them has not.
    """
    inner = oracle
    while isinstance(inner, Not):  # whose progress is that of what it negates
        inner = inner.operand
    joined = isinstance(inner, Combination)
    if not joined and len(guides) == 1:
        return [oracle]
    # Parts are known by fingerprints, for which classifiers read their weights: only where guides are told.
    asking = [guide for guide in guides if guide.config.progress_bits or guide.config.named_parts]
    names = dict.fromkeys(guide.config.oracle_fingerprint for guide in asking)
    found = {name: find_part(oracle, name) for name in names}
    # One that names nothing may have been trained for all of an oracle that has no members.
    named = [guide for guide in asking if joined or guide.config.oracle_fingerprint]
    lost = [guide for guide in named if found[guide.config.oracle_fingerprint] is None]
    if lost and len(guides) > 1:
        _refuse(lost[0], oracle, joined=joined)
    told = [found.get(guide.config.oracle_fingerprint) if joined else None for guide in guides]
    return [oracle if part is None else part for part in told]


def _refuse(guide: "Guide", oracle: Oracle, *, joined: bool) -> None:
    name = guide.config.oracle_name
    raise MismatchError(
        f"guides trained for {'parts of ' if joined else ''}{oracle.name}, whose progress they are told",
        f"one trained for {name}" if name else "one that does not say what it was trained for",
        "Join the oracles they were trained for; a guide's own is its config's oracle_fingerprint.",
    )


def names_for(folder: str | Path, oracle: Oracle | None) -> Callable[[str], Sequence[str]] | None:
    """What names a condition's parts for the guide in `folder`: the part of `oracle` it was trained for."""
    if oracle is None:
        return None
    config = Path(folder) / "config.json"  # where there is none, whoever loads the guide says so
    own = read_json(config).get("oracle_fingerprint", "") if config.is_file() else ""
    part = find_part(oracle, own)
    return oracle.progress_names if part is None else part.progress_names


def find_part(oracle: Oracle, fingerprint: str) -> Oracle | None:
    """The part of an oracle, or all of it, that has this fingerprint; None where none has."""
    if not fingerprint:
        return None
    return next((part for part in _parts(oracle) if part.fingerprint == fingerprint), None)


def _parts(oracle: Oracle) -> Iterator[Oracle]:
    """An oracle and everything that it may have been made of."""
    yield oracle
    inner = oracle.members if isinstance(oracle, Combination) else ()
    inner = (oracle.operand,) if isinstance(oracle, Not) else inner
    for each in inner:
        yield from _parts(each)
    if isinstance(oracle, Combination):
        yield from _joined_before(oracle)


def _joined_before(oracle: Combination) -> Iterator[Oracle]:
    """Neighbours that may have been one: `(a & b) & c` is kept as `a & b & c`, `~(a | b)` as `~a & ~b`."""
    for first, last in combinations(range(len(oracle.members) + 1), 2):
        members = oracle.members[first:last]
        if len(members) > 1:
            yield type(oracle)(members)
            if isinstance(oracle, AllOf):
                yield AnyOf(tuple(~member for member in members))
