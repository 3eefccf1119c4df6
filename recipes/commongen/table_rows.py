"""The numbers of one line of the table, with intervals, and against p under the same decoding."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from concept_sets import ConceptSet
from dev_decoding import Written
from numpy.typing import NDArray
from side_work import TextScores
from study_settings import Row

from nado.huggingface import CausalModel
from nado.metrics import Measure, Metric, compare, mean, perplexity_of_log_p, score_tokens, share
from nado.metrics.bleu import ORDER, bleu_of_rows
from nado.metrics.likelihood import LogP

_TOKENS = "english"
_SCORE_BATCH = 256


class Scored:
    """The texts of one line, measured text by text: any part of the sets can be summed up from it."""

    def __init__(self, scores: TextScores, written: Written, log_p: Sequence[LogP]) -> None:
        self.scores, self.written, self.log_p = scores, written, log_p
        self.everywhere = np.ones(len(written.texts), dtype=bool)

    def coverage(self, chosen: NDArray[np.bool_]) -> Metric:
        """Mean share of the concepts, in percent."""
        method = "mean over sets; whole words, inflections by prepared forms"
        return mean("coverage", 100 * self.scores.coverage[chosen], method=method, unit="%")

    def bleu(self, chosen: NDArray[np.bool_], order: int) -> Metric:
        """Corpus BLEU."""
        return bleu_of_rows(f"BLEU-{order}", self.scores.bleu[chosen], ORDER, order, _TOKENS)

    def measures(self, chosen: NDArray[np.bool_]) -> dict[str, Measure]:
        """Everything that is measured of the chosen sets."""
        lengths = np.array([len(each) for each in self.written.tokens], dtype=np.float64)
        log_p = [row for row, wanted in zip(self.log_p, chosen, strict=True) if wanted]
        return {
            "coverage": self.coverage(chosen).measure(),
            "all_covered": _percent(share("all covered", self.scores.complete[chosen])),
            "bleu3": self.bleu(chosen, 3).measure(),
            "bleu4": self.bleu(chosen, 4).measure(),
            "length": mean("length", self.scores.words[chosen], unit="words").measure(),
            "tokens": mean("tokens", lengths[chosen]).measure(),
            "finished": _percent(share("finished", np.array(self.written.finished)[chosen])),
            "perplexity": perplexity_of_log_p(log_p).measure(),
        }


def score_log_p(model: CausalModel, sets: Sequence[ConceptSet], written: Written) -> list[LogP]:
    """log p of every token that was written."""
    prompts = [each.prompt.prompt for each in sets]
    return score_tokens(model, prompts, written.tokens, batch_size=_SCORE_BATCH)


def table_row(
    row: Row,
    title: str,
    scored: Scored,
    base: Scored | None,
    reported: NDArray[np.bool_],
    command: str,
    *,
    group: str = "",
) -> dict[str, Any]:
    """One line as it is recorded: of the reported sets, and beside them of all and of the choosing ones.

    `group` is what it is about, where it belongs into a table of its own.
    """
    found = scored.measures(reported)
    line: dict[str, Any] = {
        "setting": title,
        "system": row.system,
        "decoding": row.decoding,
        "strength": row.strength,
        "exact_end": row.exact_end,
        "doubt": row.doubt,
        "seed": row.seed,
        "sets": int(reported.sum()),
        "sets_in_all": len(reported),
        **{name: each.value for name, each in found.items()},
        "interval": {name: [each.low, each.high] for name, each in found.items()},
        "all_sets": {name: each.value for name, each in scored.measures(scored.everywhere).items()},
        "choosing_sets": {name: each.value for name, each in scored.measures(~reported).items()},
        "seconds": scored.written.seconds,
        "oracle_calls": scored.written.oracle_calls,
        "oracle_seconds": scored.written.oracle_seconds,
        "draws_a_text": scored.written.draws / len(reported) or None,
        "base_tokens_a_text": scored.written.drawn_tokens / len(reported) or None,
        "command": command,
        "group": group,
    }
    if base is not None:
        line["against_base"] = against(scored, base, reported)
    return line


def against(scored: Scored, base: Scored, chosen: NDArray[np.bool_]) -> dict[str, Any]:
    """Paired differences to p under the same decoding, and the share of missed concepts that is removed."""
    differences = {
        "coverage": compare(scored.coverage(chosen), base.coverage(chosen)),
        "bleu3": compare(scored.bleu(chosen, 3), base.bleu(chosen, 3)),
        "bleu4": compare(scored.bleu(chosen, 4), base.bleu(chosen, 4)),
    }
    ours, theirs = scored.scores.coverage[chosen], base.scores.coverage[chosen]
    same = [one == other for one, other in zip(scored.written.texts, base.written.texts, strict=True)]
    return {
        **{name: each.describe_difference() for name, each in differences.items()},
        "missed_removed": _interval(missed_removed(ours, theirs).measure()),
        "same_texts": 100 * float(np.mean(np.array(same)[chosen])),
    }


def missed_removed(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> Metric:
    """(c_q − c_p) / (100 − c_p), in percent."""
    return _quotient("missed concepts removed", ours - theirs, 1 - theirs)


def gain_share(light: Scored, main: Scored, base: Scored, chosen: NDArray[np.bool_]) -> dict[str, Any]:
    """How much of the larger guide's gain in coverage a light one keeps."""
    c_light, c_main, c_base = (each.scores.coverage[chosen] for each in (light, main, base))
    metric = _quotient("share of the gain", c_light - c_base, c_main - c_base)
    return _interval(metric.measure(), scale=0.01)


def _quotient(name: str, above: NDArray[np.float64], below: NDArray[np.float64]) -> Metric:
    def combine(sums: NDArray[np.float64]) -> NDArray[np.float64]:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(sums[..., 1] == 0, np.nan, 100 * sums[..., 0] / sums[..., 1])

    return Metric(name, np.stack([above, below], axis=1), combine, "quotient of totals over sets", "%")


def _percent(measure: Measure) -> Measure:
    def times(value: float | None) -> float | None:
        return None if value is None else 100 * value

    return replace(
        measure, value=times(measure.value), low=times(measure.low), high=times(measure.high), unit="%"
    )


def _interval(found: Measure, scale: float = 1.0) -> dict[str, Any]:
    def times(value: float | None) -> float | None:
        return None if value is None else scale * value

    return {"value": times(found.value), "low": times(found.low), "high": times(found.high), "n": found.n}
