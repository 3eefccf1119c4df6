"""Beam search over any language model of the protocol, many prompts side by side.

transformers' own `generate` needs a transformers model; this searches q, products of models and tables as
well.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nado.baselines.method import Row, Texts
from nado.drawing import DrawingError
from nado.language_model import LanguageModel
from nado.prompts import Prompt


@dataclass
class _Found:
    """The best text of one prompt so far."""

    score: float = -math.inf
    tokens: list[int] | None = None

    def offer(self, score: float, tokens: list[int]) -> None:
        if score > self.score:
            self.score, self.tokens = score, tokens


@torch.no_grad()
def search_beams(
    model: LanguageModel[Any],
    prompts: Sequence[Prompt],
    beams: int,
    length_penalty: float = 0.0,
    batch_size: int = 64,
) -> Texts:
    """The best text of each prompt by log p / length^penalty; with 1 beam and no penalty greedy search.

    A prompt is done when nothing under way can still overtake what it has. A text cut at the limit is
    returned only where completion allows it or where no text ended.
    """
    rows: list[Row] = []
    tokens = 0
    size = max(1, batch_size // beams)
    for first in range(0, len(prompts), size):
        search = _Search(model, prompts[first : first + size], beams, length_penalty)
        rows += search.go()
        tokens += search.base_tokens
    return Texts(rows, tokens)


class _Search:
    """Some prompts with `beams` rows each."""

    def __init__(
        self, model: LanguageModel[Any], prompts: Sequence[Prompt], beams: int, penalty: float
    ) -> None:
        self.model, self.beams, self.penalty = model, beams, penalty
        asked = [each for each in prompts for _ in range(beams)]
        self.state = model.start([each.prompt for each in asked], [each.condition for each in asked])
        device = model.device
        self.live = torch.arange(len(prompts), device=device)  # (P,) prompts that are still searched
        self.scores = torch.full((len(prompts), beams), -math.inf, device=device)  # (P, K)
        self.scores[:, 0] = 0.0  # beams are equal before the first token: one of them is enough
        self.tokens = torch.zeros(len(prompts), beams, 0, dtype=torch.long, device=device)
        self.ended = [_Found() for _ in prompts]
        self.cut = [_Found() for _ in prompts]
        self.base_tokens = 0

    def go(self) -> list[Row]:
        """From the first token to the last prompt's end."""
        while len(self.live):
            self._advance()
        limit = self.model.completion == "limit"
        rows = []
        for ended, cut in zip(self.ended, self.cut, strict=True):
            whole = cut if ended.tokens is None or (limit and cut.score > ended.score) else ended
            assert whole.tokens is not None
            rows.append(Row(whole.tokens, limit or whole is ended))
        return rows

    def _advance(self) -> None:
        """One token for every beam; what ends is noted, the rest is cut to the best."""
        self.base_tokens += int(self.scores.isfinite().sum())
        total = self.scores[..., None] + require_distribution(self.state.log_p).view(
            *self.scores.shape, -1
        )  # (P, K, V)
        vocabulary = total.shape[-1]
        best, places = total.flatten(1).topk(min(2 * self.beams, total[0].numel()), dim=1)  # (P, 2K)
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
        moved = self.tokens.gather(1, sources[..., None].expand(-1, -1, self.tokens.shape[2]))
        self.tokens = torch.cat([moved, chosen[..., None]], dim=2)
        self.scores = kept
        self._go_on(sources, chosen)

    def _note_ends(self, best: Tensor, sources: Tensor, ends: Tensor) -> None:
        # As usual, an end counts only among the best K: else a poor one could stop a good search.
        written = self.tokens.shape[2] + 1
        for place, rank in ends[:, : self.beams].nonzero().tolist():
            tokens = self.tokens[place, sources[place, rank]].tolist()
            score = float(best[place, rank]) / written**self.penalty
            self.ended[int(self.live[place])].offer(score, [*tokens, self.model.eos_id])

    def _go_on(self, sources: Tensor, chosen: Tensor) -> None:
        """Step the prompts that are not done."""
        written = self.tokens.shape[2]
        if written >= self.model.length_limit:
            for place, number in enumerate(self.live.tolist()):
                for beam in self.scores[place].isfinite().nonzero().flatten().tolist():
                    score = float(self.scores[place, beam]) / written**self.penalty
                    self.cut[number].offer(score, self.tokens[place, beam].tolist())
            self.live = self.live[:0]
            return
        found = torch.tensor([self.ended[number].score for number in self.live.tolist()])
        # log p only falls: divided by the longest length it is more than any continuation can reach.
        hope = self.scores.amax(dim=1).cpu() / self.model.length_limit**self.penalty
        going = ((hope > found) & self.scores.isfinite().any(dim=1).cpu()).nonzero().flatten()
        going = going.to(self.live.device)
        if not len(going):
            self.live = self.live[:0]
            return
        rows = (going[:, None] * self.beams + sources[going]).flatten()
        self.state = self.model.select(self.state, rows)
        self.live, self.scores, self.tokens = self.live[going], self.scores[going], self.tokens[going]
        self.state = self.model.step(self.state, chosen[going].flatten())


def require_distribution(log_p: Tensor) -> Tensor:
    """The same, unless it holds what is no log-probability: a search would go on as if it did not."""
    if bool(log_p.isnan().any()):
        raise DrawingError(
            "log-probabilities from the model",
            "nan among them",
            "The model overflowed: load it in float32 or bfloat16 and check its weights.",
        )
    return log_p
