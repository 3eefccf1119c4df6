"""Texts for concept sets: of the base, of guided models, and of exact sampling on top of these."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from concept_sets import ConceptSet
from study_settings import SEARCH, VERIFIED, Row, RowSettings
from transformers import LogitsProcessorList

from nado.beam_search import search_beams
from nado.exact_sampling import resample, smc, verified
from nado.guidance import Guidance
from nado.guided import GuidedModel
from nado.guided_language_model import GuidedLanguageModel
from nado.huggingface import CausalModel
from nado.oracles.protocol import Oracle


class Written(NamedTuple):
    """The texts of one line of the table, one a set."""

    texts: list[str]
    tokens: list[list[int]]  # the end included
    finished: list[bool]
    oracle_calls: int | None  # None where nobody counted them
    oracle_seconds: float | None
    seconds: float
    draws: int = 0  # texts drawn in all, where a text is chosen among several
    drawn_tokens: int = 0  # of the base, for all of them

    def describe(self) -> dict[str, Any]:
        """JSON-ready."""
        return self._asdict()


def write_base(model: CausalModel, sets: Sequence[ConceptSet], row: Row, settings: RowSettings) -> Written:
    """What the base alone writes: its own `generate`, nothing of ours in between but p's temperature."""
    if row.kind == SEARCH:
        return _search_base(model, sets, row, settings)
    began, tokens = time.perf_counter(), []
    with _seeded(row, model.device):
        for some in _batches(sets, settings, row):
            ids, mask = model._pad_left(model.encode([each.prompt.prompt for each in some]))
            output = model.model.generate(  # type: ignore[operator]
                input_ids=ids,
                attention_mask=mask.long(),
                max_new_tokens=model.length_limit,
                eos_token_id=model.eos_id,
                pad_token_id=model.eos_id,
                logits_processor=LogitsProcessorList(_at_temperature(model.warpers.temperature)),
                **search(row, settings),
            )
            tokens += [cut(written, model.eos_id) for written in output[:, ids.shape[1] :].tolist()]
    texts = model.decode(tokens)
    finished = [each[-1] == model.eos_id for each in tokens]
    return Written(tidy(texts), tokens, finished, 0, 0.0, time.perf_counter() - began)


def _at_temperature(temperature: float) -> list[Any]:
    """p's own temperature, also with beams: their sums of log p are of the p that is guided, normalised."""
    return [] if temperature == 1 else [lambda tokens, scores: (scores / temperature).log_softmax(dim=-1)]


def write_guided(model: GuidedModel, sets: Sequence[ConceptSet], row: Row, settings: RowSettings) -> Written:
    """What a guided model writes: by `generate`, by beams over p·R, or by exact sampling on top."""
    if row.decoding == VERIFIED:
        return _write_verified(model, sets, row, settings)
    if row.particles:
        return _write_particles(model, sets, row, settings)
    guidance = Guidance(strength=row.strength, exact_end=row.exact_end, doubt=row.doubt)
    began, written, calls, asked = time.perf_counter(), [], 0, 0.0
    with _seeded(row, model.base.device):
        for some in _batches(sets, settings, row):
            if row.kind == SEARCH:
                found = model.search_texts(*_asked(some), guidance=guidance, **_beams(row, settings))
            else:
                found = model.generate_texts(*_asked(some), guidance=guidance, **search(row, settings))
            written += found.texts
            calls, asked = calls + found.oracle_calls, asked + found.oracle_seconds
    return Written(
        tidy([each.text for each in written]),
        [each.tokens for each in written],
        [each.finished for each in written],
        calls,
        asked,
        time.perf_counter() - began,
    )


def _write_verified(
    model: GuidedModel, sets: Sequence[ConceptSet], row: Row, settings: RowSettings
) -> Written:
    """Only texts that the oracle has said yes to; the nearest miss where none was found."""
    began = time.perf_counter()
    drawn = _drawn_from(model, row, sets)
    found = verified(*drawn, budget=settings.budget, doubling=True, seed=row.seed, batch_size=settings.batch)
    misses = [each.partial.unverified_text for each in found if each.partial is not None]
    missed = zip(misses, model.base.encode_texts(misses) if misses else [], strict=True)
    rows = [
        (each.text, each.tokens) if each.text is not None and each.tokens else next(missed) for each in found
    ]
    return Written(
        tidy([text for text, _ in rows]),
        [tokens for _, tokens in rows],
        [each.partial is None or each.partial.finished for each in found],
        None,
        None,
        time.perf_counter() - began,
        sum(each.draws for each in found),
        sum(each.base_tokens for each in found),
    )


def _write_particles(
    model: GuidedModel, sets: Sequence[ConceptSet], row: Row, settings: RowSettings
) -> Written:
    """One particle of each set's run, by its weight; the first one where none satisfies."""
    began = time.perf_counter()
    drawn = _drawn_from(model, row, sets)
    runs = smc(*drawn, particles=row.particles, seed=row.seed, batch_size=settings.batch)
    chosen = resample(runs.particles, seed=row.seed).rows[:, 0].tolist()
    chosen = [place if place >= 0 else number * row.particles for number, place in enumerate(chosen)]
    rows, lengths = runs.particles.tokens[chosen].tolist(), runs.particles.lengths[chosen].tolist()
    tokens = [row[:length] for row, length in zip(rows, lengths, strict=True)]
    return Written(
        tidy([runs.particles.texts[place] for place in chosen]),
        tokens,
        runs.particles.finished[chosen].tolist(),
        None,
        None,
        time.perf_counter() - began,
        len(sets) * row.particles,
        int(runs.base_tokens.sum()),
    )


def _search_base(model: CausalModel, sets: Sequence[ConceptSet], row: Row, settings: RowSettings) -> Written:
    """The base's own texts by the beams that search q."""
    began = time.perf_counter()
    best = search_beams(model, [each.prompt for each in sets], **_beams(row, settings)).best
    tokens = [each.tokens for each in best]
    texts, finished = tidy(model.decode(tokens)), [each.finished for each in best]
    return Written(texts, tokens, finished, 0, 0.0, time.perf_counter() - began)


def _beams(row: Row, settings: RowSettings) -> dict[str, Any]:
    """What such a search is told; a step takes as long with all sets as with a few, while memory lasts."""
    rows = settings.batch * settings.beams
    return {"beams": row.beams(settings.beams), "length_penalty": row.length_penalty, "batch_size": rows}


def _drawn_from(
    model: GuidedModel, row: Row, sets: Sequence[ConceptSet]
) -> tuple[GuidedLanguageModel, list[str], list[str], Oracle]:
    """What exact sampling asks for: q, prompts, conditions and the oracle."""
    assert model.oracle is not None
    guidance = Guidance(strength=row.strength, exact_end=row.exact_end, doubt=row.doubt)
    q = GuidedLanguageModel(model.base, model.guides[0], guidance=guidance, oracle=model.oracle)
    return q, *_asked(sets), model.oracle


def _asked(sets: Sequence[ConceptSet]) -> tuple[list[str], list[str]]:
    return [each.prompt.prompt for each in sets], [each.prompt.condition for each in sets]


def search(row: Row, settings: RowSettings) -> dict[str, Any]:
    """What `generate` is told: greedy, beams, or sampling from the distribution itself."""
    if row.decoding == "sample":
        return {"do_sample": True, "top_k": 0, "num_beams": 1}
    once = {"no_repeat_ngram_size": row.unrepeated} if row.unrepeated else {}
    return {"do_sample": False, "num_beams": settings.beams if row.decoding == "beam" else 1, **once}


def tidy(texts: Sequence[str]) -> list[str]:
    """Without the blank that parts a sentence from its prompt."""
    return [text.strip() for text in texts]


def cut(tokens: list[int], eos_id: int) -> list[int]:
    """Up to the end, and with it."""
    return tokens[: tokens.index(eos_id) + 1] if eos_id in tokens else tokens


def _batches(sets: Sequence[ConceptSet], settings: RowSettings, row: Row) -> Iterator[Sequence[ConceptSet]]:
    size = settings.batch if row.decoding != "beam" else max(1, settings.batch // 4)
    for at in range(0, len(sets), size):
        yield sets[at : at + size]


@contextmanager
def _seeded(row: Row, device: torch.device) -> Iterator[None]:
    """torch's own random numbers, which `generate` samples with: from the row's seed, then as before."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(row.seed)
        yield
