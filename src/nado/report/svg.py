"""Charts as inline SVG: small, themed by the page's CSS variables, readable by a screen reader.

Every chart has the width of a phone, so that its letters are never scaled down; a wide page shows several
side by side. Series differ in dashes and markers as well as in colour.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from nado.report.content import Chart, Curve, Histogram, Point, Rate, Round
from nado.report.numbers import Style, style_of

WIDTH, HEIGHT = 360, 244
_LEFT, _RIGHT, _TOP, _BOTTOM = 42, 14, 26, 40
SERIES = 6  # styles in the page's style sheet; more series than that share them


def tag(name: str, *children: str, **attributes: str | float | None) -> Markup:
    """An element with everything in it escaped; `class_` and `stroke_width` are written as in SVG."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_plain(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = Markup("").join(children)
    return Markup(f"<{name}{written}>{inner}</{name}>")


def _plain(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


@dataclass(frozen=True)
class Frame:
    """Where numbers lie on the drawing."""

    x: tuple[float, float]
    y: tuple[float, float]
    height: float = HEIGHT

    def across(self, value: float) -> float:
        """The horizontal place of a number."""
        low, high = self.x
        return _LEFT + (value - low) / (high - low) * (WIDTH - _LEFT - _RIGHT)

    def down(self, value: float) -> float:
        """The vertical place of a number; what lies outside is put at the edge."""
        low, high = self.y
        share = min(1.0, max(0.0, (value - low) / (high - low)))
        return self.height - _BOTTOM - share * (self.height - _TOP - _BOTTOM)


def span(values: Iterable[float], *, from_zero: bool = False) -> tuple[float, float]:
    """A range that holds the values, never empty."""
    known = list(values)
    low, high = min(known, default=0.0), max(known, default=1.0)
    low = min(0.0, low) if from_zero else low
    if low == high == 0:
        return 0.0, 1.0
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        return low - 0.5 * abs(low), high + 0.5 * abs(high)
    return low, high


def widen(low: float, high: float, most: int = 5) -> tuple[float, float]:
    """A range that begins and ends at its own round numbers."""
    for _ in range(3):  # a wider range may have coarser ones
        inside = ticks(low, high, most)
        step = inside[1] - inside[0] if len(inside) > 1 else high - low
        low = inside[0] if inside[0] <= low + 1e-9 * step else inside[0] - step
        high = inside[-1] if inside[-1] >= high - 1e-9 * step else inside[-1] + step
    return low, high


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers inside a range: steps of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [float(f"{k * step:.12g}") + 0.0 for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _draw(label: str, frame: Frame, *parts: str) -> Markup:
    """The drawing with its name, which is what a screen reader says of it."""
    box = f"0 0 {WIDTH} {frame.height:g}"
    return tag("svg", tag("title", escape(label)), *parts, viewBox=box, role="img", class_="chart")


def _grid(
    frame: Frame,
    x: str,
    y: str,
    x_ticks: Sequence[tuple[float, str]],
    y_ticks: Sequence[tuple[float, str]],
) -> Markup:
    """Horizontal rules, tick labels and the axes' names."""
    bottom = frame.height - _BOTTOM
    parts = []
    for value, text in y_ticks:
        place = frame.down(value)
        parts.append(tag("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=place, y2=place, class_="rule"))
        parts.append(tag("text", escape(text), x=_LEFT - 7, y=place + 3.5, class_="tick", text_anchor="end"))
    for value, text in x_ticks:
        place = frame.across(value)
        parts.append(tag("line", x1=place, x2=place, y1=bottom, y2=bottom + 4, class_="axis"))
        parts.append(tag("text", escape(text), x=place, y=bottom + 16, class_="tick", text_anchor="middle"))
    parts.append(tag("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=bottom, y2=bottom, class_="axis"))
    centre = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(tag("text", escape(x), x=centre, y=frame.height - 6, class_="label", text_anchor="middle"))
    parts.append(tag("text", escape(y), x=0, y=11, class_="label"))
    return Markup("").join(parts)


def _number_ticks(low: float, high: float, most: int) -> list[tuple[float, str]]:
    values = ticks(low, high, most)
    step = values[1] - values[0] if len(values) > 1 else abs(values[0] if values else 1.0)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) if step else 0
    style = Style(scientific=True) if decimals > 4 else Style(decimals=decimals)
    return [(value, style.write(value)) for value in values]


def _percent_ticks(count: int = 5) -> list[tuple[float, str]]:
    return [(k / count, f"{100 * k // count}%") for k in range(count + 1)]


def _marker(
    series: int, x: float, y: float, title: str, size: float = 3.2, *, hollow: bool = False
) -> Markup:
    """A point: disc, square, triangle or diamond by series."""
    hover = tag("title", escape(title))
    kind = f"mark s{series % SERIES}" + (" hollow" if hollow else "")
    shape = series % 4
    if shape == 0:
        return tag("circle", hover, cx=x, cy=y, r=size, class_=kind)
    corners = _CORNERS[shape]
    points = " ".join(f"{x + size * a:.1f},{y + size * b:.1f}" for a, b in corners)
    return tag("polygon", hover, points=points, class_=kind)


_CORNERS: dict[int, list[tuple[float, float]]] = {
    1: [(-1, -1), (1, -1), (1, 1), (-1, 1)],
    2: [(0, -1.3), (1.2, 1), (-1.2, 1)],
    3: [(0, -1.4), (1.4, 0), (0, 1.4), (-1.4, 0)],
}


def _whisker(x: float, low: float, high: float, series: int) -> Markup:
    return tag("line", x1=x, x2=x, y1=low, y2=high, class_=f"whisker s{series % SERIES}")


def swatch(series: int) -> Markup:
    """A short line with its marker, for a legend."""
    line = tag("line", x1=0, x2=26, y1=6, y2=6, class_=f"line s{series % SERIES}")
    return tag(
        "svg", line, _marker(series, 13, 6, ""), viewBox="0 0 26 12", class_="swatch", aria_hidden="true"
    )


# --- charts -------------------------------------------------------------------------------------------


def draw_chart(chart: Chart, *, share: bool = False) -> Markup:
    """Curves with the bands of their intervals."""
    points = [point for curve in chart.curves for point in curve.points]
    edges = [edge for point in points for edge in (point.y, point.low, point.high) if edge is not None]
    y = (0.0, 1.0) if share else widen(*span(edges, from_zero=chart.from_zero))
    x = (-0.5, len(chart.ticks) - 0.5) if chart.ticks else span(point.x for point in points)
    frame = Frame(x, y)
    named = [(float(place), name) for place, name in enumerate(chart.ticks)]
    grid = _grid(
        frame,
        chart.x,
        chart.y,
        _thin(named) if named else _number_ticks(*x, 6),
        _percent_ticks() if share else _number_ticks(*y, 5),
    )
    curves = [_draw_curve(frame, curve, place) for place, curve in enumerate(chart.curves)]
    return _draw(f"{chart.title}: {chart.y} over {chart.x}", frame, grid, *curves)


def _thin(named: list[tuple[float, str]], most: int = 10) -> list[tuple[float, str]]:
    return named[:: math.ceil(len(named) / most)]


def _draw_curve(frame: Frame, curve: Curve, series: int) -> Markup:
    places = [(frame.across(point.x), frame.down(point.y)) for point in curve.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = [_band(frame, curve.points, series)]
    parts.append(tag("polyline", points=path, class_=f"line s{series % SERIES}"))
    if len(places) <= 40:
        parts += [
            _marker(series, x, y, f"{curve.name}: {_tell(point)}")
            for (x, y), point in zip(places, curve.points, strict=True)
        ]
    return Markup("").join(parts)


def _band(frame: Frame, points: Sequence[Point], series: int) -> Markup:
    """The area between the intervals' ends, where all points of a stretch have one."""
    known = [point for point in points if point.low is not None and point.high is not None]
    if len(known) < 2:
        return Markup("")
    above = [(frame.across(p.x), frame.down(p.high or 0.0)) for p in known]
    below = [(frame.across(p.x), frame.down(p.low or 0.0)) for p in reversed(known)]
    outline = " ".join(f"{x:.1f},{y:.1f}" for x, y in above + below)
    return tag("polygon", points=outline, class_=f"band s{series % SERIES}")


def _tell(point: Point) -> str:
    style = style_of([point.y])
    interval = (
        "" if point.low is None or point.high is None else " " + style.write_interval(point.low, point.high)
    )
    rests = "" if point.n is None else f", n = {point.n:,}"
    return f"{style.write(point.y)}{interval} at {point.x:g}{rests}"


@dataclass(frozen=True)
class Spot:
    """A pair of shares that should be equal, with what to say of it."""

    x: float
    y: float
    low: float | None
    high: float | None
    title: str
    size: float = 3.6
    series: int = 0


def draw_diagonal(title: str, x: str, y: str, spots: Sequence[Spot]) -> Markup:
    """Shares against shares: what lies on the diagonal came as it was promised."""
    frame = Frame((0.0, 1.0), (0.0, 1.0), height=340)
    grid = _grid(frame, x, y, _percent_ticks(), _percent_ticks())
    ideal = tag(
        "line",
        x1=frame.across(0),
        y1=frame.down(0),
        x2=frame.across(1),
        y2=frame.down(1),
        class_="ideal",
    )
    parts = []
    for spot in spots:
        place = frame.across(min(1.0, max(0.0, spot.x)))
        if spot.low is not None and spot.high is not None:
            parts.append(_whisker(place, frame.down(spot.low), frame.down(spot.high), spot.series))
        parts.append(
            _marker(spot.series, place, frame.down(spot.y), spot.title, spot.size, hollow=spot.low is None)
        )
    return _draw(f"{title}: {y} against {x}", frame, grid, ideal, *parts)


def rate_spots(rates: Sequence[Rate], systems: Sequence[str]) -> list[Spot]:
    """Requested and achieved rates, a series a system."""
    spots = []
    for rate in rates:
        got = rate.achieved
        if got.value is not None:
            said = f"{rate.system}: {rate.requested:.1%} requested, {got.value:.1%} achieved, n = {got.n:,}"
            spots.append(
                Spot(rate.requested, got.value, got.low, got.high, said, series=systems.index(rate.system))
            )
    return spots


def draw_rounds(rounds: Sequence[Round]) -> Markup:
    """Satisfaction before (hollow) and after (filled) each round."""
    frame = Frame((0.4, len(rounds) + 0.6), (0.0, 1.0))
    names = [(float(place), str(each.number)) for place, each in enumerate(rounds, start=1)]
    parts = [_grid(frame, "round", "satisfied", names, _percent_ticks())]
    for place, each in enumerate(rounds, start=1):
        left, right = frame.across(place - 0.12), frame.across(place + 0.12)
        before, after = each.before.value, None if each.after is None else each.after.value
        if before is not None and after is not None:
            ends = {"x1": left, "y1": frame.down(before), "x2": right, "y2": frame.down(after)}
            parts.append(tag("line", class_="step", **ends))
        if before is not None:
            said = f"round {each.number}: {before:.1%} of what was drawn"
            parts.append(_marker(0, left, frame.down(before), said, 4.2, hollow=True))
        if each.after is not None and after is not None:
            low, high = each.after.low, each.after.high
            if low is not None and high is not None:
                parts.append(_whisker(right, frame.down(low), frame.down(high), 0))
            parts.append(
                _marker(0, right, frame.down(after), f"round {each.number}: {after:.1%} afterwards", 4.2)
            )
    return _draw("Satisfaction before and after each round", frame, *parts)


def draw_histogram(histogram: Histogram, series: int = 0) -> Markup:
    """Bars; what has no place on the axis is said beside the chart."""
    y = widen(*span(map(float, histogram.counts), from_zero=True), 4)
    frame = Frame((histogram.edges[0], histogram.edges[-1]), y)
    grid = _grid(frame, histogram.x, "texts", _number_ticks(*span(histogram.edges), 6), _number_ticks(*y, 4))
    bars = []
    for place, count in enumerate(histogram.counts):
        low, high = histogram.edges[place], histogram.edges[place + 1]
        left, top = frame.across(low), frame.down(count)
        said = f"{count:,} texts between {low:.3g} and {high:.3g}"
        bars.append(
            tag(
                "rect",
                tag("title", escape(said)),
                x=left + 0.5,
                y=top,
                width=max(0.5, frame.across(high) - left - 1),
                height=frame.height - _BOTTOM - top,
                class_=f"bar s{series % SERIES}",
            )
        )
    return _draw(f"{histogram.title}: texts over {histogram.x}", frame, grid, *bars)
