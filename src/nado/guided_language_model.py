"""A guided model as a language model: q behind the protocol that p is behind.

So proposals, exact sampling, evaluation and serving step it as they step any other. transformers' `generate`
has its own wrapper, `GuidedModel` in `guided.py`.

A guide looks at each position once, for all rows together, when the distribution there is first asked for:
between a step and that moment rows may still be refilled, dropped and reordered.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from nado.composition import Composable
from nado.decomposition import SoftCoefficients
from nado.errors import InputError, MismatchError
from nado.following import Follower, GuideFollower, Standing
from nado.guidance import Guidance, GuidedStep, begin_soft, chance, guide_step, require_scale
from nado.language_model import (
    Completion,
    LanguageModel,
    OverBase,
    Preparing,
    Refillable,
    is_refillable,
)
from nado.oracles.protocol import Oracle
from nado.prefixes import JointReader


@dataclass(eq=False)
class GuidedState:
    """Rows of a guided model: the base's rows, and what the guide needs beside them."""

    owner: "GuidedLanguageModel"
    base: Any
    followed: Any
    conditions: list[str]
    tokens: Tensor  # (B, L) what has been written
    generated: Tensor  # (B,) how much
    done: Tensor  # bool (B,)
    soft: Tensor | None  # (B, 2) log α and log β of each row
    now: GuidedStep | None = None  # made when it is first asked for
    base_log_p: Tensor | None = None  # (B, V), made with it
    log_chance: Tensor | None = None  # (B,) how likely success still is, made with it where there is a floor

    @property
    def log_p(self) -> Tensor:
        """log q of the next token: (B, V)."""
        return self.step.log_q

    @property
    def step(self) -> GuidedStep:
        """q here, with its normaliser S and the factor that was multiplied into p."""
        if self.now is None:
            self.owner.settle(self)
        assert self.now is not None
        return self.now

    @property
    def log_p_base(self) -> Tensor:
        """log p of the next token: (B, V)."""
        assert self.step is not None
        assert self.base_log_p is not None
        return self.base_log_p

    def forget(self) -> None:
        """Drop what was made for this position: the rows are about to stand elsewhere."""
        self.now = self.base_log_p = self.log_chance = None


class GuidedLanguageModel(OverBase):
    """q ∝ p·R for a base and a guide, a formula over guides, or any other `Follower`.

    `oracle` is needed where the guide was trained with its progress, and for an exact end.
    """

    def __init__(
        self,
        base: LanguageModel[Any],
        guide: Composable | Follower[Any],
        *,
        guidance: Guidance | None = None,
        oracle: Oracle | None = None,
    ) -> None:
        self.base = base
        self.guidance = guidance if guidance is not None else Guidance()
        self.follower = GuideFollower(guide, oracle) if isinstance(guide, Composable) else guide
        if isinstance(self.follower, GuideFollower):
            _require_base(self.follower, base)
            require_scale(self.guidance, self.follower.guides)
        self.oracle = oracle
        bits = self.follower.progress_bits
        self._asks = self.guidance.exact_end or bits > 0
        _require_oracle(self.guidance, oracle, bits, base.completion)
        self.prefixes = None
        if oracle is not None:
            told = self.follower.told if isinstance(self.follower, GuideFollower) else [(oracle, bits)]
            self.prefixes = JointReader(oracle, told, base.decode, ends=self.guidance.exact_end)

    @property
    def refillable(self) -> bool:
        """Whether the base's rows can be replaced while others go on."""
        return is_refillable(self.base)

    @property
    def fingerprint(self) -> str:
        """A digest of base, guide, guidance and oracle."""
        parts = [self.base.fingerprint, self.follower.fingerprint, str(dataclasses.astuple(self.guidance))]
        if self.oracle is not None:
            parts.append(self.oracle.fingerprint)
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:32]

    def prepare(self, prompts: Sequence[str]) -> int:
        """Let the base read prompts ahead, if it can."""
        if callable(getattr(self.base, "prepare", None)):
            return cast(Preparing[Any], self.base).prepare(prompts)
        return 0

    @torch.no_grad()
    def start(self, prompts: Sequence[str], conditions: Sequence[str] | None = None) -> GuidedState:
        """The state before the first token of each row."""
        conditions = list(prompts if conditions is None else conditions)
        count, device = len(prompts), self.device
        return GuidedState(
            owner=self,
            base=self.base.start(prompts, conditions),
            followed=self.follower.start(prompts, conditions),
            conditions=conditions,
            tokens=torch.full((count, self.length_limit), self.eos_id, device=device),
            generated=torch.zeros(count, dtype=torch.long, device=device),
            done=torch.zeros(count, dtype=torch.bool, device=device),
            soft=torch.zeros(count, 2, device=device) if self.guidance.soft else None,
        )

    @torch.no_grad()
    def step(self, state: GuidedState, tokens: Tensor) -> GuidedState:
        """Append one token to every row."""
        if state.now is None:
            self.settle(state)  # the guide must see every position
        inside = state.generated < self.length_limit
        place = state.generated.clamp(max=self.length_limit - 1)[:, None]
        kept = torch.where(inside[:, None], tokens[:, None], state.tokens.gather(1, place))
        state.tokens.scatter_(1, place, kept)
        state.generated = state.generated + 1
        state.done = state.done | (tokens == self.eos_id) | (state.generated >= self.length_limit)
        state.base = self.base.step(state.base, tokens)
        state.forget()
        return state

    @torch.no_grad()
    def select(self, state: GuidedState, rows: Tensor) -> GuidedState:
        """The given rows, in that order."""
        now = None if state.now is None else GuidedStep(*(value[rows] for value in state.now))
        return GuidedState(
            owner=self,
            base=self.base.select(state.base, rows),
            followed=self.follower.select(state.followed, rows),
            conditions=[state.conditions[row] for row in rows.tolist()],
            tokens=state.tokens[rows],
            generated=state.generated[rows],
            done=state.done[rows],
            soft=None if state.soft is None else state.soft[rows],
            now=now,
            base_log_p=None if state.base_log_p is None else state.base_log_p[rows],
            log_chance=None if state.log_chance is None else state.log_chance[rows],
        )

    @torch.no_grad()
    def refill(
        self,
        state: GuidedState,
        rows: Tensor,
        prompts: Sequence[str],
        conditions: Sequence[str] | None = None,
    ) -> GuidedState:
        """Start `prompts` in `rows`; the other rows go on where they are."""
        if state.now is not None:  # looked at before they were refilled: all rows are looked at again
            self.follower.rewind(state.followed)
            state.forget()
        conditions = list(prompts if conditions is None else conditions)
        state.base = cast(Refillable[Any], self.base).refill(state.base, rows, prompts, conditions)
        state.followed = self.follower.refill(state.followed, rows, prompts, conditions)
        for row, condition in zip(rows.tolist(), conditions, strict=True):
            state.conditions[row] = condition
        state.generated[rows] = 0
        state.done[rows] = False
        return state

    def score(
        self, prompts: Sequence[str], tokens: Tensor, lengths: Tensor, conditions: Sequence[str] | None = None
    ) -> Tensor:
        """Teacher-forced log q of each token, float32 (B, T), 0 from `lengths` on."""
        return self.trace(prompts, tokens, lengths, conditions).log_q

    @torch.no_grad()
    def trace(
        self, prompts: Sequence[str], tokens: Tensor, lengths: Tensor, conditions: Sequence[str] | None = None
    ) -> "Trace":
        """What guided decoding looks like along given texts, position by position."""
        tokens, lengths = tokens.to(self.device), lengths.to(self.device)
        state = self.start(prompts, conditions)
        columns = []
        for position in range(tokens.shape[1]):
            inside = position < lengths
            token = torch.where(inside, tokens[:, position], self.eos_id)
            found = _look(state, token)
            columns.append([torch.where(inside, value, 0) for value in found])
            state = self.step(state, token)
        return Trace(*(torch.stack(column, dim=1) for column in zip(*columns, strict=True)))

    def trace_rows(
        self, prompts: Sequence[str], rows: Sequence[Sequence[int]], conditions: Sequence[str] | None = None
    ) -> "Trace":
        """`trace` of texts of different length, given as rows of tokens."""
        lengths = torch.tensor([len(row) for row in rows])
        padded = torch.full((len(rows), max([1, *(len(row) for row in rows)])), self.eos_id)
        for at, row in enumerate(rows):
            padded[at, : len(row)] = torch.as_tensor(row, dtype=torch.long)
        return self.trace(prompts, padded, lengths, conditions)

    def decode(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """The base's."""
        return self.base.decode(tokens)

    @torch.no_grad()
    def settle(self, state: GuidedState) -> None:
        """Make the distribution where the rows stand."""
        log_p = state.base.log_p
        progress, stops = self._ask(state)
        last = state.tokens.gather(1, (state.generated - 1).clamp(0, self.length_limit - 1)[:, None])[:, 0]
        last = torch.where(state.generated > 0, last, -1)
        standing = Standing(state.base, log_p, last, state.generated, progress)
        log_r = self.follower.log_r(state.followed, standing)
        soft = self._soften(state, log_p, log_r)
        answers: dict[str, Any] = {"stops": stops, "eos_id": self.eos_id}
        state.now = guide_step(log_p, log_r, self.guidance, soft=soft, **answers)
        state.base_log_p = log_p
        if self.guidance.floor:
            state.log_chance = chance(state.now, log_p, log_r, self.guidance, **answers)

    def _ask(self, state: GuidedState) -> tuple[Tensor | None, Tensor | None]:
        """What the oracle says of the rows that are still being written."""
        if not self._asks:
            return None, None
        assert self.prefixes is not None
        live = (~state.done).nonzero().flatten().tolist()
        written, lengths = state.tokens.tolist(), state.generated.tolist()
        answers = self.prefixes.read(
            [state.conditions[row] for row in live], [written[row][: lengths[row]] for row in live]
        )
        progress = torch.full((len(written), self.prefixes.bits), -1, dtype=torch.int8)
        stops = torch.ones(len(written), dtype=torch.bool)
        progress[live], stops[live] = answers
        return progress.to(self.device), stops.to(self.device)

    def _soften(self, state: GuidedState, log_p: Tensor, log_r: Tensor) -> SoftCoefficients | None:
        """A soft rate's coefficients: made at a row's first position, kept until its end."""
        if state.soft is None:
            return None
        fresh = (state.generated == 0).nonzero().flatten()
        if len(fresh):
            made = begin_soft(log_p[fresh], log_r[fresh], self.guidance)
            assert made is not None
            state.soft = state.soft.index_copy(0, fresh, torch.stack(made, dim=1).to(state.soft.dtype))
        return SoftCoefficients(state.soft[:, 0], state.soft[:, 1])


@dataclass(frozen=True)
class Trace:
    """Guided decoding along given texts: (B, T) each, 0 past the end."""

    log_q: Tensor  # of the chosen token
    log_p: Tensor  # of the chosen token
    log_factor: Tensor  # what was multiplied into p for it; R itself for a plain guide
    log_s: Tensor  # the normaliser
    base_choice: Tensor  # the token the base alone likes best
    log_p_base_choice: Tensor


def _look(state: GuidedState, token: Tensor) -> tuple[Tensor, ...]:
    log_q, log_s, factor = state.step
    log_p = state.log_p_base
    best, choice = log_p.max(dim=-1)

    def chosen(values: Tensor) -> Tensor:
        return values.gather(-1, token[:, None]).squeeze(-1)

    return chosen(log_q), chosen(log_p), chosen(factor), log_s, choice, best


def _require_base(follower: GuideFollower, base: LanguageModel[Any]) -> None:
    for guide in follower.guides:
        if guide.reader is not None and guide.reader.model is not base:
            raise MismatchError(
                "guides attached to this very base",
                "one attached to another",
                "Attach the guide to a reader of the model it shall guide.",
            )


def _require_oracle(guidance: Guidance, oracle: Oracle | None, bits: int, completion: Completion) -> None:
    if guidance.exact_end and completion == "limit":
        raise InputError(
            'completion "eos" for an exact end', '"limit"', "Turn exact_end off: texts are cut as they are."
        )
    if oracle is None and (guidance.exact_end or bits):
        reason = "exact_end is on" if guidance.exact_end else "this guide was trained with its progress"
        raise InputError(f"the oracle, because {reason}", "none", "Give oracle=, the one it was trained for.")
