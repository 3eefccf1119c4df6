"""Coverage and BLEU-4 of greedy texts along the training of guides, as a picture."""

from pathlib import Path
from typing import Any

from svg_figures import new_figure, save_figure

_PANELS = (("guided_coverage", "concepts there, %"), ("guided_bleu4", "BLEU-4"))


def measured_looks(metrics: dict[str, Any]) -> list[tuple[str, list[dict[str, float]]]]:
    """What guides wrote on the way, each under its title; `read` counts texts, repeats included."""
    found = []
    for name, settings in metrics["settings"]["guides"].items():
        looks = metrics["stages"].get(f"guide-{name}", {}).get("looks", [])
        written = [each for each in looks if "guided_coverage" in each]
        if written:
            batch = settings["batch"]
            found.append((settings["title"], [{**each, "read": each["step"] * batch} for each in written]))
    return found


def draw_looks(metrics: dict[str, Any], path: Path) -> bool:
    """One line a guide that was measured on the way, as SVG; whether there was any."""
    found = measured_looks(metrics)
    if not found:
        return False
    figure = new_figure(8.4, 3.2)
    axes = figure.subplots(1, len(_PANELS))
    for axis, (what, title) in zip(axes, _PANELS, strict=True):
        for name, looks in found:
            read, got = [each["read"] for each in looks], [each[what] for each in looks]
            axis.plot(read, got, marker="o", markersize=3, linewidth=1.2, label=name)
        axis.set_xlabel("texts read")
        axis.set_title(f"{title}, greedy", fontsize=9)
        axis.ticklabel_format(axis="x", style="plain")
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=8, frameon=False)
    save_figure(figure, path)
    return True
