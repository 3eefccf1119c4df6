"""Texts under way: the loop that steps a guided model for everything exact that is built on it.

A text drawn from q ∝ p·R carries log p − log q = Σ_i (log S_i − log R(y≤i)) with it, from the very numbers
that drew it: no second pass over the base. Draws are a pure function of (seed, number of the text, step), so
they do not depend on what else is in the batch.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nado.decomposition import (
    SoftCoefficients,
    hard_log_terminal,
    smc_log_increment,
    soft_log_terminal,
)
from nado.exact_sampling.judge import Judge
from nado.guided_language_model import GuidedLanguageModel, GuidedState
from nado.language_model import has_fixed_rows, is_finished
from nado.noise import sample, uniforms
from nado.prompts import Prompt

_REFILL_SHARE = 8  # refill once an eighth of the rows stand idle
_COLUMNS = ("tokens", "lengths", "ended", "dead", "satisfied", "log_ratio", "log_s", "soft")


def number_texts(group: Tensor, member: Tensor) -> Tensor:
    """The number that a text's noise depends on: more members or groups leave the others as they are."""
    return (group << 32) + member


class Writing:
    """Texts of a guided model from their first token to their end, in columns with one place a text.

    A text that is being written also holds a row of the model's state. Rows that no text holds belong to a
    spare place behind the last one, so that a step writes the same way for all rows.
    """

    state: GuidedState
    held: Tensor  # (B,) the place that each row of the state belongs to

    def __init__(
        self,
        model: GuidedLanguageModel,
        tasks: Sequence[Prompt],
        task: Tensor,
        numbers: Tensor,
        judge: Judge,
        *,
        seed: int,
        floor: float = 0.0,
    ) -> None:
        """`task` (n,) says which of the tasks each text is for, `numbers` (n,) which noise it gets."""
        self.model, self.tasks, self.judge, self.seed = model, tasks, judge, seed
        self.count, self.spare = len(task), len(task)
        self._log_floor = math.log(floor) if floor > 0 else -math.inf
        self._shrinkable = not has_fixed_rows(model)
        self._refilling = False
        self.begun = 0  # places before this one have been started
        self.live = 0  # texts that are being written

        device, places, limit = model.device, self.count + 1, model.length_limit
        self.task = task.to(device)
        self.numbers = torch.cat([numbers, numbers.new_zeros(1)]).to(device)
        self.tokens = torch.full((places, limit), model.eos_id, device=device)
        self.lengths = torch.zeros(places, dtype=torch.long, device=device)
        self.ended = torch.zeros(places, dtype=torch.bool, device=device)  # by EOS
        self.dead = torch.zeros_like(self.ended)  # given up: S was 0, or success less likely than the floor
        self.satisfied = torch.zeros_like(self.ended)
        self.log_ratio = torch.zeros(places, dtype=torch.float64, device=device)  # log p − log q so far
        self.log_s = torch.zeros(places, limit, device=device)
        self.soft = torch.zeros(places, 2, device=device)  # log α and log β at a soft rate

    @property
    def finished(self) -> Tensor:
        """Which texts count as finished, once none is being written: (n + 1,)."""
        return is_finished(self.ended, self.model.completion) & ~self.dead

    def finish(self, batch_size: int) -> None:
        """Write and judge every text, at most `batch_size` side by side, each on its own."""
        self._refilling = self.model.refillable
        while self.begun < self.count:
            self.begin(batch_size)
            while self.live:
                self.advance()
                self._refill()
        self.ask(torch.arange(self.count, device=self.model.device))

    def begin(self, count: int) -> range:
        """Start the next `count` texts in a fresh state; returns their places."""
        taken = self._take(count)
        self.state = self.model.start(*self._asked(taken))
        self.held = torch.arange(taken.start, taken.stop, device=self.model.device)
        self.live = len(taken)
        return taken

    def advance(self) -> Tensor:
        """Draw one token for every text under way; returns the places of those that ended with it."""
        held, now = self.held, self.state.step
        holds = held != self.spare
        lost = holds & now.log_s.isneginf()
        if self._log_floor > -math.inf:
            assert self.state.log_chance is not None
            lost |= holds & (self.state.log_chance < self._log_floor)
        live = holds & ~lost
        token = sample(now.log_q, uniforms(self.seed, self.numbers[held], self.lengths[held]))
        token = torch.where(live, token, self.model.eos_id)
        self._record(held, live, token)
        self.dead[held] = lost
        over = live & ((token == self.model.eos_id) | (self.lengths[held] >= self.model.length_limit))
        self.ended[held] = live & (token == self.model.eos_id)
        self.held = torch.where(over | lost, self.spare, held)
        self.live = int((self.held != self.spare).sum())
        if self.live:
            token = self._shrink(token)
            self.state = self.model.step(self.state, token)
        return held[over]

    def ask(self, places: Tensor) -> None:
        """Ask the oracle about the finished ones of texts that are over."""
        places = places[self.finished[places]]
        if len(places):
            answers = self.judge.ask(self.task[places], self.tokens[places], self.lengths[places])
            self.satisfied[places] = answers.to(self.satisfied.device)

    def log_terminal(self, places: slice) -> Tensor:
        """The last factor of the weight of texts that are over: C, or αC + β(1 − C) at a soft rate."""
        satisfied = self.satisfied[places]
        if self.model.guidance.soft:
            coefficients = SoftCoefficients(self.soft[places, 0], self.soft[places, 1])
            log_terminal = soft_log_terminal(satisfied, coefficients)
        else:
            log_terminal = hard_log_terminal(satisfied)
        return torch.where(self.dead[places], -math.inf, log_terminal).double()

    def log_weights(self, places: slice) -> Tensor:
        """log p − log q of what is written and then what it promises: S of the next step, or the last factor.

        These are the running products of SMC's increments S_1, S_{i+1} / R(y≤i), …, C / R(y≤T).
        """
        promise = self.log_terminal(places)
        if self.live:
            holds = self.held != self.spare
            promise[self.held[holds] - places.start] = self.state.step.log_s[holds].double()
        return self.log_ratio[places] + promise

    def replace(self, places: slice, ancestors: Tensor) -> None:
        """Let every text of `places` go on as a copy of its ancestor's; all under way must be among them."""
        rows = torch.full((self.count + 1,), -1, device=self.held.device)
        rows[self.held] = torch.arange(len(self.held), device=self.held.device)
        rows[self.spare] = -1
        for name in _COLUMNS:
            column: Tensor = getattr(self, name)
            column[places] = column[ancestors]
        sources = rows[ancestors]
        moved = sources >= 0
        if bool(moved.any()):
            self._keep(sources[moved], moved.nonzero().flatten() + places.start)
        else:
            self.held, self.live = torch.full_like(self.held, self.spare), 0

    def _record(self, held: Tensor, live: Tensor, token: Tensor) -> None:
        """Write one token to every live text, and EOS, which is padding, behind the others."""
        now = self.state.step
        column = self.lengths[held].clamp(max=self.model.length_limit - 1)
        factor = now.log_factor.gather(-1, token[:, None]).squeeze(-1)
        gained = torch.where(live, smc_log_increment(now.log_s, factor), 0.0)
        self.tokens[held, column] = torch.where(live, token, self.tokens[held, column])
        self.log_s[held, column] = torch.where(live, now.log_s.float(), self.log_s[held, column])
        self.log_ratio[held] = self.log_ratio[held] + gained.double()
        self.lengths[held] = self.lengths[held] + live
        if self.state.soft is not None:
            self.soft[held] = self.state.soft

    def _shrink(self, token: Tensor) -> Tensor:
        """Go on with the rows that are held, once half of them are not; returns their tokens."""
        waiting = self._refilling and self.begun < self.count
        if waiting or not self._shrinkable or 2 * self.live > len(self.held):
            return token
        rows = (self.held != self.spare).nonzero().flatten()
        self._keep(rows, self.held[rows])
        return token[rows]

    def _keep(self, rows: Tensor, places: Tensor) -> None:
        """Go on with these rows of the state, which then belong to `places`."""
        self.live, spare = len(rows), len(self.held) - len(rows)
        if spare > 0 and not self._shrinkable:
            rows = torch.cat([rows, rows.new_zeros(spare)])
            places = torch.cat([places, places.new_full((spare,), self.spare)])
        self.state = self.model.select(self.state, rows)
        self.held = places

    def _refill(self) -> None:
        """Start new texts in rows that no text holds any more, when there are enough to be worth it."""
        idle, waiting = len(self.held) - self.live, self.count - self.begun
        if not (self._refilling and self.live and waiting and idle * _REFILL_SHARE >= len(self.held)):
            return
        rows = (self.held == self.spare).nonzero().flatten()[:waiting]
        taken = self._take(len(rows))
        self.state = self.model.refill(self.state, rows, *self._asked(taken))
        self.held[rows] = torch.arange(taken.start, taken.stop, device=self.held.device)
        self.live += len(taken)

    def _take(self, count: int) -> range:
        taken = range(self.begun, min(self.begun + count, self.count))
        self.begun = taken.stop
        return taken

    def _asked(self, taken: range) -> tuple[list[str], list[str]]:
        asked = [self.tasks[number] for number in self.task[taken.start : taken.stop].tolist()]
        return [each.prompt for each in asked], [each.condition for each in asked]
