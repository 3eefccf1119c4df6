"""Systems side by side: measures that need equally many texts of all, and tests on the same prompts."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from nado.metrics import Comparison, Metric, adjust_holm, compare, compare_shares, distinct, self_bleu
from nado.metrics.likelihood import LogP
from nado.metrics.measure import Measure, divide_sums, join_notes
from nado.metrics.resampling import Resampling, sum_by_prompt
from nado.prompts import Prompt
from nado.study.systems import Written


def first_texts(written: Sequence[Written]) -> dict[Prompt, Written]:
    """The first text of every prompt."""
    first: dict[Prompt, Written] = {}
    for each in written:
        first.setdefault(Prompt(each.prompt, each.condition), each)
    return first


def measure_diversity(written: Sequence[Written], resampling: Resampling) -> list[Measure]:
    """distinct-2 of the first text of every prompt, so that all systems have equally many, and self-BLEU."""
    first = list(first_texts(written).values())
    measured = distinct([each.text for each in first], 2)
    method = f"first text of each prompt; {measured.method}"
    pairs = [(each.prompt, each.condition) for each in written]
    return [
        replace(measured, method=method),
        self_bleu([each.text for each in written], pairs, resampling=resampling),
    ]


def compare_satisfied(
    first: Sequence[Written], second: Sequence[Written], resampling: Resampling
) -> Comparison:
    """Satisfaction of two systems on the same prompts, which may have written different numbers of texts."""
    if len(first_texts(first)) == len(first) and len(first_texts(second)) == len(second):
        a, b = ([bool(each.satisfied) for each in texts] for texts in (first, second))
        return compare_shares("satisfied", a, b, range(len(a)), resampling)
    one, other = (
        _by_prompt("satisfied", texts, [(float(bool(each.satisfied)), 1.0) for each in texts])
        for texts in (first, second)
    )
    return compare(one, other, range(len(one.rows)), resampling)


def compare_fluency(
    first: tuple[Sequence[Written], Sequence[LogP]],
    second: tuple[Sequence[Written], Sequence[LogP]],
    resampling: Resampling,
) -> Comparison:
    """log p a token under the base of two systems on the same prompts; higher is more fluent."""
    name, metrics = "log p a token", []
    for texts, log_p in (first, second):
        rows = [(float(row.sum(dtype=np.float64)), float(len(row))) for row in log_p]
        impossible = sum(not np.isfinite(total) for total, _ in rows)
        if impossible:
            note = f"the base cannot write {impossible} of {len(rows)} texts"
            return Comparison(name, None, None, len(rows), note=note)
        metrics.append(_by_prompt(name, texts, rows))
    return compare(metrics[0], metrics[1], range(len(metrics[0].rows)), resampling)


def _by_prompt(name: str, texts: Sequence[Written], rows: Sequence[tuple[float, float]]) -> Metric:
    """A ratio of sums with one row a prompt: systems with different numbers of texts can be paired."""
    groups = [(each.prompt, each.condition) for each in texts]
    return Metric(name, sum_by_prompt(np.array(rows), groups), divide_sums, "total over prompts")


def adjust(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The same with Holm's adjusted p-values in their notes: many methods are compared with one."""
    known = [place for place, each in enumerate(comparisons) if each.p_value is not None]
    adjusted = dict(
        zip(known, adjust_holm([comparisons[place].p_value or 0.0 for place in known]), strict=True)
    )
    found = []
    for place, each in enumerate(comparisons):
        note = f"p = {adjusted[place]:.3g} after Holm for {len(known)} methods" if place in adjusted else None
        found.append(replace(each, note=join_notes(each.note, note)))
    return found
