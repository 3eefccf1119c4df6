"""Which settings a method is compared with: one rule for all methods, which can be read in every report."""

from collections.abc import Sequence
from typing import Any


def choose_settings(tried: Sequence[dict[str, Any]], most_perplexity: float) -> dict[str, Any]:
    """The settings that satisfy the oracle most often without becoming much more perplexing than the base.

    Ties go to the less perplexing. Where all are too perplexing it is the least perplexing of them.
    """

    def perplexity(each: dict[str, Any]) -> float:
        return float("inf") if each["perplexity"] is None else float(each["perplexity"])

    fluent = [each for each in tried if perplexity(each) <= most_perplexity]
    if fluent:
        best = max(fluent, key=lambda each: (each["satisfied"], -perplexity(each)))
    else:
        best = min(tried, key=perplexity)
    settings: dict[str, Any] = best["settings"]
    return settings


def describe_criterion(most_perplexity: float) -> str:
    """How settings are chosen, in words."""
    return (
        "most texts that satisfy, among settings whose perplexity under the base is at most "
        f"{most_perplexity:g} times that of base sampling; where none is, the least perplexing"
    )
