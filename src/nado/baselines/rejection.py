"""Rejection: draw from the base until the oracle says yes (von Neumann 1951).

What is accepted is a draw from q* itself, exactly. The price is 1 / R(x) texts each, so the budget is
shared: what easy prompts leave over is spent on hard ones. A prompt that is out of luck when it is used up
returns its last text, which fails.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from nado.baselines.method import (
    Method,
    Provisions,
    Row,
    Settings,
    System,
    Texts,
    Training,
    count_tokens,
    draw_texts,
    judge,
    number_attempts,
)
from nado.prompts import Prompt

_TOGETHER = 4  # attempts of a prompt drawn at once, at most


class Rejection(Method):
    """Draws until the oracle is satisfied or the budget is used up."""

    name = "rejection"
    source = "von Neumann 1951"
    sized = True

    def prepare(self, given: Provisions, settings: Settings) -> System:
        """The method with its budget."""
        return _Rejecting(given)


@dataclass(frozen=True)
class _Rejecting:
    given: Provisions
    training: Training | None = None

    def write(self, prompts: Sequence[Prompt], seed: int) -> Texts:
        """The first draw of each prompt that satisfies the oracle, or the last one that did not."""
        budget = self.given.budget * len(prompts)
        found: dict[int, Row] = {}
        waiting, spent, attempt = list(range(len(prompts))), 0, 0
        # The first attempt is everybody's, whatever it takes; later ones stop at the budget.
        while waiting and (attempt == 0 or spent < budget):
            affordable = len(prompts) if attempt == 0 else int((budget - spent) / self.given.text_length) + 1
            count = 1 if attempt == 0 else self._together(len(waiting), affordable)
            rows = [row for row in waiting for _ in range(count)][:affordable]
            asked = [prompts[row] for row in rows]
            numbers = [number_attempts(row, attempt + place % count) for place, row in enumerate(rows)]
            drawn = draw_texts(self.given.base, asked, seed, self.given.rows, numbers)
            spent += count_tokens(drawn)
            accepted: set[int] = set()
            for row, text, good in zip(rows, drawn, judge(self.given, asked, drawn).satisfied, strict=True):
                if row not in accepted:  # what was drawn behind the first success is thrown away
                    found[row] = Row(text.tokens, text.finished)
                    accepted |= {row} if good else set()
            waiting = [row for row in waiting if row not in accepted]
            attempt += count
        return Texts([found[row] for row in range(len(prompts))], spent)

    def _together(self, waiting: int, affordable: int) -> int:
        """Attempts of each prompt that are drawn at once: a few hard prompts must not leave a batch empty."""
        return max(1, min(_TOGETHER, _TOGETHER * self.given.rows // waiting, affordable // waiting))
