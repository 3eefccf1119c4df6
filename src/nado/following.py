"""Guides that go along with rows as they are written, one position at a time."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import DynamicCache

from nado.composition import Composable, Composition, combine, leaves
from nado.decomposition import close_at_limit
from nado.errors import InputError
from nado.exact import TabularState
from nado.guide import Conditions, Guide, Known, round_up
from nado.huggingface.shared import weights_digest
from nado.huggingface.slot_cache import SlotCache, stack_states
from nado.oracles.protocol import Oracle
from nado.prefixes import told_by

StateT = TypeVar("StateT")

_WIDTH_STEP = 16  # slots are this many columns wide, or a multiple


@dataclass(frozen=True)
class Standing:
    """Where the rows of a batch stand."""

    base: Any  # the base's own state
    log_p: Tensor  # (B, V)
    last_tokens: Tensor  # (B,), −1 before the first
    generated: Tensor  # (B,) tokens written
    progress: Tensor | None  # int8 (B, bits)


class Follower(Protocol[StateT]):
    """Gives log R where the rows stand. `log_r` is called once for every position, for all rows together."""

    @property
    def progress_bits(self) -> int:
        """How many bits of progress it wants to be told; 0 for none."""
        ...

    @property
    def fingerprint(self) -> str:
        """A digest of everything that R depends on."""
        ...

    def start(self, prompts: Sequence[str], conditions: Sequence[str]) -> StateT:
        """Fresh rows."""
        ...

    def select(self, state: StateT, rows: Tensor) -> StateT:
        """The given rows, in that order."""
        ...

    def refill(
        self, state: StateT, rows: Tensor, prompts: Sequence[str], conditions: Sequence[str]
    ) -> StateT:
        """Fresh rows in the given places."""
        ...

    def log_r(self, state: StateT, standing: Standing) -> Tensor:
        """log R(prefix ⊕ v): (B, V)."""
        ...

    def rewind(self, state: StateT) -> None:
        """Forget the last position, which `log_r` will be called for again."""
        ...


@dataclass
class _Rows:
    """One guide's rows: what it knows of their conditions, and its keys and values where it has any."""

    known: Known
    slots: SlotCache | None


class GuideFollower:
    """A guide, or a formula over guides, as a follower."""

    def __init__(self, formula: Composable, oracle: Oracle | None = None, *, rounding: int = 1) -> None:
        """Conditions are padded to multiples of `rounding` tokens: their tensors then have few shapes."""
        self.formula, self.guides, self._rounding = formula, leaves(formula), rounding
        # Each guide is told the progress of its own oracle.
        self.oracles: Sequence[Oracle | None] = [None] * len(self.guides)
        if oracle is not None:
            self.oracles = told_by(self.guides, oracle)
        for guide in self.guides:
            if guide.reader is None:
                raise InputError(
                    "a guide attached to its base", "one that is not", "Call guide.attach(reader) first."
                )
            guide.eval()  # type: ignore[no-untyped-call]

    @property
    def progress_bits(self) -> int:
        """Those of all guides, side by side."""
        return sum(self._bits)

    @property
    def told(self) -> list[tuple[Oracle, int]]:
        """The oracle of each guide, and how many bits of its progress the guide is told."""
        pairs = zip(self.oracles, self._bits, strict=True)
        return [(own, bits) for own, bits in pairs if own is not None]

    @property
    def _bits(self) -> list[int]:
        return [int(guide.config.progress_bits) for guide in self.guides]

    @property
    def fingerprint(self) -> str:
        """A digest of the guides' weights and of how they are joined."""
        parts = [weights_digest(guide) + json.dumps(guide.config.identity()) for guide in self.guides]
        return hashlib.sha256((_shape(self.formula) + "".join(parts)).encode()).hexdigest()[:32]

    @torch.no_grad()
    def start(self, prompts: Sequence[str], conditions: Sequence[str]) -> list[_Rows]:
        """Read the conditions."""
        rows = []
        for number, guide in enumerate(self.guides):
            known, keys, lengths = self._read(number, conditions)
            slots = None
            if keys is not None:
                slots = SlotCache.empty(keys, len(conditions), self._width(guide, known))
                everyone = torch.arange(len(conditions), device=lengths.device)
                slots.insert(everyone, keys, everyone, lengths)
            rows.append(_Rows(known, slots))
        return rows

    def select(self, state: list[_Rows], rows: Tensor) -> list[_Rows]:
        """The given rows, in that order."""
        return [
            _Rows(each.known.rows(rows), None if each.slots is None else each.slots.select(rows))
            for each in state
        ]

    @torch.no_grad()
    def refill(
        self, state: list[_Rows], rows: Tensor, prompts: Sequence[str], conditions: Sequence[str]
    ) -> list[_Rows]:
        """Read new conditions into the given rows."""
        filled = []
        for number, (guide, each) in enumerate(zip(self.guides, state, strict=True)):
            known, keys, lengths = self._read(number, conditions)
            slots = each.slots
            if slots is not None:
                assert keys is not None
                if self._width(guide, known) > slots.width:
                    slots = slots.widen(self._width(guide, known))
                slots.insert(rows, keys, torch.arange(len(rows), device=rows.device), lengths)
            filled.append(_Rows(each.known.put(rows, known), slots))
        return filled

    @torch.no_grad()
    def log_r(self, state: list[_Rows], standing: Standing) -> Tensor:
        """log R of the formula."""
        first, parts = 0, []
        for guide, each, bits in zip(self.guides, state, self._bits, strict=True):
            progress = None
            if bits:
                assert standing.progress is not None
                progress = standing.progress[:, None, first : first + bits]
            first += bits
            parts.append(self._follow(guide, each, standing, progress))
        log_r = combine(self.formula, parts)
        config = self.guides[0].config
        if config.completion == "limit" or not isinstance(self.formula, Composition):
            return log_r  # a guide closes its own
        return close_at_limit(log_r, config.eos_id, standing.generated == config.length_limit - 1)

    def rewind(self, state: list[_Rows]) -> None:
        """Step each cache back; the same keys will be written again."""
        for each in state:
            if each.slots is not None:
                each.slots.lengths.sub_(1)

    def _read(self, number: int, conditions: Sequence[str]) -> tuple[Known, Tensor | None, Tensor]:
        """What a guide knows of conditions, their keys and values, and their lengths."""
        guide, own, names = self.guides[number], self.oracles[number], None
        assert guide.reader is not None
        if guide.config.named_parts and own is not None:
            names = own.progress_names
        encoded = Conditions.encode(guide.reader, conditions, names)
        if self._rounding > 1:
            encoded = encoded.rounded(self._rounding, guide.config.progress_bits)
        known = guide.know(encoded)
        lengths = known.mask.sum(dim=-1)
        if not guide.attentive:
            return known, None, lengths
        cache = DynamicCache()
        guide.read_conditions(known, cache)
        return known, stack_states(cache), lengths

    def _width(self, guide: Guide, known: Known) -> int:
        # One column to spare: where a row is held back at its last position it could not be rewound.
        needed = known.mask.shape[1] + guide.config.length_limit + 1
        return round_up(int(needed), _WIDTH_STEP)

    def _follow(self, guide: Guide, rows: _Rows, standing: Standing, progress: Tensor | None) -> Tensor:
        assert guide.reader is not None
        states = None if guide.config.reads == "tokens" else guide.reader.current(standing.base)[:, None]
        left = (guide.config.length_limit - standing.generated).clamp(min=0)[:, None]
        text = guide.text_inputs(rows.known, states, standing.last_tokens[:, None], left, progress)
        if rows.slots is None:
            features = guide.follow(rows.known, text)
        else:
            slots = rows.slots
            features = guide.follow(rows.known, text, slots.mask(), slots.lengths[:, None], slots.cache)
            slots.advance()
        return guide.log_r(guide.scores(features[:, 0]), standing.log_p, standing.generated)


@dataclass
class TabularFollower:
    """A table of log R for each (prompt, condition) of a tabular model: (N, V) each."""

    tables: Mapping[tuple[str, str], Tensor]

    progress_bits = 0

    def __post_init__(self) -> None:
        self._number = {key: number for number, key in enumerate(self.tables)}
        self._stacked = torch.stack(list(self.tables.values()))  # (K, N, V)

    @property
    def fingerprint(self) -> str:
        """A digest of the tables."""
        digest = hashlib.sha256(str(list(self._number)).encode())
        digest.update(self._stacked.numpy().tobytes())
        return digest.hexdigest()[:32]

    def start(self, prompts: Sequence[str], conditions: Sequence[str]) -> Tensor:
        """Each row's table."""
        return torch.tensor([self._number[pair] for pair in zip(prompts, conditions, strict=True)])

    def select(self, state: Tensor, rows: Tensor) -> Tensor:
        """The given rows, in that order."""
        return state[rows]

    def refill(
        self, state: Tensor, rows: Tensor, prompts: Sequence[str], conditions: Sequence[str]
    ) -> Tensor:
        """Other tables in the given rows."""
        return state.index_copy(0, rows, self.start(prompts, conditions))

    def log_r(self, state: Tensor, standing: Standing) -> Tensor:
        """The row of the table where each row stands; any row once it has ended."""
        assert isinstance(standing.base, TabularState)
        prefix = standing.base.prefix
        return self._stacked[state, torch.where(prefix < self._stacked.shape[1], prefix, 0)]

    def rewind(self, state: Tensor) -> None:
        """Nothing to forget."""


def _shape(formula: Composable) -> str:
    """The formula with its guides left out."""
    if not isinstance(formula, Composition):
        return "g"
    return f"({formula.operator} {' '.join(_shape(member) for member in formula.members)})"
