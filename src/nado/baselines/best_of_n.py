"""Best of n: draw n texts, return the one the oracle likes best (Stiennon et al. 2020; Nakano et al. 2021).

The oracle answers yes or no, so first come texts that satisfy it, then those of which more parts hold. Among
equals it is the first drawn, or the one the base finds likeliest a token: that is tuned.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


class BestOfN(Method):
    """As many draws as the budget pays for, and the oracle's choice among them."""

    name = "best of n"
    source = "Stiennon et al. 2020; Nakano et al. 2021"
    sized = True

    def obstacle(self, given: Provisions) -> str | None:
        """The best of one is base sampling."""
        return "the budget pays for one draw, which is base sampling" if given.draws < 2 else None

    def grid(self, given: Provisions) -> list[dict[str, Any]]:
        """What decides among texts that the oracle finds equal."""
        return [{"n": given.draws, "among_equals": choice} for choice in ("first", "likeliest")]

    def prepare(self, given: Provisions, settings: Settings) -> System:
        """The method with its n."""
        return _BestOf(given, settings["n"], likeliest=settings["among_equals"] == "likeliest")


@dataclass(frozen=True)
class _BestOf:
    given: Provisions
    n: int
    likeliest: bool
    training: Training | None = None

    def write(self, prompts: Sequence[Prompt], seed: int) -> Texts:
        """The best of n draws for each prompt."""
        asked = [each for each in prompts for _ in range(self.n)]
        numbers = [number_attempts(row, attempt) for row in range(len(prompts)) for attempt in range(self.n)]
        drawn = draw_texts(self.given.base, asked, seed, self.given.rows, numbers)
        satisfied, parts = judge(self.given, asked, drawn)
        chosen = []
        for first in range(0, len(drawn), self.n):
            rank = {
                row: (bool(satisfied[row]), float(parts[row]), self._likelihood(drawn[row]))
                for row in range(first, first + self.n)
            }
            best = max(rank, key=rank.__getitem__)  # the first of equals
            chosen.append(Row(drawn[best].tokens, drawn[best].finished))
        return Texts(chosen, count_tokens(drawn))

    def _likelihood(self, row: Row) -> float:
        assert row.log_q is not None
        return row.log_q / len(row.tokens) if self.likeliest else 0.0
