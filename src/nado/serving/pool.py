"""A batch of fixed shape whose rows come and go: one for each combination of guides.

Whatever could make a row depend on the others is kept out. The batch has the same number of rows and columns
from its first step on, occupied or not; prompts are read in shapes of their own (`joining.py`); noise is
counted by (seed, row, step). So on a CPU a request gets the same text alone and in a full batch.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from nado.exact_sampling.writing import number_texts
from nado.guide import round_up
from nado.huggingface import CausalModel
from nado.labeling import label
from nado.noise import sample, uniforms
from nado.oracles.protocol import Oracle
from nado.serving.jobs import Answer, DeadlineError, Delta, Job, Reason, ServingConfig, TokenRecord
from nado.serving.joining import ROWS, Shape, group, measure, read_ahead, rows_together
from nado.serving.text_stream import TextStream
from nado.serving.voices import ROUNDING, VoicedModel, VoicedState, as_oracle_error, join_oracles

log = logging.getLogger(__name__)

END = "⟨end⟩"  # how a choice of EOS is written
_ADMITTED_SHARE = 2  # at most half of the rows begin between two steps: those under way must not starve
_PATIENCE = 3  # steps that a new row waits for others to be read with, while texts are being written
_MOST_TOP = 20  # alternatives that a request may ask for

Ending = Literal["eos", "stop", "limit", "cut"]  # itself, a stop sequence, at L, at the client's max_tokens


@dataclass(eq=False)
class Row:
    """One text of a request, from the queue to its end."""

    job: Job
    index: int
    attempt: int = 0  # draws before this one
    drawn_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    records: list[TokenRecord] = field(default_factory=list)
    stream: TextStream = field(default_factory=TextStream)
    shape: Shape = ()
    nearest: tuple[int, tuple[str, ...]] | None = None  # parts that held in the best miss; the others

    def begin(self) -> None:
        """Before its first token."""
        self.tokens, self.records, self.stream = [], [], TextStream(self.job.stops)

    @property
    def prompt(self) -> str:
        """What the base reads."""
        return self.job.prompts[self.index]

    @property
    def condition(self) -> str:
        """What guide and oracle read."""
        return self.job.conditions[self.index]

    @property
    def number(self) -> int:
        """What its noise depends on beside the seed: as `nado generate` counts texts, and verified ones."""
        if not self.job.verified:
            return self.index
        return int(number_texts(torch.tensor(self.index), torch.tensor(self.attempt)))


@dataclass
class Tally:
    """What an engine has done so far."""

    steps: int = 0  # forward passes over a whole batch
    tokens: int = 0
    texts: int = 0
    verified: int = 0
    not_found: int = 0
    cancelled: int = 0
    late: int = 0
    failed: int = 0
    busy_seconds: float = 0.0


class Pool:
    """Rows of one combination of guides."""

    def __init__(self, model: VoicedModel, config: ServingConfig, widest: str, tally: Tally) -> None:
        self.model, self.config, self.tally = model, config, tally
        assert isinstance(model.base, CausalModel)
        self.base = model.base
        self.oracle: Oracle | None = join_oracles(model.members)
        self.waiting: deque[Row] = deque()
        self._coming: list[Row] = []  # taken from the queue, not yet in a place
        self.rows: list[Row | None] = [None] * config.batch_size
        self.used = 0.0  # when it last had something to do
        self._widest, self._most_tokens = widest, len(self.base.encode([widest])[0])
        self._waited = 0  # steps that rows have waited while others were being written
        self._state: VoicedState | None = None
        size, limit = config.batch_size, model.length_limit
        self._noise = torch.full((size, limit), 0.5, dtype=torch.float64, device=model.device)
        self._temperature = torch.ones(size, device=model.device)
        self._top_p = torch.ones(size, device=model.device)

    @property
    def running(self) -> int:
        """Texts being written."""
        return sum(row is not None for row in self.rows)

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.waiting) or any(row is not None for row in self.rows)

    def advance(self) -> None:
        """Let rows go and come, then write one token in each."""
        began = time.perf_counter()
        self._drop()
        self._admit()
        if self.running:
            self._write()
        self.used = time.monotonic()
        self.tally.busy_seconds += time.perf_counter() - began

    def abandon(self, error: Exception) -> None:
        """Fail everything; the next request begins with a fresh state."""
        for row in [*self.waiting, *self._coming, *self.rows]:
            if row is not None:
                row.job.fail(error)
        self.waiting.clear()
        self._coming = []
        self.rows = [None] * len(self.rows)
        self._state = None

    # --- coming and going -----------------------------------------------------------------------------

    def _drop(self) -> None:
        """Let go of rows that nobody waits for, or that are late."""
        now = time.monotonic()
        for row in [*self.waiting, *self.rows]:
            if row is not None and not row.job.cancelled and now > row.job.deadline:
                self.tally.late += 1
                row.job.fail(DeadlineError())
        for slot, row in enumerate(self.rows):
            if row is not None and row.job.cancelled:
                self.tally.cancelled += not row.job.failed
                self._free(slot)
        self.tally.cancelled += sum(row.job.cancelled and not row.job.failed for row in self.waiting)
        self.waiting = deque(row for row in self.waiting if not row.job.cancelled)

    def _free(self, slot: int) -> None:
        self.rows[slot] = None
        if self._state is not None:
            self._state.done[slot] = True

    def _admit(self) -> None:
        """Begin waiting rows in free places."""
        free = [slot for slot, row in enumerate(self.rows) if row is None]
        if not self._worth_reading(len(free)):
            return
        count = min(len(free), len(self.waiting), max(1, len(self.rows) // _ADMITTED_SHARE))
        self._coming = coming = [self.waiting.popleft() for _ in range(count)]
        for row in coming:
            if not row.shape:
                row.shape = measure(
                    self.base, self.model.members, row.prompt, row.condition, self._most_tokens
                )
        for places in group([row.shape for row in coming], len(self.rows)):
            some = [coming[place] for place in places]
            slots = [free.pop() for _ in some]
            try:
                self._begin(slots, some)
            except Exception as error:  # of these rows alone
                log.exception("rows could not begin")
                self.tally.failed += len(some)
                for slot, row in zip(slots, some, strict=True):
                    self._free(slot)
                    row.job.fail(error)
        self._coming = []

    def _worth_reading(self, free: int) -> bool:
        """Whether to read prompts now: as many as a pass takes, or after a few steps, or on an idle server.

        A pass costs the same however few of its rows are new.
        """
        coming = min(free, len(self.waiting))
        if not coming:
            return False
        self._waited += 1
        if coming < ROWS and self._waited <= _PATIENCE and self.running:
            return False
        self._waited = 0
        return True

    def _begin(self, slots: list[int], rows: list[Row]) -> None:
        """Begin rows of one shape together."""
        if self._state is None:
            self._state = self._start(rows[0].condition)
        together = rows_together(rows[0].shape, len(self.rows))
        # Rows that stand in for missing ones are copies of the last: they write the same into the same place.
        repeated = rows + [rows[-1]] * (together - len(rows))
        places = torch.tensor(slots + [slots[-1]] * (together - len(rows)), device=self.model.device)
        prompts = [row.prompt for row in repeated]
        read_ahead(self.base, prompts, together, rows[0].shape[0])
        state = self.model.refill(
            self._state,
            places,
            prompts,
            [row.condition for row in repeated],
            [row.job.voice for row in repeated],
        )
        assert isinstance(state, VoicedState)
        self._state = state
        steps = torch.arange(self.model.length_limit, device=self.model.device)
        for slot, row in zip(slots, rows, strict=True):
            self._noise[slot] = uniforms(row.job.seed, torch.full_like(steps, row.number), steps)
            self._temperature[slot], self._top_p[slot] = row.job.temperature, row.job.top_p
            row.begin()
            self.rows[slot] = row

    def _start(self, condition: str) -> VoicedState:
        """Empty places, as wide as any request may need: shapes never change afterwards."""
        size = len(self.rows)
        state = self.model.start([self._widest] * size, [condition] * size)
        self.model.joint.widen(state.followed, round_up(self.config.max_condition_tokens, ROUNDING))
        state.done[:] = True
        return state

    # --- one token ------------------------------------------------------------------------------------

    def _write(self) -> None:
        state = self._state
        assert state is not None
        columns = self._choose(state)
        for slot, error in sorted(state.failures.items()):
            row = self.rows[slot]
            if row is not None:
                self.tally.failed += 1
                row.job.fail(error)
                self._free(slot)
        state.failures.clear()
        live = [(slot, row) for slot, row in enumerate(self.rows) if row is not None]
        self._take(live, columns)
        ended = [(slot, row, end) for slot, row in live if (end := self._ending(row)) is not None]
        self.tally.steps += 1
        self.tally.tokens += len(live)
        self._finish(ended)
        if self.running:
            token = torch.tensor(columns["token"], device=self.model.device)
            stepped = self.model.step(state, token)
            assert isinstance(stepped, VoicedState)
            self._state = stepped

    @torch.no_grad()
    def _choose(self, state: VoicedState) -> dict[str, list[Any]]:
        """The next token of every row, and the numbers that requests ask for: one entry a row."""
        now = state.step
        place = state.generated.clamp(max=self.model.length_limit - 1)[:, None]
        noise = self._noise.gather(1, place).squeeze(-1)
        token = sample(self._warp(now.log_q), noise)
        greedy = self._temperature == 0
        if bool(greedy.any()):
            token = torch.where(greedy, now.log_q.argmax(dim=-1), token)
        jobs = [row.job for row in self.rows if row is not None]
        columns: dict[str, list[Any]] = {"token": token.tolist()}
        if not any(job.recorded for job in jobs):
            return columns
        columns["log_q"] = _pick(now.log_q, token)
        if any(job.top_logprobs for job in jobs):
            top = now.log_q.topk(min(_MOST_TOP, now.log_q.shape[1]))
            columns |= {"top": top.indices.tolist(), "log_q_top": top.values.tolist()}
        if any(job.guidance for job in jobs):
            columns |= self._explain(state, token)
        return columns

    def _explain(self, state: VoicedState, token: Tensor) -> dict[str, list[Any]]:
        best, choice = state.log_p_base.max(dim=-1)
        assert state.log_r is not None
        return {
            "log_p": _pick(state.log_p_base, token),
            "log_r": _pick(state.log_r, token),
            "log_s": state.step.log_s.tolist(),
            "base_choice": choice.tolist(),
            "log_p_base_choice": best.tolist(),
        }

    def _warp(self, log_q: Tensor) -> Tensor:
        """log q at each row's own temperature and top_p; rows that ask for neither are left as they are."""
        heated = (self._temperature != 1) & (self._temperature > 0)
        if bool(heated.any()):
            warmth = torch.where(heated, self._temperature, 1.0)
            scaled = log_q / warmth[:, None]
            scaled = scaled - scaled.amax(dim=-1, keepdim=True)
            log_q = torch.where(heated[:, None], scaled, log_q)
        if bool((self._top_p < 1).any()):
            log_q = _keep_top(log_q, self._top_p)
        return log_q

    def _take(self, live: Sequence[tuple[int, Row]], columns: dict[str, list[Any]]) -> None:
        """Append the chosen tokens, with text and numbers where those are wanted."""
        for slot, row in live:
            row.tokens.append(columns["token"][slot])
        followed = [(slot, row) for slot, row in live if row.job.followed]
        if not followed:
            return
        texts = self.model.decode([row.tokens for _, row in followed])
        for (slot, row), text in zip(followed, texts, strict=True):
            row.stream.add(text, last=self._over(row))
            if row.job.recorded:
                row.records.append(self._record(row, {key: column[slot] for key, column in columns.items()}))
            if row.job.stream and not row.job.verified and not row.stream.stopped and not self._over(row):
                self._send(row)

    def _record(self, row: Row, found: dict[str, Any]) -> TokenRecord:
        job, token = row.job, row.tokens[-1]
        top: tuple[tuple[str, float], ...] = ()
        if job.top_logprobs:
            ids = found["top"][: job.top_logprobs]
            pairs = zip(self._name(ids), found["log_q_top"], strict=False)
            top = tuple((name, value) for name, value in pairs if value > float("-inf"))
        more: dict[str, Any] = {}
        if job.guidance:
            more = {key: found[key] for key in ("log_p", "log_s", "log_p_base_choice")}
            more["log_r"] = found["log_r"] if self.model.members else None
            more["base_choice"] = self._continue(row, found["base_choice"])
        return TokenRecord(token, "", found["log_q"], top, ends=token == self.model.eos_id, **more)

    def _name(self, ids: list[int]) -> list[str]:
        names = self.model.decode([[each] for each in ids])
        return [END if each == self.model.eos_id else name for each, name in zip(ids, names, strict=True)]

    def _continue(self, row: Row, token: int) -> str:
        """A token as it would have stood here: alone, some tokenizers drop the blank before it."""
        if token == self.model.eos_id:
            return END
        before, after = self.model.decode([row.tokens[:-1], [*row.tokens[:-1], token]])
        return after[len(before) :] if after.startswith(before) else self._name([token])[0]

    def _send(self, row: Row) -> None:
        """Stream what may be given out."""
        pieces = row.stream.release()
        text = "".join(row.stream.pieces[place] for place in pieces)
        if text or (row.records and pieces):
            row.job.deliver(Delta(row.index, text, _with_text(row, pieces)))

    # --- the end of a text ----------------------------------------------------------------------------

    def _over(self, row: Row) -> bool:
        return row.tokens[-1] == self.model.eos_id or len(row.tokens) >= row.job.max_tokens

    def _ending(self, row: Row) -> Ending | None:
        if row.stream.stopped:
            return "stop"
        if row.tokens[-1] == self.model.eos_id:
            return "eos"
        if len(row.tokens) < row.job.max_tokens:
            return None
        return "limit" if len(row.tokens) == self.model.length_limit else "cut"

    def _finish(self, ended: Sequence[tuple[int, Row, Ending]]) -> None:
        """Answer texts that are over, once the oracle has been asked where it has to be."""
        if not ended:
            return
        unread = [row for _, row, _ in ended if not row.job.followed]
        for row, text in zip(unread, self.model.decode([row.tokens for row in unread]), strict=True):
            row.stream.finish(text)
        for slot, row, end in ended:
            self._free(slot)
            row.drawn_tokens += len(row.tokens)
            try:
                satisfied = self._judge(row, end) if row.job.verified or row.job.judged else None
            except Exception as error:
                log.exception("the oracle failed")
                self.tally.failed += 1
                assert self.oracle is not None
                row.job.fail(as_oracle_error(self.oracle, error))
                continue
            if row.job.verified and not satisfied:
                self._try_again(row)
            else:
                self.tally.verified += row.job.verified
                self._answer(row, "length" if end in ("limit", "cut") else "stop", satisfied)

    def _judge(self, row: Row, end: Ending) -> bool | None:
        """Whether this very text, as it will be sent, satisfies the oracle. A text that was cut does not."""
        if self.oracle is None:
            return None
        finished = end in ("eos", "stop") or (end == "limit" and self.model.completion == "limit")
        condition = row.condition
        labels = label(self.oracle, [condition], [row.stream.text], finished=[finished])
        if row.job.verified and not labels.satisfied[0]:
            assert labels.parts is not None
            parts = labels.parts.row(0).tolist()
            names = zip(self.oracle.part_names(condition), parts, strict=True)
            if row.nearest is None or sum(parts) > row.nearest[0]:
                row.nearest = sum(parts), tuple(name for name, holds in names if not holds)
        return bool(labels.satisfied[0])

    def _try_again(self, row: Row) -> None:
        row.attempt += 1
        if row.attempt < self.config.budget:
            self.waiting.appendleft(row)
            return
        self.tally.not_found += 1
        row.begin()
        self._answer(row, "content_filter", False)

    def _answer(self, row: Row, reason: Reason, satisfied: bool | None) -> None:
        self.tally.texts += 1
        pieces = row.stream.release(last=True)
        sent = len(row.stream.text) - sum(len(row.stream.pieces[place]) for place in pieces)
        lost = row.nearest[1] if reason == "content_filter" and row.nearest is not None else ()
        row.job.deliver(
            Answer(
                index=row.index,
                text=row.stream.text,
                tokens=tuple(row.tokens),
                reason=reason,
                records=_with_text(row, pieces),
                rest=row.stream.text[sent:] if row.job.followed else row.stream.text,
                satisfied=satisfied,
                draws=row.attempt + (reason != "content_filter"),
                drawn_tokens=row.drawn_tokens,
                missing=lost,
            )
        )


def _with_text(row: Row, pieces: range) -> tuple[TokenRecord, ...]:
    """Records with their pieces of text, which may have been cut since."""
    if not row.records:
        return ()
    return tuple(_named(row.records[place], row.stream.pieces[place]) for place in pieces)


def _named(record: TokenRecord, text: str) -> TokenRecord:
    return TokenRecord(**{**vars(record), "text": text})


def _pick(values: Tensor, token: Tensor) -> list[float]:
    picked: list[float] = values.gather(-1, token[:, None]).squeeze(-1).tolist()
    return picked


def _keep_top(log_q: Tensor, top_p: Tensor) -> Tensor:
    """Leave each row the smallest set of tokens with at least its `top_p` (B,) of the mass."""
    descending, order = log_q.sort(dim=-1, descending=True)
    mass = descending.softmax(dim=-1)
    surplus = (mass.cumsum(dim=-1) - mass >= top_p[:, None]) & (top_p < 1)[:, None]
    return log_q.masked_fill(torch.zeros_like(surplus).scatter(-1, order, surplus), -torch.inf)
