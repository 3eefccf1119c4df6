"""The report: what was measured, as JSON, Markdown and one HTML page that needs nothing else.

    from nado.report import Report, system_from_measures, write_report

    systems = (system_from_measures("base", [satisfied]), system_from_measures("guided", [satisfied_guided]))
    write_report(Report("Keywords", systems=systems), "runs/keywords/report")

The page is the same for one run and for a comparison of several systems. What was not measured is left out
and said to be missing.
"""

from nado.report.content import (
    Calibration,
    Chart,
    Curve,
    Example,
    Examples,
    ExampleText,
    Fact,
    Histogram,
    Pair,
    Point,
    Rate,
    Report,
    Round,
    System,
    TokenTrace,
    Weights,
)
from nado.report.files import read_report, write_report
from nado.report.markdown import render_markdown
from nado.report.page import render_page
from nado.report.sources import (
    calibration_from_reliability,
    calibration_from_table,
    charts_of_histories,
    cost_from_texts,
    report_from_evaluation,
    rounds_from_summaries,
    system_from_measures,
    system_from_row,
    training_charts,
    weights_from_summary,
    weights_from_texts,
)
from nado.report.traces import (
    choose_rows,
    consistency_chart,
    consistency_curve,
    cut_text,
    pair_examples,
    text_from_trace,
    trace_texts,
)

__all__ = [
    "Calibration",
    "Chart",
    "Curve",
    "Example",
    "ExampleText",
    "Examples",
    "Fact",
    "Histogram",
    "Pair",
    "Point",
    "Rate",
    "Report",
    "Round",
    "System",
    "TokenTrace",
    "Weights",
    "calibration_from_reliability",
    "calibration_from_table",
    "charts_of_histories",
    "choose_rows",
    "consistency_chart",
    "consistency_curve",
    "cost_from_texts",
    "cut_text",
    "pair_examples",
    "read_report",
    "render_markdown",
    "render_page",
    "report_from_evaluation",
    "rounds_from_summaries",
    "system_from_measures",
    "system_from_row",
    "text_from_trace",
    "trace_texts",
    "training_charts",
    "weights_from_summary",
    "weights_from_texts",
    "write_report",
]
