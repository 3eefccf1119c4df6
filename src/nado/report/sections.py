"""The sections of a report: which there are, what each shows, and what was not measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from nado.metrics import Bin
from nado.report.content import Calibration, Chart, Curve, Point, Report
from nado.report.numbers import style_of_measures
from nado.report.svg import Spot, draw_chart, draw_diagonal, draw_histogram, draw_rounds, rate_spots, swatch
from nado.report.tables import (
    Table,
    bins_table,
    chart_table,
    cost_table,
    headline_table,
    measures_table,
    pairs_table,
    rates_table,
    rounds_table,
    weights_table,
)

SHOWN_PROMPTS = 200  # of R(x) by prompt: more points hide one another


@dataclass(frozen=True)
class Figure:
    """A drawing with its legend, its remark and its numbers."""

    title: str
    drawing: Markup
    legend: tuple[tuple[Markup, str], ...] = ()
    note: str = ""
    table: Table | None = None


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading of its own."""

    key: str
    title: str
    lead: str = ""
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    folded: tuple[Table, ...] = ()  # tables that are opened by those who want them


def list_sections(report: Report) -> tuple[list[Section], list[str]]:
    """The sections that have something to show, and the names of those that have not."""
    found, missing = [], []
    for name, make in _MAKERS.items():
        section = make(report)
        if section is None:
            missing.append(name)
        else:
            found.append(section)
    if report.examples is None or not report.examples.examples:
        missing.append("example texts")
    return found, missing


def _headline(report: Report) -> Section | None:
    if not any(system.measures for system in report.systems):
        return None
    lead = (
        "Intervals are in brackets; how each number was made stands under “Every measure”. "
        "Numbers of few texts or prompts are marked: they settle nothing."
    )
    return Section(
        "results",
        "Results",
        lead,
        tables=(headline_table(report),),
        folded=(measures_table(report),),
    )


def _pairs(report: Report) -> Section | None:
    if not report.pairs:
        return None
    lead = "First minus second, on the same prompts. p: how often luck alone would make such a difference."
    return Section("differences", "Differences", lead, tables=(pairs_table(report),))


def _training(report: Report) -> Section | None:
    charts = [chart for chart in report.training if any(curve.points for curve in chart.curves)]
    if not charts:
        return None
    return Section("training", "Training", figures=tuple(_figure(chart) for chart in charts))


def _figure(chart: Chart, *, share: bool = False) -> Figure:
    drawn = draw_chart(chart, share=share)
    several = len(chart.curves) > 1
    legend = [(swatch(place), curve.name) for place, curve in enumerate(chart.curves)] if several else []
    return Figure(chart.title, drawn, tuple(legend), chart.note, chart_table(chart))


def _rounds(report: Report) -> Section | None:
    if not report.rounds:
        return None
    note = "Hollow: what the round drew, before training on it. Filled: guided texts afterwards."
    figure = Figure("Satisfied, before and after", draw_rounds(report.rounds), note=note)
    return Section("rounds", "Rounds", figures=(figure,), tables=(rounds_table(report.rounds),))


def _rates(report: Report) -> Section | None:
    if not report.rates:
        return None
    names = list(dict.fromkeys(rate.system for rate in report.rates))
    legend = [(swatch(place), name) for place, name in enumerate(names)] if len(names) > 1 else []
    title = "Satisfaction, requested and achieved"
    drawing = draw_diagonal(title, "requested rate r", "achieved", rate_spots(report.rates, names))
    figure = Figure(
        title, drawing, tuple(legend), "On the diagonal a request is met.", rates_table(report.rates)
    )
    return Section("rates", "Requested rates", figures=(figure,))


def _calibration(report: Report) -> Section | None:
    if not report.calibration:
        return None
    figures = []
    for each in report.calibration:
        named = f"{each.system}: " if len(report.calibration) > 1 else ""
        figures.append(_reliability_figure(each, named))
        if each.positions:
            figures.append(_positions_figure(each.positions, named))
        if each.prompts:
            figures.append(_prompts_figure(each.prompts, named))
    lead = "Of the texts for which R says 30%, do 30% come true when the base writes on?"
    return Section("calibration", "Calibration", lead, tuple(figures))


def _reliability_figure(each: Calibration, named: str) -> Figure:
    title = f"{named}Reliability"
    said = [
        f"{measure.name} {style_of_measures([measure]).write(measure.value)}"
        for measure in (each.ece, each.brier)
        if measure is not None and measure.value is not None
    ]
    note = "; ".join([*said, each.method])
    drawing = draw_diagonal(title, "R says", "came true", _spots(each.bins))
    return Figure(title, drawing, note=f"{note}. Hollow: no interval.", table=bins_table(each.bins, "R"))


def _spots(bins: Sequence[Bin]) -> list[Spot]:
    """Bins as points whose area grows with the number of texts."""
    most = max((each.n for each in bins), default=1)
    largest = 3.6 if len(bins) <= 12 else 1.6
    return [
        Spot(
            each.predicted,
            each.rate,
            each.low,
            each.high,
            f"{_shorten(each.name)}: R says {each.predicted:.1%}, {each.rate:.1%} came true, n = {each.n:,}",
            2.2 + largest * (each.n / most) ** 0.5,
        )
        for each in bins
    ]


def _shorten(text: str, most: int = 80) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _positions_figure(bins: Sequence[Bin], named: str) -> Figure:
    promised = Curve("R says", tuple(Point(place, each.predicted) for place, each in enumerate(bins)))
    came = Curve(
        "came true",
        tuple(Point(place, each.rate, each.low, each.high, each.n) for place, each in enumerate(bins)),
    )
    ticks = tuple(each.name for each in bins)
    chart = Chart(f"{named}By position", "tokens written", "", (promised, came), ticks=ticks)
    figure = _figure(chart, share=True)
    return Figure(figure.title, figure.drawing, figure.legend, table=bins_table(bins, "tokens written"))


def _prompts_figure(bins: Sequence[Bin], named: str) -> Figure:
    shown = bins[:SHOWN_PROMPTS]
    left = f" The first {SHOWN_PROMPTS} of {len(bins)} prompts." if len(bins) > SHOWN_PROMPTS else ""
    title = f"{named}R(x) by prompt"
    drawing = draw_diagonal(title, "R(x) says", "came true", _spots(shown))
    table = bins_table([_short_name(each) for each in shown[:20]], "prompt")
    return Figure(title, drawing, note=f"Before the first token.{left}", table=table)


def _short_name(each: Bin) -> Bin:
    return Bin(_shorten(each.name), each.n, each.predicted, each.rate, each.low, each.high)


def _consistency(report: Report) -> Section | None:
    chart = report.consistency
    if chart is None or not any(curve.points for curve in chart.curves):
        return None
    return Section("consistency", "Consistency", figures=(_figure(chart),))


def _weights(report: Report) -> Section | None:
    systems = [system for system in report.systems if system.weights is not None]
    if not systems:
        return None
    figures = []
    for system in systems:
        histogram = system.weights.histogram if system.weights is not None else None
        if histogram is not None:
            zeros = f"{histogram.zeros:,} texts weigh 0: they fail." if histogram.zeros else ""
            title = f"{system.name}: {histogram.title.lower()}"
            figures.append(Figure(title, draw_histogram(histogram), note=zeros))
    lead = (
        "A text of the guided model weighs p·C / q: equal weights would be the target itself. "
        "ESS is how many texts of the target the weighted ones are worth."
    )
    return Section("weights", "Weights", lead, tuple(figures), (weights_table(report),))


def _cost(report: Report) -> Section | None:
    if not any(system.cost for system in report.systems):
        return None
    return Section("cost", "Cost", tables=(cost_table(report),))


_MAKERS: dict[str, Callable[[Report], Section | None]] = {
    "results": _headline,
    "paired differences": _pairs,
    "training curves": _training,
    "rounds": _rounds,
    "requested rates": _rates,
    "calibration": _calibration,
    "consistency": _consistency,
    "weights": _weights,
    "cost": _cost,
}
