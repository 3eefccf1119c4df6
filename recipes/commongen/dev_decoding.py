"""Texts for the dev sets: of the base, and of guided models, by transformers' own `generate`."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from concept_sets import ConceptSet
from study_settings import Row, RowSettings

from nado.guidance import Guidance
from nado.guided import GuidedModel
from nado.huggingface import CausalModel


class Written(NamedTuple):
    """The texts of one line of the table, one a set."""

    texts: list[str]
    tokens: list[list[int]]  # the end included
    finished: list[bool]
    oracle_calls: int
    oracle_seconds: float
    seconds: float

    def describe(self) -> dict[str, Any]:
        """JSON-ready."""
        return self._asdict()


def write_base(model: CausalModel, sets: Sequence[ConceptSet], row: Row, settings: RowSettings) -> Written:
    """What the base alone writes: its own `generate`, nothing of ours in between."""
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
                **search(row, settings),
            )
            tokens += [cut(written, model.eos_id) for written in output[:, ids.shape[1] :].tolist()]
    texts = model.decode(tokens)
    finished = [each[-1] == model.eos_id for each in tokens]
    return Written(tidy(texts), tokens, finished, 0, 0.0, time.perf_counter() - began)


def write_guided(model: GuidedModel, sets: Sequence[ConceptSet], row: Row, settings: RowSettings) -> Written:
    """What a guided model writes."""
    guidance = Guidance(strength=row.strength, exact_end=row.exact_end)
    began, written, calls, asked = time.perf_counter(), [], 0, 0.0
    with _seeded(row, model.base.device):
        for some in _batches(sets, settings, row):
            found = model.generate_texts(
                [each.prompt.prompt for each in some],
                [each.prompt.condition for each in some],
                guidance=guidance,
                **search(row, settings),
            )
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


def search(row: Row, settings: RowSettings) -> dict[str, Any]:
    """What `generate` is told: greedy, beams, or sampling from the distribution itself."""
    if row.decoding == "sample":
        return {"do_sample": True, "top_k": 0, "num_beams": 1}
    return {"do_sample": False, "num_beams": settings.beams if row.decoding == "beam" else 1}


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
