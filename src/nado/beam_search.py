"""Beam search over any language model of the protocol, many prompts side by side.

transformers' own `generate` needs a transformers model; this searches products of models and tables as well.
And it searches q for what it is: the likeliest texts of p among those that satisfy. A prefix of a guided
model is ranked by p(prefix) · R(prefix), the mass of satisfied texts that begin with it, and a text that
ended by p and by what the guide, or the oracle, says of its end. Products of q's next-token probabilities
would come to the same where R is exact; where it is learned, every step divides by an S that is not quite the
R before it, and those errors add up along a text (what that costs: benchmarks/LOG.md). With a doubt d
and the exact end off the search is for the likeliest texts, of which one that does not satisfy counts d to
the strength times its p: it is found where satisfying would cost more than that.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nado.composition import require_probability
from nado.drawing import DrawingError
from nado.errors import InputError, require_at_least
from nado.following import GuideFollower
from nado.guidance import Guidance
from nado.guided_language_model import GuidedLanguageModel, GuidedState
from nado.language_model import LanguageModel, has_fixed_rows
from nado.prompts import Prompt

_RANKED = "by which beams rank prefixes"
_WITHOUT_BEAMS = (
    'Train it further without warm_up, or leave beams out: search = "greedy" in a study, --greedy on a '
    "command line. In Python GuidedModel.generate(num_beams=…) searches q, which needs no more than ratios "
    "of R."
)


class SearchedText(NamedTuple):
    """One text as tokens."""

    tokens: list[int]  # EOS included when the text ended itself
    finished: bool
    score: float  # what it is ranked by


@dataclass(frozen=True)
class SearchedTexts:
    """What a search has found, and the tokens that the model was run for."""

    found: list[list[SearchedText]]  # of each prompt, the best first
    base_tokens: int

    @property
    def best(self) -> list[SearchedText]:
        """The best text of each prompt."""
        return [texts[0] for texts in self.found]


@torch.no_grad()
def search_beams(
    model: LanguageModel[Any],
    prompts: Sequence[Prompt],
    beams: int,
    length_penalty: float = 0.0,
    batch_size: int = 64,
    *,
    count: int = 1,
    patient: bool = False,
) -> SearchedTexts:
    """The best texts of each prompt by log p / length^penalty, `count` of them; fewer where no more were met.

    Of a guided model by log p + log R, see above. A prompt is done when nothing under way would overtake what
    it has, were it to end now for nothing; a `patient` search goes on while anything still could, however
    long it got. A single beam is greedy search, up to its first end. A text cut at the limit is returned only
    where completion allows it or where too few texts ended; so is one that the oracle, asked for an exact
    end, did not let end there. Neither is finished.
    """
    require_at_least(1, beams=beams, count=count, batch_size=batch_size)
    if isinstance(model, GuidedLanguageModel):
        require_searchable(model.guidance)
        for guide in model.follower.guides if isinstance(model.follower, GuideFollower) else ():
            require_probability(guide, _RANKED, _WITHOUT_BEAMS)
    found: list[list[SearchedText]] = []
    tokens = 0
    size = max(1, batch_size // beams)
    for first in range(0, len(prompts), size):
        search = _Search(model, prompts[first : first + size], beams, length_penalty, count, patient)
        found += search.go()
        tokens += search.base_tokens
    return SearchedTexts(found, tokens)


def require_searchable(guidance: Guidance) -> None:
    """Refuse what is for sampling alone."""
    if guidance.soft:
        raise InputError(
            f"sampling for a target rate of {guidance.target_rate:g}",
            "beam search",
            "A rate is a property of sampling: draw from the model.",
        )
    if guidance.floor:
        raise InputError(
            "no floor under beam search",
            f"a floor of {guidance.floor:g}",
            "Beams leave dead ends by themselves: they are ranked by their chances.",
        )


def _best_first(texts: Sequence[SearchedText]) -> list[SearchedText]:
    """Finished texts before others."""
    return sorted(texts, key=lambda each: (each.finished, each.score), reverse=True)


@dataclass
class _Best:
    """The best texts of one prompt so far."""

    count: int
    scored: list[tuple[float, list[int]]] = field(default_factory=list)  # the best last

    @property
    def least(self) -> float:
        """What a text must surpass to be among them."""
        return self.scored[0][0] if len(self.scored) == self.count else -math.inf

    def keep(self, score: float, tokens: list[int]) -> None:
        """One more, in the worst one's place."""
        bisect.insort(self.scored, (score, tokens), key=lambda each: each[0])
        del self.scored[: -self.count]


class _Search:
    """Some prompts with `beams` rows each."""

    def __init__(
        self,
        model: LanguageModel[Any],
        prompts: Sequence[Prompt],
        beams: int,
        penalty: float,
        count: int,
        patient: bool,
    ) -> None:
        self.model, self.beams, self.penalty, self.count = model, beams, penalty, count
        self.patient = patient
        self.by_halves = has_fixed_rows(model)  # how prompts that are done leave
        asked = [each for each in prompts for _ in range(beams)]
        self.state = model.start([each.prompt for each in asked], [each.condition for each in asked])
        device = model.device
        self.live = torch.arange(len(prompts), device=device)  # (P,) prompts that have rows
        self.scores = torch.full((len(prompts), beams), -math.inf, device=device)  # (P, K)
        self.scores[:, 0] = 0.0  # beams are equal before the first token: one of them is enough
        self.log_p = self.scores.clone()  # the base's part of them, without R; −inf where there is no beam
        self.tokens = torch.zeros(len(prompts), beams, 0, dtype=torch.long, device=device)
        self.ended = [_Best(count) for _ in prompts]
        self.cut = [_Best(count) for _ in prompts]
        self.base_tokens = 0

    def go(self) -> list[list[SearchedText]]:
        """From the first token to the last prompt's end."""
        while len(self.live):
            self._advance()
        return [self._choose(*each) for each in zip(self.ended, self.cut, strict=True)]

    def _choose(self, ended: _Best, cut: _Best) -> list[SearchedText]:
        """The best first; texts that did not end come after those that did, unless being cut is an end."""
        cut_is_end = self.model.completion == "limit"
        limit = self.model.length_limit
        found = [SearchedText(tokens, True, score) for score, tokens in ended.scored]
        found += [
            SearchedText(tokens, cut_is_end and len(tokens) == limit, score) for score, tokens in cut.scored
        ]
        return _best_first(found)[: self.count]

    def _advance(self) -> None:
        """One token for every beam; what ends is noted, the rest is cut to the best."""
        self.base_tokens += int(self.scores.isfinite().sum())
        log_p, total = self._rank()  # (P, K, V) each
        self._note_refused(log_p[..., self.model.eos_id], total[..., self.model.eos_id])
        vocabulary = total.shape[-1]
        best, places = total.flatten(1).topk(min(2 * self.beams, total[0].numel()), dim=1)  # (P, 2K)
        log_p = log_p.flatten(1).gather(1, places)
        sources, chosen = places // vocabulary, places % vocabulary
        ends = (chosen == self.model.eos_id) & best.isfinite()
        self._note_ends(best, sources, ends)
        best = best.masked_fill(ends, -math.inf)
        kept, order = best.topk(min(self.beams, best.shape[1]), dim=1)  # (P, K')
        if kept.shape[1] < self.beams:  # fewer continuations than beams: a tiny vocabulary
            missing = self.beams - kept.shape[1]
            kept = torch.nn.functional.pad(kept, (0, missing), value=-math.inf)
            order = torch.nn.functional.pad(order, (0, missing))
        sources, chosen = sources.gather(1, order), chosen.gather(1, order)
        stuck = self._searched() & ~kept.isfinite().any(dim=1)
        for place in stuck.nonzero().flatten().tolist():  # nothing can follow
            self._offer_cut(place)
        moved = self.tokens.gather(1, sources[..., None].expand(-1, -1, self.tokens.shape[2]))
        self.tokens = torch.cat([moved, chosen[..., None]], dim=2)
        self.scores = kept
        self.log_p = log_p.gather(1, order).masked_fill(kept.isneginf(), -math.inf)
        self._go_on(sources, chosen)

    def _rank(self) -> tuple[Tensor, Tensor]:
        """log p of every continuation, and what it is ranked by: (P, K, V) each."""
        shape = (*self.scores.shape, -1)
        guided = isinstance(self.state, GuidedState)
        next_log_p = require_distribution(self.state.log_p_base if guided else self.state.log_p)
        log_p = self.log_p[..., None] + next_log_p.view(shape)
        return log_p, log_p + self.state.step.log_factor.view(shape) if guided else log_p

    def _note_refused(self, log_p: Tensor, total: Tensor) -> None:
        """Keep the likeliest text that may not end where it would, for prompts of which none may: (P, K)."""
        refused = total.isneginf() & log_p.isfinite()
        best, beams = log_p.masked_fill(~refused, -math.inf).max(dim=1)
        length = self.tokens.shape[2] + 1
        columns = (self.live.tolist(), best.tolist(), beams.tolist())
        for place, (number, log_p_here, beam) in enumerate(zip(*columns, strict=True)):
            self._offer(self.cut[number], log_p_here / length**self.penalty, place, beam)

    def _note_ends(self, best: Tensor, sources: Tensor, ends: Tensor) -> None:
        # As usual, an end counts only among the best K: else a poor one could stop a good search.
        length = self.tokens.shape[2] + 1
        counted = ends[:, : self.beams].nonzero(as_tuple=True)
        columns = (counted[0].tolist(), best[counted].tolist(), sources[counted].tolist())
        numbers = self.live.tolist()
        for place, score, beam in zip(*columns, strict=True):
            end = [self.model.eos_id]
            self._offer(self.ended[numbers[place]], score / length**self.penalty, place, beam, end)

    def _offer_cut(self, place: int) -> None:
        """Keep what a prompt's beams have written: they go no further."""
        length = max(1, self.tokens.shape[2])
        best = self.cut[int(self.live[place])]
        for beam, score in enumerate(self.scores[place].tolist()):
            self._offer(best, score / length**self.penalty, place, beam)

    def _offer(self, best: _Best, score: float, place: int, beam: int, end: Sequence[int] = ()) -> None:
        """Keep what a beam has written if it is better; only then are its tokens fetched from the device."""
        if score > best.least:
            best.keep(score, [*self.tokens[place, beam].tolist(), *end])

    def _go_on(self, sources: Tensor, chosen: Tensor) -> None:
        """Step the prompts that are not done."""
        if self.tokens.shape[2] >= self.model.length_limit:
            for place in self._searched().nonzero().flatten().tolist():
                self._offer_cut(place)
            self.live = self.live[:0]
            return
        least = torch.tensor([self.ended[number].least for number in self.live.tolist()])
        # log p only falls, and R is at most 1: divided by the longest length no continuation reaches more.
        highest = self.log_p.amax(dim=1).cpu()
        length = self.model.length_limit if self.patient else self.tokens.shape[2] + 1
        hope = highest / length**self.penalty
        ahead = hope > least if self.beams > 1 else least.isneginf()
        searched = ahead & highest.isfinite()
        if not searched.any():
            self.live = self.live[:0]
            return
        done = (~searched).to(self.live.device)[:, None]
        self.scores, self.log_p = (each.masked_fill(done, -math.inf) for each in (self.scores, self.log_p))
        leaving = not self.by_halves or 2 * int(searched.sum()) <= len(searched)
        kept = searched.nonzero().flatten() if leaving else torch.arange(len(searched))
        self._keep(kept.to(self.live.device), sources, chosen)

    def _keep(self, kept: Tensor, sources: Tensor, chosen: Tensor) -> None:
        """Step these prompts' beams; a row without a beam ends, so that nobody asks about it."""
        rows = (kept[:, None] * self.beams + sources[kept]).flatten()
        self.state = self.model.select(self.state, rows)
        self.live, self.tokens = self.live[kept], self.tokens[kept]
        self.scores, self.log_p = self.scores[kept], self.log_p[kept]
        chosen = chosen[kept].masked_fill(self.scores.isneginf(), self.model.eos_id)
        self.state = self.model.step(self.state, chosen.flatten())

    def _searched(self) -> Tensor:
        """Prompts with a beam that may still become a text: bool (P,)."""
        return self.log_p.isfinite().any(dim=1)


def require_distribution(log_p: Tensor) -> Tensor:
    """The same, unless it holds what is no log-probability: a search would go on as if it did not."""
    if bool(log_p.isnan().any()):
        raise DrawingError(
            "log-probabilities from the model",
            "nan among them",
            "The model overflowed: load it in float32 or bfloat16 and check its weights.",
        )
    return log_p
