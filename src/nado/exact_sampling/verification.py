"""Verified generation: only texts that the oracle has said yes to, or an honest "not found".

A guided model is drawn from, its texts are checked, and prompts without one are drawn again until the budget
is spent. A verified text is a draw from q given that it satisfies the oracle: nearly q* where the guide is
good. For draws from q* itself use rejection or SMC.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from nado.drawing import default_batch_size
from nado.errors import require_at_least
from nado.exact_sampling.judge import Judge, decode_distinct
from nado.exact_sampling.writing import Writing, number_texts
from nado.guided_language_model import GuidedLanguageModel
from nado.oracles.protocol import Oracle
from nado.prompts import Prompt, pair_prompts


@dataclass(frozen=True)
class Partial:
    """The nearest miss: a text that was *not* verified."""

    unverified_text: str
    finished: bool  # False for a text cut at the length limit, or given up
    satisfied_parts: list[str]  # names of the oracle's parts that hold
    missing_parts: list[str]


@dataclass(frozen=True)
class Verified:
    """What came of one prompt. `text` is there only if the oracle said yes to this very text."""

    prompt: str
    condition: str
    status: Literal["verified", "not found"]
    text: str | None
    tokens: list[int] | None  # of the text, EOS included
    draws: int  # texts drawn for this prompt
    base_tokens: int  # tokens of all of them
    partial: Partial | None  # only when not found


@dataclass
class _Search:
    """A prompt on its way to a text."""

    task: Prompt
    text: str | None = None
    tokens: list[int] | None = None
    draws: int = 0
    base_tokens: int = 0
    misses: dict[str, bool] = field(default_factory=dict)  # failing texts, and whether they are finished


def verified(
    model: GuidedLanguageModel,
    prompts: Sequence[str],
    conditions: Sequence[str] | None,
    oracle: Oracle,
    *,
    budget: int = 16,
    at_once: int = 1,
    doubling: bool = False,
    seed: int = 0,
    batch_size: int | None = None,
) -> list[Verified]:
    """For every prompt a text that satisfies the oracle, within `budget` draws, or "not found".

    Prompts are drawn together, in rounds; a prompt that has its text leaves. `at_once` draws of a prompt are
    made in each round: the text found is the same, sooner, for more base tokens. With `doubling` each round
    makes as many as all rounds before it, so that a stubborn prompt costs few rounds. A text that comes below
    the guidance's floor is given up and counts as a draw.
    """
    tasks = pair_prompts(prompts, conditions)
    require_at_least(1, budget=budget, at_once=at_once, batch_size=batch_size)
    batch_size = batch_size or default_batch_size(model)
    judge = Judge(model, oracle, tasks)
    searches = [_Search(task) for task in tasks]
    first = 0
    while first < budget:
        wanted = [number for number, search in enumerate(searches) if search.text is None]
        if not wanted:
            break
        last = min(first + max(at_once, first * doubling), budget)
        attempts = torch.arange(first, last)
        task = torch.tensor(wanted).repeat_interleave(len(attempts))
        numbers = number_texts(task, attempts.repeat(len(wanted)))
        writing = Writing(model, tasks, task, numbers, judge, seed=seed, floor=model.guidance.floor)
        writing.finish(batch_size)
        _sort_out(writing, searches)
        first = last
    return _report(searches, oracle)


def _sort_out(writing: Writing, searches: list[_Search]) -> None:
    """Give every prompt its first satisfying text, and remember the others."""
    places = slice(0, writing.count)
    tokens, lengths = writing.tokens[places].cpu(), writing.lengths[places].cpu()
    columns = zip(
        writing.task.tolist(),
        decode_distinct(writing.model, tokens, lengths),
        tokens.tolist(),
        lengths.tolist(),
        writing.satisfied[places].tolist(),
        writing.finished[places].tolist(),
        strict=True,
    )
    for number, text, row, length, satisfied, finished in columns:
        search = searches[number]
        search.draws += 1
        search.base_tokens += length
        if not satisfied:
            search.misses[text] = search.misses.get(text, False) or finished
        elif search.text is None:
            search.text, search.tokens = text, row[:length]


def _report(searches: list[_Search], oracle: Oracle) -> list[Verified]:
    lost = [search for search in searches if search.text is None]
    partials = dict(zip(map(id, lost), _find_partials(lost, oracle), strict=True))
    return [
        Verified(
            prompt=search.task.prompt,
            condition=search.task.condition,
            status="not found" if search.text is None else "verified",
            text=search.text,
            tokens=search.tokens,
            draws=search.draws,
            base_tokens=search.base_tokens,
            partial=partials.get(id(search)),
        )
        for search in searches
    ]


def _find_partials(lost: list[_Search], oracle: Oracle) -> list[Partial]:
    """Of each prompt's misses the one with most parts that hold; if equal a finished one, then the first."""
    conditions = [search.task.condition for search in lost for _ in search.misses]
    texts = [text for search in lost for text in search.misses]
    answers = iter(oracle.parts(conditions, texts) if texts else [])
    partials = []
    for search in lost:
        judged = [(text, finished, next(answers)) for text, finished in search.misses.items()]
        text, finished, parts = max(judged, key=lambda each: (each[2].sum(), each[1]))
        names = list(zip(oracle.part_names(search.task.condition), parts.tolist(), strict=True))
        partials.append(
            Partial(
                unverified_text=text,
                finished=finished,
                satisfied_parts=[name for name, holds in names if holds],
                missing_parts=[name for name, holds in names if not holds],
            )
        )
    return partials
