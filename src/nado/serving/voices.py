"""q with settings of its own for every row: different strengths and target rates in one forward pass.

`GuidedLanguageModel` has one guidance for all rows. Here each row has a `Voice`. Everything is computed for
the whole batch whoever is in it: tensors never change their shape, and so a row's numbers, on a CPU, do not
depend on the company it is in.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from nado.composition import Composition
from nado.decomposition import (
    SoftCoefficients,
    apply_strength,
    conjoin,
    doubted_log_r,
    expected_log_r,
    log_one_minus,
    soft_coefficients,
    soft_log_r,
)
from nado.errors import InfeasibleError, NadoError, OracleError
from nado.following import GuideFollower, Standing
from nado.guidance import Guidance, GuidedStep, guide_step
from nado.guide import Guide, Known
from nado.guided_language_model import GuidedLanguageModel, GuidedState
from nado.huggingface.slot_cache import SlotCache
from nado.language_model import LanguageModel
from nado.oracles.protocol import AllOf, Oracle
from nado.prefixes import JointReader, PrefixAnswers, told_by

ROUNDING = 8  # prompts and conditions are padded to multiples of so many tokens: few shapes, read together


@dataclass(frozen=True)
class Member:
    """A guide that is served, with the oracle it was trained for, or a stricter one."""

    name: str
    guide: Guide
    oracle: Oracle | None

    @property
    def bits(self) -> int:
        """Bits of progress it wants to be told."""
        return int(self.guide.config.progress_bits)

    @cached_property
    def told(self) -> Oracle | None:
        """Whose progress that is: of the part of the oracle that the guide was trained for."""
        return None if self.oracle is None else told_by([self.guide], self.oracle)[0]


_ROWS = ("strengths", "rates", "exact", "doubts", "plausibles")  # of a voiced state, a row each


@dataclass(frozen=True)
class Voice:
    """How the guides are applied to one row."""

    strengths: tuple[float, ...] = ()  # of each guide, in the members' order
    target_rate: float = 1.0
    exact_end: bool = False
    doubt: float = 0.0  # of each guide
    plausible: float = 0.0

    def __post_init__(self) -> None:
        for strength in self.strengths:  # the same rules, in the same words, as everywhere
            Guidance(
                strength,
                self.target_rate,
                exact_end=self.exact_end,
                doubt=self.doubt,
                plausible=self.plausible,
            )


@dataclass(eq=False)
class VoicedState(GuidedState):
    """Rows of a voiced model, and the voice of each."""

    strengths: Tensor = field(default_factory=lambda: torch.ones(0, 0))  # (B, K)
    rates: Tensor = field(default_factory=lambda: torch.ones(0))  # (B,)
    exact: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))  # (B,)
    doubts: Tensor = field(default_factory=lambda: torch.zeros(0))  # (B,)
    plausibles: Tensor = field(default_factory=lambda: torch.zeros(0))  # (B,)
    doubting: bool = False  # whether any row ever had a doubt: known without asking a GPU
    choosing: bool = False  # whether any row ever was to write plausible tokens alone
    failures: dict[int, Exception] = field(default_factory=dict)  # rows that cannot go on, and why
    log_r: Tensor | None = None  # (B, V) of all guides, before strength, doubt and rate; made with `now`

    def forget(self) -> None:
        """Drop what was made for this position."""
        super().forget()
        self.log_r = None

    def speak(self, rows: Tensor, voices: Sequence[Voice]) -> None:
        """Give rows their voices."""
        device = self.rates.device
        for row, voice in zip(rows.tolist(), voices, strict=True):
            self.strengths[row] = torch.tensor(voice.strengths, device=device)
            self.failures.pop(row, None)
        self.rates[rows] = torch.tensor([voice.target_rate for voice in voices], device=device)
        self.exact[rows] = torch.tensor([voice.exact_end for voice in voices], device=device)
        self.doubts[rows] = torch.tensor([voice.doubt for voice in voices], device=device)
        self.plausibles[rows] = torch.tensor([voice.plausible for voice in voices], device=device)
        self.doubting = self.doubting or any(voice.doubt for voice in voices)
        self.choosing = self.choosing or any(voice.plausible for voice in voices)


class JointFollower:
    """Several guides going along with the same rows, each told the progress of its own oracle."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = list(members)
        self.followers = [GuideFollower(each.guide, each.oracle, rounding=ROUNDING) for each in members]

    @property
    def progress_bits(self) -> int:
        """Those of all guides, side by side."""
        return sum(each.bits for each in self.members)

    @property
    def fingerprint(self) -> str:
        """A digest of all guides."""
        joined = " ".join(each.fingerprint for each in self.followers)
        return hashlib.sha256(joined.encode()).hexdigest()[:32]

    def start(self, prompts: Sequence[str], conditions: Sequence[str]) -> list[Any]:
        """Each guide's rows."""
        return [each.start(prompts, conditions) for each in self.followers]

    def select(self, state: list[Any], rows: Tensor) -> list[Any]:
        """The given rows, in that order."""
        return [each.select(own, rows) for each, own in self._pairs(state)]

    def refill(
        self, state: list[Any], rows: Tensor, prompts: Sequence[str], conditions: Sequence[str]
    ) -> list[Any]:
        """Fresh rows in the given places."""
        return [each.refill(own, rows, prompts, conditions) for each, own in self._pairs(state)]

    def rewind(self, state: list[Any]) -> None:
        """Forget the last position."""
        for each, own in self._pairs(state):
            each.rewind(own)

    def log_r(self, state: list[Any], standing: Standing) -> Tensor:
        """log R of all guides together."""
        return join_parts(self.log_parts(state, standing), standing.log_p)

    def log_parts(self, state: list[Any], standing: Standing) -> list[Tensor]:
        """log R of each guide: (B, V) each."""
        parts, first = [], 0
        for member, (each, own) in zip(self.members, self._pairs(state), strict=True):
            progress = None
            if standing.progress is not None:
                progress = standing.progress[:, first : first + member.bits]
            first += member.bits
            parts.append(each.log_r(own, dataclasses.replace(standing, progress=progress)))
        return parts

    def widen(self, state: list[Any], condition_tokens: int) -> None:
        """Make room for the longest condition now: a tensor that grows later would change every row."""
        for member, (each, own) in zip(self.members, self._pairs(state), strict=True):
            for rows in own:
                rows.known = _widen(rows.known, condition_tokens, member.bits)
                if isinstance(rows.slots, SlotCache):
                    rows.slots = rows.slots.widen(each._width(member.guide, rows.known))

    def _pairs(self, state: list[Any]) -> Iterator[tuple[GuideFollower, Any]]:
        return zip(self.followers, state, strict=True)


class VoicedModel(GuidedLanguageModel):
    """A base with any number of guides, none of them included, and a voice for every row."""

    def __init__(self, base: LanguageModel[Any], members: Sequence[Member]) -> None:
        if len(members) > 1:
            Composition("&", tuple(each.guide for each in members))  # refuses guides that do not go together
        self.members = tuple(members)
        self.joint = JointFollower(members)
        super().__init__(base, self.joint, oracle=join_oracles(members))
        self._readers = [
            None
            if each.oracle is None or each.told is None
            else JointReader(each.oracle, [(each.told, each.bits)], base.decode, ends=True)
            for each in members
        ]

    def start(
        self,
        prompts: Sequence[str],
        conditions: Sequence[str] | None = None,
        voices: Sequence[Voice] | None = None,
    ) -> VoicedState:
        """The state before the first token of each row; without a voice guides have strength 1."""
        plain = super().start(prompts, conditions)
        count, device = len(prompts), self.device
        state = VoicedState(
            **vars(plain),
            strengths=torch.ones(count, len(self.members), device=device),
            rates=torch.ones(count, device=device),
            exact=torch.zeros(count, dtype=torch.bool, device=device),
            doubts=torch.zeros(count, device=device),
            plausibles=torch.zeros(count, device=device),
        )
        state.soft = torch.zeros(count, 2, device=device)
        if voices is not None:
            state.speak(torch.arange(count), voices)
        return state

    def select(self, state: GuidedState, rows: Tensor) -> VoicedState:
        """The given rows, in that order."""
        assert isinstance(state, VoicedState)
        own: dict[str, Any] = {name: getattr(state, name)[rows] for name in _ROWS}
        own["log_r"] = None if state.log_r is None else state.log_r[rows]
        failures = {
            new: state.failures[old] for new, old in enumerate(rows.tolist()) if old in state.failures
        }
        kept = {**own, "doubting": state.doubting, "choosing": state.choosing, "failures": failures}
        return VoicedState(**vars(super().select(state, rows)), **kept)

    def refill(
        self,
        state: GuidedState,
        rows: Tensor,
        prompts: Sequence[str],
        conditions: Sequence[str] | None = None,
        voices: Sequence[Voice] | None = None,
    ) -> GuidedState:
        """Start `prompts` in `rows`; the other rows go on where they are."""
        assert isinstance(state, VoicedState)
        state = super().refill(state, rows, prompts, conditions)
        assert isinstance(state, VoicedState)
        state.speak(rows, voices or [Voice((1.0,) * len(self.members))] * len(rows))
        return state

    @torch.no_grad()
    def settle(self, state: GuidedState) -> None:
        """Make the distribution where the rows stand, each in its own voice."""
        assert isinstance(state, VoicedState)
        log_p = state.base.log_p
        progress, stops = self._ask(state)
        last = state.tokens.gather(1, (state.generated - 1).clamp(0, self.length_limit - 1)[:, None])[:, 0]
        last = torch.where(state.generated > 0, last, -1)
        standing = Standing(state.base, log_p, last, state.generated, progress)
        log_parts = self.joint.log_parts(state.followed, standing)
        state.log_r = join_parts(log_parts, log_p)
        factor = self._factor(state, log_parts, log_p)
        state.now = self._guide(state, log_p, factor, stops)
        state.base_log_p = log_p

    def _factor(self, state: VoicedState, log_parts: list[Tensor], log_p: Tensor) -> Tensor:
        """What is multiplied into p: R itself, doubted, to a power, or αR + β(1 − R)."""
        assert state.log_r is not None
        factor = state.log_r
        if state.doubting:
            log_parts = [doubted_log_r(part, state.doubts) for part in log_parts]
            factor = join_parts(log_parts, log_p)
        other = (state.strengths != 1).any(dim=1)  # (B,)
        if bool((other & ~state.done).any()):
            powers = [apply_strength(part, state.strengths[:, k]) for k, part in enumerate(log_parts)]
            factor = torch.where(other[:, None], torch.stack(powers).sum(dim=0), factor)
        soft = (state.rates < 1) & ~state.done
        if bool(soft.any()):
            self._begin_soft(state, log_p, soft)
            assert state.soft is not None
            coefficients = SoftCoefficients(state.soft[:, 0], state.soft[:, 1])
            factor = torch.where(soft[:, None], soft_log_r(state.log_r, coefficients), factor)
        return factor

    def _begin_soft(self, state: VoicedState, log_p: Tensor, soft: Tensor) -> None:
        """Coefficients of rows at their first token; a rate out of reach is a failure of that row alone."""
        fresh = soft & (state.generated == 0)
        if not bool(fresh.any()):
            return
        assert state.log_r is not None
        assert state.soft is not None
        hit = expected_log_r(log_p, state.log_r)  # (B,)
        miss = expected_log_r(log_p, log_one_minus(state.log_r))
        for row in fresh.nonzero().flatten().tolist():
            one = slice(row, row + 1)
            try:
                made = soft_coefficients(hit[one], miss[one], state.rates[one])
            except InfeasibleError as error:
                state.failures[row] = error
                made = SoftCoefficients(torch.zeros(1), torch.zeros(1))  # p itself, until the row is gone
            state.soft[row] = torch.stack(made, dim=1)[0].to(state.soft)

    def _guide(self, state: VoicedState, log_p: Tensor, factor: Tensor, stops: Tensor | None) -> GuidedStep:
        if not self.members:
            return GuidedStep(log_p, torch.zeros_like(log_p[:, 0]), factor)
        ends = state.exact & ~state.done
        shares = state.plausibles if state.choosing else None
        if stops is None or not bool(ends.any()):
            return guide_step(log_p, factor, Guidance(), plausible=shares)
        exactly = Guidance(exact_end=True)
        return guide_step(
            log_p, factor, exactly, stops=stops, eos_id=self.eos_id, exact=ends, plausible=shares
        )

    def _ask(self, state: GuidedState) -> tuple[Tensor | None, Tensor | None]:
        """The guides' progress side by side (B, bits), and whether all oracles in use let a text end (B,)."""
        assert isinstance(state, VoicedState)
        live = ~state.done
        ends = live & state.exact
        if not (self.joint.progress_bits or bool(ends.any())):
            return None, None
        progress, stops = [], torch.ones(len(live), dtype=torch.bool)
        for place, (member, reader) in enumerate(zip(self.members, self._readers, strict=True)):
            told = torch.full((len(live), member.bits), -1, dtype=torch.int8)
            used = ends & (state.strengths[:, place] > 0)
            asked = (live if member.bits else used).nonzero().flatten().tolist()
            if reader is not None and asked:
                answers = self._read(reader, state, asked, used[asked].tolist())
                told[asked] = answers.progress
                stops[asked] &= answers.stops
            progress.append(told)
        joined = torch.cat(progress, dim=1).to(self.device) if self.joint.progress_bits else None
        return joined, stops.to(self.device)

    def _read(
        self, reader: JointReader, state: VoicedState, rows: list[int], ending: list[bool]
    ) -> PrefixAnswers:
        """What an oracle says of rows. Where it fails, row by row: one text must not spoil the others."""
        written, lengths = state.tokens[rows].tolist(), state.generated[rows].tolist()
        prefixes = [tokens[:length] for tokens, length in zip(written, lengths, strict=True)]
        conditions = [state.conditions[row] for row in rows]
        try:
            return reader.read(conditions, prefixes, ending)
        except Exception:
            found = []
            for row, condition, prefix, ends in zip(rows, conditions, prefixes, ending, strict=True):
                try:
                    found.append(reader.read([condition], [prefix], [ends]))
                except Exception as error:
                    state.failures[row] = as_oracle_error(reader.oracle, error)
                    nothing = torch.full((1, reader.bits), -1, dtype=torch.int8)
                    found.append(PrefixAnswers(nothing, torch.ones(1, dtype=torch.bool)))
            return PrefixAnswers(*(torch.cat(columns) for columns in zip(*found, strict=True)))


def join_parts(log_parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """log R of several guides together: of one its own, of none 1."""
    if not log_parts:
        return torch.zeros_like(like)
    return log_parts[0] if len(log_parts) == 1 else conjoin(log_parts)


def join_oracles(members: Sequence[Member]) -> Oracle | None:
    """What texts of these guides are to satisfy; None where one of them has no oracle, or there are none."""
    oracles = [each.oracle for each in members]
    known = [each for each in oracles if each is not None]
    if not known or len(known) < len(oracles):
        return None
    return known[0] if len(known) == 1 else AllOf(tuple(known))


def as_oracle_error(oracle: Oracle, error: Exception) -> NadoError:
    """Whatever an oracle raised, as an error that says who raised it."""
    if isinstance(error, NadoError):
        return error
    return OracleError(
        f"an answer from the oracle {oracle.name}", f"a {type(error).__name__}", "Look at the server's log."
    )


def _widen(known: Known, width: int, parts: int) -> Known:
    """The same with room for conditions of `width` tokens and that many parts."""
    size = known.inputs.shape[-1]
    nobody = torch.zeros(0, dtype=torch.long, device=known.mask.device)
    shapes = [known.inputs.new_zeros(0, width, size), known.mask.new_zeros(0, width)]
    if known.missing is not None and known.settled is not None:
        shapes += [each.new_zeros(0, parts, size) for each in (known.missing, known.settled)]
    return known.put(nobody, Known(*shapes))
