"""Keyword-constrained beam search in the manner of NeuroLogic decoding (Lu et al. 2021).

Every keyword, in any of its forms, is a clause. At every step each beam is continued with its likeliest
tokens and with those that begin or go on with a missing keyword. Candidates that have far fewer clauses
than the best are dropped; the rest is grouped by which clauses they have, and the beam is filled from the
groups in turn, so that a candidate with a keyword is not crowded out by likelier ones without. Inside a
group they are ranked by log p and a bonus for a keyword that is partly written. In the end a text with more
clauses comes first, then the likelier one for its length.

Which clauses a beam really has is asked of the oracle once it is chosen ("dog" may have become "dogma").
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import torch

from nado.baselines.keyword_forms import Forms, KeywordForms, keyword_forms, no_keywords
from nado.baselines.method import Method, Provisions, Row, Settings, System, Texts, Training
from nado.beam_search import require_distribution
from nado.prompts import Prompt

_TOLERANCE = 2  # a candidate with so many clauses less than the best is still kept


class NeuroLogic(Method):
    """Beam search that gathers keywords."""

    name = "NeuroLogic-style search"
    source = "Lu et al. 2021"
    sized = True
    one_text = True

    def obstacle(self, given: Provisions) -> str | None:
        """It needs keywords, and beams to gather them in."""
        if no_keywords(given) is not None:
            return no_keywords(given)
        return "the budget pays for one beam, and the search needs several" if given.draws < 2 else None

    def grid(self, given: Provisions) -> list[dict[str, Any]]:
        """The bonus for a partly written keyword, and the length penalty of the last choice."""
        return [
            {"beams": given.draws, "bonus": bonus, "length_penalty": penalty}
            for bonus in (0.5, 2.0)
            for penalty in (1.0, 0.0)
        ]

    def prepare(self, given: Provisions, settings: Settings) -> System:
        """The search."""
        return _Searching(
            given,
            keyword_forms(given),
            settings["beams"],
            settings["bonus"],
            settings["length_penalty"],
        )


@dataclass(frozen=True)
class _Searching:
    given: Provisions
    forms: KeywordForms
    beams: int
    bonus: float
    length_penalty: float
    training: Training | None = None

    @torch.no_grad()
    def write(self, prompts: Sequence[Prompt], seed: int) -> Texts:
        """The best text that was found for each prompt; the seed changes nothing."""
        rows: list[Row] = []
        tokens = 0
        size = max(1, self.given.rows // self.beams)
        for first in range(0, len(prompts), size):
            search = _Search(self, prompts[first : first + size])
            rows += search.go()
            tokens += search.base_tokens
        return Texts(rows, tokens)


@dataclass
class _Hypothesis:
    """A text under way, and which of its clauses the oracle says it has."""

    tokens: list[int]
    log_p: float
    clauses: tuple[bool, ...]


class _Candidate(NamedTuple):
    """A hypothesis with one token more."""

    rank: float  # log p and the bonus
    log_p: float
    source: int  # which of the prompt's hypotheses
    token: int
    clauses: tuple[bool, ...]


@dataclass
class _Task:
    """One prompt."""

    prompt: Prompt
    forms: list[Forms]
    beams: list[_Hypothesis]
    over: list[tuple[_Hypothesis, bool]] = field(default_factory=list)  # with whether it is finished


class _Search:
    """Some prompts; the rows of the state are their beams, one prompt after the other."""

    def __init__(self, settings: _Searching, prompts: Sequence[Prompt]) -> None:
        self.settings, self.model = settings, settings.given.base
        self.tasks = [self._begin(prompt) for prompt in prompts]
        self.live = list(self.tasks)
        self.state: Any = self.model.start(
            [each.prompt for each in prompts], [each.condition for each in prompts]
        )
        self.base_tokens = 0

    def _begin(self, prompt: Prompt) -> _Task:
        forms = self.settings.forms.of(prompt.condition)
        return _Task(prompt, forms, [_Hypothesis([], 0.0, (False,) * len(forms))])

    def go(self) -> list[Row]:
        """From the first token to the last prompt's end."""
        for length in range(1, self.model.length_limit + 1):
            if not self.live:
                break
            self._advance(length)
        return [self._choose(task) for task in self.tasks]

    def _advance(self, length: int) -> None:
        """One token for every beam of every prompt."""
        log_p = require_distribution(self.state.log_p)
        self.base_tokens += len(log_p)
        likely = log_p.topk(min(2 * self.settings.beams, log_p.shape[-1]), dim=-1)
        found = list(zip(likely.values.tolist(), likely.indices.tolist(), strict=True))
        wanted = [forms for task in self.live for forms in self._wanted(task)]
        extra = self._look_up(log_p, wanted)
        sources: list[int] = []
        tokens: list[int] = []
        first, going = 0, []
        for task in self.live:
            rows = range(first, first + len(task.beams))
            first = rows.stop
            chosen = self._fill(task, [found[row] for row in rows], [extra[row] for row in rows])
            chosen = self._settle(task, chosen, length)
            if chosen:
                going.append(task)
                sources += [rows[each.source] for each in chosen]
                tokens += [each.token for each in chosen]
        self.live = going
        if going:
            self._ask()
            places = torch.tensor(sources, device=self.model.device)
            self.state = self.model.select(self.state, places)
            self.state = self.model.step(self.state, torch.tensor(tokens, device=self.model.device))

    def _wanted(self, task: _Task) -> list[dict[int, tuple[int, float]]]:
        """For each beam the tokens of missing keywords: which keyword, and the share of it then written."""
        rows = []
        for beam in task.beams:
            own: dict[int, tuple[int, float]] = {}
            for number, forms in enumerate(task.forms):
                if not beam.clauses[number]:
                    for token, share in forms.nexts(beam.tokens).items():
                        if share > own.get(token, (0, 0.0))[1]:
                            own[token] = (number, share)
            rows.append(own)
        return rows

    def _look_up(
        self, log_p: torch.Tensor, wanted: list[dict[int, tuple[int, float]]]
    ) -> list[dict[int, tuple[int, float, float]]]:
        """The same with log p of each token."""
        places = [(row, token) for row, own in enumerate(wanted) for token in own]
        if not places:
            return [{} for _ in wanted]
        where = torch.tensor(places, device=log_p.device)
        values = iter(log_p[where[:, 0], where[:, 1]].tolist())
        return [{token: (*own[token], next(values)) for token in own} for own in wanted]

    def _fill(
        self,
        task: _Task,
        likely: list[tuple[list[float], list[int]]],
        extra: list[dict[int, tuple[int, float, float]]],
    ) -> list[_Candidate]:
        """The next beams: candidates of every group of clauses in turn, the best of each first."""
        candidates = [
            candidate
            for source, beam in enumerate(task.beams)
            for candidate in self._continue(beam, source, likely[source], extra[source])
        ]
        if not candidates:
            return []
        most = max(sum(each.clauses) for each in candidates)
        groups: dict[tuple[bool, ...], list[_Candidate]] = {}
        for each in sorted(candidates, reverse=True):
            if sum(each.clauses) >= most - _TOLERANCE:
                groups.setdefault(each.clauses, []).append(each)
        turns = chain.from_iterable(zip_longest(*groups.values()))
        return [each for each in turns if each is not None][: 2 * self.settings.beams]

    def _continue(
        self,
        beam: _Hypothesis,
        source: int,
        likely: tuple[list[float], list[int]],
        extra: dict[int, tuple[int, float, float]],
    ) -> list[_Candidate]:
        found: dict[int, _Candidate] = {}
        for gained, token in zip(*likely, strict=True):
            log_p = beam.log_p + gained
            found[token] = _Candidate(log_p, log_p, source, token, beam.clauses)
        for token, (number, share, gained) in extra.items():
            log_p, clauses = beam.log_p + gained, list(beam.clauses)
            clauses[number] = share >= 1
            rank = log_p + self.settings.bonus * share
            found[token] = _Candidate(rank, log_p, source, token, tuple(clauses))
        return [each for each in found.values() if each.log_p > -math.inf]

    def _settle(self, task: _Task, chosen: list[_Candidate], length: int) -> list[_Candidate]:
        """Note what ends, keep as many others as there are beams; nothing where the prompt is done."""
        going: list[tuple[_Candidate, _Hypothesis]] = []
        limit = length >= self.model.length_limit
        for each in chosen:
            old = task.beams[each.source]
            made = _Hypothesis([*old.tokens, each.token], each.log_p, each.clauses)
            if each.token == self.model.eos_id:
                task.over.append((made, True))
            elif limit:
                task.over.append((made, self.model.completion == "limit"))
            elif len(going) < self.settings.beams:
                going.append((each, made))
        task.beams = [made for _, made in going]
        complete = sum(all(made.clauses) for made, finished in task.over if finished)
        return [] if complete >= self.settings.beams else [each for each, _ in going]

    def _ask(self) -> None:
        """Let the oracle say which clauses the chosen beams have."""
        beams = [(task, beam) for task in self.live for beam in task.beams]
        texts = self.model.decode([beam.tokens for _, beam in beams])
        bits = self.settings.forms.oracle.progress([task.prompt.condition for task, _ in beams], texts)
        for (task, beam), own in zip(beams, bits, strict=True):
            beam.clauses = tuple(bool(bit) for bit in own[: len(task.forms)])

    def _choose(self, task: _Task) -> Row:
        """The text with the most clauses that is finished, the likelier for its length among equals."""
        over = task.over or [(beam, False) for beam in task.beams]
        penalty = self.settings.length_penalty

        def rank(entry: tuple[_Hypothesis, bool]) -> tuple[bool, int, float]:
            made, finished = entry
            return finished, sum(made.clauses), made.log_p / len(made.tokens) ** penalty

        best, finished = max(over, key=rank)
        return Row(best.tokens, finished)
