"""The dial as a picture: asked for and got, what it costs in KL, what it does to perplexity."""

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import around  # noqa: F401  (finds pictures of the CommonGen recipe)
from svg_figures import new_figure, save_figure

_COLOURS = {"positive": "#1b6ca8", "clean": "#b5501b"}
_OTHER = "#555555"
_FEW = 3  # so few points of a curve say nothing of what lies between them


def draw_dial(curves: dict[str, Any], names: Sequence[str], path: Path) -> None:
    """Three panels, one line a question and a way to ask, as SVG."""
    figure = new_figure(10.5, 4.2)
    rate, kl, surprise = figure.subplots(1, 3)
    rate.plot([0, 1], [0, 1], color="#bbbbbb", linewidth=1, zorder=0)
    rate.fill_between([0, 1], [-0.05, 0.95], [0.05, 1.05], color="#eeeeee", zorder=-1)
    for name in names:
        _draw_curve(curves[name], name, rate, kl, surprise)
    _label(rate, "share satisfied, got", title="asked for and got (grey: ±0.05)")
    rate.set_ylim(-0.02, 1.02)
    _draw_legend(figure, rate, names)
    _label(kl, "nats a text", title="KL(q‖p); dotted: the least possible")
    _label(surprise, "perplexity under p", title="perplexity; dashed: p's own texts")
    save_figure(figure, path)


def _draw_curve(curve: dict[str, Any], name: str, rate: Any, kl: Any, surprise: Any) -> None:
    colour, points = _COLOURS.get(name, _OTHER), curve["points"]
    asked = [each["asked"] for each in points]
    panels, style = (rate, kl, surprise), {"color": colour, "linewidth": 1.2}
    line = "-" if len(points) > _FEW else ""
    _draw_points(points, panels, label=f"{name}, soft rate", marker="o", linestyle=line, **style)
    if "turned" in curve:
        label = f"{name}, dial of measured stops"
        _draw_points(curve["turned"], panels, label=label, marker="s", linestyle="--", **style)
    corrected = [each["corrected"]["value"] for each in points]
    rate.plot(asked, corrected, "x", color=colour, markersize=5, label=f"{name}, chosen by weight")
    if "mixed" in curve:
        mixed = [each["corrected"]["value"] for each in curve["mixed"]]
        rate.plot(asked, mixed, "+", color=colour, markersize=7, label=f"{name}, ends mixed, by weight")
    least = sorted((float(each), found) for each, found in curve["base"]["least_kl"].items())
    kl.plot(*zip(*least, strict=True), ":", color=colour, linewidth=1.2)
    natural = curve["base"]["got"]["value"]
    rate.plot([natural], [natural], "D", color=colour, markersize=5, markerfacecolor="white")
    surprise.axhline(curve["base"]["perplexity"]["value"], color=colour, linestyle="--", linewidth=0.8)


def _draw_legend(figure: Any, axis: Any, names: Sequence[str]) -> None:
    """Below everything, a row for each question."""
    drawn = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    rows = [[each for each in drawn if each.startswith(f"{name},")] for name in names]
    labels = [each for column in zip_longest(*rows) for each in column if each is not None]
    handles = [drawn[each] for each in labels]
    columns = max(map(len, rows))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


def _draw_points(points: Sequence[dict[str, Any]], axes: Sequence[Any], *, label: str, **style: Any) -> None:
    """The same points in all three panels, with their intervals."""
    asked = [each["asked"] for each in points]
    for axis, what in zip(axes, ("got", "kl", "perplexity"), strict=True):
        values = [each[what]["value"] for each in points]
        errors = [
            [value - _edge(each[what], "low") for value, each in zip(values, points, strict=True)],
            [_edge(each[what], "high") - value for value, each in zip(values, points, strict=True)],
        ]
        axis.errorbar(asked, values, errors, markersize=3.5, capsize=2, label=label, **style)


def _edge(found: dict[str, Any], name: str) -> float:
    return float(found["value"] if found[name] is None else found[name])


def _label(axis: Any, y: str, *, title: str) -> None:
    axis.set_xlabel("share satisfied, asked for")
    axis.set_ylabel(y)
    axis.set_title(title, fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
