"""The report as one HTML page that needs no network, no fonts and no scripts but a few lines of its own.

Every text, token and name is escaped: templates escape by themselves, drawings through `svg.tag`. The
page's own policy lets nothing be loaded and no script run but the one that nado ships, by its digest.
"""

import base64
import hashlib
from dataclasses import dataclass, replace
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from nado.metrics import Measure
from nado.report.content import Report
from nado.report.highlights import SHOWN_TEXT, shorten, show_characters, show_text
from nado.report.numbers import style_of_measures
from nado.report.sections import list_sections
from nado.report.svg import span
from nado.report.tables import Cell, headline_names, measure_cell


@dataclass(frozen=True)
class Bar:
    """A system in the first figure: where its value and interval lie, as percentages of the width."""

    name: str
    cell: Cell
    place: float | None
    low: float | None
    high: float | None


def render_page(report: Report) -> str:
    """The whole page."""
    environment = _environment()
    script, style = (_source(name) for name in ("script.js", "style.css"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    sections, missing = list_sections(report)
    lead, bars, ends = _bars(report)
    page = environment.get_template("page.html").render(
        report=report,
        sections=sections,
        missing=missing,
        lead=lead,
        bars=bars,
        ends=ends,
        examples=report.examples if report.examples is not None and report.examples.examples else None,
        script=Markup(script),
        script_digest=digest,
        style=Markup(style),
    )
    return page.lstrip()


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("nado.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["show_text"] = show_text
    environment.filters["characters"] = lambda text: show_characters(shorten(text, SHOWN_TEXT))
    return environment


def _source(name: str) -> str:
    """A file of the package as it is: what a digest is taken of must not go through the template engine."""
    loader = _environment().loader
    assert loader is not None
    return loader.get_source(_environment(), name)[0]


def _bars(report: Report) -> tuple[str, list[Bar], tuple[str, str]]:
    """The first headline measure of every system that has it, on one scale, and the ends of that."""
    names = headline_names(report)
    if not names:
        return "", [], ("", "")
    found = [
        (system.name, measure)
        for system in report.systems
        for measure in system.measures
        if measure.name == names[0]
    ]
    low, high = _scale([measure for _, measure in found])
    style = style_of_measures([measure for _, measure in found])
    whole = replace(style, decimals=0) if style.percent else style

    def place(value: float | None) -> float | None:
        return None if value is None else round(100 * min(1.0, max(0.0, (value - low) / (high - low))), 2)

    bars = [
        Bar(name, measure_cell(each, style), place(each.value), place(each.low), place(each.high))
        for name, each in found
    ]
    return names[0], bars, (whole.write(low), whole.write(high))


def _scale(measures: list[Measure]) -> tuple[float, float]:
    units = {measure.unit for measure in measures}
    if units == {"share"}:
        return 0.0, 1.0
    if units == {"0–100"}:
        return 0.0, 100.0
    edges = [edge for each in measures for edge in (each.value, each.low, each.high) if edge is not None]
    return span(edges, from_zero=True)
