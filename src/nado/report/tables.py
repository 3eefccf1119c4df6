"""Tables of a report, written once for the page and for Markdown, so that both say the same."""

from collections.abc import Sequence
from dataclasses import dataclass

from nado.metrics import Bin, Comparison, Measure
from nado.metrics.resampling import SMALLEST
from nado.report.content import Chart, Point, Rate, Report, Round, System
from nado.report.numbers import MINUS, Style, is_small, style_of, style_of_measures, write_p_value

HEADLINE = 6  # columns of the first table where a report does not name them
NAMED_SYSTEMS = 6  # that a remark may list by name
MISSING = "–"
TOO_SMALL = "n too small"


@dataclass(frozen=True)
class Cell:
    """One entry: what is read first, what is smaller beside it, and the number itself."""

    text: str
    detail: str = ""
    badge: str = ""
    hover: str = ""
    value: float | None = None
    numeric: bool = True


@dataclass(frozen=True)
class Table:
    """Heads and rows; a row's first cell names it. `by_system`: each row is one system."""

    heads: tuple[Cell, ...]
    rows: tuple[tuple[Cell, ...], ...]
    title: str = ""
    by_system: bool = False
    caveats: tuple[str, ...] = ()

    @property
    def wide(self) -> bool:
        """Whether a phone has to show its rows one below the other."""
        return self.by_system or len(self.heads) > 4


def words(text: str, detail: str = "") -> Cell:
    """An entry that is no number."""
    return Cell(text, detail, numeric=False)


def measure_cell(measure: Measure | None, style: Style | None = None) -> Cell:
    """A measure with its interval, or with why it has none."""
    if measure is None:
        return Cell(MISSING, hover="not measured")
    style = style if style is not None else style_of_measures([measure])
    badge = TOO_SMALL if is_small(measure) or TOO_SMALL in (measure.note or "") else ""
    hover = "; ".join(part for part in (f"n = {measure.n:,}", measure.method, measure.note) if part)
    if measure.value is None:
        return Cell(MISSING, "not defined", badge, hover)
    known = measure.low is not None and measure.high is not None
    detail = style.write_interval(measure.low or 0.0, measure.high or 0.0) if known else f"n = {measure.n:,}"
    return Cell(style.write(measure.value), detail, badge, hover, measure.value)


def number_cell(value: float | None, style: Style | None = None) -> Cell:
    """A bare number."""
    if value is None:
        return Cell(MISSING)
    return Cell((style or style_of([value])).write(value), value=value)


# --- systems by measures ------------------------------------------------------------------------------


def headline_names(report: Report) -> tuple[str, ...]:
    """The measures of the first table: those the report names, else the first ones that are no parts."""
    if report.headline:
        return report.headline
    names = _names([system.measures for system in report.systems])
    return tuple(name for name in names if not name.startswith("part: "))[:HEADLINE]


def headline_table(report: Report) -> Table:
    """Systems by headline measures."""
    return _by_system(report.systems, [system.measures for system in report.systems], headline_names(report))


def cost_table(report: Report) -> Table:
    """Systems by what their texts have cost."""
    columns = [system.cost for system in report.systems]
    return _by_system(report.systems, columns, _names(columns))


def weights_table(report: Report) -> Table:
    """Systems with weights by what those are worth."""
    systems = [system for system in report.systems if system.weights is not None]
    columns = [system.weights.measures for system in systems if system.weights is not None]
    return _by_system(systems, columns, _names(columns))


def _names(columns: Sequence[Sequence[Measure]]) -> tuple[str, ...]:
    """The names of measures in the order in which they first come."""
    return tuple(dict.fromkeys(measure.name for measures in columns for measure in measures))


def _by_system(
    systems: Sequence[System], measures: Sequence[Sequence[Measure]], names: Sequence[str]
) -> Table:
    found = [{each.name: each for each in several} for several in measures]
    columns = [[row.get(name) for row in found] for name in names]
    styles = [style_of_measures(column) for column in columns]
    heads = [
        words(name, next((each.unit for each in column if each and each.unit != "share"), ""))
        for name, column in zip(names, columns, strict=True)
    ]
    rows = tuple(
        (
            words(system.name, system.detail),
            *(measure_cell(column[place], style) for column, style in zip(columns, styles, strict=True)),
        )
        for place, system in enumerate(systems)
    )
    shown = [
        (system.name, row.get(name)) for name in names for system, row in zip(systems, found, strict=True)
    ]
    return Table((words("system"), *heads), rows, by_system=True, caveats=_caveats(shown))


def _caveats(shown: Sequence[tuple[str, Measure | None]]) -> tuple[str, ...]:
    """What the measures say of themselves, each remark once."""
    where: dict[str, dict[str, list[str]]] = {}
    for system, measure in shown:
        if measure is not None and measure.note:
            where.setdefault(measure.note, {}).setdefault(measure.name, []).append(system)
    total = len(dict.fromkeys(system for system, _ in shown))
    return tuple(
        "; ".join(f"{name} ({_name_systems(systems, total)})" for name, systems in places.items())
        + f": {note}"
        for note, places in where.items()
    )


def _name_systems(systems: Sequence[str], total: int) -> str:
    """The systems a remark is about: by name, unless there are too many to read."""
    if len(systems) <= NAMED_SYSTEMS:
        return ", ".join(systems)
    return f"all {total} systems" if len(systems) == total else f"{len(systems)} of {total} systems"


def measures_table(report: Report) -> Table:
    """Every measure of every system, with how it was made."""
    rows = []
    for system in report.systems:
        kept = () if system.weights is None else system.weights.measures
        for measure in (*system.measures, *system.cost, *kept):
            made = "; ".join(part for part in (measure.method, measure.note) if part)
            rows.append(
                (
                    words(system.name),
                    words(measure.name, measure.unit if measure.unit != "share" else ""),
                    measure_cell(measure),
                    number_cell(measure.n),
                    number_cell(measure.prompts),
                    words(made),
                )
            )
    heads = ("system", "measure", "value", "texts", "resampled", "how")
    return Table(tuple(map(words, heads)), tuple(rows), "Every measure")


# --- the other tables ---------------------------------------------------------------------------------


def pairs_table(report: Report) -> Table:
    """Differences between systems on the same prompts; those of shares in percentage points."""
    units = {each.name: each.unit for system in report.systems for each in system.measures}
    rows = []
    for pair in report.pairs:
        found = pair.result
        points = units.get(found.name) == "share"
        style = style_of([found.difference, found.low, found.high], "share" if points else "")
        rows.append(
            (
                words(f"{pair.first} {MINUS} {pair.second}"),
                words(found.name, "percentage points" if points else ""),
                _difference_cell(found, style),
                Cell(write_p_value(found.p_value), value=found.p_value),
                number_cell(found.n),
                words("; ".join(part for part in (found.method, found.note) if part)),
            )
        )
    heads = ("systems", "measure", "difference", "p", "n", "how")
    return Table(tuple(map(words, heads)), tuple(rows))


def _difference_cell(found: Comparison, style: Style) -> Cell:
    if found.difference is None:
        return Cell(MISSING)
    known = found.low is not None and found.high is not None
    detail = style.write_interval(found.low or 0.0, found.high or 0.0, signed=True) if known else ""
    return Cell(style.write_bare(found.difference, signed=True), detail, value=found.difference)


def rounds_table(rounds: Sequence[Round]) -> Table:
    """Rounds with what they drew and what came of it."""
    rows = tuple(
        (
            words(f"round {each.number}"),
            words(each.oracle),
            words(each.proposal),
            number_cell(each.drawn),
            measure_cell(each.before),
            measure_cell(each.after),
            number_cell(each.effective_share, Style(percent=True, decimals=1)),
        )
        for each in rounds
    )
    heads = ("round", "asked", "drawn from", "drawn", "satisfied before", "satisfied after", "ESS share")
    return Table(tuple(map(words, heads)), rows)


def rates_table(rates: Sequence[Rate]) -> Table:
    """Requested and achieved rates."""
    style = Style(percent=True, decimals=1)
    rows = tuple(
        (
            words(each.system),
            number_cell(each.requested, style),
            measure_cell(each.achieved, style),
            number_cell(each.achieved.n),
        )
        for each in rates
    )
    return Table(tuple(map(words, ("system", "requested", "achieved", "texts"))), rows)


def bins_table(bins: Sequence[Bin], name: str) -> Table:
    """What R promised and what came, a row a bin."""
    style = Style(percent=True, decimals=1)
    rows = []
    for each in bins:
        known = each.low is not None and each.high is not None
        detail = style.write_interval(each.low or 0.0, each.high or 0.0) if known else ""
        rate = Cell(style.write(each.rate), detail, value=each.rate)
        rows.append((words(each.name), number_cell(each.predicted, style), rate, number_cell(each.n)))
    return Table(tuple(map(words, (name, "mean R", "came true", "n"))), tuple(rows))


def chart_table(chart: Chart, most: int = 40) -> Table:
    """A chart's numbers; of long curves only where they begin, where they end and where they are lowest."""
    if all(len(curve.points) <= most for curve in chart.curves):
        return _points_table(chart)
    rows = []
    for curve in chart.curves:
        style = style_of([point.y for point in curve.points])
        lowest = min(curve.points, key=lambda point: point.y)
        cells = [number_cell(point.y, style) for point in (curve.points[0], curve.points[-1], lowest)]
        rows.append((words(curve.name), *cells, number_cell(lowest.x)))
    return Table(tuple(map(words, ("curve", "first", "last", "lowest", f"at {chart.x}"))), tuple(rows))


def _points_table(chart: Chart) -> Table:
    """A row for every x, a column for every curve."""
    styles = [style_of([point.y for point in curve.points]) for curve in chart.curves]
    columns = [{point.x: point for point in curve.points} for curve in chart.curves]
    rows = []
    for x in sorted({x for column in columns for x in column}):
        where = words(chart.ticks[int(x)]) if chart.ticks else number_cell(x)
        cells = [_point_cell(column.get(x), style) for column, style in zip(columns, styles, strict=True)]
        rows.append((where, *cells))
    names = [curve.name if len(columns) > 1 else chart.y or curve.name for curve in chart.curves]
    return Table((words(chart.x), *map(words, names)), tuple(rows))


def _point_cell(point: Point | None, style: Style) -> Cell:
    if point is None:
        return Cell("")
    known = point.low is not None and point.high is not None
    detail = style.write_interval(point.low or 0.0, point.high or 0.0) if known else ""
    badge = TOO_SMALL if point.n is not None and point.n < SMALLEST else ""
    return Cell(style.write(point.y), detail, badge, "" if point.n is None else f"n = {point.n:,}", point.y)
