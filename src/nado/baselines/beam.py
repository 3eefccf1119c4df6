"""Beam search over the base: the likeliest texts, not the likeliest tokens."""

from typing import Any

from nado.baselines.greedy import Searched
from nado.baselines.method import Method, Provisions, Settings, System


class Beam(Method):
    """As many beams as the budget pays for; the length penalty is tuned."""

    name = "beam search"
    source = "the base itself"
    sized = True
    one_text = True

    def obstacle(self, given: Provisions) -> str | None:
        """One beam is greedy search."""
        return "the budget pays for one beam, which is greedy search" if given.draws < 2 else None

    def grid(self, given: Provisions) -> list[dict[str, Any]]:
        """Scores as they are, by the root of the length, and by the length."""
        return [{"beams": given.draws, "length_penalty": penalty} for penalty in (1.0, 0.0, 0.5)]

    def prepare(self, given: Provisions, settings: Settings) -> System:
        """The search."""
        return Searched(given.base, settings["beams"], settings["length_penalty"], given.rows)
