"""What a study found, as a report: its measures, how training went, and texts to read."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nado.errors import InputError
from nado.guided_language_model import GuidedLanguageModel
from nado.report import (
    Chart,
    Examples,
    ExampleText,
    Report,
    calibration_from_table,
    charts_of_histories,
    choose_rows,
    consistency_chart,
    consistency_curve,
    pair_examples,
    report_from_evaluation,
    trace_texts,
)
from nado.report.records import from_record, to_record
from nado.report.traces import trace_tokens
from nado.storage import read_json, write_json
from nado.study.systems import Written

EXAMPLES = 20  # prompts whose texts are shown
_TRACED = 200  # texts from which consistency by position is measured
_INSIGHTS = "insights.json"
_HISTORY = "history.json"


def save_history(folder: Path, histories: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    """Write the steps of training runs, by name, for the report's curves."""
    write_json(folder / _HISTORY, {name: list(rows) for name, rows in histories.items()})


def save_insights(
    folder: Path, model: GuidedLanguageModel, texts: Mapping[str, Sequence[Written]], guided: str, seed: int
) -> None:
    """Write what the guide thinks of texts: those to be shown token by token, and its consistency.

    `texts` are each system's, about the same prompts in the same order; `model` is the system `guided`.
    """
    rows, how = choose_rows(len(texts[guided]), EXAMPLES, seed)
    chosen = [texts[guided][row] for row in rows]
    columns = [trace_written(model, name, [own[row] for row in rows]) for name, own in texts.items()]
    pairs = pair_examples([each.prompt for each in chosen], [each.condition for each in chosen], *columns)
    record = {"examples": to_record(Examples(how, pairs), "examples")}
    if model.guidance.plain:
        chart = consistency_chart(_consistency(model, guided, texts[guided][:_TRACED]))
        record["consistency"] = to_record(chart, "consistency")
    write_json(folder / _INSIGHTS, record)


def trace_written(model: GuidedLanguageModel, name: str, own: Sequence[Written]) -> list[ExampleText]:
    """Texts of a system as the guided model sees them, token by token."""
    return trace_texts(
        model,
        name,
        [each.prompt for each in own],
        [each.tokens for each in own],
        [each.condition for each in own],
        satisfied=[each.satisfied for each in own],
        finished=[each.finished for each in own],
    )


def _consistency(model: GuidedLanguageModel, name: str, own: Sequence[Written]) -> Any:
    tokens = [each.tokens for each in own]
    trace, lengths = trace_tokens(
        model, [each.prompt for each in own], tokens, [each.condition for each in own]
    )
    return consistency_curve(name, trace, lengths, model.guidance)


def report_study(folder: Path) -> Report:
    """The report of a study's folder, or of one that `nado evaluate` has written."""
    found = [path for path in (folder / "evaluate", folder) if (path / "evaluation.json").is_file()]
    if not found:
        raise InputError(
            "an evaluation", f"no evaluation.json in {folder}", "Run nado run, or nado evaluate --out FOLDER."
        )
    parts: dict[str, Any] = {}
    if (folder / "train" / _HISTORY).is_file():
        parts["training"] = charts_of_histories(read_json(folder / "train" / _HISTORY))
    table = folder / "train" / "calibration.json"
    if table.is_file():
        parts["calibration"] = (calibration_from_table("trained guide", read_json(table)),)
    if (found[0] / _INSIGHTS).is_file():
        insights = read_json(found[0] / _INSIGHTS)
        parts["examples"] = from_record(Examples, insights["examples"], "examples")
        if "consistency" in insights:
            parts["consistency"] = from_record(Chart, insights["consistency"], "consistency")
    return report_from_evaluation(read_json(found[0] / "evaluation.json"), **parts)
