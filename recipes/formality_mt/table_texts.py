"""The texts of the table's lines: base, best of n, guided, verified; decoding is the library's."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from table_settings import BEAM, BestOfSettings, Row, SearchSettings, VerifiedSettings

from nado.exact_sampling import verified
from nado.guidance import Guidance
from nado.guide import Guide
from nado.guided_language_model import GuidedLanguageModel
from nado.prompts import Prompt
from nado.study.sections import GenerateConfig
from nado.study.systems import System, Written, write_texts


@dataclass(frozen=True)
class Lines:
    """The texts of one line, one a source, and what they took."""

    texts: list[Written]
    seconds: float
    facts: dict[str, Any]

    def describe(self) -> dict[str, Any]:
        """What the stage reports."""
        satisfied = float(np.mean([bool(each.satisfied) for each in self.texts]))
        finished = float(np.mean([each.finished for each in self.texts]))
        return {"seconds": round(self.seconds, 2), "satisfied": satisfied, "finished": finished, **self.facts}


def by_length(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Prompts of about equal length together: batches end sooner."""
    return sorted(prompts, key=lambda each: (len(each.prompt), each.prompt))


def search_texts(
    system: System, prompts: Sequence[Prompt], row: Row, settings: SearchSettings, fallback: Guide
) -> Lines:
    """Greedy decoding by transformers' own `generate`, or the library's beams, which rank prefixes by p·R."""
    beams, size = settings.sizes(row.decoding)
    config = GenerateConfig(
        search="beam" if row.decoding == BEAM else "greedy", count=1, beams=beams, batch_size=size
    )
    began = time.perf_counter()
    texts = write_texts(system, by_length(prompts), config, fallback)
    return Lines(texts, time.perf_counter() - began, {"base_tokens": sum(len(each.tokens) for each in texts)})


def best_of_texts(system: System, prompts: Sequence[Prompt], settings: BestOfSettings, batch: int) -> Lines:
    """Of several samples of the base the one that the oracle finds most formal."""
    began = time.perf_counter()
    config = GenerateConfig(search="sample", count=settings.count, seed=settings.seed, batch_size=batch)
    drawn = write_texts(system, by_length(prompts), config, None)
    scorer: Any = system.oracle
    scores = scorer.probabilities([each.text for each in drawn])
    # A text that was cut has not been written to its end: it comes last, whatever it says.
    ranks = np.where([each.finished for each in drawn], scores, -1.0).reshape(-1, settings.count)
    best = ranks.argmax(axis=1) + np.arange(len(ranks)) * settings.count
    facts = {"base_tokens": sum(len(each.tokens) for each in drawn), "samples": settings.count}
    return Lines([drawn[place] for place in best], time.perf_counter() - began, facts)


def verified_texts(
    system: System, prompts: Sequence[Prompt], settings: VerifiedSettings, batch: int
) -> Lines:
    """The first guided draw that satisfies the oracle; where there is none, the nearest miss, unverified."""
    assert system.guide is not None
    assert system.oracle is not None
    began, asked = time.perf_counter(), by_length(prompts)
    found = verified(
        GuidedLanguageModel(system.base, system.guide, guidance=Guidance(), oracle=system.oracle),
        [each.prompt for each in asked],
        [each.condition for each in asked],
        system.oracle,
        budget=settings.budget,
        seed=settings.seed,
        batch_size=batch,
    )
    texts = []
    for each in found:
        missed = each.partial
        text = each.text if each.text is not None else missed.unverified_text if missed is not None else ""
        ended = missed is None or missed.finished
        texts.append(
            Written(each.prompt, each.condition, text, each.tokens or [], ended, each.text is not None)
        )
    facts = {
        "base_tokens": sum(each.base_tokens for each in found),
        "verified": float(np.mean([each.status == "verified" for each in found])),
        "draws": float(np.mean([each.draws for each in found])),
    }
    return Lines(texts, time.perf_counter() - began, facts)
