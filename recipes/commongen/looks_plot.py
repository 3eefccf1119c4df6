"""Coverage and BLEU-4 of greedy texts along the training of guides, as a picture."""

from pathlib import Path
from typing import Any

from nado.storage import write_atomically

_PANELS = (("guided_coverage", "concepts there, %"), ("guided_bleu4", "BLEU-4"))


def draw_looks(metrics: dict[str, Any], path: Path) -> bool:
    """One line a guide that was measured on the way, as SVG; whether there was any."""
    # No window is opened and nothing global is touched: a figure of its own with its own canvas.
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.2), layout="constrained")
    canvas = FigureCanvasSVG(figure)
    axes = figure.subplots(1, len(_PANELS))
    for axis, (what, title) in zip(axes, _PANELS, strict=True):
        for name, settings in metrics["settings"]["guides"].items():
            looks = metrics["stages"].get(f"guide-{name}", {}).get("looks", [])
            points = [(each["step"] * settings["batch"], each[what]) for each in looks if what in each]
            if points:
                axis.plot(
                    *zip(*points, strict=True),
                    marker="o",
                    markersize=3,
                    linewidth=1.2,
                    label=settings["title"],
                )
        axis.set_xlabel("texts read")
        axis.set_title(f"{title}, greedy", fontsize=9)
        axis.ticklabel_format(axis="x", style="plain")
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    if not axes[0].lines:
        return False
    axes[0].legend(fontsize=8, frameon=False)
    write_atomically(path, lambda partial: canvas.print_svg(str(partial), metadata={"Date": None}))
    return True
