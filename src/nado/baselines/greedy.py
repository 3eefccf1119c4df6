"""Greedy search: the likeliest token, every time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nado.baselines.method import Method, Provisions, Row, Settings, System, Texts, Training
from nado.beam_search import search_beams
from nado.language_model import LanguageModel
from nado.prompts import Prompt


class Greedy(Method):
    """The base's likeliest next token, every time."""

    name = "greedy search"
    source = "the base itself"
    one_text = True

    def prepare(self, given: Provisions, settings: Settings) -> System:
        """One beam."""
        return Searched(given.base, 1, 0.0, given.rows)


@dataclass(frozen=True)
class Searched:
    """A system that searches a language model with beams; its texts do not depend on the seed."""

    model: LanguageModel[Any]
    beams: int
    length_penalty: float
    batch_size: int
    training: Training | None = None

    def write(self, prompts: Sequence[Prompt], seed: int) -> Texts:
        """The best text that was found for each prompt."""
        found = search_beams(self.model, prompts, self.beams, self.length_penalty, self.batch_size)
        return Texts([Row(each.tokens, each.finished) for each in found.best], found.base_tokens)
