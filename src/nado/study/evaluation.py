"""What the texts of a study's systems come to: satisfaction with intervals, fluency, divergence, cost."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from nado.language_model import LanguageModel
from nado.metrics import kl_from_base, mean, perplexity_of_log_p, score_tokens, share
from nado.metrics.likelihood import LogP
from nado.metrics.measure import Measure
from nado.metrics.resampling import Resampling
from nado.oracles import Oracle
from nado.study.sections import EvaluateConfig, GenerateConfig
from nado.study.systems import Written
from nado.versions import versions


def measure_texts(
    written: Sequence[Written],
    base: LanguageModel[Any],
    config: EvaluateConfig,
    log_p: Sequence[LogP] | None = None,
) -> dict[str, dict[str, Any]]:
    """The measures of one system's texts, by name; `log_p` of their tokens where that is known already."""
    prompts = [(each.prompt, each.condition) for each in written]
    resampling = Resampling(confidence=config.confidence)

    def rate(name: str, answers: Sequence[bool]) -> Measure:
        return share(name, list(answers), prompts, confidence=config.confidence)

    found = [
        rate("satisfied", [bool(each.satisfied) for each in written]),
        mean(
            "parts", [_parts_share(each) for each in written], method="mean share of parts that hold"
        ).measure(prompts, resampling),
        *_by_part(written, rate),
        rate("finished", [each.finished for each in written]),
        mean("length", [len(each.tokens) for each in written], unit="tokens").measure(prompts, resampling),
    ]
    if config.perplexity:
        scored = score_texts(written, base, config.batch_size) if log_p is None else log_p
        found += _likelihood(written, scored, prompts, resampling)
    return {each.name: each.describe() for each in found}


def _parts_share(written: Written) -> float:
    return float(np.mean(list(written.parts.values()))) if written.parts else float(bool(written.satisfied))


def _by_part(written: Sequence[Written], rate: Any) -> list[Measure]:
    """The rate of every part, where all conditions have the same ones and there is more than one."""
    names = list(written[0].parts)
    if len(names) < 2 or any(list(each.parts) != names for each in written):
        return []
    return [rate(f"part: {name}", [each.parts[name] for each in written]) for name in names]


def score_texts(written: Sequence[Written], base: LanguageModel[Any], batch_size: int) -> list[LogP]:
    """log p of every token of every text."""
    return score_tokens(
        base,
        [each.prompt for each in written],
        [each.tokens for each in written],
        conditions=[each.condition for each in written],
        batch_size=batch_size,
    )


def _likelihood(
    written: Sequence[Written], log_p: Sequence[LogP], prompts: Sequence[Any], resampling: Resampling
) -> list[Measure]:
    found = [perplexity_of_log_p(log_p).measure(prompts, resampling)]
    totals = np.array([float(row.sum(dtype=np.float64)) for row in log_p])
    log_q = [each.log_q for each in written]
    if None not in log_q and np.isfinite(totals).all():
        found.append(kl_from_base(np.array(log_q, dtype=np.float64), totals, prompts, resampling))
    return found


def describe_evaluation(
    base_name: str,
    base: LanguageModel[Any],
    oracle: Oracle,
    prompts: int,
    config: GenerateConfig,
    rows: list[dict[str, Any]],
    *,
    seen: bool | None,
) -> dict[str, Any]:
    """What was measured, and on what; `seen`: whether the prompts were trained on, None if not known."""
    return {
        "format": 1,
        "base": base_name,
        "base_fingerprint": base.fingerprint,
        "oracle": oracle.name,
        "oracle_fingerprint": oracle.fingerprint,
        "length_limit": base.length_limit,
        "completion": base.completion,
        "prompts": prompts,
        "prompts_seen_in_training": seen,
        "texts_per_prompt": config.count,
        "search": config.search,
        "systems": rows,
        "versions": versions(),
    }


def table_rows(evaluation: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The heads and rows of the short table."""
    heads = [
        "system",
        "exact end",
        "satisfied",
        "parts",
        "length",
        "perplexity",
        "KL(q‖p)",
        "tokens",
        "seconds",
    ]
    rows = []
    for each in evaluation["systems"]:
        measures = each["measures"]
        rows.append(
            [
                each["system"],
                "on" if each["exact_end"] else "off",
                _percent(measures["satisfied"]),
                _percent(measures["parts"]),
                _number(measures["length"], 1),
                _number(measures.get("perplexity"), 2),
                _number(measures.get("KL(q‖p)"), 2),
                f"{each['base_tokens']:,}",
                f"{each['seconds']:.1f}",
            ]
        )
    return heads, rows


def _percent(measure: dict[str, Any]) -> str:
    value = f"{measure['value']:.1%}"
    if measure["low"] is None:
        return value
    return f"{value} [{measure['low']:.1%}, {measure['high']:.1%}]"


def _number(measure: dict[str, Any] | None, digits: int) -> str:
    return "–" if measure is None or measure["value"] is None else f"{measure['value']:z.{digits}f}"
