"""Scores of texts that were written for keys; the table's lines with intervals and differences to p."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import nearby  # noqa: F401  (finds decoding and tables of the CommonGen recipe)
import numpy as np
from dev_decoding import Written
from numpy.typing import NDArray
from ordered_keys import KeyedText, ordered_oracle
from table_rows import missed_removed

from nado.metrics import Measure, Metric, compare, corpus_bleus, mean, perplexity_of_log_p, share
from nado.metrics.likelihood import LogP
from nado.oracles import Keywords

_ORDERS = (2, 4)


class KeyScores(NamedTuple):
    """What texts come to, a row a text."""

    coverage: NDArray[np.float64]  # share of the keys that stand anywhere in the text, in exact form
    in_order: NDArray[np.bool_]  # all of them, one after the other
    bleu: list[NDArray[np.float64]]  # rows of counts for BLEU-2 and BLEU-4
    words: NDArray[np.float64]


def score_keyed(tested: Sequence[KeyedText], texts: Sequence[str]) -> KeyScores:
    """Coverage, order and BLEU counts of one text a list of keys."""
    conditions = [each.prompt.condition for each in tested]
    found = Keywords(inflections=False).parts(conditions, texts)
    bleu = corpus_bleus(texts, [each.targets for each in tested], _ORDERS)
    return KeyScores(
        np.array([float(each.mean()) for each in found]),
        ordered_oracle()(conditions, texts),
        [each.rows for each in bleu],
        np.array([len(text.split()) for text in texts], dtype=np.float64),
    )


class KeyLine:
    """One line of the table: what was written, and what it scored."""

    def __init__(self, scores: KeyScores, written: Written, log_p: Sequence[LogP]) -> None:
        self.scores, self.written, self.log_p = scores, written, log_p

    @property
    def coverage(self) -> Metric:
        """Mean share of the keys, in percent."""
        return mean("coverage", 100 * self.scores.coverage, method="mean over lists; exact forms", unit="%")

    def bleu(self, order: int) -> Metric:
        """Corpus BLEU, from the counts."""
        from nado.metrics.bleu import bleu_of_rows

        rows = self.scores.bleu[_ORDERS.index(order)]
        return bleu_of_rows(f"BLEU-{order}", rows, max(_ORDERS), order, "english")

    def measures(self) -> dict[str, Measure]:
        """Everything that is measured."""
        return {
            "coverage": self.coverage.measure(),
            "in_order": share("all in order", self.scores.in_order),
            "bleu2": self.bleu(2).measure(),
            "bleu4": self.bleu(4).measure(),
            "words": mean("words", self.scores.words).measure(),
            "finished": share("finished", np.array(self.written.finished)),
            "perplexity": perplexity_of_log_p(self.log_p).measure(),
        }


def describe_line(title: str, row: Any, line: KeyLine, base: KeyLine | None) -> dict[str, Any]:
    """A line as it is recorded."""
    found = line.measures()
    described: dict[str, Any] = {
        "setting": title,
        "system": row.system,
        "decoding": row.decoding,
        "strength": row.strength,
        "exact_end": row.exact_end,
        "doubt": row.doubt,
        "lists": len(line.written.texts),
        **{name: each.value for name, each in found.items()},
        "interval": {name: [each.low, each.high] for name, each in found.items()},
        "seconds": line.written.seconds,
        "oracle_seconds": line.written.oracle_seconds,
    }
    if base is not None:
        described["against_base"] = against_base(line, base)
    return described


def against_base(line: KeyLine, base: KeyLine) -> dict[str, Any]:
    """Paired differences to p, and the share of missed keys that is removed."""
    removed = missed_removed(line.scores.coverage, base.scores.coverage).measure()
    pairs = {
        "coverage": compare(line.coverage, base.coverage),
        "bleu2": compare(line.bleu(2), base.bleu(2)),
        "bleu4": compare(line.bleu(4), base.bleu(4)),
    }
    return {
        **{name: each.describe_difference() for name, each in pairs.items()},
        "missed_removed": {"value": removed.value, "low": removed.low, "high": removed.high},
    }
