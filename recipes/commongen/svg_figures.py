"""Pictures as SVG: no window is opened, nothing global is touched, equal figures make equal files."""

from pathlib import Path
from typing import Any

from nado.storage import write_atomically


def new_figure(width: float, height: float) -> Any:
    """An empty figure with its own canvas, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Write it, without a date and with names that do not change from run to run."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    canvas = FigureCanvasSVG(figure)
    with rc_context({"svg.hashsalt": "nado"}):
        write_atomically(path, lambda partial: canvas.print_svg(str(partial), metadata={"Date": None}))
