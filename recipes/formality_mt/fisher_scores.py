"""Fisher test: what texts are worth there, and how two systems differ."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from formality_classifiers import JUDGE, ORACLE
from formality_oracle import FormalityOracle
from raw_files import read_records, require_file
from style_judge import StyleJudge

from nado.metrics import Metric, chrf, compare, mean, sacre_bleu


class Scored(NamedTuple):
    """One line's metrics, of some utterances in some order."""

    texts: list[str]
    metrics: dict[str, Metric]
    groups: dict[str, list[str]]  # what is resampled together: the texts of equal sources, which are equal


class FisherTest:
    """The utterances with their references, and both classifiers."""

    def __init__(self, prepared: Path, threshold: float) -> None:
        self.records = read_records(
            require_file(prepared / "test.jsonl.gz", "the test set of prepare_translation.py"), "the test set"
        )
        self.sources = [each["source"] for each in self.records]
        self.fluent = [row for row, each in enumerate(self.records) if each["fluent"]]
        self.oracle = FormalityOracle(prepared / ORACLE, threshold)
        self.judge = StyleJudge.load(prepared / JUDGE)

    def score(self, texts: Sequence[str]) -> Scored:
        """All metrics of one text an utterance."""
        told = [texts[row] for row in self.fluent]
        fluent = [self.records[row]["fluent"] for row in self.fluent]
        original = [each["original"] for each in self.records]
        oracle, judge = self.oracle.probabilities(texts), self.judge.probabilities(texts)
        words = [float(len(text.split())) for text in texts]
        metrics = {
            "bleu_fluent": sacre_bleu(told, fluent),
            "chrf_fluent": chrf(told, fluent),
            "bleu_original": sacre_bleu(texts, original),
            "formality_oracle": mean("formality, oracle", oracle, method="mean probability"),
            "formality_judge": mean("formality, judge", judge, method="mean probability"),
            "satisfied": mean("satisfied", (oracle >= self.oracle.threshold).astype(float)),
            "words": mean("words", words),
        }
        told_sources = [self.sources[row] for row in self.fluent]
        groups = {name: told_sources if name.endswith("fluent") else self.sources for name in metrics}
        return Scored(list(texts), metrics, groups)


def compare_scored(first: Scored, second: Scored) -> dict[str, Any]:
    """First minus second, paired."""
    found = {
        name: compare(metric, second.metrics[name], first.groups[name]).describe_difference()
        for name, metric in first.metrics.items()
    }
    same = np.mean([one == other for one, other in zip(first.texts, second.texts, strict=True)])
    return {**found, "same_texts": float(same)}
